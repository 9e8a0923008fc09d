use lorafleet_engine::text::{Decoder, StopMatcher, TextError};
use proptest::prelude::*;

use super::super::small_text;

/// Answers of whole strings, of any bytes, and of special tokens in between.
fn tokens() -> impl Strategy<Value = Vec<u32>> {
    let texts = "[a-c ä日🙂\u{301}]{0,8}".prop_map(|text| small_text().encode(&text).unwrap());
    let any = prop::collection::vec(0_u32..270, 0..6);
    prop::collection::vec(prop_oneof![texts, any], 0..6).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn pieces_put_together_are_the_whole_text(tokens in tokens()) {
        let text = small_text();
        let mut decoder = text.decoder();
        let mut pieces = String::new();
        for token in &tokens {
            pieces.push_str(&decoder.push(*token));
            prop_assert!(decoder.pending().len() < 4);
        }
        pieces.push_str(&decoder.finish());
        prop_assert_eq!(pieces, text.decode(&tokens));
    }

    #[test]
    fn whole_characters_come_without_replacement(source in "\\PC{0,40}") {
        let text = small_text();
        let mut decoder = text.decoder();
        let ids = text.encode(&source).unwrap();
        let pieces: String = ids.iter().map(|token| decoder.push(*token)).collect();
        prop_assert_eq!(pieces, source);
        prop_assert_eq!(decoder.finish(), "");
    }

    #[test]
    fn stops_do_not_depend_on_the_cuts(
        source in "[ab🙂]{0,24}",
        stops in prop::collection::vec("[ab🙂]{1,4}", 0..4),
        cuts in prop::collection::vec(1_usize..5, 24),
    ) {
        let (text, stopped) = streamed(&stops, &pieces(&source, &cuts))?;
        let wanted = first_stop(&stops, &source);
        prop_assert_eq!(stopped, wanted.map(|(_, index)| index));
        prop_assert_eq!(text, wanted.map_or(source.as_str(), |(start, _)| &source[..start]));
    }
}

/// The source in pieces of some characters each.
fn pieces(source: &str, cuts: &[usize]) -> Vec<String> {
    let mut letters = source.chars();
    cuts.iter().map(|count| letters.by_ref().take(*count).collect()).collect()
}

/// All that the matcher lets out; checks on the way that nothing let out is held to be part of a stop string.
fn streamed(stops: &[String], pieces: &[String]) -> Result<(String, Option<usize>), TestCaseError> {
    let mut matcher = StopMatcher::new(stops.to_vec()).unwrap();
    let (mut out, mut seen) = (String::new(), String::new());
    for piece in pieces {
        seen.push_str(piece);
        let step = matcher.push(piece);
        out.push_str(&step.text);
        if step.stopped.is_some() {
            prop_assert_eq!(matcher.finish(), "");
            return Ok((out, step.stopped));
        }
        // What could still become a stop string is not out yet, and nothing else is held.
        let open = |start: &usize| {
            stops.iter().any(|stop| stop.starts_with(&seen[*start..]) && stop.len() > seen.len() - start)
        };
        let held_from = seen.char_indices().map(|(at, _)| at).find(open).unwrap_or(seen.len());
        prop_assert_eq!(&out, &seen[..held_from]);
    }
    out.push_str(&matcher.finish());
    Ok((out, None))
}

/// Start and index of the stop string that is complete first, by definition.
fn first_stop(stops: &[String], source: &str) -> Option<(usize, usize)> {
    (1..=source.len()).filter(|end| source.is_char_boundary(*end)).find_map(|end| {
        let ending = stops.iter().enumerate().filter(|(_, stop)| source[..end].ends_with(stop.as_str()));
        ending.map(|(index, stop)| (end - stop.len(), index)).min()
    })
}

fn check_stop(stops: &[&str], pieces: &[&str], text: &str, stopped: Option<usize>) {
    let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
    let pieces: Vec<String> = pieces.iter().map(|piece| (*piece).to_owned()).collect();
    assert_eq!(streamed(&stops, &pieces).unwrap(), (text.to_owned(), stopped), "{stops:?} {pieces:?}");
}

#[test]
fn stop_strings() {
    check_stop(&["\n\n"], &["a\n", "b\n", "\nc"], "a\nb", Some(0));
    check_stop(&["END"], &["the E", "N", "d"], "the ENd", None);
    check_stop(&["END"], &["EEN", "D tail"], "E", Some(0));
    check_stop(&["abc", "b"], &["abc"], "a", Some(1));
    check_stop(&["bc", "abc"], &["xab", "c"], "x", Some(1));
    check_stop(&[], &["any", "thing"], "anything", None);
}

#[test]
fn stop_limits() {
    let error = StopMatcher::new(vec![String::new()]).unwrap_err();
    assert!(matches!(error, TextError::StopLength { index: 0, bytes: 0, .. }), "{error}");
    assert!(matches!(StopMatcher::new(vec!["x".repeat(1025)]), Err(TextError::StopLength { .. })));
    assert!(matches!(StopMatcher::new(vec!["x".to_owned(); 17]), Err(TextError::TooManyStops { .. })));
}

#[test]
fn broken_bytes_become_one_replacement_for_each_run() {
    let text = small_text();
    let mut decoder: Decoder = text.decoder();
    let pieces: Vec<String> = [0xF0, 0x9F, 0x41, 0xFF, 0xE2, 0x82].iter().map(|byte| decoder.push(*byte)).collect();
    assert_eq!(pieces, ["", "", "\u{fffd}A", "\u{fffd}", "", ""]);
    assert_eq!(decoder.finish(), "\u{fffd}");
    assert_eq!(decoder.finish(), "");
}
