//! The real model against the oracle: transformers on the dequantised file, PEFT on top. `tests/oracle/truth.py` made the
//! golden files, `tests/oracle/llama_kl.py` llama.cpp's figures beside them.

#![allow(clippy::panic, clippy::unwrap_used)] // Helpers of tests may say what they expect plainly.

mod support;

use std::path::{Path, PathBuf};

use lorafleet_backend::Backend;
use lorafleet_backend::batch::{PageId, ResidentId, SampleSpec, SampledRow, Segment, SequenceId};
use serde::Deserialize;
use support::{Runner, greedy, json, load_adapter};

/// Where the oracle's best two tokens are closer than this, another token than its own is no fault.
const GAP: f32 = 0.05;
/// Mean KL of llama.cpp along the base's answers is 0.0029 nats; ours must be below a tenth of it.
const MEAN_KL_NATS_MAX: f64 = 3e-4;

#[derive(Deserialize)]
struct Truth {
    tokens: usize,
    top: usize,
    top_every: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    gaps: Vec<f32>,
}

const MODELS: [&str; 3] = ["base", "tickets", "pirate"];

/// The oracle's best tokens at one position, with their log-probabilities.
type TopRow = Vec<(u32, f32)>;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/truth")
}

fn top_rows(name: &str, top: usize) -> Vec<TopRow> {
    let bytes = std::fs::read(folder().join(format!("{name}.top64.bin"))).unwrap();
    let row = |row: &[u8]| {
        let (ids, logprobs) = row.split_at(2 * top);
        let ids = ids.chunks_exact(2).map(|id| u32::from(u16::from_le_bytes(id.try_into().unwrap())));
        let logprobs = logprobs.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap()));
        ids.zip(logprobs).collect()
    };
    bytes.chunks_exact(6 * top).map(row).collect()
}

/// One sequence that is fed the oracle's tokens, whatever the backend would have drawn.
struct Forced {
    name: String,
    adapter: Option<ResidentId>,
    case: Case,
    top: Vec<TopRow>,
    pages: Vec<PageId>,
    rows: Vec<SampledRow>,
}

fn segment(index: usize, forced: &Forced) -> Segment {
    let fed = forced.rows.len();
    let (tokens, position) = match fed.checked_sub(1) {
        None => (forced.case.prompt.clone(), 0),
        Some(last) => (vec![forced.case.tokens[last]], forced.case.prompt.len() + last),
    };
    Segment {
        sequence: SequenceId(index as u64),
        adapter: forced.adapter,
        tokens,
        position: u32::try_from(position).unwrap(),
        pages: forced.pages.clone(),
        sample: Some(SampleSpec { logprobs: Some(u8::MAX), ..greedy() }),
    }
}

/// KL of the oracle to us, in nats, over the tokens that both name and one bucket for the others: never above the true KL.
fn kl(oracle: &TopRow, row: &SampledRow) -> f64 {
    let (mut sum, mut rest_p, mut rest_q) = (0.0, 1.0, 1.0);
    for (token, oracle) in oracle {
        let ours = row.alternatives.iter().find(|(other, _)| other == token);
        let Some((_, ours)) = ours else { continue };
        let (oracle, ours) = (f64::from(*oracle), f64::from(*ours));
        sum += oracle.exp() * (oracle - ours);
        rest_p -= oracle.exp();
        rest_q -= ours.exp();
    }
    let (rest_p, rest_q) = (rest_p.max(1e-12_f64), rest_q.max(1e-12_f64));
    sum + rest_p * (rest_p / rest_q).ln()
}

/// Base and adapters in one batch, fed with the oracle's tokens. `suffix` says which golden files.
fn run(path: &Path, suffix: &str) -> (Vec<Forced>, Truth) {
    let mut runner = Runner::new(path, 1 << 30, 2);
    let shape = runner.model.shape().base();
    let page_tokens = runner.backend.page_budget().page_tokens as usize;
    let mut forced = Vec::new();
    let mut last = None;
    for model in MODELS {
        let name = format!("{model}{suffix}");
        let mut truth: Truth = json(&folder().join(format!("{name}.json")));
        let adapters = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/demo/adapters");
        let adapter = (model != "base").then(|| runner.upload(&load_adapter(&adapters.join(model), &shape)));
        let mut rows = top_rows(&name, truth.top).into_iter();
        for case in std::mem::take(&mut truth.cases) {
            let top: Vec<TopRow> = rows.by_ref().take(truth.tokens.div_ceil(truth.top_every)).collect();
            let pages = runner.take((case.prompt.len() + truth.tokens).div_ceil(page_tokens));
            forced.push(Forced { name: name.clone(), adapter, case, top, pages, rows: Vec::new() });
        }
        last = Some(truth);
    }
    let truth = last.unwrap();
    for _ in 0..truth.tokens {
        let segments = forced.iter().enumerate().map(|(index, forced)| segment(index, forced)).collect();
        for row in runner.step(segments) {
            forced[row.sequence.0 as usize].rows.push(row);
        }
    }
    (forced, truth)
}

fn check(suffix: &str, prompts: usize) {
    let path = std::env::var_os("LORAFLEET_TEST_GGUF").map(PathBuf::from);
    let path = path.expect("LORAFLEET_TEST_GGUF is the path of SmolLM2-135M-Instruct.Q4_1.gguf");
    let (forced, truth) = run(&path, suffix);
    for name in MODELS.map(|model| format!("{model}{suffix}")) {
        let (mut divergences, mut same, mut largest) = (Vec::new(), 0, 0.0_f32);
        for forced in forced.iter().filter(|forced| forced.name == name) {
            let Case { tokens, logprobs, gaps, .. } = &forced.case;
            for (position, row) in forced.rows.iter().enumerate() {
                same += usize::from(row.token == tokens[position]);
                assert!(
                    row.token == tokens[position] || gaps[position] < GAP,
                    "{name}, token {position}: {} instead of {} with a gap of {}",
                    row.token,
                    tokens[position],
                    gaps[position]
                );
                if row.token == tokens[position] {
                    largest = largest.max((row.logprob - logprobs[position]).abs());
                }
                if position % truth.top_every == 0 {
                    divergences.push(kl(&forced.top[position / truth.top_every], row));
                }
            }
        }
        let mean = divergences.iter().sum::<f64>() / divergences.len() as f64;
        let positions = divergences.len();
        println!(
            "{name}: {same} of {} tokens, mean KL {mean:.2e} nats over {positions} positions, largest difference of a log-probability {largest:.1e}",
            prompts * truth.tokens
        );
        assert_eq!(positions, prompts * truth.tokens.div_ceil(truth.top_every));
        assert!(mean < MEAN_KL_NATS_MAX, "{name}: mean KL {mean}");
    }
}

#[test]
#[ignore = "needs LORAFLEET_TEST_GGUF"]
fn greedy_tokens_and_distributions_are_the_oracles() {
    check("", 10);
}

/// Over many pages, many tiles of rows and angles far from zero.
#[test]
#[ignore = "needs LORAFLEET_TEST_GGUF"]
fn prompts_of_up_to_two_thousand_tokens_are_answered_as_by_the_oracle() {
    check("-long", 3);
}
