//! The rest of the decoder against its twins.
#![allow(clippy::unwrap_used, clippy::panic)]

mod gpu;

use gpu::{Bits, Gpu, Random, bytes, words};
use lorafleet_kernels::decoder::attention::{
    AttentionArgs, LINES, attention_launches, attention_splits, cut_tiles, parts_bytes, twin as attention_twin,
};
use lorafleet_kernels::decoder::attention_chunk::{
    CHUNK_HEAD_DIMS, CHUNK_LINES, attention_chunk_launch, longest_first,
};
use lorafleet_kernels::decoder::kv::{Kv, Row, page_bytes, row_offset};
use lorafleet_kernels::decoder::pages::{PagesArgs, Piece, pages_launch, scatter};
use lorafleet_kernels::decoder::rope::{Llama3Scaling, RopeArgs, frequencies, rope_launch_as, twin as rope_twin};
use lorafleet_kernels::decoder::{Round, activation, embedding, norm};
use lorafleet_kernels::image::Arch;
use lorafleet_kernels::launch::Element;
use lorafleet_kernels::lora::twin::relative_error;
use lorafleet_kernels::plain::bytes_of;

const KINDS: [(Bits, Element, Round, f64); 2] = [
    (Bits::Bf16, Element::Bf16, |v| half::bf16::from_f64(v).to_f64(), 5e-3),
    (Bits::F16, Element::F16, |v| half::f16::from_f64(v).to_f64(), 1e-3),
];

fn wide(bits: Bits, v: &[u16]) -> Vec<f64> {
    v.iter().map(|b| bits.value(*b)).collect()
}

fn read(gpu: &Gpu, bits: Bits, p: u64, n: usize) -> Vec<f64> {
    wide(bits, &words(&gpu.read(p, n * 2)))
}

#[track_caller]
fn close(found: &[f64], expected: &[f64], most: f64, what: &str) {
    assert_eq!(found.len(), expected.len());
    let error = relative_error(found.iter().copied(), expected.iter().copied());
    assert!(error < most, "{what}: {error:.2e}");
}

#[test]
fn norm_adds_and_normalises() {
    let Some(gpu) = Gpu::open() else { return };
    for (bits, element, round, most) in KINDS {
        for (width, rows, with_delta, with_x) in [
            (576, 3, true, true),
            (4096, 129, false, true),
            (14336, 2, true, true),
            (8, 5, false, false),
            (16384, 1, false, true),
            (2048, 1030, true, true),
        ] {
            let mut random = Random(width as u64);
            let n = width * rows;
            let [x, delta, residual] = [0; 3].map(|_| bits.random(n, 2.0, &mut random));
            let weight = bits.random(width, 1.0, &mut random);
            let residual_ptr = gpu.upload(&bytes(&residual));
            let y = gpu.upload(&vec![0xff; n * 2]);
            let args = norm::NormArgs {
                x: if with_x { gpu.upload(&bytes(&x)) } else { 0 },
                delta: if with_delta { gpu.upload(&bytes(&delta)) } else { 0 },
                residual: residual_ptr,
                weight: gpu.upload(&bytes(&weight)),
                y,
                width: width as u32,
                eps: 1e-5,
                ..norm::NormArgs::default()
            };
            gpu.launch(&norm::norm_launch(&args, rows as u32, element).unwrap());
            let (mut h, mut expected) = (Vec::new(), Vec::new());
            for row in 0..rows {
                let part = |v: &[u16]| wide(bits, &v[row * width..][..width]);
                let added: Vec<f64> = (0..width)
                    .map(|i| {
                        f64::from(u8::from(with_x)) * part(&x)[i] + f64::from(u8::from(with_delta)) * part(&delta)[i]
                    })
                    .collect();
                let (a, b) = norm::twin(&part(&residual), &added, &wide(bits, &weight), 1e-5, round);
                h.extend(a);
                expected.extend(b);
                if row == 2 {
                    break;
                }
            }
            close(&read(&gpu, bits, residual_ptr, h.len()), &h, most, "residual");
            close(&read(&gpu, bits, y, expected.len()), &expected, most, "norm");
        }
        gpu.free_all();
    }
}

