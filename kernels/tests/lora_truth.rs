//! The LoRA kernels against their twin, on adversarial input.
#![allow(clippy::unwrap_used, clippy::panic)]

mod gpu;
mod lora;

use gpu::{Bits, Gpu, Random};
use lora::{Adapters, Case, Place};
use lorafleet_kernels::image::Arch;
use lorafleet_kernels::lora::decode::Weights;
use lorafleet_kernels::lora::{Group, Segment};
use lorafleet_kernels::tuning::{Company, is_prefill};

const RANKS: [u32; 9] = [1, 3, 7, 8, 16, 31, 64, 100, 256];

fn group(inputs: u32, outputs: &[u32]) -> Group {
    Group { inputs, outputs: outputs.to_vec() }
}

/// Segments of the given lengths over shuffled rows, with some rows of the base between them.
fn segments(lengths: &[u32], random: &mut Random, absent: bool) -> (Vec<Segment>, Vec<i32>, u32) {
    let total: u32 = lengths.iter().sum();
    let all = total + 5;
    let mut ids: Vec<i32> = (0..all as i32).collect();
    random.shuffle(&mut ids);
    ids.truncate(total as usize);
    let mut out = Vec::new();
    let mut row0 = 0;
    for (slot, rows) in (0..).zip(lengths) {
        out.push(Segment { slot, row0, rows: *rows, rank: 0 });
        row0 += rows;
    }
    if absent {
        for i in (0..ids.len()).step_by(7) {
            ids[i] = -1;
        }
    }
    (out, ids, all)
}

#[test]
fn every_rank_and_length() {
    let Some(gpu) = Gpu::open() else { return };
    for (element, inputs, outputs) in [
        (Bits::Bf16, 4096, vec![4096, 1024, 1024]),
        (Bits::Bf16, 72, vec![200, 8]),
        (Bits::F16, 576, vec![576, 192, 192]),
        (Bits::Bf16, 14336, vec![512]),
    ] {
        let mut random = Random(7);
        let lengths = [0u32, 1, 7, 8, 9, 129];
        let lengths: Vec<u32> = (0..RANKS.len() * lengths.len()).map(|i| lengths[i % 6]).collect();
        let rank = |slot: u32| RANKS[slot as usize / 6];
        let (segments, rows, all) = segments(&lengths, &mut random, true);
        let group = group(inputs, &outputs);
        let adapters =
            Adapters::new(&gpu, &group, 2, lengths.len() as u32, element, 6144, |s, _, _| rank(s), &mut random);
        let mut case = Case::new(&gpu, &adapters, segments, rows, all, &mut random);
        let (before, after) = case.run(&gpu, &adapters, Place { layer: 1, launch: 3, step: 5, early: 0 });
        let error = case.check(&adapters, 1, &before, &after);
        println!("{element:?} {inputs} -> {outputs:?}: {error:.2e}");
        assert!(error < 1e-2, "{error}");
        gpu.free_all();
    }
}

#[test]
fn prefill_of_every_rank_and_length() {
    let Some(gpu) = Gpu::open() else { return };
    for (element, inputs, outputs) in [
        (Bits::Bf16, 4096, vec![1024, 512, 512]),
        (Bits::Bf16, 72, vec![200, 8]),
        (Bits::F16, 576, vec![576, 192, 192]),
        (Bits::Bf16, 14336, vec![512]),
    ] {
        let mut random = Random(19);
        let lengths = [129u32, 1, 300, 7, 64, 0, 8, 65, 128];
        let (segments, rows, all) = segments(&lengths, &mut random, true);
        let group = group(inputs, &outputs);
        let rank = |slot: u32, layer: u32, projection: u32| match (layer, (slot + projection) % 4) {
            (0, 0) => 0,
            (0, n) => RANKS[(slot as usize + 3 * n as usize) % 9],
            _ => RANKS[slot as usize],
        };
        let adapters = Adapters::new(&gpu, &group, 2, lengths.len() as u32, element, 6144, rank, &mut random);
        let mut case = Case::new(&gpu, &adapters, segments, rows, all, &mut random);
        for layer in 0..2 {
            let (before, after) = case.run_prefill(&gpu, &adapters, layer);
            let error = case.check(&adapters, layer, &before, &after);
            println!("{element:?} {inputs} -> {outputs:?}, layer {layer}: {error:.2e}");
            assert!(error < 1e-2, "{error}");
        }
        gpu.free_all();
    }
}

