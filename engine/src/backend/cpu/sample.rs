//! From logits to one token. Pure: the same logits and spec give the same token.
//!
//! Order: penalties, bias, bans; greedy, or temperature, then top-k, top-p (on what top-k left), min-p (against the
//! best), and one draw. Ties are always in favour of the lower token id.

use std::cmp::Ordering;

use crate::batch::{SampleSpec, SampledRow, SequenceId};

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
        let mut order = ids(logits);
        keep_best(&mut order, count);
        let alternatives = order.into_iter().map(|(logit, id)| (id, logit - log_total)).collect();
        Self { logits: logits.to_vec(), log_total, alternatives }
    }
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
