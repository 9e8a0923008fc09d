//! The rest of the decoder: microseconds, and the share of the copy bandwidth that the bytes make of it.
//!
//! Graph replay over buffers larger than the L2, medians. `cargo bench --bench decoder -- [small] [attention] [chunks] [pages]`
//! runs those parts alone.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../tests/gpu/mod.rs"]
mod gpu;
mod measure;

use gpu::{Gpu, Random};
use lorafleet_kernels::decoder::attention::{
    AttentionArgs, attention_launches, attention_splits, cut_tiles, parts_bytes,
};
use lorafleet_kernels::decoder::attention_chunk::{CHUNK_LINES, attention_chunk_launch, longest_first};
use lorafleet_kernels::decoder::kv::{Kv, Row, page_bytes};
use lorafleet_kernels::decoder::pages::{PagesArgs, pages_launch, scatter};
use lorafleet_kernels::decoder::rope::{RopeArgs, frequencies, rope_launch};
use lorafleet_kernels::decoder::{activation, embedding, norm};
use lorafleet_kernels::launch::{Element, Launch};
use lorafleet_kernels::plain::bytes_of;
use lorafleet_kernels::tuning::attention_lines;
use measure::{SETS, noise, row};

/// Below an op's row: what a plain copy takes that reads and writes as many bytes in as many arrays, launched alike; and a launch of
/// as many CTAs that do nothing.
fn floor(gpu: &Gpu, each: u64, reads: u32, writes: u32) {
    let (x, y) =
        (noise(gpu, (each * u64::from(reads) / 2) as usize), gpu.alloc((each * u64::from(writes) * SETS) as usize));
    for (what, pieces) in [("  a copy of such arrays", each as u32 / 16), ("  as many CTAs without work", 0)] {
        row(gpu, what, (each * u64::from(reads + writes)) as f64, |set| {
            let place = |p: u64, n: u32| p + set * each * u64::from(n);
            let words = [pieces, reads, writes, 0].map(u32::to_le_bytes).concat();
            vec![Launch {
                module: "floor",
                function: "floor_copy",
                grid: [(each as u32 / 16).div_ceil(256), 1, 1],
                block: [256, 1, 1],
                shared_bytes: 0,
                argument: [&place(x, reads).to_le_bytes()[..], &place(y, writes).to_le_bytes(), &words].concat(),
                overlaps_previous: true,
            }]
        });
    }
}

fn small(gpu: &Gpu, rows: u32) {
    let (hidden, inner, element) = (4096u32, 14336u32, Element::Bf16);
    let n = rows as usize;
    let [x, residual, y] = [0; 3].map(|_| noise(gpu, n * hidden as usize));
    let weight = noise(gpu, hidden as usize);
    let at = |p: u64, set: u64, width: u32| p + set * u64::from(rows) * u64::from(width) * 2;
    row(gpu, &format!("norm, {rows} rows"), f64::from(rows * hidden) * 8.0, |set| {
        let place = |p| at(p, set, hidden);
        let args = norm::NormArgs {
            x: place(x),
            residual: place(residual),
            y: place(y),
            weight,
            width: hidden,
            eps: 1e-5,
            ..norm::NormArgs::default()
        };
        vec![norm::norm_launch(&args, rows, element).unwrap()]
    });
    floor(gpu, u64::from(rows * hidden) * 2, 2, 2);
    let gate_up = noise(gpu, n * 2 * inner as usize);
    let out = noise(gpu, n * inner as usize);
    row(gpu, &format!("activation, {rows} rows"), f64::from(rows) * f64::from(inner) * 6.0, |set| {
        let args = activation::ActivationArgs {
            x: at(gate_up, set, 2 * inner),
            y: at(out, set, inner),
            rows,
            width: inner,
            ..activation::ActivationArgs::default()
        };
        vec![activation::activation_launch(&args, element).unwrap()]
    });
    floor(gpu, u64::from(rows) * u64::from(inner) * 2, 2, 1);
    let vocabulary = 128_256u32;
    let table = gpu.alloc(vocabulary as usize * hidden as usize * 2);
    gpu.fill(table, 0x3c, vocabulary as usize * hidden as usize * 2);
    let mut random = Random(5);
    let tokens: Vec<u32> = (0..n * SETS as usize).map(|_| random.below(vocabulary as usize) as u32).collect();
    let tokens = gpu.upload(&bytes_of(&tokens));
    row(gpu, &format!("embedding, {rows} rows"), f64::from(rows * hidden) * 4.0, |set| {
        let args = embedding::EmbeddingArgs {
            table,
            tokens: tokens + set * u64::from(rows) * 4,
            y: at(y, set, hidden),
            rows,
            width: hidden,
            vocabulary,
            scale: 1.0,
        };
        vec![embedding::embedding_launch(&args, element).unwrap()]
    });
    floor(gpu, u64::from(rows * hidden) * 2, 1, 1);
    rope(gpu, rows);
}

fn rope(gpu: &Gpu, rows: u32) {
    let (heads, kv_heads, dim) = (32u32, 8u32, 128u32);
    let width = (heads + 2 * kv_heads) * dim;
    let qkv = noise(gpu, rows as usize * width as usize);
    let size = page_bytes(1, kv_heads, dim, 16);
    let pages: Vec<u32> = (0..rows).collect();
    let kv = Kv {
        base: gpu.alloc(size as usize * rows as usize),
        pages: gpu.upload(&bytes_of(&pages)),
        page_bytes: size,
        page_tokens: 16,
        heads: kv_heads,
        head_dim: dim,
        layer: 0,
    };
    let table: Vec<Row> = (0..rows).map(|list| Row { position: 9, list }).collect();
    let (table, waves) = (gpu.upload(&bytes_of(&table)), gpu.upload(&bytes_of(&frequencies(500_000.0, dim, None))));
    row(gpu, &format!("rope and KV write, {rows} rows"), f64::from(rows * width) * 4.0, |set| {
        let args = RopeArgs {
            x: qkv + set * u64::from(rows) * u64::from(width) * 2,
            rows: table,
            frequencies: waves,
            kv,
            query_heads: heads,
            rotary: dim,
            attention_scale: 1.0,
            eps: 1e-5,
            ..RopeArgs::default()
        };
        vec![rope_launch(&args, rows, Element::Bf16).unwrap()]
    });
    floor(gpu, u64::from(rows * width) * 2, 1, 1);
}