/// A prompt of 8,192 rows beside a short one.
#[test]
fn a_prompt_of_8192_rows() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random(37);
    let (segments, rows, all) = segments(&[8192, 70], &mut random, true);
    let group = group(512, &[512, 256]);
    let adapters =
        Adapters::new(&gpu, &group, 1, 2, Bits::Bf16, 6144, |slot, _, _| [16, 64][slot as usize], &mut random);
    let mut case = Case::new(&gpu, &adapters, segments, rows, all, &mut random);
    let (before, after) = case.run_prefill(&gpu, &adapters, 0);
    let error = case.check(&adapters, 0, &before, &after);
    println!("{all} rows: {error:.2e}");
    assert!(error < 1e-2, "{error}");
}

/// A batch of both kinds: short segments by the decode kernel, long ones by the prefill kernels, rows of one y.
#[test]
fn one_batch_through_both_kernels() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random(31);
    let (segments, rows, all) = segments(&[1u32, 7, 65, 129, 513, 8, 64, 0, 300], &mut random, true);
    let group = group(1024, &[512, 256, 256]);
    let rank = |slot: u32, _: u32, _: u32| RANKS[slot as usize % 9];
    let adapters = Adapters::new(&gpu, &group, 1, 9, Bits::Bf16, 6144, rank, &mut random);
    let mut case = Case::new(&gpu, &adapters, segments.clone(), rows, all, &mut random);
    let (long, short): (Vec<Segment>, Vec<Segment>) = segments.iter().copied().partition(|s| is_prefill(s.rows));
    assert!(!long.is_empty() && !short.is_empty());
    case.set_segments(&gpu, &adapters, short);
    let (before, _) = case.run(&gpu, &adapters, Place { layer: 0, launch: 0, step: 1, early: 0 });
    case.set_segments(&gpu, &adapters, long);
    let (_, after) = case.run_prefill(&gpu, &adapters, 0);
    case.set_segments(&gpu, &adapters, segments);
    let error = case.check(&adapters, 0, &before, &after);
    println!("{all} rows: {error:.2e}");
    assert!(error < 1e-2, "{error}");
}

