//! From logits to one token. Pure: the same logits and spec give the same token.
//!
//! Order: penalties, bias, bans; greedy, or temperature, then top-k, top-p (on what top-k left), min-p (against the
//! best), and one draw. Ties are always in favour of the lower token id.

use std::cmp::Ordering;

use lorafleet_backend::batch::{SampleSpec, SampledRow, SequenceId};

/// Draws from one row of logits; `logits` is used up.
pub fn sample(sequence: SequenceId, logits: &mut [f32], spec: &SampleSpec) -> SampledRow {
    let raw = spec.logprobs.map(|count| Raw::of(logits, usize::from(count)));
    adjust(logits, spec);
    let token = if spec.temperature <= 0.0 { best(logits) } else { draw(logits, spec) };
    match raw {
        None => SampledRow { sequence, token, logprob: f32::NAN, alternatives: Vec::new() },
        Some(raw) => {
            let logprob = raw.logits.get(token as usize).map_or(f32::NEG_INFINITY, |logit| logit - raw.log_total);
            SampledRow { sequence, token, logprob, alternatives: raw.alternatives }
        }
    }
}

/// The distribution before anything is done to it.
struct Raw {
    logits: Vec<f32>,
    log_total: f32,
    alternatives: Vec<(u32, f32)>,
}

impl Raw {
    fn of(logits: &[f32], count: usize) -> Self {
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total: f64 = logits.iter().map(|logit| f64::from((logit - top).exp())).sum();
        let log_total = (f64::from(top) + total.ln()) as f32;
        let alternatives = leaders(logits, count).into_iter().map(|(logit, id)| (id, logit - log_total)).collect();
        Self { logits: logits.to_vec(), log_total, alternatives }
    }
}

/// The `count` best in order, in one pass: few are asked for, and few of a row are ever among the best so far.
fn leaders(logits: &[f32], count: usize) -> Vec<Candidate> {
    let mut leaders: Vec<Candidate> = Vec::with_capacity(count + 1);
    for candidate in logits.iter().copied().zip(0u32..) {
        let full = leaders.len() == count;
        if full && leaders.last().is_none_or(|last| order(last, &candidate).is_le()) {
            continue;
        }
        let at = leaders.partition_point(|leader| order(leader, &candidate).is_le());
        leaders.insert(at, candidate);
        leaders.truncate(count);
    }
    leaders
}

fn adjust(logits: &mut [f32], spec: &SampleSpec) {
    for (token, seen) in spec.seen.iter() {
        let Some(logit) = logits.get_mut(*token as usize) else { continue };
        if spec.repetition_penalty != 1.0 && seen.prompt + seen.output > 0 {
            *logit = if *logit > 0.0 { *logit / spec.repetition_penalty } else { *logit * spec.repetition_penalty };
        }
        if seen.output > 0 {
            *logit -= spec.presence_penalty + spec.frequency_penalty * seen.output as f32;
        }
    }
    for (token, bias) in spec.logit_bias.iter() {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit += bias;
        }
    }
    for token in spec.banned.iter() {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

fn best(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (id, logit) in (0u32..).zip(logits) {
        if *logit > best.0 {
            best = (*logit, id);
        }
    }
    best.1
}

type Candidate = (f32, u32);

fn ids(logits: &[f32]) -> Vec<Candidate> {
    logits.iter().copied().zip(0u32..).collect()
}

/// Higher logits first, then lower ids; what is no number comes last.
fn order(a: &Candidate, b: &Candidate) -> Ordering {
    let key = |logit: f32| if logit.is_nan() { f32::NEG_INFINITY } else { logit };
    key(b.0).total_cmp(&key(a.0)).then(a.1.cmp(&b.1))
}

/// The `count` first in order, sorted.
fn keep_best(candidates: &mut Vec<Candidate>, count: usize) {
    if count == 0 {
        candidates.clear();
        return;
    }
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count - 1, order);
        candidates.truncate(count);
    }
    candidates.sort_unstable_by(order);
}

