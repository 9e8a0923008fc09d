//! What sampling must give: a full sort, and sums in whole numbers. The kernels give the same token, always.

use super::{Ask, Edit, SLICE};
use crate::decoder::exact::{self, exp, gumbel, ordered, philox, tanh};

const OUT: f32 = f32::NEG_INFINITY;
/// A token so far below the best is out.
const DEPTH_MAX: f32 = 3.4e38;

/// A row's answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// Nothing where no token is allowed.
    pub token: Option<u32>,
    /// Of `token`, before any edit.
    pub logprob: f64,
    /// Best first, with their log-probabilities.
    pub leaders: Vec<(u32, f64)>,
}

/// The row as a model with a soft cap of its final logits means it. 0: none. What is out stays out.
pub fn capped(logits: &[f32], cap: f32) -> Vec<f32> {
    let one = |v: f32| if cap > 0.0 && v > OUT { tanh(v / cap) * cap } else { v };
    logits.iter().map(|v| one(finite(*v))).collect()
}

/// One row, capped before. `edits`: the row's own; `mask`: its row of the masks.
pub fn answer(logits: &[f32], ask: &Ask, edits: &[Edit], mask: Option<&[u32]>) -> Answer {
    let raw: Vec<f32> = logits.iter().map(|v| finite(*v)).collect();
    let total = log_total(&raw);
    if ask.leaders > 0 {
        let order = in_order(&raw);
        let best = order.first().map_or(OUT, |token| at(&raw, *token));
        let near = order.into_iter().filter(|token| best - at(&raw, *token) < DEPTH_MAX);
        let leaders =
            near.take(ask.leaders as usize).map(|token| (token, f64::from(at(&raw, token)) - total)).collect();
        return Answer { leaders, ..Answer::default() };
    }
    let changed = change(&raw, ask, edits, mask);
    let token = draw(&changed, ask);
    Answer { token, logprob: token.map_or(f64::NEG_INFINITY, |t| f64::from(at(&raw, t)) - total), leaders: Vec::new() }
}

/// What is no number is out, what is infinite counts as the greatest number.
fn finite(v: f32) -> f32 {
    if v.is_nan() { OUT } else { v.min(f32::MAX) }
}

fn at(logits: &[f32], token: u32) -> f32 {
    logits.get(token as usize).copied().unwrap_or(OUT)
}

fn log_total(raw: &[f32]) -> f64 {
    let best = f64::from(raw.iter().copied().fold(OUT, f32::max));
    best + raw.iter().map(|v| (f64::from(*v) - best).exp()).sum::<f64>().ln()
}

/// Penalties, biases and the mask.
pub fn change(raw: &[f32], ask: &Ask, edits: &[Edit], mask: Option<&[u32]>) -> Vec<f32> {
    let mut logits = raw.to_vec();
    for edit in edits {
        let Some(v) = logits.get_mut(edit.token as usize) else { continue };
        if edit.seen != 0 && ask.repetition != 1.0 {
            *v = if *v > 0.0 { *v / ask.repetition } else { *v * ask.repetition };
        }
        if edit.outputs > 0 {
            *v -= ask.presence + ask.frequency * edit.outputs as f32;
        }
        *v = finite(*v + edit.bias);
    }
    for (token, v) in logits.iter_mut().enumerate() {
        if mask.is_some_and(|words| words.get(token / 32).is_none_or(|word| word >> (token % 32) & 1 == 0)) {
            *v = OUT;
        }
    }
    logits
}

/// Tokens by logit, the lower id first where logits are equal; without those that are out.
fn in_order(logits: &[f32]) -> Vec<u32> {
    let mut tokens: Vec<u32> = (0..logits.len() as u32).filter(|token| at(logits, *token) > OUT).collect();
    tokens.sort_unstable_by_key(|token| (std::cmp::Reverse(ordered(at(logits, *token))), *token));
    tokens
}

/// 2^31 for the best token.
fn weight(depth: f32) -> u64 {
    exact::weight(depth * std::f32::consts::LOG2_E).into()
}

/// Weights of a slice, counted from its best token, and what their sum is scaled by.
fn weigh_slice(slice: &[f32], best: f32, inverse_temperature: f32) -> (Vec<u64>, u64) {
    let top = slice.iter().copied().fold(OUT, f32::max);
    if top == OUT {
        return (vec![0; slice.len()], 0);
    }
    let weights = slice.iter().map(|v| weight((top - v) * inverse_temperature)).collect();
    (weights, weight((best - top) * inverse_temperature))
}

/// What each slice weighs, and all together.
fn weigh_slices(logits: &[f32], best: f32, inverse_temperature: f32) -> (Vec<u64>, u64) {
    let slice = |slice: &[f32]| {
        let (weights, scale) = weigh_slice(slice, best, inverse_temperature);
        ((u128::from(weights.iter().sum::<u64>()) * u128::from(scale)) >> 31) as u64
    };
    let shares: Vec<u64> = logits.chunks(SLICE as usize).map(slice).collect();
    let all = shares.iter().sum();
    (shares, all)
}