#[test]
fn activation_of_both_kinds() {
    let Some(gpu) = Gpu::open() else { return };
    for (bits, element, round, most) in KINDS {
        for (rows, width, gelu, with_delta) in
            [(1usize, 8usize, 0, true), (37, 1536, 1, false), (64, 14336, 0, true), (70_001, 8, 0, false)]
        {
            let mut random = Random(rows as u64 + 3);
            let x = bits.random(rows * width * 2, 4.0, &mut random);
            let delta = bits.random(rows * width * 2, 1.0, &mut random);
            let y = gpu.upload(&vec![0xff; rows * width * 2]);
            let args = activation::ActivationArgs {
                x: gpu.upload(&bytes(&x)),
                delta: if with_delta { gpu.upload(&bytes(&delta)) } else { 0 },
                y,
                rows: rows as u32,
                width: width as u32,
                gelu,
                unused: 0,
            };
            gpu.launch(&activation::activation_launch(&args, element).unwrap());
            let value = |at: usize| bits.value(x[at]) + if with_delta { bits.value(delta[at]) } else { 0.0 };
            let one = |i: usize| {
                let (row, at) = (i / width, i % width);
                activation::twin(value(row * 2 * width + at), value(row * 2 * width + width + at), gelu == 1, round)
            };
            let expected: Vec<f64> = (0..rows * width).map(one).collect();
            close(&read(&gpu, bits, y, expected.len()), &expected, most, "activation");
        }
        gpu.free_all();
    }
}

#[test]
fn embedding_gathers_and_refuses_strangers() {
    let Some(gpu) = Gpu::open() else { return };
    for (bits, element, round, most) in KINDS {
        for (width, scale) in [(576usize, 1.0f32), (4096, 24.0), (8, 1.0)] {
            let (vocabulary, tokens) = (1000u32, [0u32, 999, 1000, 7, u32::MAX, 7]);
            let table = bits.random(vocabulary as usize * width, 1.0, &mut Random(4));
            let y = gpu.upload(&vec![0xff; tokens.len() * width * 2]);
            let args = embedding::EmbeddingArgs {
                table: gpu.upload(&bytes(&table)),
                tokens: gpu.upload(&bytes_of(&tokens)),
                y,
                rows: tokens.len() as u32,
                width: width as u32,
                vocabulary,
                scale,
            };
            gpu.launch(&embedding::embedding_launch(&args, element).unwrap());
            let row = |t: &u32| match *t < vocabulary {
                true => wide(bits, &table[*t as usize * width..][..width]),
                false => vec![0.0; width],
            };
            let expected: Vec<f64> = tokens.iter().flat_map(row).map(|v| round(v * f64::from(scale))).collect();
            close(&read(&gpu, bits, y, expected.len()), &expected, most, "embedding");
        }
        gpu.free_all();
    }
}

/// Sequences on shuffled pages; whatever nobody wrote is NaN.
struct Sequences {
    kv: Kv,
    lists: Vec<Vec<u32>>,
    starts: Vec<u32>,
    pool_bytes: usize,
}

fn sequences(
    gpu: &Gpu,
    lengths: &[usize],
    layers: u32,
    heads: u32,
    dim: u32,
    page_tokens: u32,
    random: &mut Random,
) -> Sequences {
    let size = page_bytes(layers, heads, dim, page_tokens);
    let counts: Vec<usize> = lengths.iter().map(|l| l.div_ceil(page_tokens as usize)).collect();
    let total: usize = counts.iter().sum::<usize>() + 2;
    let mut pages: Vec<u32> = (0..total as u32).collect();
    random.shuffle(&mut pages);
    let (mut lists, mut starts, mut at) = (Vec::new(), Vec::new(), 0);
    for count in counts {
        lists.push(pages[at..at + count].to_vec());
        starts.push(at as u32);
        at += count;
    }
    let pool_bytes = total * size as usize;
    let base = gpu.alloc(pool_bytes);
    gpu.fill(base, 0xff, pool_bytes);
    let kv = Kv {
        base,
        pages: gpu.upload(&bytes_of(&pages)),
        page_bytes: size,
        page_tokens,
        heads,
        head_dim: dim,
        layer: layers - 1,
    };
    Sequences { kv, lists, starts, pool_bytes }
}

