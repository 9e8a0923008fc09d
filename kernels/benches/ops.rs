//! What an engine needs beside a decoder's layers: drawing tokens, merging adapters, LoRA of embedding and head, swapping.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../tests/gpu/mod.rs"]
mod gpu;
#[path = "../tests/lora/mod.rs"]
mod lora;
mod measure;

use gpu::{Bits, Gpu, Random, bytes};
use lora::{Adapters, Case, Place};
use lorafleet_kernels::decoder::pages::{PagesArgs, Piece as Move, pages_launch};
use lorafleet_kernels::decoder::sample::{Ask, Logits, SampleArgs, candidates_bytes, parts_bytes, sample_launches};
use lorafleet_kernels::launch::Element;
use lorafleet_kernels::lora::embedding::{EmbeddingLoraArgs, cut_pieces, embedding_lora_launch};
use lorafleet_kernels::lora::merge::{MergeArgs, merge_launch};
use lorafleet_kernels::lora::{Group, Segment};
use lorafleet_kernels::plain::bytes_of;
use measure::{BANDWIDTH, SETS, noise, row};

const VOCABULARY: u32 = 128_256;

/// Rows as a model gives them: a bell, and a few tokens above it; or nearly flat.
fn logits(gpu: &Gpu, kind: Logits, rows: u32, flat: bool) -> u64 {
    let mut random = Random(9);
    let different = 4;
    let mut block = Vec::new();
    for _ in 0..different {
        let bell = |random: &mut Random| (0..6).map(|_| random.unit()).sum::<f32>() * if flat { 0.01 } else { 1.4 };
        let mut row: Vec<f32> = (0..VOCABULARY).map(|_| bell(&mut random)).collect();
        for lift in [14.0, 13.5, 13.0, 12.0, 12.0, 11.0, 10.5, 10.0] {
            row[random.below(VOCABULARY as usize)] += if flat { 0.0 } else { lift };
        }
        match kind {
            Logits::F32 => block.extend(row.into_iter().flat_map(f32::to_le_bytes)),
            _ => block.extend(bytes(&row.into_iter().map(|v| Bits::Bf16.of(v)).collect::<Vec<_>>())),
        }
    }
    let count = (u64::from(rows) * SETS).next_multiple_of(different);
    let p = gpu.alloc(block.len() * (count / different) as usize);
    (0..count / different).for_each(|i| gpu.write(p + i * block.len() as u64, &block));
    p
}

fn sampling(gpu: &Gpu, kind: Logits, rows: u32, what: &str, flat: bool, ask: Ask) {
    let bytes_each = if kind == Logits::F32 { 4 } else { 2 };
    let logits = logits(gpu, kind, rows, flat);
    let asks: Vec<Ask> = (0..u64::from(rows)).map(|seed| Ask { seed, ..ask }).collect();
    let args = SampleArgs {
        asks: gpu.upload(&bytes_of(&asks)),
        tokens: gpu.alloc(rows as usize * 4),
        logprobs: gpu.alloc(rows as usize * 4),
        leaders: gpu.alloc(rows as usize * 32 * 8),
        parts: gpu.alloc(parts_bytes(rows) as usize),
        candidates: gpu.alloc(candidates_bytes(rows) as usize),
        rows,
        vocabulary: VOCABULARY,
        stride: VOCABULARY,
        leaders_stride: 32,
        ..SampleArgs::default()
    };
    let moved = f64::from(rows) * f64::from(VOCABULARY * bytes_each);
    let name = format!("sample, {rows} rows of {kind:?}, {what}");
    row(gpu, &name, moved, |set| {
        let args = SampleArgs { logits: logits + set * moved as u64, ..args };
        sample_launches(&args, kind).unwrap().to_vec()
    });
    gpu.free_all();
}

