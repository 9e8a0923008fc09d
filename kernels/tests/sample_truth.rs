//! Sampling against its twin: the same token, always, on random and adversarial rows.
#![allow(clippy::unwrap_used, clippy::panic)]

mod gpu;

use gpu::{Bits, Gpu, Random, bytes};
use lorafleet_kernels::decoder::sample::twin::{answer, capped};
use lorafleet_kernels::decoder::sample::{
    Ask, Edit, Leader, Logits, NONE, SampleArgs, candidates_bytes, parts_bytes, sample_launches,
};
use lorafleet_kernels::launch::Launch;
use lorafleet_kernels::plain::{Plain, bytes_of};

const LEADERS: u32 = 32;

/// Rows of logits with what they ask for.
struct Batch {
    kind: Logits,
    soft_cap: f32,
    vocabulary: usize,
    rows: Vec<Vec<f32>>,
    asks: Vec<Ask>,
    edits: Vec<Edit>,
    masks: Vec<Vec<u32>>,
}

/// What the device holds of a batch.
struct Placed {
    args: SampleArgs,
    launches: [Launch; 2],
}

/// Bits, so that equal means equal.
#[derive(Clone, Debug, PartialEq)]
struct Found {
    tokens: Vec<u32>,
    logprobs: Vec<u32>,
    leaders: Vec<u32>,
}

