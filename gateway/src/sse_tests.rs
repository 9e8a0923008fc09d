use proptest::prelude::*;

use super::*;

const CHUNK: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}],\"usage\":null}\n\n";
const TEXT: &str = "data: {\"choices\":[{\"text\":\"the word \\\"usage\\\"\"}]}\r\n\r\n";
const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n";
const COMMENT: &str = ": keep-alive\n\n";
const DONE: &str = "data: [DONE]\n\n";

/// Pushes `stream` in pieces of `size` bytes: all that came out, and the follower.
fn follow(stream: &str, size: usize, hide_usage: bool) -> (String, Follower) {
    let mut follower = Follower::new(hide_usage);
    let mut out = Vec::new();
    for piece in stream.as_bytes().chunks(size.max(1)) {
        out.extend_from_slice(&follower.push(Bytes::copy_from_slice(piece)));
    }
    (String::from_utf8(out).unwrap(), follower)
}

#[test]
fn events_pass_in_the_chunk_that_ends_them() {
    let mut follower = Follower::new(true);
    assert_eq!(follower.push(Bytes::from(CHUNK)), CHUNK);
    assert_eq!(follower.push(Bytes::from(&CHUNK[..20])), "");
    assert_eq!(follower.push(Bytes::from(format!("{}{}", &CHUNK[20..], &TEXT[..5]))), CHUNK);
    assert_eq!(follower.push(Bytes::from(&TEXT[5..])), TEXT);
    assert_eq!(follower.push(Bytes::from(format!("{USAGE}{DONE}"))), DONE);
    assert_eq!((follower.events, follower.done), (3, true));
}

#[test]
fn usage_is_read_and_hidden_only_if_nobody_asked() {
    let stream = [CHUNK, TEXT, COMMENT, USAGE, DONE].concat();
    let (kept, follower) = follow(&stream, 1000, false);
    assert_eq!(kept, stream);
    let usage = follower.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens()), (7, 2, 4));
    let (hidden, follower) = follow(&stream, 1000, true);
    assert_eq!(hidden, [CHUNK, TEXT, COMMENT, DONE].concat());
    assert_eq!((follower.usage, follower.events, follower.done), (Some(usage), 2, true));
}

#[test]
fn usage_beside_choices_is_never_hidden() {
    let both = "data: {\"choices\":[{}],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":3}}\n\n";
    let (kept, follower) = follow(both, 1000, true);
    assert_eq!((kept.as_str(), follower.events), (both, 1));
    assert_eq!(follower.usage.map(|usage| usage.completion_tokens), Some(3));
}

#[test]
fn an_unfinished_event_is_not_passed_on() {
    let (kept, follower) = follow(&format!("{CHUNK}data: {{\"choi"), 1000, false);
    assert_eq!((kept.as_str(), follower.done), (CHUNK, false));
}

#[test]
fn an_endless_event_passes_unread() {
    let stream = format!("{CHUNK}data: {}", "x".repeat(EVENT_BYTES_MAX + 1));
    let (kept, follower) = follow(&format!("{stream}yz"), 8_192, false);
    assert!(follower.blind());
    assert_eq!(kept, format!("{stream}yz"));
}

#[test]
fn usage_of_a_whole_reply() {
    let usage = Usage::of_reply(
        br#"{"id":"x","choices":[{}],"usage":{"prompt_tokens":5,"completion_tokens":6,"total_tokens":11}}"#,
    );
    assert_eq!(usage, Some(Usage { prompt_tokens: 5, completion_tokens: 6, prompt_tokens_details: None }));
    assert_eq!(Usage::of_reply(b"<html>"), None);
    assert_eq!(Usage::of_reply(b"{}"), None);
}

proptest! {
    /// How the bytes are cut changes nothing.
    #[test]
    fn chunking_does_not_matter(events in prop::collection::vec(prop::sample::select(vec![CHUNK, TEXT, COMMENT, USAGE, DONE]), 0..12), size in 1..200_usize, hide in any::<bool>()) {
        let stream = events.concat();
        let (whole, once) = follow(&stream, stream.len(), hide);
        let (pieces, cut) = follow(&stream, size, hide);
        prop_assert_eq!(whole, pieces);
        prop_assert_eq!((once.events, once.usage, once.done), (cut.events, cut.usage, cut.done));
        prop_assert_eq!(once.events as usize, events.iter().filter(|event| **event == CHUNK || **event == TEXT).count());
    }
}