/// Head dimension, how much of it turns, heads of queries and of keys, norms of both, a delta.
const ROPES: [(u32, u32, u32, u32, [bool; 2], bool); 12] = [
    (64u32, 64u32, 9u32, 3u32, [false; 2], true),
    (128, 128, 32, 8, [true; 2], false),
    (128, 96, 24, 8, [false; 2], true),
    (80, 32, 4, 4, [false; 2], false),
    (80, 80, 1, 1, [true, false], false),
    (96, 96, 16, 1, [false, true], true),
    (256, 256, 2, 1, [true; 2], true),
    (256, 64, 8, 2, [true; 2], false),
    (256, 0, 40, 8, [false; 2], false),
    (256, 256, 64, 8, [true; 2], true),
    (8, 0, 3, 1, [true; 2], true),
    (16, 16, 1, 1, [true; 2], true),
];

const SCALING: Llama3Scaling =
    Llama3Scaling { factor: 8.0, low_frequency_factor: 1.0, high_frequency_factor: 4.0, original_context: 8192.0 };

#[test]
fn rope_rotates_and_writes_pages() {
    let Some(gpu) = Gpu::open() else { return };
    for (bits, element, round, most) in KINDS {
        // Each by the kernel for few rows and by that for many.
        let both = ROPES.into_iter().flat_map(|case| [false, true].map(|many| (case, many)));
        for ((dim, rotary, query_heads, kv_heads, norms, with_delta), many) in both {
            let attention_scale = if rotary == 96 { 1.19 } else { 1.0 };
            let mut random = Random(u64::from(dim));
            let seq = sequences(&gpu, &[40, 3, 70_000], 2, kv_heads, dim, 16, &mut random);
            // Rows of all three sequences, and one that is padding.
            let rows = [(0usize, 39i32), (0, 0), (1, 2), (2, 69_999), (1, -1), (2, 4097)];
            let table: Vec<Row> =
                rows.iter().map(|(s, position)| Row { position: *position, list: seq.starts[*s] }).collect();
            let heads = (query_heads + 2 * kv_heads) as usize;
            let n = rows.len() * heads * dim as usize;
            let (x, delta) = (bits.random(n, 1.0, &mut random), bits.random(n, 0.5, &mut random));
            let weights = [0; 2].map(|_| bits.random(dim as usize, 1.0, &mut random));
            let waves = frequencies(500_000.0, rotary, Some(SCALING));
            let x_ptr = gpu.upload(&bytes(&x));
            let weight_ptr = [0, 1].map(|i| if norms[i] { gpu.upload(&bytes(&weights[i])) } else { 0 });
            let args = RopeArgs {
                x: x_ptr,
                delta: if with_delta { gpu.upload(&bytes(&delta)) } else { 0 },
                rows: gpu.upload(&bytes_of(&table)),
                frequencies: gpu.upload(&bytes_of(&waves)),
                query_norm: weight_ptr[0],
                key_norm: weight_ptr[1],
                kv: seq.kv,
                query_heads,
                rotary,
                attention_scale,
                eps: 1e-6,
            };
            gpu.launch(&rope_launch_as(&args, rows.len() as u32, many, element).unwrap());
            let after = words(&gpu.read(x_ptr, n * 2));
            let pool = gpu.read(seq.kv.base, seq.pool_bytes);
            let (mut found, mut expected) = (Vec::new(), Vec::new());
            for (i, (s, position)) in rows.iter().enumerate() {
                for head in 0..heads as u32 {
                    let at = (i * heads + head as usize) * dim as usize;
                    let mut input = wide(bits, &x[at..at + dim as usize]);
                    if with_delta {
                        let d = wide(bits, &delta[at..at + dim as usize]);
                        input = input.iter().zip(&d).map(|(v, d)| round(v + d)).collect();
                    }
                    if *position < 0 {
                        assert_eq!(after[at..at + dim as usize], x[at..at + dim as usize]);
                        continue;
                    }
                    let (query, value) = (head < query_heads, head >= query_heads + kv_heads);
                    let weight = wide(bits, &weights[usize::from(!query)]);
                    let norm = (norms[usize::from(!query)] && !value).then_some((weight.as_slice(), 1e-6));
                    let turn = (*position, attention_scale.into());
                    expected.extend(if value { input } else { rope_twin(&input, norm, &waves, turn, round) });
                    if query {
                        found.extend(wide(bits, &after[at..at + dim as usize]));
                    } else {
                        let page = seq.lists[*s][*position as usize / 16];
                        let kv_head = (head - query_heads) % kv_heads;
                        let at = row_offset(&seq.kv, page, value, kv_head, *position as u32 % 16) as usize;
                        found.extend(wide(bits, &words(&pool[at..at + 2 * dim as usize])));
                    }
                }
            }
            close(&found, &expected, most, &format!("rope of {dim}, {rotary} turn"));
            gpu.free_all();
        }
    }
}