fn u32s(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// The row as the element type holds it.
fn round(kind: Logits, v: f32) -> f32 {
    match kind {
        Logits::F32 => v,
        Logits::Bf16 => half::bf16::from_f32(v).to_f32(),
        Logits::F16 => half::f16::from_f32(v).to_f32(),
    }
}

impl Batch {
    fn place(&self, gpu: &Gpu) -> Placed {
        let rows = self.rows.len() as u32;
        // What lies between the vocabulary and the next row is no number.
        let stride = self.vocabulary.next_multiple_of(8) + 8;
        let mut elements = Vec::new();
        for row in &self.rows {
            let padded = row.iter().copied().chain(std::iter::repeat(f32::INFINITY)).take(stride);
            match self.kind {
                Logits::F32 => elements.extend(padded.flat_map(f32::to_le_bytes)),
                Logits::Bf16 => elements.extend(bytes(&padded.map(|v| Bits::Bf16.of(v)).collect::<Vec<_>>())),
                Logits::F16 => elements.extend(bytes(&padded.map(|v| Bits::F16.of(v)).collect::<Vec<_>>())),
            }
        }
        self.asks.iter().for_each(|ask| ask.check(LEADERS).unwrap());
        let words = self.vocabulary.div_ceil(32);
        assert!(self.masks.iter().all(|mask| mask.len() == words));
        let scratch = |bytes: u64, fill| {
            let p = gpu.alloc(bytes as usize);
            gpu.fill(p, fill, bytes as usize);
            p
        };
        let args = SampleArgs {
            logits: gpu.upload(&elements),
            asks: gpu.upload(&bytes_of(&self.asks)),
            edits: gpu.upload(&bytes_of(&self.edits)),
            masks: gpu.upload(&bytes_of(&self.masks.concat())),
            tokens: scratch(u64::from(rows) * 4, 0xee),
            logprobs: scratch(u64::from(rows) * 4, 0xee),
            leaders: scratch(u64::from(rows * LEADERS) * 8, 0xee),
            parts: scratch(parts_bytes(rows), 0xff),
            candidates: scratch(candidates_bytes(rows), 0xff),
            rows,
            vocabulary: self.vocabulary as u32,
            stride: stride as u32,
            slices: 0,
            mask_words: words as u32,
            leaders_stride: LEADERS,
            soft_cap: self.soft_cap,
            unused: 0,
        };
        Placed { launches: sample_launches(&args, self.kind).unwrap(), args }
    }

    fn check(&self, found: &Found, what: &str) {
        for (r, (row, ask)) in self.rows.iter().zip(&self.asks).enumerate() {
            let edits = &self.edits[ask.edit as usize..][..ask.edits as usize];
            let mask = (ask.mask != NONE).then(|| self.masks[ask.mask as usize].as_slice());
            let expected = answer(&capped(row, self.soft_cap), ask, edits, mask);
            let close = |bits: u32, truth: f64| {
                let found = f64::from(f32::from_bits(bits));
                assert!((found - truth).abs() < 3e-4 || found == truth, "{what}, row {r}: {found} {truth}");
            };
            for (i, (token, logprob)) in expected.leaders.iter().enumerate() {
                let at = (r * LEADERS as usize + i) * 2;
                assert_eq!(found.leaders[at], *token, "{what}, row {r}, leader {i}");
                close(found.leaders[at + 1], *logprob);
            }
            if ask.leaders > 0 {
                continue;
            }
            assert_eq!(found.tokens[r], expected.token.unwrap_or(NONE), "{what}, row {r}: {ask:?}");
            if ask.logprob == 1 {
                close(found.logprobs[r], expected.logprob);
            }
        }
    }
}

impl Placed {
    fn run(&self, gpu: &Gpu) -> Found {
        self.launches.iter().for_each(|l| gpu.launch(l));
        self.read(gpu)
    }

    fn read(&self, gpu: &Gpu) -> Found {
        let rows = self.args.rows as usize;
        Found {
            tokens: u32s(&gpu.read(self.args.tokens, rows * 4)),
            logprobs: u32s(&gpu.read(self.args.logprobs, rows * 4)),
            leaders: u32s(&gpu.read(self.args.leaders, rows * LEADERS as usize * Leader::SIZE)),
        }
    }
}

fn bell(random: &mut Random) -> f32 {
    (0..6).map(|_| random.unit()).sum::<f32>() * 0.7
}

/// Kinds of rows: as a model's, wide, flat, with ties, with what is no number.
fn logits(shape: usize, kind: Logits, vocabulary: usize, random: &mut Random) -> Vec<f32> {
    let mut row: Vec<f32> = match shape {
        0 => (0..vocabulary).map(|_| bell(random) * 2.0).collect(),
        1 => (0..vocabulary).map(|_| bell(random) * 30.0).collect(),
        2 => vec![1.5; vocabulary],
        3 => (0..vocabulary).map(|_| (bell(random) * 4.0).round() * 0.5).collect(),
        4 => (0..vocabulary).map(|_| bell(random) * 1e-3).collect(),
        _ => (0..vocabulary).map(|_| if random.below(50) == 0 { bell(random) } else { f32::NEG_INFINITY }).collect(),
    };
    if shape == 0 || shape == 5 {
        // A model is sure of a few.
        for lift in [9.0, 8.0, 8.0, 7.5, 6.0] {
            row[random.below(vocabulary)] += lift;
        }
    }
    if shape == 3 {
        row[random.below(vocabulary)] = f32::NAN;
        row[random.below(vocabulary)] = f32::INFINITY;
    }
    row.into_iter().map(|v| round(kind, v)).collect()
}

const ASKS: usize = 16;

fn ask(which: usize, random: &mut Random) -> Ask {
    let draw = Ask { seed: random.next(), draw: random.next(), inverse_temperature: 1.0, logprob: 1, ..Ask::greedy() };
    match which % ASKS {
        0 => Ask { logprob: 1, ..Ask::greedy() },
        1 => draw,
        2 => Ask { inverse_temperature: 1.0 / 0.3, ..draw },
        3 => Ask { inverse_temperature: 0.2, logprob: 0, ..draw },
        4 => Ask { top_k: 1, ..draw },
        5 => Ask { top_k: 40, ..draw },
        6 => Ask { top_k: 3000, ..draw },
        7 => Ask { top_p: 0.95, ..draw },
        8 => Ask { top_p: 0.3, inverse_temperature: 1.5, ..draw },
        9 => Ask { top_p: 0.0, ..draw },
        10 => Ask { min_p: 0.05, ..draw },
        11 => Ask { top_k: 50, top_p: 0.9, min_p: 0.02, inverse_temperature: 1.0 / 0.7, ..draw },
        12 => Ask { leaders: 20, ..draw },
        13 => Ask { leaders: 1 + random.below(32) as u32, ..Ask::greedy() },
        14 => Ask { top_k: 100_000, top_p: 0.999, ..draw },
        _ => Ask { inverse_temperature: 1e6, top_p: 0.5, ..draw },
    }
}

/// Distinct tokens, some beyond the vocabulary.
fn edits(count: usize, vocabulary: usize, random: &mut Random) -> Vec<Edit> {
    let mut tokens: Vec<u32> = (0..count).map(|_| random.below(vocabulary + vocabulary / 8 + 1) as u32).collect();
    tokens.sort_unstable();
    tokens.dedup();
    let edit = |token| Edit {
        token,
        outputs: random.below(3) as u32,
        bias: match random.below(6) {
            0 => f32::NEG_INFINITY,
            1 => random.unit() * 10.0,
            _ => 0.0,
        },
        seen: random.below(2) as u32,
    };
    tokens.into_iter().map(edit).collect()
}

fn mixed_batch(kind: Logits, vocabulary: usize, soft_cap: f32, rows: usize, random: &mut Random) -> Batch {
    let words = vocabulary.div_ceil(32);
    let mask = |one_in: usize, random: &mut Random| -> Vec<u32> {
        (0..words).map(|_| (0..32).fold(0, |w, bit| w | u32::from(random.below(one_in) == 0) << bit)).collect()
    };
    let masks = vec![vec![u32::MAX; words], mask(2, random), mask(300, random), vec![0; words]];
    let mut batch = Batch { kind, soft_cap, vocabulary, rows: Vec::new(), asks: Vec::new(), edits: Vec::new(), masks };
    for r in 0..rows {
        // Every ask meets every shape as rows and vocabularies go by.
        let shape = (r / ASKS + r + vocabulary) % 6;
        batch.rows.push(logits(shape, kind, vocabulary, random));
        let mut ask = ask(r, random);
        if r % 3 == 1 {
            let own = edits([1, 300, 5000][r / 3 % 3], vocabulary, random);
            ask = Ask { edit: batch.edits.len() as u32, edits: own.len() as u32, ..ask };
            ask = Ask { repetition: 1.3, presence: 0.4, frequency: -0.2, ..ask };
            batch.edits.extend(own);
        }
        if r % 5 >= 3 {
            ask.mask = random.below(4) as u32;
        }
        batch.asks.push(ask);
    }
    batch
}

#[test]
fn tokens_are_those_of_the_twin() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random(41);
    for (kind, vocabulary, soft_cap, rows) in [
        (Logits::F32, 1, 0.0, 5),
        (Logits::F32, 5, 3.0, 48),
        (Logits::Bf16, 1000, 0.0, 96),
        (Logits::F32, 8192, 0.0, 64),
        (Logits::F16, 8193, 0.0, 64),
        (Logits::F32, 32_001, 30.0, 48),
        (Logits::Bf16, 49_152, 0.0, 48),
        (Logits::F32, 128_256, 0.0, 48),
        (Logits::Bf16, 128_256, 0.0, 32),
        (Logits::Bf16, 256_000, 30.0, 48),
        (Logits::F32, 262_144, 0.0, 16),
    ] {
        let batch = mixed_batch(kind, vocabulary, soft_cap, rows, &mut random);
        let placed = batch.place(&gpu);
        let found = placed.run(&gpu);
        batch.check(&found, &format!("{kind:?}, {vocabulary} tokens"));
        // A graph of the same launches gives the same bits, again and again.
        let graph = gpu.capture(|| placed.launches.iter().for_each(|l| gpu.launch(l)));
        for _ in 0..3 {
            gpu.fill(placed.args.tokens, 0xee, rows * 4);
            gpu.replay(&graph);
            assert_eq!(placed.read(&gpu), found);
        }
        gpu.free_all();
    }
}