fn attention(gpu: &Gpu, batch: u32, context: u32, fresh: u32) {
    let (heads, kv_heads, dim, page_tokens) = (32u32, 8u32, 128u32, 16u32);
    let sets = if fresh > 1 { 1 } else { SETS };
    let size = page_bytes(1, kv_heads, dim, page_tokens);
    let each = context.div_ceil(page_tokens);
    let count = u64::from(each) * u64::from(batch) * sets;
    let base = noise(gpu, (count * size / 2 / SETS) as usize);
    let mut pages: Vec<u32> = (0..count as u32).collect();
    Random(3).shuffle(&mut pages);
    let pages = gpu.upload(&bytes_of(&pages));
    let stride = (heads + 2 * kv_heads) * dim;
    let q = noise(gpu, (batch * fresh * stride) as usize);
    let y = gpu.alloc((batch * fresh * heads * dim * 2) as usize);
    let per = heads / kv_heads;
    let lines = attention_lines(gpu.arch, dim, per, kv_heads, &vec![fresh; batch as usize], gpu.sms);
    let mut tile_count = 0;
    let lists: Vec<u64> = (0..sets)
        .map(|set| {
            let list = |s: u32| (set as u32 * batch + s) * each;
            let cut = |s: u32| cut_tiles(s * fresh, fresh, (context - fresh) as i32, list(s), per, lines);
            let mut tiles: Vec<_> = (0..batch).flat_map(cut).collect();
            longest_first(&mut tiles);
            tile_count = tiles.len() as u32;
            gpu.upload(&bytes_of(&tiles))
        })
        .collect();
    let chunk = lines == CHUNK_LINES;
    let splits = if chunk { 1 } else { attention_splits(tile_count, kv_heads, context, gpu.sms) };
    let parts = gpu.alloc(parts_bytes(tile_count, kv_heads, splits, dim) as usize);
    let moved = f64::from(batch) * f64::from(context) * f64::from(kv_heads * dim) * 4.0;
    let name = if fresh > 1 {
        format!("attention, chunk of {fresh} at {context}")
    } else {
        format!("attention, {batch} of {context}, {splits} parts")
    };
    let us = row(gpu, &name, moved, |set| {
        let kv = Kv { base, pages, page_bytes: size, page_tokens, heads: kv_heads, head_dim: dim, layer: 0 };
        let args = AttentionArgs {
            q,
            y,
            tiles: lists[(set % sets) as usize],
            parts,
            kv,
            query_heads: heads,
            stride_q: stride,
            splits,
            scale: 0.088,
            tile_count,
            ..AttentionArgs::default()
        };
        match chunk {
            true => vec![attention_chunk_launch(&args, Element::Bf16, gpu.sms).unwrap()],
            false => attention_launches(&args, Element::Bf16).unwrap(),
        }
    });
    if fresh > 1 {
        let (start, tokens) = (f64::from(context - fresh), f64::from(fresh));
        let seen = f64::from(batch) * tokens * (start + (tokens + 1.0) / 2.0);
        println!("{:52} {:8.0} TFLOP/s", "", seen * f64::from(heads * dim) * 4.0 / us / 1e6);
    }
}

fn main() {
    let Some(gpu) = Gpu::open() else { return };
    println!("{}\n{:52} {:>8} {:>8} {:>6} {:>7}", gpu.name, "op", "us", "floor", "ratio", "of copy");
    let asked: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let wanted = |part: &str| asked.is_empty() || asked.iter().any(|a| a == part);
    for rows in [1, 64, 256, 8192].into_iter().filter(|_| wanted("small")) {
        small(&gpu, rows);
        gpu.free_all();
    }
    let decode = [(1, 1024), (1, 32_768), (16, 4096), (64, 256), (64, 2048), (256, 1024)];
    for (batch, context) in decode.into_iter().filter(|_| wanted("attention")) {
        attention(&gpu, batch, context, 1);
        gpu.free_all();
    }
    let chunks = [(4, 2048, 2048), (1, 8192, 2048), (1, 8192, 8192), (1, 32_768, 512)];
    for (batch, context, fresh) in chunks.into_iter().filter(|_| wanted("chunks")) {
        attention(&gpu, batch, context, fresh);
        gpu.free_all();
    }
    if !wanted("pages") {
        return;
    }
    let (count, size) = (40u32, 2u64 << 20);
    let (staged, base) =
        (noise(&gpu, (u64::from(count) * size / 2 / SETS) as usize), gpu.alloc((u64::from(count) * size) as usize));
    let mut owned: Vec<u32> = (0..count).collect();
    Random(8).shuffle(&mut owned);
    let pieces = scatter(staged, &owned, base, size);
    let args = PagesArgs { pieces: gpu.upload(&bytes_of(&pieces)), ..PagesArgs::default() };
    row(&gpu, "pages, an adapter of 84 MB", f64::from(count) * size as f64 * 2.0, |_| {
        pages_launch(&pieces, &args, gpu.sms).unwrap().into_iter().collect()
    });
}
