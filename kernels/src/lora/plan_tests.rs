//! A plan is right when every piece's inputs and outputs are covered once, by CTAs that exist, with slots of its own.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::tuning::{Company, decode_tuning};

fn runs(plan: &DecodePlan) -> (Vec<Run>, Vec<Run>) {
    let (mut shrinks, mut expands) = (Vec::new(), Vec::new());
    for block in &plan.blocks {
        let (s, n) = (block.shrinks as usize, (block.shrinks + block.expands) as usize);
        assert!(n <= RUNS_MAX);
        let inline = block.runs.iter().take(n);
        let overflow = &plan.overflow[block.overflow as usize..][..n.saturating_sub(BLOCK_RUNS)];
        for (i, run) in inline.chain(overflow).enumerate() {
            if i < s { shrinks.push(*run) } else { expands.push(*run) }
        }
    }
    (shrinks, expands)
}

fn covers_once(mut ranges: Vec<(u32, u32)>, total: u32) {
    ranges.sort();
    let mut at = 0;
    for (from, count) in ranges {
        assert_eq!(from, at);
        assert!(count > 0);
        at += count;
    }
    assert_eq!(at, total);
}

fn check(segments: &[Segment], group: &Group, tuning: &DecodeTuning) -> DecodePlan {
    let plan = plan_decode(segments, group, tuning).unwrap();
    assert_eq!(plan.blocks.len(), tuning.grid as usize);
    assert!(plan.blocks[tuning.ctas as usize..].iter().all(|b| b.shrinks + b.expands == 0));
    let (shrinks, expands) = runs(&plan);
    let mut by_piece: BTreeMap<u32, (Vec<Run>, Vec<Run>)> = BTreeMap::new();
    shrinks.iter().for_each(|r| by_piece.entry(r.row0).or_default().0.push(*r));
    expands.iter().for_each(|r| by_piece.entry(r.row0).or_default().1.push(*r));
    let blocks = group.inputs.div_ceil(BLOCK_INPUTS);
    let units = group.outputs.iter().map(|n| n.div_ceil(UNIT_OUTPUTS)).sum();
    let (mut slots, mut rows) = (BTreeSet::new(), BTreeMap::<u32, u32>::new());
    for (row0, (s, e)) in &by_piece {
        covers_once(s.iter().map(|r| (r.from, r.count)).collect(), blocks);
        covers_once(e.iter().map(|r| (r.from, r.count)).collect(), units);
        assert!((1..=PIECE_ROWS).contains(&s[0].rows));
        (0..s[0].rows).for_each(|k| assert!(rows.insert(row0 + k, s[0].slot).is_none()));
        let base = s.iter().map(|r| r.exchange).min().unwrap();
        for r in s.iter().chain(e) {
            assert_eq!((r.slot, r.rows, r.stride, r.splits), (s[0].slot, s[0].rows, s[0].stride, s.len() as u32));
        }
        for r in s {
            assert!((r.exchange - base).is_multiple_of(r.stride));
            (0..r.stride).for_each(|c| assert!(r.exchange + c < plan.exchange_columns && slots.insert(r.exchange + c)));
        }
        e.iter().for_each(|r| assert_eq!(r.exchange, base));
    }
    let expect = segments.iter().filter(|s| s.rank > 0);
    let expect: BTreeMap<u32, u32> = expect.flat_map(|s| (0..s.rows).map(|k| (s.row0 + k, s.slot))).collect();
    assert_eq!(rows, expect);
    plan
}

fn distinct(count: u32, rows: u32, rank: impl Fn(u32) -> u32) -> Vec<Segment> {
    (0..count).map(|i| Segment { slot: i, row0: i * rows, rows, rank: rank(i) }).collect()
}

fn qkv() -> Group {
    Group { inputs: 4096, outputs: vec![4096, 1024, 1024] }
}

#[test]
fn sixty_four_distinct_get_four_whole_ctas_each() {
    let plan = check(&distinct(64, 1, |_| 16), &qkv(), &decode_tuning(64, 132, Company::Nothing));
    let used: Vec<_> = plan.blocks.iter().filter(|b| b.shrinks + b.expands > 0).collect();
    assert_eq!(used.len(), 256);
    assert!(used.iter().all(|b| b.shrinks == 1 && b.expands == 1 && b.runs[0].slot == b.runs[1].slot));
    assert!(plan.overflow.is_empty());
}

