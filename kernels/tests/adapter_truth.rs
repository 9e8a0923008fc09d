//! What is done with adapters beside the projections of a layer: merging, LoRA of the embedding and of the head, moving.
#![allow(clippy::unwrap_used, clippy::panic)]

mod gpu;
mod lora;

use gpu::{Bits, Gpu, Random, bytes, words};
use lora::{Adapters, Case, Place};
use lorafleet_kernels::decoder::pages::{PagesArgs, Piece as Move, pages_launch, scatter};
use lorafleet_kernels::lora::embedding::{
    EmbeddingLoraArgs, cut_pieces, embedding_lora_launch, twin as embedding_twin,
};
use lorafleet_kernels::lora::layout::{Projection, Tensor};
use lorafleet_kernels::lora::merge::{MergeArgs, merge_launch, twin as merge_twin};
use lorafleet_kernels::lora::twin::relative_error;
use lorafleet_kernels::lora::{Group, Segment};
use lorafleet_kernels::plain::{Plain, bytes_of};

const RANKS: [u32; 10] = [1, 3, 7, 8, 16, 24, 31, 64, 100, 256];

fn group(inputs: u32, outputs: u32) -> Group {
    Group { inputs, outputs: vec![outputs] }
}

fn copy(gpu: &Gpu, moves: &[Move]) {
    let args = PagesArgs { pieces: gpu.upload(&bytes_of(moves)), ..PagesArgs::default() };
    gpu.launch(&pages_launch(moves, &args, gpu.sms).unwrap().unwrap());
}

/// Half a step of the element type at `v`, and a little for sums in f32.
fn rounding(bits: Bits, v: f64) -> f64 {
    let (digits, least) = if bits == Bits::Bf16 { (8, -126) } else { (11, -14) };
    0.501 * 2f64.powi((v.abs().log2().floor() as i32).max(least) + 1 - digits)
}

#[test]
fn merged_weights_are_rounded_once_and_come_back_bit_for_bit() {
    let Some(gpu) = Gpu::open() else { return };
    for (bits, inputs, outputs, ranks) in [
        (Bits::Bf16, 576u32, 192u32, &RANKS[..]),
        (Bits::F16, 72, 200, &RANKS[..]),
        (Bits::Bf16, 8, 8, &RANKS[..4]),
        (Bits::Bf16, 4096, 1032, &RANKS[4..6]),
    ] {
        let mut random = Random(u64::from(inputs) + 77);
        let rank = |slot: u32, _: u32, _: u32| ranks[slot as usize];
        let adapters =
            Adapters::new(&gpu, &group(inputs, outputs), 1, ranks.len() as u32, bits, 6144, rank, &mut random);
        let base = bits.random((inputs * outputs) as usize, 1.0, &mut random);
        let size = base.len() as u64 * 2;
        // The kept copy is on the host; a row of something else lies behind the live weights.
        let (kept, live) = (gpu.alloc_pinned(size as usize), gpu.alloc(size as usize + 4096));
        gpu.write(kept, &bytes(&base));
        gpu.fill(live, 0xa5, size as usize + 4096);
        let wide: Vec<f64> = base.iter().map(|b| bits.value(*b)).collect();
        let restore = [Move { from: kept, to: live, bytes: size }];
        for slot in 0..ranks.len() as u32 {
            let args = MergeArgs {
                from: kept,
                to: live,
                pool: adapters.pool,
                tensor: adapters.tensors + u64::from(slot) * Tensor::SIZE as u64,
                inputs,
                outputs,
            };
            // From the kept copy over what another adapter had left there.
            gpu.launch(&merge_launch(&args, adapters.element()).unwrap());
            let merged = gpu.read(live, size as usize);
            let truth = merge_twin(&wide, Projection { inputs, outputs }, adapters.weights(slot, 0, 0));
            for (i, (found, truth)) in words(&merged).iter().zip(&truth).enumerate() {
                let gap = (bits.value(*found) - truth).abs();
                let slack = 3e-6 * truth.abs().max(1.0);
                assert!(gap <= rounding(bits, *truth) + slack, "rank {}, element {i}: {gap}", ranks[slot as usize]);
            }
            // In place gives the same bits.
            copy(&gpu, &restore);
            assert!(gpu.read(live, size as usize) == bytes(&base), "restored");
            gpu.launch(&merge_launch(&MergeArgs { from: live, ..args }, adapters.element()).unwrap());
            assert!(gpu.read(live, size as usize) == merged, "in place");
        }
        assert!(gpu.read(live + size, 4096).iter().all(|b| *b == 0xa5), "nothing behind the matrix");
        assert!(gpu.read(kept, size as usize) == bytes(&base), "the kept copy");
        gpu.free_all();
    }
}