fn draw(logits: &[f32], spec: &SampleSpec) -> u32 {
    let mut candidates = ids(logits);
    if spec.top_k > 0 {
        keep_best(&mut candidates, spec.top_k as usize);
    }
    let top = candidates.iter().map(|candidate| candidate.0).fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: f32| {
        let weight = f64::from((logit - top) / spec.temperature).exp();
        if weight.is_nan() { 0.0 } else { weight }
    };
    if spec.top_p < 1.0 {
        keep_mass(&mut candidates, f64::from(spec.top_p.max(0.0)), &weight);
    }
    if spec.min_p > 0.0 {
        let least = f64::from(spec.min_p.min(1.0));
        candidates.retain(|candidate| weight(candidate.0) >= least);
    }
    let weights: Vec<f64> = candidates.iter().map(|candidate| weight(candidate.0)).collect();
    let mut left = uniform(spec.seed, spec.draw) * weights.iter().sum::<f64>();
    let mut drawn = None;
    for (candidate, weight) in candidates.iter().zip(&weights).filter(|(_, weight)| **weight > 0.0) {
        drawn = Some(candidate.1);
        left -= weight;
        if left < 0.0 {
            break;
        }
    }
    // Nothing had a weight: every logit was minus infinity or no number.
    drawn.unwrap_or_else(|| best(logits))
}

/// The fewest best candidates whose weights reach `part` of all; at least one.
fn keep_mass(candidates: &mut Vec<Candidate>, part: f64, weight: &dyn Fn(f32) -> f64) {
    let enough = part * candidates.iter().map(|candidate| weight(candidate.0)).sum::<f64>();
    let mut sorted = 256;
    loop {
        let mut head = candidates.clone();
        keep_best(&mut head, sorted);
        let mut mass = 0.0;
        let reached = head.iter().position(|candidate| {
            mass += weight(candidate.0);
            mass >= enough
        });
        if let Some(last) = reached {
            head.truncate(last + 1);
            *candidates = head;
            return;
        }
        if head.len() == candidates.len() {
            *candidates = head;
            return;
        }
        sorted *= 8;
    }
}