#[test]
fn one_token_shrinks_on_few_and_expands_on_all() {
    let plan = check(
        &distinct(1, 1, |_| 16),
        &Group { inputs: 4096, outputs: vec![14336; 2] },
        &decode_tuning(1, 132, Company::Nothing),
    );
    assert_eq!(plan.blocks.iter().map(|b| b.shrinks).sum::<u32>(), 16);
    assert!(plan.blocks.iter().filter(|b| b.expands == 1).count() > 100);
}

#[test]
fn nothing_to_do_is_a_plan() {
    for segments in [vec![], distinct(3, 0, |_| 16), distinct(3, 2, |_| 0)] {
        let plan = check(&segments, &qkv(), &decode_tuning(0, 132, Company::Nothing));
        assert!(plan.blocks.iter().all(|b| b.shrinks + b.expands == 0));
        assert_eq!(plan.exchange_columns, 0);
    }
}

#[test]
fn mixed_ranks_are_balanced() {
    for count in [64u32, 100, 256, 400] {
        let segments = distinct(count, 1, |i| [8, 16, 32, 64][i as usize % 4]);
        let plan = check(&segments, &qkv(), &decode_tuning(count, 132, Company::Nothing));
        let load = |b: &Block| {
            let n = (b.shrinks + b.expands) as usize;
            let more = plan.overflow[b.overflow as usize..][..n.saturating_sub(BLOCK_RUNS)].iter();
            let cost = |(i, r): (usize, &Run)| {
                let rank = segments[r.row0 as usize].rank as u64;
                r.count as u64 * rank * if i < b.shrinks as usize { 3 * 32 } else { 64 }
            };
            b.runs.iter().take(n).chain(more).enumerate().map(cost).sum::<u64>()
        };
        let loads: Vec<u64> = plan.blocks.iter().map(load).collect();
        let (max, mean) = (*loads.iter().max().unwrap(), loads.iter().sum::<u64>() / 264);
        assert!(max * 100 < mean * 135, "{count}: {max} against {mean}");
    }
}

#[test]
fn refusals() {
    let tuning = decode_tuning(1, 132, Company::Nothing);
    let e = plan_decode(&distinct(2, 1, |i| 256 + i), &qkv(), &tuning).unwrap_err();
    assert_eq!(e.to_string(), "segment 1 has rank 257, above 256");
    let e = plan_decode(&[], &Group { inputs: 8, outputs: vec![8; 4] }, &tuning).unwrap_err();
    assert_eq!(e, PlanError::Slices { found: 4 });
    let e = plan_decode(&distinct(4097, 1, |_| 1), &qkv(), &tuning).unwrap_err();
    assert_eq!(e, PlanError::Pieces { found: 4097 });
}

proptest! {
    #[test]
    fn any_mix_is_covered_once(
        mix in prop::collection::vec((prop::sample::select(vec![0u32, 1, 7, 8, 9, 129]), prop::sample::select(vec![0u32, 1, 3, 8, 16, 31, 64, 100, 256])), 0..200),
        shape in prop::sample::select(vec![(8u32, vec![8u32]), (576, vec![576, 192, 192]), (4096, vec![14336, 14336]), (14336, vec![4096])]),
        sms in prop::sample::select(vec![1u32, 7, 68, 132]),
    ) {
        let mut row0 = 0;
        let mut segments = Vec::new();
        for (slot, (rows, rank)) in (0..).zip(mix) {
            segments.push(Segment { slot, row0, rows, rank });
            row0 += rows;
        }
        let pieces: u32 = segments.iter().filter(|s| s.rank > 0).map(|s| s.rows.div_ceil(PIECE_ROWS)).sum();
        // A CTA holds 64 runs: few SMs cannot hold many pieces, and say so.
        let tuning = decode_tuning(pieces, sms, Company::Nothing);
        let group = Group { inputs: shape.0, outputs: shape.1 };
        if pieces > tuning.ctas * 8 {
            match plan_decode(&segments, &group, &tuning) {
                Ok(_) => { check(&segments, &group, &tuning); }
                Err(e) => prop_assert!(matches!(e, PlanError::Ctas { .. }), "{e}"),
            }
        } else {
            check(&segments, &group, &tuning);
        }
    }
}