#[test]
fn embeddings_get_their_column() {
    let Some(gpu) = Gpu::open() else { return };
    for (bits, vocabulary, width, scale) in
        [(Bits::Bf16, 999u32, 576u32, 1.0f32), (Bits::F16, 32_001, 200, 1.0), (Bits::Bf16, 70, 8, 24.0)]
    {
        let mut random = Random(u64::from(width));
        let inputs = vocabulary.next_multiple_of(8);
        let rank = |slot: u32, _: u32, _: u32| *RANKS.get(slot as usize).unwrap_or(&0);
        let slots = RANKS.len() as u32 + 1;
        let adapters = Adapters::new(&gpu, &group(inputs, width), 1, slots, bits, 6144, rank, &mut random);
        // Segments of several lengths over shuffled rows; some entries are no row, some rows have a token that there is not.
        let lengths = [1u32, 8, 9, 0, 17, 3, 129, 2, 7, 16, 5];
        let count: u32 = lengths.iter().sum();
        let mut rows: Vec<i32> = (0..count as i32 + 9).collect();
        random.shuffle(&mut rows);
        rows.truncate(count as usize);
        rows.iter_mut().step_by(11).for_each(|row| *row = -1);
        let tokens: Vec<u32> = (0..count + 9)
            .map(|i| if i % 13 == 4 { vocabulary + i % 3 * 1000 } else { random.below(vocabulary as usize) as u32 })
            .collect();
        let mut row0 = 0;
        let segments: Vec<Segment> = (0..)
            .zip(lengths)
            .map(|(slot, rows)| {
                row0 += rows;
                Segment { slot, row0: row0 - rows, rows, rank: rank(slot, 0, 0) }
            })
            .collect();
        let pieces = cut_pieces(&segments);
        let before = bits.random(((count + 9) * width) as usize, 0.1, &mut random);
        let y = gpu.upload(&bytes(&before));
        let args = EmbeddingLoraArgs {
            y,
            tokens: gpu.upload(&bytes_of(&tokens)),
            pieces: gpu.upload(&bytes_of(&pieces)),
            rows: gpu.upload(&bytes_of(&rows)),
            pool: adapters.pool,
            tensors: adapters.tensors,
            stride: 1,
            place: 0,
            vocabulary,
            inputs,
            width,
            scale,
        };
        gpu.launch(&embedding_lora_launch(&args, pieces.len() as u32, adapters.element()).unwrap().unwrap());
        let after = words(&gpu.read(y, before.len() * 2));
        let mut slot_of = vec![None; (count + 9) as usize];
        for s in &segments {
            let own = rows[s.row0 as usize..][..s.rows as usize].iter().filter(|row| **row >= 0);
            own.for_each(|row| slot_of[*row as usize] = Some(s.slot));
        }
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        for (row, slot) in slot_of.iter().enumerate() {
            let place = row * width as usize..(row + 1) * width as usize;
            let known = tokens[row] < vocabulary;
            let Some(slot) = slot.filter(|slot| known && rank(*slot, 0, 0) > 0) else {
                assert_eq!(after[place.clone()], before[place], "row {row} gets nothing");
                continue;
            };
            let delta = embedding_twin(tokens[row] as usize, inputs as usize, adapters.weights(slot, 0, 0));
            expected
                .extend(before[place.clone()].iter().zip(&delta).map(|(b, d)| bits.value(*b) + f64::from(scale) * d));
            found.extend(after[place].iter().map(|b| bits.value(*b)));
        }
        let error = relative_error(found, expected);
        println!("embedding of {vocabulary} x {width}, {bits:?}: {error:.2e}");
        assert!(error < 3e-3, "{error}");
        gpu.free_all();
    }
}