fn all_sampling(gpu: &Gpu) {
    let draw = Ask { inverse_temperature: 1.0 / 0.8, ..Ask::greedy() };
    let usual = Ask { top_k: 50, top_p: 0.95, logprob: 1, ..draw };
    for (rows, kind) in [(1, Logits::F32), (64, Logits::F32), (64, Logits::Bf16), (256, Logits::F32)] {
        sampling(gpu, kind, rows, "greedy", false, Ask::greedy());
        sampling(gpu, kind, rows, "greedy with its log-probability", false, Ask { logprob: 1, ..Ask::greedy() });
        sampling(gpu, kind, rows, "temperature", false, draw);
        sampling(gpu, kind, rows, "top-k, top-p, log-probability", false, usual);
        sampling(gpu, kind, rows, "20 best", false, Ask { leaders: 20, ..draw });
    }
    sampling(gpu, Logits::F32, 64, "temperature, flat", true, draw);
    sampling(gpu, Logits::F32, 64, "top-p, flat", true, Ask { top_p: 0.95, ..draw });
}

fn merging(gpu: &Gpu, rank: u32) {
    let (inputs, outputs) = (4096u32, 14336u32);
    let group = Group { inputs, outputs: vec![outputs] };
    let adapters = Adapters::new(gpu, &group, 1, 1, Bits::Bf16, 2 << 20, |_, _, _| rank, &mut Random(4));
    let size = u64::from(inputs * outputs) * 2;
    let (from, to) = (noise(gpu, (size / 2 / SETS) as usize), gpu.alloc(size as usize));
    let args = MergeArgs { from, to, pool: adapters.pool, tensor: adapters.tensors, inputs, outputs };
    row(gpu, &format!("merge of r{rank} into {outputs} x {inputs}"), size as f64 * 2.0, |_| {
        vec![merge_launch(&args, Element::Bf16).unwrap()]
    });
    gpu.free_all();
}

/// Rows spread evenly over adapters of rank 16.
fn embedding(gpu: &Gpu, rows: u32, slots: u32) {
    let width = 4096;
    let group = Group { inputs: VOCABULARY, outputs: vec![width] };
    let adapters = Adapters::new(gpu, &group, 1, slots, Bits::Bf16, 2 << 20, |_, _, _| 16, &mut Random(4));
    let each = rows / slots;
    let segments: Vec<Segment> =
        (0..slots).map(|slot| Segment { slot, row0: slot * each, rows: each, rank: 16 }).collect();
    let pieces = cut_pieces(&segments);
    let mut random = Random(6);
    let tokens: Vec<u32> = (0..rows).map(|_| random.below(VOCABULARY as usize) as u32).collect();
    let y = noise(gpu, (rows * width) as usize);
    let args = EmbeddingLoraArgs {
        y,
        tokens: gpu.upload(&bytes_of(&tokens)),
        pieces: gpu.upload(&bytes_of(&pieces)),
        rows: gpu.upload(&bytes_of(&(0..rows as i32).collect::<Vec<_>>())),
        pool: adapters.pool,
        tensors: adapters.tensors,
        stride: 1,
        place: 0,
        vocabulary: VOCABULARY,
        inputs: VOCABULARY,
        width,
        scale: 1.0,
    };
    let moved = f64::from(rows * width) * 4.0 + f64::from(slots * width) * 32.0 + f64::from(rows) * 16.0 * 32.0;
    row(gpu, &format!("LoRA of the embedding, {rows} rows over {slots}"), moved, |set| {
        let args = EmbeddingLoraArgs { y: y + set * u64::from(rows * width) * 2, ..args };
        embedding_lora_launch(&args, pieces.len() as u32, Element::Bf16).unwrap().into_iter().collect()
    });
    gpu.free_all();
}