/// A batch whose keys and values are random, and the rest of its pool NaN.
struct Attended {
    seq: Sequences,
    pool: Vec<u8>,
    /// Sequence length, and how many of its last tokens are in the batch.
    batch: Vec<(usize, usize)>,
    rows: u32,
    q: Vec<u16>,
    args: AttentionArgs,
}

/// What a case of attention is about.
#[derive(Clone, Copy, Debug)]
struct Heads {
    dim: u32,
    query: u32,
    kv: u32,
    page_tokens: u32,
    window: u32,
    cap: f32,
}

fn attended(gpu: &Gpu, bits: Bits, heads: Heads, batch: &[(usize, usize)], random: &mut Random) -> Attended {
    let Heads { dim, page_tokens, .. } = heads;
    let lengths: Vec<usize> = batch.iter().map(|b| b.0).collect();
    let seq = sequences(gpu, &lengths, 2, heads.kv, dim, page_tokens, random);
    let mut pool = gpu.read(seq.kv.base, seq.pool_bytes);
    for (s, length) in lengths.iter().enumerate() {
        for (token, (value, head)) in
            (0..*length).flat_map(|t| (0..2 * heads.kv).map(move |i| (t, (i & 1 == 1, i / 2))))
        {
            let (page, place) = (seq.lists[s][token / page_tokens as usize], token as u32 % page_tokens);
            let at = row_offset(&seq.kv, page, value, head, place) as usize;
            pool[at..at + 2 * dim as usize].copy_from_slice(&bytes(&bits.random(dim as usize, 1.0, random)));
        }
    }
    gpu.write(seq.kv.base, &pool);
    let rows = batch.iter().map(|b| b.1 as u32).sum();
    let stride = (heads.query + 2 * heads.kv) * dim;
    let q = bits.random((rows * stride) as usize, 2.0, random);
    let args = AttentionArgs {
        q: gpu.upload(&bytes(&q)),
        y: gpu.upload(&vec![0xff; (rows * heads.query * dim) as usize * 2]),
        kv: seq.kv,
        query_heads: heads.query,
        stride_q: stride,
        splits: 1,
        window: heads.window,
        scale: 1.0 / (dim as f32).sqrt(),
        soft_cap: heads.cap,
        ..AttentionArgs::default()
    };
    Attended { seq, pool, batch: batch.to_vec(), rows, q, args }
}

impl Attended {
    fn tiles(&self, lines: u32) -> Vec<lorafleet_kernels::decoder::attention::Tile> {
        let per = self.args.query_heads / self.args.kv.heads;
        let mut row = 0;
        let mut tiles = Vec::new();
        for ((length, fresh), start) in self.batch.iter().zip(&self.seq.starts) {
            tiles.extend(cut_tiles(row, *fresh as u32, (length - fresh) as i32, *start, per, lines));
            row += *fresh as u32;
        }
        tiles
    }

