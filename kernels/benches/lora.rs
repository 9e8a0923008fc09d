//! LoRA alone and beside the base GEMMs, Llama-3-8B shapes, microseconds per layer of seven projections.
//!
//! Graph replay, medians, weights and activations rotated through more than the L2. Every row is checked against the
//! twin before it is timed. `cargo bench -p lorafleet-kernels -- [NAME...]` runs the rows whose name holds one of NAMEs.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "lora/base.rs"]
mod base;
#[path = "lora/beside.rs"]
mod beside;
#[path = "../tests/gpu/mod.rs"]
mod gpu;
#[path = "lora/model.rs"]
mod model;

use gpu::{Gpu, Random};
use lorafleet_kernels::tuning::{Company, DecodeTuning, decode_tuning, prefill_shrink, wide_shrink};
use model::{Batch, Model};

/// Name, segment lengths by adapter, rank of each adapter, whether it is a prefill, goal in microseconds.
struct Row {
    name: &'static str,
    segments: Vec<u32>,
    rank: fn(u32) -> u32,
    prefill: bool,
    goal_us: f64,
    peer_us: f64,
}

fn rows() -> Vec<Row> {
    let row = |name, segments: Vec<u32>, rank, prefill, goal_us, peer_us| Row {
        name,
        segments,
        rank,
        prefill,
        goal_us,
        peer_us,
    };
    // 64 requests over 128 adapters by Zipf 1.0 in the recorded draw: nine distinct.
    let zipf = vec![22, 13, 9, 6, 5, 4, 2, 2, 1];
    vec![
        row("lora_d1_r16_us", vec![1], |_| 16, false, 10.0, 39.0),
        row("lora_d64_distinct_r16_us", vec![1; 64], |_| 16, false, 48.0, 110.0),
        row("lora_d64_zipf_r16_us", zipf, |_| 16, false, 22.0, 59.0),
        row("lora_d256_uniform32_r16_us", vec![8; 32], |_| 16, false, 44.0, 86.0),
        row("lora_d256_128_r16_us", vec![2; 128], |_| 16, false, f64::NAN, f64::NAN),
        row("lora_d256_distinct_r16_us", vec![1; 256], |_| 16, false, 182.0, 365.0),
        row("lora_d64_distinct_r64_us", vec![1; 64], |_| 64, false, 170.0, 232.0),
        row("lora_d64_distinct_mixed_us", vec![1; 64], |slot| [8, 16, 32, 64][slot as usize % 4], false, 90.0, 203.0),
        row("lora_d64_distinct_r8_us", vec![1; 64], |_| 8, false, f64::NAN, f64::NAN),
        row("lora_prefill2048_r16_us", vec![512; 4], |_| 16, true, 130.0, 221.0),
        row("lora_prefill8192_r16_us", vec![512; 16], |_| 16, true, 475.0, 658.0),
        row("lora_prefill8192_r64_us", vec![512; 16], |_| 64, true, f64::NAN, f64::NAN),
    ]
}

/// Copy bandwidth that floors are counted with, bytes per microsecond.
const BANDWIDTH: f64 = 4.2e6;

/// One line: the row with this setting.
fn measure(gpu: &Gpu, model: &Model, batch: &mut Batch, row: &Row, tuning: DecodeTuning) {
    let floor = model.floor_bytes(&row.segments) / BANDWIDTH;
    batch.set_tuning(gpu, model, tuning);
    let error = batch.check(gpu, model);
    assert!(error < 1e-2, "{}: wrong by {error}", row.name);
    let us = batch.time(gpu, model);
    let setting = if row.prefill {
        let parts = [0, 1].map(|part| batch.time_part(gpu, model, part, None));
        format!("shrink {:.1} us, expand {:.1} us, splits {:?}", parts[0], parts[1], batch.splits())
    } else {
        batch.set_early(0);
        batch.set_tuning(gpu, model, decode_tuning(batch.pieces(), gpu.sms, Company::Nothing));
        let late = batch.time(gpu, model);
        batch.set_early(1);
        format!(
            "x waited for {late:.1} us; grid {} ctas {} splits {} {:?}",
            tuning.grid, tuning.ctas, tuning.splits, tuning.weights
        )
    };
    println!(
        "{:32} {us:8.1} {floor:8.1} {:6.2} {:8.1} {:8.1} {error:9.1e}  {setting}",
        row.name,
        us / floor,
        row.goal_us,
        row.peer_us
    );
}

/// Parts of a prefill by group, and other settings of each.
fn prefill_variants(gpu: &Gpu, model: &Model, batch: &mut Batch, name: &str) {
    for part in [0, 1] {
        let groups = [0, 1, 2, 3].map(|group| batch.time_part(gpu, model, part, Some(group)));
        println!("{name:32} {groups:8.1?}  {}", ["shrink by group", "expand by group"][part]);
    }
    for units in [4, 8, 16] {
        batch.set_units(units);
        let [part, both] = [batch.time_part(gpu, model, 1, None), batch.time(gpu, model)];
        println!("{name:32} {part:8.1}  expand by {units} units; with the shrink {both:.1}");
    }
    for tiles in [2, 3, 4, 6] {
        batch.set_shrink(gpu, model, |columns| wide_shrink(columns, tiles));
        let error = batch.check(gpu, model);
        assert!(error < 1e-2, "{name}: wrong by {error}");
        let groups = [0, 1, 2, 3].map(|group| batch.time_part(gpu, model, 0, Some(group)));
        let [part, both] = [batch.time_part(gpu, model, 0, None), batch.time(gpu, model)];
        println!("{name:32} {part:8.1}  wide shrink of {tiles} tiles; with the expand {both:.1} {groups:.1?}");
    }
    batch.set_shrink(gpu, model, prefill_shrink);
}

fn main() {
    let Some(gpu) = Gpu::open() else { return };
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let variants = std::env::var("LORAFLEET_BENCH_VARIANTS").is_ok();
    let beside = std::env::var("LORAFLEET_BENCH_BASE").is_ok();
    println!("{}", gpu.name);
    println!(
        "{:32} {:>8} {:>8} {:>6} {:>8} {:>8} {:>9}  setting",
        "row", "us", "floor", "ratio", "goal", "peer", "error"
    );
    for row in rows() {
        if !wanted.is_empty() && !wanted.iter().any(|w| row.name.contains(w.as_str())) {
            continue;
        }
        let mut random = Random(row.name.len() as u64 * 77 + 5);
        let model = Model::new(&gpu, row.segments.len() as u32, row.rank, &mut random);
        let mut batch = Batch::new(&gpu, &model, &row.segments, row.prefill, &mut random);
        let standard = batch.tuning;
        let mut settings = vec![standard];
        if variants && !row.prefill {
            for (grid, ctas, splits) in [(264, 264, 8), (264, 264, 16), (264, 132, 8), (264, 132, 16), (264, 49, 16)] {
                settings.push(DecodeTuning { grid, ctas, ctas_per_piece: ctas, splits, ..standard });
            }
        }
        for tuning in settings {
            measure(&gpu, &model, &mut batch, &row, tuning);
        }
        if variants && row.prefill {
            prefill_variants(&gpu, &model, &mut batch, row.name);
        }
        batch.set_tuning(&gpu, &model, standard);
        if beside {
            base::beside(&gpu, &model, &mut batch, row.name);
        }
        gpu.free_all();
    }
}