/// In 0..1, a function of the counters alone (the finaliser of SplitMix64 over both).
fn uniform(seed: u64, draw: u64) -> f64 {
    let mix = |value: u64| {
        let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    };
    let state = mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15));
    let bits = mix(state.wrapping_add(draw.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use lorafleet_backend::batch::Seen;

    fn spec() -> SampleSpec {
        SampleSpec { temperature: 1.0, seed: 7, ..SampleSpec::greedy() }
    }

    fn token(logits: &[f32], spec: &SampleSpec) -> u32 {
        sample(SequenceId(0), &mut logits.to_vec(), spec).token
    }

    /// Logits whose probabilities are 0.5, 0.25, 0.15, 0.07, 0.03.
    fn five() -> Vec<f32> {
        [0.5f32, 0.25, 0.15, 0.07, 0.03].map(f32::ln).to_vec()
    }

    /// How often each of the five is drawn in many draws.
    fn shares(spec: &SampleSpec) -> Vec<f64> {
        const DRAWS: u32 = 20_000;
        let mut counts = [0u32; 5];
        for draw in 0..u64::from(DRAWS) {
            counts[token(&five(), &SampleSpec { draw, ..spec.clone() }) as usize] += 1;
        }
        counts.iter().map(|count| f64::from(*count) / f64::from(DRAWS)).collect()
    }

    fn check_shares(what: &str, spec: &SampleSpec, expected: [f64; 5]) {
        for (found, expected) in shares(spec).iter().zip(expected) {
            // Four standard deviations of 20,000 draws are below 0.015; what cannot be drawn is never drawn.
            assert!(
                (found - expected).abs() < 0.015 && (expected > 0.0 || *found == 0.0),
                "{what}: {found} {expected}"
            );
        }
    }

    #[test]
    fn draws_follow_the_distribution() {
        check_shares("plain", &spec(), [0.5, 0.25, 0.15, 0.07, 0.03]);
        check_shares("top-k 2", &SampleSpec { top_k: 2, ..spec() }, [2.0 / 3.0, 1.0 / 3.0, 0.0, 0.0, 0.0]);
        let mass = 0.5 + 0.25 + 0.15;
        let three = [0.5 / mass, 0.25 / mass, 0.15 / mass, 0.0, 0.0];
        check_shares("top-p 0.8", &SampleSpec { top_p: 0.8, ..spec() }, three);
        check_shares("min-p 0.2", &SampleSpec { min_p: 0.2, ..spec() }, three);
        let top_p_zero = SampleSpec { top_p: 0.0, ..spec() };
        check_shares("top-p 0", &top_p_zero, [1.0, 0.0, 0.0, 0.0, 0.0]);
        let total = 0.25 + 0.0625 + 0.0225 + 0.0049 + 0.0009;
        let squared = [0.25, 0.0625, 0.0225, 0.0049, 0.0009].map(|p| p / total);
        check_shares("temperature 0.5", &SampleSpec { temperature: 0.5, ..spec() }, squared);
        let banned = SampleSpec { banned: Arc::new([0]), ..spec() };
        check_shares("banned", &banned, [0.0, 0.5, 0.3, 0.14, 0.06]);
    }

    #[test]
    fn the_same_seed_and_draw_give_the_same_token_and_others_differ() {
        let logits = vec![0.0; 1000];
        let drawn = |seed, draw| token(&logits, &SampleSpec { seed, draw, ..spec() });
        assert_eq!(drawn(1, 2), drawn(1, 2));
        let different: std::collections::BTreeSet<u32> = (0..64).map(|draw| drawn(1, draw)).collect();
        assert!(different.len() > 50);
        assert_ne!(drawn(1, 2), drawn(2, 2));
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals_and_lives_with_what_is_no_number() {
        let greedy = SampleSpec { temperature: 0.0, ..spec() };
        assert_eq!(token(&[1.0, 3.0, 3.0], &greedy), 1);
        assert_eq!(token(&[f32::NAN, 3.0, f32::NAN], &greedy), 1);
        assert_eq!(token(&[f32::NEG_INFINITY; 3], &greedy), 0);
        assert_eq!(token(&[f32::NEG_INFINITY; 3], &spec()), 0);
    }

    #[test]
    fn penalties_and_bias_move_logits_as_defined() {
        let seen = BTreeMap::from([(0, Seen { prompt: 1, output: 0 }), (1, Seen { prompt: 0, output: 3 })]);
        let spec = SampleSpec {
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            repetition_penalty: 2.0,
            seen: Arc::new(seen),
            logit_bias: Arc::new(BTreeMap::from([(2, -1.5)])),
            ..spec()
        };
        let mut logits = [4.0, -1.0, 2.0, 7.0];
        adjust(&mut logits, &spec);
        // 4 / 2; -1 * 2 - 0.5 - 3 * 0.25; 2 - 1.5; untouched.
        assert_eq!(logits, [2.0, -3.25, 0.5, 7.0]);
    }

    #[test]
    fn log_probabilities_are_of_the_raw_distribution() {
        let spec = SampleSpec { temperature: 0.3, top_k: 1, logprobs: Some(3), banned: Arc::new([0]), ..spec() };
        let row = sample(SequenceId(3), &mut five(), &spec);
        assert_eq!((row.sequence, row.token), (SequenceId(3), 1));
        assert!((row.logprob - 0.25f32.ln()).abs() < 1e-6);
        let ids: Vec<u32> = row.alternatives.iter().map(|alternative| alternative.0).collect();
        assert_eq!(ids, [0, 1, 2]);
        assert!((row.alternatives[2].1 - 0.15f32.ln()).abs() < 1e-6);
    }

    #[test]
    fn leaders_are_what_a_full_sort_gives() {
        let logits: Vec<f32> = (0..500u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as f32).collect();
        for count in [0, 1, 5, 20, 499, 500, 600] {
            let mut sorted = ids(&logits);
            keep_best(&mut sorted, count);
            assert_eq!(leaders(&logits, count), sorted, "{count}");
        }
    }
}