fn head(gpu: &Gpu, rows: u32, slots: u32) {
    let group = Group { inputs: 4096, outputs: vec![VOCABULARY] };
    let mut random = Random(4);
    let adapters = Adapters::new(gpu, &group, 1, slots, Bits::Bf16, 2 << 20, |_, _, _| 16, &mut random);
    let each = rows / slots;
    let segments = (0..slots).map(|slot| Segment { slot, row0: slot * each, rows: each, rank: 16 }).collect();
    let case = Case::new(gpu, &adapters, segments, (0..rows as i32).collect(), rows, &mut random);
    let moved = f64::from(slots) * f64::from(4096 + VOCABULARY) * 32.0 + f64::from(rows * VOCABULARY) * 4.0;
    let graph = gpu.capture(|| gpu.launch(&case.launch(&adapters, Place { layer: 0, launch: 1, step: 0, early: 0 })));
    // Something else passes through the L2 in between.
    let other = gpu.alloc(256 << 20);
    let mut step = 0;
    let mut times = gpu.time(&graph, 24, || {
        step += 1;
        gpu.fill_async(other, 0x11, 256 << 20);
        gpu.set_u32(case.step, step);
    });
    times.sort_by(f64::total_cmp);
    let (us, floor) = (times[times.len() / 2], moved / BANDWIDTH);
    let name = format!("LoRA of the head, {rows} rows over {slots}");
    println!("{name:52} {us:8.1} {floor:8.1} {:6.2} {:6.0}%", us / floor, 100.0 * floor / us);
    gpu.free_all();
}

/// Between the device and pinned memory of the host; there is one copy in a graph, since the bus is what bounds it.
fn swap(gpu: &Gpu) {
    let (count, size) = (128u64, 2u64 << 20);
    let total = (count * size) as usize;
    let (pool, host) = (noise(gpu, total / 2 / SETS as usize), gpu.alloc_pinned(total));
    let mut pages: Vec<u64> = (0..count).collect();
    Random(8).shuffle(&mut pages);
    for (what, outward) in [("out", true), ("in", false)] {
        let place = |(i, page): (u64, &u64)| (pool + page * size, host + i * size);
        let turn = |(device, host): (u64, u64)| if outward { (device, host) } else { (host, device) };
        let moves: Vec<Move> =
            (0..).zip(&pages).map(place).map(turn).map(|(from, to)| Move { from, to, bytes: size }).collect();
        let args = PagesArgs { pieces: gpu.upload(&bytes_of(&moves)), ..PagesArgs::default() };
        // The bus needs few CTAs.
        for sms in [4, 16, gpu.sms] {
            let launch = pages_launch(&moves, &args, sms).unwrap().unwrap();
            let graph = gpu.capture(|| gpu.launch(&launch));
            let mut times = gpu.time(&graph, 7, || ());
            times.sort_by(f64::total_cmp);
            let name = format!("swap {what} of 128 pages of 2 MB, {} CTAs", launch.grid[0] * launch.grid[1]);
            println!("{name:52} {:8.1} us {:8.1} GB/s", times[3], total as f64 / times[3] / 1e3);
        }
        let copy = || if outward { gpu.copy_async(host, pool, total) } else { gpu.copy_async(pool, host, total) };
        let graph = gpu.capture(copy);
        let mut times = gpu.time(&graph, 7, || ());
        times.sort_by(f64::total_cmp);
        let name = format!("the copy engine, {what}, in one piece");
        println!("{name:52} {:8.1} us {:8.1} GB/s", times[3], total as f64 / times[3] / 1e3);
    }
    gpu.free_all();
}

fn main() {
    let Some(gpu) = Gpu::open() else { return };
    println!("{}\n{:52} {:>8} {:>8} {:>6} {:>7}", gpu.name, "op", "us", "floor", "ratio", "of copy");
    all_sampling(&gpu);
    [16, 64, 256].into_iter().for_each(|rank| merging(&gpu, rank));
    for (rows, slots) in [(1, 1), (64, 16), (8192, 16)] {
        embedding(&gpu, rows, slots);
    }
    for (rows, slots) in [(1, 1), (64, 16)] {
        head(&gpu, rows, slots);
    }
    swap(&gpu);
}