/// Ranks up to 64 in the sums of the base product, beside slices, layers and segments that have none; tiles in one round of
/// clusters and in many.
#[test]
fn a_gemm_takes_the_delta_on() {
    let Some(gpu) = Gpu::open() else { return };
    if gpu.arch != Arch::Sm90a {
        gpu::skipped(&format!("{} has no image of gemm_lora_sm90a", gpu.name));
        return;
    }
    let short = [129u32, 300, 7, 64, 8, 65, 128, 1, 256];
    let long = [640u32, 1000, 7, 129, 513, 65, 2048, 1, 600];
    for (element, inputs, outputs, lengths, ranks) in [
        (Bits::Bf16, 1024, vec![512, 256, 256], short, [1, 3, 7, 8, 16, 31, 64, 40, 57]),
        (Bits::F16, 192, vec![768], short, [16, 64, 33, 24, 8, 1, 48, 2, 17]),
        (Bits::Bf16, 4096, vec![256], short, [16, 3, 7, 8, 1, 15, 9, 12, 11]),
        (Bits::Bf16, 128, vec![1536, 512, 256], long, [16, 3, 7, 8, 1, 15, 9, 12, 11]),
        (Bits::Bf16, 64, vec![512], long, [16, 3, 7, 8, 1, 15, 9, 12, 11]),
        (Bits::F16, 128, vec![512, 2048], long, [64, 3, 7, 8, 1, 15, 9, 32, 11]),
    ] {
        let mut random = Random(23);
        let (mut row0, mut segments) = (0, Vec::new());
        for (slot, rows) in (0..).zip(lengths) {
            segments.push(Segment { slot, row0, rows, rank: 0 });
            row0 += rows;
        }
        let group = group(inputs, &outputs);
        let rank = |slot: u32, layer: u32, projection: u32| match (layer, (slot + projection) % 4) {
            _ if slot == 3 => 0,
            (0, 0) => 0,
            (0, n) => ranks[(slot as usize + 3 * n as usize) % 9],
            _ => ranks[slot as usize],
        };
        let adapters = Adapters::new(&gpu, &group, 2, lengths.len() as u32, element, 6144, rank, &mut random);
        let rows: Vec<i32> = (0..row0 as i32).collect();
        let mut case = Case::new(&gpu, &adapters, segments, rows, row0, &mut random);
        let w = element.random((inputs * outputs.iter().sum::<u32>()) as usize, 0.3, &mut random);
        for layer in 0..2 {
            let error = case.run_gemm(&gpu, &adapters, &w, layer);
            println!("{element:?} {inputs} -> {outputs:?}, {row0} rows, layer {layer}: {error:.2e}");
            assert!(error < 1e-2, "{error}");
        }
        gpu.free_all();
    }
}

/// Layers that an adapter leaves alone, projections without one, another rank in each.
#[test]
fn ranks_differ_by_layer_and_projection() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random(11);
    let (segments, rows, all) = segments(&[1; 40], &mut random, false);
    let group = group(1024, &[1024, 256, 256]);
    let rank = |slot: u32, layer: u32, projection: u32| match (slot + layer + projection) % 5 {
        0 => 0,
        n => {
            RANKS[(slot as usize + 2 * n as usize + projection as usize) % 9]
                * u32::from(!(slot + layer).is_multiple_of(7))
        }
    };
    let adapters = Adapters::new(&gpu, &group, 4, 40, Bits::Bf16, 2048, rank, &mut random);
    let mut case = Case::new(&gpu, &adapters, segments, rows, all, &mut random);
    for layer in 0..4 {
        let (before, after) = case.run(&gpu, &adapters, Place { layer, launch: layer, step: 1, early: layer % 3 });
        let error = case.check(&adapters, layer, &before, &after);
        assert!(error < 1e-2, "layer {layer}: {error}");
    }
}

/// Batches from one row to 512, each row its own adapter or shared.
#[test]
fn batch_sizes() {
    let Some(gpu) = Gpu::open() else { return };
    for (count, adapters_count, ranks) in [
        (1u32, 1u32, [16, 16]),
        (2, 2, [8, 64]),
        (64, 64, [16, 16]),
        (200, 200, [8, 16]),
        (256, 32, [16, 16]),
        (512, 256, [8, 16]),
        (512, 1, [64, 64]),
    ] {
        let mut random = Random(count as u64 + 1);
        let each = count / adapters_count;
        let (segments, rows, all) = segments(&vec![each; adapters_count as usize], &mut random, false);
        let group = group(2048, &[2048, 512, 512]);
        let rank = |slot: u32, _: u32, _: u32| ranks[slot as usize % 2];
        let adapters = Adapters::new(&gpu, &group, 1, adapters_count, Bits::Bf16, 1 << 16, rank, &mut random);
        let mut case = Case::new(&gpu, &adapters, segments, rows, all, &mut random);
        let (before, after) = case.run(&gpu, &adapters, Place { layer: 0, launch: 0, step: 9, early: 1 });
        let error = case.check(&adapters, 0, &before, &after);
        println!("{count} rows, {adapters_count} adapters: {error:.2e}");
        assert!(error < 1e-2, "{count} rows: {error}");
        gpu.free_all();
    }
}