    /// What the kernel left against the twin, for every `step`th row.
    fn check(&self, gpu: &Gpu, bits: Bits, round: Round, most: f64, step: usize, what: &str) {
        let (args, dim) = (&self.args, self.args.kv.head_dim as usize);
        let (width, per) = (args.query_heads as usize * dim, args.query_heads / args.kv.heads);
        let y = read(gpu, bits, args.y, self.rows as usize * width);
        let (mut found, mut expected, mut row) = (Vec::new(), Vec::new(), 0usize);
        let page_tokens = args.kv.page_tokens as usize;
        for (s, (length, fresh)) in self.batch.iter().enumerate() {
            for position in length - fresh..*length {
                row += 1;
                if !row.is_multiple_of(step) && position + 1 != *length {
                    continue;
                }
                let from = if args.window == 0 { 0 } else { (position + 1).saturating_sub(args.window as usize) };
                for head in 0..args.query_heads {
                    let at = (row - 1) * args.stride_q as usize + head as usize * dim;
                    let query = wide(bits, &self.q[at..at + dim]);
                    let side = |value| -> Vec<Vec<f64>> {
                        let one = |t: usize| {
                            let (page, place) = (self.seq.lists[s][t / page_tokens], (t % page_tokens) as u32);
                            let at = row_offset(&args.kv, page, value, head / per, place) as usize;
                            wide(bits, &words(&self.pool[at..at + 2 * dim]))
                        };
                        (from..=position).map(one).collect()
                    };
                    let (scale, cap) = (args.scale.into(), args.soft_cap.into());
                    expected.extend(attention_twin(&query, &side(false), &side(true), scale, cap, round));
                }
                found.extend_from_slice(&y[(row - 1) * width..row * width]);
            }
        }
        close(&found, &expected, most, what);
    }
}

#[test]
fn attention_of_decode_and_chunks() {
    let Some(gpu) = Gpu::open() else { return };
    for (bits, element, round, most) in KINDS {
        for (dim, query, kv, window, cap) in [
            (64u32, 9u32, 3u32, 0u32, 0f32),
            (128, 32, 8, 0, 0.0),
            (80, 4, 4, 100, 0.0),
            (96, 16, 1, 0, 30.0),
            (256, 8, 1, 33, 0.0),
            (128, 14, 2, 0, 0.0),
            (64, 8, 2, 0, 50.0),
            (128, 8, 4, 70, 5.0),
            (256, 4, 2, 0, 20.0),
            (80, 6, 2, 0, 1.0),
        ] {
            let heads = Heads { dim, query, kv, page_tokens: 32, window, cap };
            let batch = [(1usize, 1usize), (17, 1), (300, 1), (1500, 1), (50, 33), (16, 16), (129, 5)];
            let mut case = attended(&gpu, bits, heads, &batch, &mut Random(u64::from(dim) + 1));
            let tiles = case.tiles(LINES);
            let count = tiles.len() as u32;
            for splits in [1, 3, attention_splits(count, kv, 1500, gpu.sms)] {
                case.args = AttentionArgs {
                    y: gpu.upload(&vec![0xff; (case.rows * query * dim) as usize * 2]),
                    tiles: gpu.upload(&bytes_of(&tiles)),
                    parts: gpu.alloc(parts_bytes(count, kv, splits, dim) as usize),
                    splits,
                    tile_count: count,
                    ..case.args
                };
                let n = (case.rows * query * dim) as usize * 2;
                let [first, again] = [0; 2].map(|_| {
                    gpu.fill(case.args.y, 0xff, n);
                    attention_launches(&case.args, element).unwrap().iter().for_each(|l| gpu.launch(l));
                    gpu.read(case.args.y, n)
                });
                assert!(first == again, "{bits:?} {heads:?}, {splits} parts: other bits");
                case.check(&gpu, bits, round, most * 1.5, 1, &format!("attention {bits:?} {dim}, {splits} parts"));
            }
            gpu.free_all();
        }
    }
}

