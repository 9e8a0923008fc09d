//! Tokens per second of the CPU backend, as csv.
//!
//! `cargo bench --profile dev -p lorafleet-cpu --bench cpu -- MODEL [THREADS] [processor-time] [WORKLOAD]...`. Each figure is the
//! best of some repetitions, since other processes can only make a run slower. With `processor-time` (one thread) the
//! clock is the processor time of the thread, so that the figures hold on a machine that others use too. Adapters are
//! random, on all seven projections. `llama_bench.py` runs the same workloads on llama.cpp.

// The test support says what it expects plainly, as a benchmark may.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../../tests/support/random.rs"]
mod random;
#[path = "../tests/support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lorafleet_artifact::{BaseShape, Digest, Fitted, FittedModule, FloatType, ModuleKind, TensorRef};
use lorafleet_backend::Backend;
use lorafleet_backend::HostAdapter;
use lorafleet_backend::batch::{PageId, ResidentId, SampleSpec, Segment, SequenceId};
use random::Random;
use support::{Runner, greedy};

const PROMPT: usize = 64;
const STEPS: usize = 24;
const PREFILL: usize = 512;
const REPETITIONS: usize = 3;

/// Wall-clock time, or this thread's processor time as Linux counts it.
#[derive(Clone, Copy)]
struct Clock {
    start: std::time::Instant,
    processor: bool,
}

impl Clock {
    fn now(self) -> Duration {
        if !self.processor {
            return self.start.elapsed();
        }
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux with schedstat");
        Duration::from_nanos(text.split_whitespace().next().and_then(|field| field.parse().ok()).expect("nanoseconds"))
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let Some(model) = arguments.next().map(PathBuf::from) else {
        println!("usage: cpu MODEL [THREADS]; nothing measured");
        return;
    };
    let threads = arguments.next().map_or(2, |threads| threads.parse().expect("THREADS is a number"));
    let (clocks, wanted): (Vec<String>, Vec<String>) = arguments.partition(|argument| argument == "processor-time");
    let processor = !clocks.is_empty();
    assert!(!processor || threads == 1, "processor time is that of one thread");
    let clock = Clock { start: std::time::Instant::now(), processor };
    let start = clock.now();
    let mut runner = Runner::new(&model, 1 << 30, threads);
    println!("workload,value,unit");
    println!("ready,{:.3},s", (clock.now() - start).as_secs_f64());
    println!("resident_after_load,{},MiB", resident_mib());
    let report = |name: String, measure: &mut dyn FnMut() -> f64| {
        if wanted.is_empty() || wanted.contains(&name) {
            println!("{name},{:.1},tokens/s", measure());
        }
    };
    for batch in [1, 8, 32] {
        report(format!("decode_{batch}"), &mut || decode(clock, &mut runner, &vec![None; batch]));
    }
    report("prefill_512".into(), &mut || prefill(clock, &mut runner, None));
    let base = runner.model.shape().base();
    for rank in [8, 16] {
        if !wanted.is_empty() && !wanted.iter().any(|name| name.ends_with(&format!("_r{rank}"))) {
            continue;
        }
        let adapters: Vec<ResidentId> = (0..8).map(|seed| runner.upload(&random_adapter(&base, rank, seed))).collect();
        let distinct: Vec<Option<ResidentId>> = adapters.iter().copied().map(Some).collect();
        let (one, same) = (&distinct[..1], [distinct[0]; 8]);
        report(format!("decode_1_r{rank}"), &mut || decode(clock, &mut runner, one));
        report(format!("decode_8_same_r{rank}"), &mut || decode(clock, &mut runner, &same));
        report(format!("decode_8_distinct_r{rank}"), &mut || decode(clock, &mut runner, &distinct));
        report(format!("prefill_512_r{rank}"), &mut || prefill(clock, &mut runner, distinct[0]));
        for adapter in adapters {
            runner.drop_resident(adapter);
        }
    }
    println!("resident_at_end,{},MiB", resident_mib());
}

fn without_logprobs() -> SampleSpec {
    SampleSpec { logprobs: None, ..greedy() }
}

/// One sequence for each entry, decoded together.
fn decode(clock: Clock, runner: &mut Runner, adapters: &[Option<ResidentId>]) -> f64 {
    let page_tokens = runner.backend.page_budget().page_tokens as usize;
    let pages = (PROMPT + STEPS * REPETITIONS).div_ceil(page_tokens);
    let tables: Vec<Vec<PageId>> = adapters.iter().map(|_| runner.take(pages)).collect();
    let segment = |index: usize, position: usize, tokens: Vec<u32>| Segment {
        sequence: SequenceId(index as u64),
        adapter: adapters[index],
        tokens,
        position: position as u32,
        pages: tables[index].clone(),
        sample: Some(without_logprobs()),
    };
    let prompt = |index: usize| (0..PROMPT as u32).map(|i| 1000 + 37 * i + index as u32).collect();
    runner.step((0..adapters.len()).map(|index| segment(index, 0, prompt(index))).collect());
    let mut best = Duration::MAX;
    for repetition in 0..REPETITIONS {
        let start = clock.now();
        for step in 0..STEPS {
            let position = PROMPT + repetition * STEPS + step;
            runner.step((0..adapters.len()).map(|index| segment(index, position, vec![42])).collect());
        }
        best = best.min(clock.now() - start);
    }
    tables.into_iter().for_each(|table| runner.give(table));
    (adapters.len() * STEPS) as f64 / best.as_secs_f64()
}

fn prefill(clock: Clock, runner: &mut Runner, adapter: Option<ResidentId>) -> f64 {
    let table = runner.take(PREFILL.div_ceil(runner.backend.page_budget().page_tokens as usize));
    let tokens: Vec<u32> = (0..PREFILL as u32).map(|i| 500 + 61 * i).collect();
    let mut best = Duration::MAX;
    for _ in 0..REPETITIONS {
        let segment = Segment {
            sequence: SequenceId(0),
            adapter,
            tokens: tokens.clone(),
            position: 0,
            pages: table.clone(),
            sample: Some(without_logprobs()),
        };
        let start = clock.now();
        runner.step(vec![segment]);
        best = best.min(clock.now() - start);
    }
    runner.give(table);
    PREFILL as f64 / best.as_secs_f64()
}

/// Small random values in f16 on the seven projections of every layer.
fn random_adapter(base: &BaseShape, rank: u32, seed: u64) -> Arc<HostAdapter> {
    let mut bytes = Vec::new();
    let mut random = Random::new(seed);
    let mut tensor = |rows: u32, columns: u32| {
        let start = bytes.len() as u64;
        for _ in 0..rows * columns {
            // 0.0078..0.0156 in size, either sign.
            let bits = 0x2000 | ((random.next() >> 40) as u16 & 0x83ff);
            bytes.extend(bits.to_le_bytes());
        }
        let range = start..bytes.len() as u64;
        TensorRef { name: String::new(), dtype: FloatType::F16, double: false, rows, columns, range }
    };
    let layers = base.modules().filter(|module| module.kind != ModuleKind::LmHead);
    let modules = layers.map(|module| {
        let width = base.width(module.kind);
        let (a, b) = (tensor(rank, width.input), tensor(width.output, rank));
        FittedModule { module, rank, scale: 2.0, a, b }
    });
    let fitted = Fitted { modules: modules.collect(), base_copies: Vec::new() };
    Arc::new(HostAdapter { digest: Digest::from_bytes([seed as u8; 32]), bytes, fitted })
}

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS"));
    line.and_then(|line| line.split_whitespace().nth(1)).and_then(|kib| kib.parse().ok()).unwrap_or(0u64) / 1024
}