/// One graph replays any mix with the bits of an eager launch, and every replay has the same bits.
#[test]
fn a_graph_replays_any_mix() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random(3);
    let group = group(1024, &[1024, 256, 256]);
    let rank = |slot: u32, _: u32, _: u32| RANKS[slot as usize % 9];
    let adapters = Adapters::new(&gpu, &group, 2, 64, Bits::Bf16, 1 << 14, rank, &mut random);
    let (all_segments, rows, all) = segments(&[8; 64], &mut random, false);
    let mut case = Case::new(&gpu, &adapters, all_segments.clone(), rows, all, &mut random);
    let before = gpu.read(case.y, case.y_bytes);
    // A chain whose shrinks run beside the launch before: y grows by every layer's delta many times.
    let chain = |case: &Case, step: u32| {
        for launch in 0..12 {
            gpu.launch(
                &case.launch(&adapters, Place { layer: launch % 2, launch, step, early: (launch % 5 != 3).into() }),
            );
        }
    };
    let graphs = [Weights::Ring, Weights::Registers].map(|weights| {
        case.weights = weights;
        (weights, gpu.capture(|| chain(&case, 0)))
    });
    let mut step = 100;
    for used in [64usize, 1, 17, 64, 3, 40] {
        let mix: Vec<Segment> =
            all_segments.iter().rev().take(used).map(|s| Segment { rows: 1 + s.slot % 8, ..*s }).collect();
        case.company = if used % 2 == 1 { Company::Lora } else { Company::Nothing };
        case.set_segments(&gpu, &adapters, mix);
        let mut seen: Vec<Vec<u8>> = Vec::new();
        for (weights, graph) in &graphs {
            case.weights = *weights;
            for round in 0..4 {
                step += 1;
                gpu.write(case.y, &before);
                gpu.set_u32(case.step, step);
                if round == 0 {
                    chain(&case, step);
                } else {
                    gpu.replay(graph);
                }
                seen.push(gpu.read(case.y, case.y_bytes));
            }
        }
        assert!(seen.iter().all(|y| *y == seen[0]), "{used} segments: replays differ");
        assert!(seen[0] != before);
    }
}

/// Beside another kernel in a graph LoRA waits for nothing, and what follows finds both complete.
#[test]
fn beside_another_kernel() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random(29);
    let group = group(1024, &[1024, 256, 256]);
    let rank = |slot: u32, _: u32, _: u32| RANKS[slot as usize % 9];
    let adapters = Adapters::new(&gpu, &group, 2, 30, Bits::Bf16, 1 << 14, rank, &mut random);
    let mut new_case = || {
        let (segments, rows, all) = segments(&[3; 30], &mut random, false);
        Case::new(&gpu, &adapters, segments, rows, all, &mut random)
    };
    let (first, mut second) = (new_case(), new_case());
    second.store = 1;
    let at = |launch: u32, early| Place { layer: launch % 2, launch, step: 1, early };
    let (before, expected) = second.run(&gpu, &adapters, at(1, 0));
    let graph = gpu.capture(|| {
        gpu.beside(
            gpu.stream,
            || gpu.launch(&first.launch(&adapters, at(0, 0))),
            || gpu.launch_on(gpu.stream, &second.launch(&adapters, at(1, 2)), false),
        );
        gpu.launch(&first.launch(&adapters, at(2, 0)));
    });
    let (start, poison) = (gpu.read(first.y, first.y_bytes), gpu::bytes(&before));
    let mut sums: Vec<Vec<u8>> = Vec::new();
    for step in 12..18 {
        gpu.write(first.y, &start);
        gpu.write(second.y, &poison);
        gpu.set_u32(first.step, step);
        gpu.set_u32(second.step, step);
        gpu.replay(&graph);
        assert!(gpu::words(&gpu.read(second.y, second.y_bytes)) == expected, "step {step}");
        sums.push(gpu.read(first.y, first.y_bytes));
    }
    assert!(sums.iter().all(|y| *y == sums[0]) && sums[0] != start);
}