#[test]
fn a_row_does_not_know_its_batch() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random(5);
    let batch = mixed_batch(Logits::Bf16, 32_000, 0.0, 160, &mut random);
    let together = batch.place(&gpu).run(&gpu);
    for r in (0..160).step_by(3) {
        let one = Batch {
            rows: vec![batch.rows[r].clone()],
            asks: vec![batch.asks[r]],
            ..mixed_batch(batch.kind, 32_000, 0.0, 0, &mut random)
        };
        let one = Batch { edits: batch.edits.clone(), masks: batch.masks.clone(), ..one };
        let alone = one.place(&gpu).run(&gpu);
        let ask = &batch.asks[r];
        if ask.leaders > 0 {
            let n = ask.leaders as usize * 2;
            assert_eq!(alone.leaders[..n], together.leaders[r * LEADERS as usize * 2..][..n], "row {r}");
        } else {
            assert_eq!(alone.tokens[0], together.tokens[r], "row {r}");
            assert!(ask.logprob == 0 || alone.logprobs[0] == together.logprobs[r], "row {r}");
        }
        gpu.free_all();
    }
}

/// Another seed or another draw gives other noise; a shape of probabilities comes out.
#[test]
fn draws_follow_the_distribution() {
    let Some(gpu) = Gpu::open() else { return };
    let shares = [0.5f32, 0.25, 0.15, 0.07, 0.03];
    let rows = 20_000;
    let ask = |r: u64| Ask { seed: r % 100, draw: r / 100, inverse_temperature: 1.0, ..Ask::greedy() };
    let batch = Batch {
        kind: Logits::F32,
        soft_cap: 0.0,
        vocabulary: 5,
        rows: vec![shares.map(f32::ln).to_vec(); rows],
        asks: (0..rows as u64).map(ask).collect(),
        edits: Vec::new(),
        masks: Vec::new(),
    };
    let found = batch.place(&gpu).run(&gpu);
    for (token, share) in (0u32..).zip(shares) {
        let part = found.tokens.iter().filter(|t| **t == token).count() as f32 / rows as f32;
        assert!((part - share).abs() < 0.015, "token {token}: {part}, not {share}");
    }
}