/// Of `weights` the one in which a random number of 64 bits falls.
fn falls(random: u64, weights: &[u64]) -> Option<usize> {
    let all: u64 = weights.iter().sum();
    let place = ((u128::from(random) * u128::from(all)) >> 64) as u64;
    let mut sum = 0;
    weights.iter().position(|weight| {
        sum += weight;
        place < sum
    })
}

/// A token of all: a slice by its weight, then one of its tokens.
fn draw_from_all(logits: &[f32], ask: &Ask, best: f32) -> Option<u32> {
    let [a, b, c, d] =
        philox([ask.draw as u32, (ask.draw >> 32) as u32, 0, 2], [ask.seed as u32, (ask.seed >> 32) as u32]);
    let wide = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
    let chosen = falls(wide(a, b), &weigh_slices(logits, best, ask.inverse_temperature).0)?;
    let slice = logits.chunks(SLICE as usize).nth(chosen)?;
    let token = falls(wide(c, d), &weigh_slice(slice, best, ask.inverse_temperature).0)?;
    Some((chosen * SLICE as usize + token) as u32)
}

fn draw(logits: &[f32], ask: &Ask) -> Option<u32> {
    let mut kept = in_order(logits);
    let best = at(logits, *kept.first()?);
    if ask.inverse_temperature == 0.0 {
        return kept.first().copied();
    }
    if ask.top_k == 0 && ask.top_p >= 1.0 && ask.min_p <= 0.0 {
        return draw_from_all(logits, ask, best);
    }
    let depth = |token: u32| (best - at(logits, token)) * ask.inverse_temperature;
    kept.retain(|token| depth(*token) < DEPTH_MAX);
    let mut all = None;
    if ask.top_k > 0 && (ask.top_k as usize) < logits.len() {
        kept.truncate(ask.top_k as usize);
        all = Some(kept.iter().map(|token| weight(depth(*token))).sum::<u64>());
    }
    if ask.top_p < 1.0 {
        let all = all.unwrap_or_else(|| weigh_slices(logits, best, ask.inverse_temperature).1);
        let target = ((f64::from(ask.top_p) * all as f64).ceil() as u64).max(1);
        let mut sum = 0;
        let enough = kept.iter().position(|token| {
            sum += weight(depth(*token));
            sum >= target
        });
        kept.truncate(enough.map_or(kept.len(), |last| last + 1));
    }
    kept.retain(|token| exp(-depth(*token)) >= ask.min_p);
    kept.into_iter().max_by_key(|token| (ordered(noise(ask, *token) - depth(*token)), std::cmp::Reverse(*token)))
}