/// The decode kernel on a head as wide as a vocabulary.
#[test]
fn heads_of_a_vocabulary() {
    let Some(gpu) = Gpu::open() else { return };
    for (bits, inputs, vocabulary) in
        [(Bits::Bf16, 576, 49_152), (Bits::Bf16, 4096, 128_256), (Bits::F16, 2304, 256_000)]
    {
        let mut random = Random(13);
        let ranks = [16, 1, 64, 7, 8];
        let lengths = [1u32, 3, 1, 9, 1];
        let adapters = Adapters::new(
            &gpu,
            &group(inputs, vocabulary),
            1,
            5,
            bits,
            1 << 21,
            |s, _, _| ranks[s as usize],
            &mut random,
        );
        let mut row0 = 0;
        let segments = (0..).zip(lengths).map(|(slot, rows)| {
            row0 += rows;
            Segment { slot, row0: row0 - rows, rows, rank: 0 }
        });
        let segments: Vec<Segment> = segments.collect();
        let rows = (0..15).rev().collect();
        let mut case = Case::new(&gpu, &adapters, segments, rows, 16, &mut random);
        let (before, after) = case.run(&gpu, &adapters, Place { layer: 0, launch: 0, step: 1, early: 0 });
        let error = case.check(&adapters, 0, &before, &after);
        println!("head of {vocabulary}, {bits:?}: {error:.2e}");
        assert!(error < 1e-2, "{error}");
        gpu.free_all();
    }
}

/// Pages go to pinned memory of the host and back to other pages; an adapter comes from there to its pages.
#[test]
fn pages_are_swapped_out_and_in() {
    let Some(gpu) = Gpu::open() else { return };
    let (size, count) = (96 << 10u64, 40u64);
    let mut random = Random(23);
    let image: Vec<u8> = (0..size * count).map(|_| random.next() as u8).collect();
    let (pool, host) = (gpu.upload(&image), gpu.alloc_pinned((size * count) as usize));
    let mut owned: Vec<u32> = (0..count as u32).collect();
    random.shuffle(&mut owned);
    let (out, kept) = owned.split_at(17);
    let page = |p: u32| pool + u64::from(p) * size;
    let outward: Vec<Move> =
        (0u64..).zip(out).map(|(i, p)| Move { from: page(*p), to: host + i * size, bytes: size }).collect();
    copy(&gpu, &outward);
    // Filling is on another stream.
    gpu.sync();
    out.iter().for_each(|p| gpu.fill(page(*p), 0xff, size as usize));
    // Back, but in another order.
    let mut back = out.to_vec();
    back.reverse();
    copy(&gpu, &scatter(host, &back, pool, size));
    let found = gpu.read(pool, image.len());
    let part = |v: &[u8], p: u32| v[p as usize * size as usize..][..size as usize].to_vec();
    assert!(back.iter().zip(out).all(|(to, from)| part(&found, *to) == part(&image, *from)), "swapped pages");
    assert!(kept.iter().all(|p| part(&found, *p) == part(&image, *p)), "pages that stay");
    // From page to page, as where a prefix is forked.
    copy(&gpu, &[Move { from: page(kept[0]), to: page(kept[1]), bytes: size }]);
    let found = gpu.read(pool, image.len());
    assert!(part(&found, kept[1]) == part(&image, kept[0]), "a copied page");
}