/// A prompt of 8,192 tokens at once, and the next token behind such a one, by small tiles and by those of chunks.
#[test]
fn prompts_of_8192() {
    let Some(gpu) = Gpu::open() else { return };
    let (bits, element, round, most) = KINDS[0];
    let heads = Heads { dim: 128, query: 4, kv: 1, page_tokens: 16, window: 0, cap: 0.0 };
    let mut case = attended(&gpu, bits, heads, &[(8192, 8192), (8193, 1)], &mut Random(5));
    for (lines, splits) in [(LINES, 1), (LINES, 5), (CHUNK_LINES, 1)] {
        if lines == CHUNK_LINES && gpu.arch != Arch::Sm90a {
            continue;
        }
        let mut tiles = case.tiles(lines);
        longest_first(&mut tiles);
        let count = tiles.len() as u32;
        case.args.tiles = gpu.upload(&bytes_of(&tiles));
        case.args.parts = gpu.alloc(parts_bytes(count, heads.kv, splits, heads.dim) as usize);
        (case.args.tile_count, case.args.splits) = (count, splits);
        gpu.fill(case.args.y, 0xff, (case.rows * heads.query * heads.dim) as usize * 2);
        let launches = match lines {
            LINES => attention_launches(&case.args, element).unwrap(),
            _ => vec![attention_chunk_launch(&case.args, element, gpu.sms).unwrap()],
        };
        launches.iter().for_each(|l| gpu.launch(l));
        case.check(&gpu, bits, round, most * 1.5, 911, &format!("tiles of {lines} lines, {splits} parts"));
    }
}

/// Chunks from one token to several blocks, whose lines end anywhere in a tile, on pages of 16 to 144 tokens.
#[test]
fn attention_of_chunks_by_warpgroups() {
    let Some(gpu) = Gpu::open() else { return };
    if gpu.arch != Arch::Sm90a {
        gpu::skipped(&format!("{} has no image of attention_chunk_sm90a", gpu.name));
        return;
    }
    for (bits, element, round, most) in KINDS {
        for (query, kv, page_tokens, window, cap) in [
            (32u32, 8u32, 16u32, 0u32, 0f32),
            (9, 3, 32, 0, 0.0),
            (14, 2, 48, 0, 30.0),
            (16, 1, 256, 129, 0.0),
            (2, 2, 144, 33, 0.0),
            (4, 1, 16, 300, 5.0),
        ] {
            for dim in CHUNK_HEAD_DIMS {
                let heads = Heads { dim, query, kv, page_tokens, window, cap };
                let mut batch =
                    vec![(1usize, 1usize), (127, 127), (129, 1), (300, 300), (1500, 40), (128, 128), (777, 257)];
                // Once a long prompt's end, for the sake of time.
                if query == 9 {
                    batch.push((8192, 300));
                }
                let mut case = attended(&gpu, bits, heads, &batch, &mut Random(u64::from(dim + query)));
                let mut tiles = case.tiles(CHUNK_LINES);
                longest_first(&mut tiles);
                case.args.tiles = gpu.upload(&bytes_of(&tiles));
                case.args.tile_count = tiles.len() as u32;
                let launch = attention_chunk_launch(&case.args, element, gpu.sms).unwrap();
                gpu.launch(&launch);
                case.check(&gpu, bits, round, most * 1.5, 23, &format!("{bits:?} {heads:?}"));
                // The same bits again.
                let n = (case.rows * query * dim) as usize * 2;
                let first = gpu.read(case.args.y, n);
                gpu.fill(case.args.y, 0xff, n);
                gpu.launch(&launch);
                assert!(gpu.read(case.args.y, n) == first, "{bits:?} {heads:?}: other bits");
                gpu.free_all();
            }
        }
    }
}

#[test]
fn pages_are_copied_to_their_places() {
    let Some(gpu) = Gpu::open() else { return };
    let (size, owned) = (6144u64, [5u32, 0, 9, 2]);
    let image: Vec<u8> = (0..4 * size).map(|i| (i * 7 % 251) as u8).collect();
    let (staged, base) = (gpu.upload(&image), gpu.upload(&vec![0xee; 10 * size as usize]));
    let mut pieces = scatter(staged, &owned, base, size);
    // And one odd piece, from within a page.
    pieces.push(Piece { from: staged + 16, to: base + 7 * size + 32, bytes: 4096 + 48 });
    let args = PagesArgs { pieces: gpu.upload(&bytes_of(&pieces)), ..PagesArgs::default() };
    gpu.launch(&pages_launch(&pieces, &args, gpu.sms).unwrap().unwrap());
    let mut expected = vec![0xeeu8; 10 * size as usize];
    for piece in &pieces {
        let (from, to) = ((piece.from - staged) as usize, (piece.to - base) as usize);
        expected[to..to + piece.bytes as usize].copy_from_slice(&image[from..from + piece.bytes as usize]);
    }
    assert!(gpu.read(base, expected.len()) == expected);
}