/// The token's noise of this draw.
fn noise(ask: &Ask, token: u32) -> f32 {
    let (low, high) = (|v: u64| v as u32, |v: u64| (v >> 32) as u32);
    let half = |which| {
        let words = philox([low(ask.draw), high(ask.draw), token / 8, which], [low(ask.seed), high(ask.seed)]);
        words[token as usize % 8 / 2] >> (token % 2 * 16) & 0xffff
    };
    gumbel(half(0) << 16 | half(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask() -> Ask {
        Ask { inverse_temperature: 1.0, seed: 7, ..Ask::greedy() }
    }

    /// Logits whose probabilities are 0.5, 0.25, 0.15, 0.07, 0.03.
    fn five() -> Vec<f32> {
        [0.5f32, 0.25, 0.15, 0.07, 0.03].map(f32::ln).to_vec()
    }

    fn check_shares(what: &str, ask: Ask, expected: [f64; 5]) {
        const DRAWS: u64 = 20_000;
        let mut counts = [0u32; 5];
        for draw in 0..DRAWS {
            counts[answer(&five(), &Ask { draw, ..ask }, &[], None).token.unwrap() as usize] += 1;
        }
        for (found, expected) in counts.iter().map(|c| f64::from(*c) / DRAWS as f64).zip(expected) {
            // Four standard deviations of 20,000 draws are below 0.015; what cannot be drawn never is.
            let close = (found - expected).abs() < 0.015 && (expected > 0.0 || found == 0.0);
            assert!(close, "{what}: {found} {expected}");
        }
    }

    #[test]
    fn draws_follow_the_distribution() {
        check_shares("plain", ask(), [0.5, 0.25, 0.15, 0.07, 0.03]);
        check_shares("top-k 2", Ask { top_k: 2, ..ask() }, [2.0 / 3.0, 1.0 / 3.0, 0.0, 0.0, 0.0]);
        let three = [0.5, 0.25, 0.15, 0.0, 0.0].map(|p| p / 0.9);
        check_shares("top-p 0.8", Ask { top_p: 0.8, ..ask() }, three);
        check_shares("min-p 0.2", Ask { min_p: 0.2, ..ask() }, three);
        check_shares("top-p 0", Ask { top_p: 0.0, ..ask() }, [1.0, 0.0, 0.0, 0.0, 0.0]);
        // Of the two that top-k leaves, the first has two thirds.
        check_shares("top-k, then top-p", Ask { top_k: 2, top_p: 0.6, ..ask() }, [1.0, 0.0, 0.0, 0.0, 0.0]);
        let squares = [0.25, 0.0625, 0.0225, 0.0049, 0.0009].map(|p| p / 0.3408);
        check_shares("temperature 0.5", Ask { inverse_temperature: 2.0, ..ask() }, squares);
    }

    #[test]
    fn edits_and_masks() {
        let edit = |token, outputs, bias, seen| Edit { token, outputs, bias, seen };
        let ask = Ask { repetition: 2.0, presence: 0.5, frequency: 0.25, ..ask() };
        let edits =
            [edit(0, 0, 0.0, 1), edit(1, 3, 0.0, 1), edit(2, 0, -1.5, 0), edit(9, 1, 1.0, 1), edit(4, 0, OUT, 0)];
        // 4 / 2; -1 * 2 - 0.5 - 3 * 0.25; 2 - 1.5; untouched; banned.
        let changed = change(&[4.0, -1.0, 2.0, 7.0, 9.0], &ask, &edits, None);
        assert_eq!(changed, [2.0, -3.25, 0.5, 7.0, OUT]);
        assert_eq!(change(&[1.0, 2.0, 3.0], &ask, &[], Some(&[0b101])), [1.0, OUT, 3.0]);
        assert_eq!(answer(&[1.0, 2.0], &ask, &[], Some(&[0])).token, None);
    }

    #[test]
    fn ties_and_what_is_no_number() {
        let greedy = |logits: &[f32]| answer(logits, &Ask::greedy(), &[], None).token;
        assert_eq!(greedy(&[1.0, 3.0, 3.0]), Some(1));
        assert_eq!(greedy(&[f32::NAN, 3.0, f32::NAN]), Some(1));
        assert_eq!(greedy(&[f32::INFINITY, f32::INFINITY]), Some(0));
        assert_eq!(greedy(&[f32::NAN; 2]), None);
    }

    #[test]
    fn a_cap_bends_logits_and_keeps_what_is_out_out() {
        let row = [0.0, 1.0, -7.5, 60.0, -1e30, f32::INFINITY, f32::NAN, OUT];
        for (found, v) in capped(&row, 30.0).into_iter().zip(row) {
            let truth = 30.0 * (f64::from(v) / 30.0).tanh();
            assert!(
                if v > OUT { (f64::from(found) - truth).abs() < 4e-6 } else { found == OUT },
                "{v}: {found} {truth}"
            );
        }
        assert_eq!(capped(&row, 0.0)[..5], row[..5]);
    }

    /// Over many slices a draw has the same shares, and top-p the same cut, as over one.
    #[test]
    fn slices_change_nothing() {
        let mut logits = vec![OUT; SLICE as usize * 3];
        let places = [5, SLICE as usize + 1, SLICE as usize * 2, SLICE as usize * 2 + 1, 9];
        places.iter().zip(five()).for_each(|(place, v)| logits[*place] = v);
        let mut counts = [0u32; 5];
        for draw in 0..4_000 {
            let token = answer(&logits, &Ask { draw, ..ask() }, &[], None).token.unwrap() as usize;
            counts[places.iter().position(|place| *place == token).unwrap()] += 1;
        }
        for (found, expected) in counts.iter().map(|c| f64::from(*c) / 4e3).zip([0.5, 0.25, 0.15, 0.07, 0.03]) {
            assert!((found - expected).abs() < 0.032, "{found} {expected}");
        }
        let [whole, one] = [&logits[..], &five()[..]].map(|row| weigh_slices(row, 0.5f32.ln(), 1.0).1);
        // As near as one weight is right.
        assert!(whole.abs_diff(one) <= 2_600, "{whole} {one}");
    }

    #[test]
    fn leaders_and_log_probabilities_are_of_the_raw_row() {
        let found = answer(&five(), &Ask { leaders: 2, ..ask() }, &[], None).leaders;
        assert_eq!(found.iter().map(|l| l.0).collect::<Vec<_>>(), [0, 1]);
        assert!((found[1].1 - 0.25f64.ln()).abs() < 1e-6);
        let banned = [Edit { bias: OUT, ..Edit::default() }];
        let one = answer(&five(), &Ask { top_k: 1, ..ask() }, &banned, None);
        assert!(one.token == Some(1) && (one.logprob - 0.25f64.ln()).abs() < 1e-6);
    }
}
