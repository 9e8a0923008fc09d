//! A prefill's LoRA beside the base GEMMs, and our own GEMM that has it in its sums.

use lorafleet_kernels::image::Arch;

use super::base::Base;
use super::gpu::Gpu;
use super::model::{Batch, Model};

/// Layers of one graph.
const LAYERS: u32 = 4;

/// A prefill: schedules take turns, so that all meet the device as warm as the others. Prints both GEMMs by group.
pub fn prefill(gpu: &Gpu, model: &Model, batch: &mut Batch, base: &Base, name: &str) {
    type Record<'a> = Box<dyn Fn(&Batch, u32, usize) + 'a>;
    let theirs = |b: &Batch, number: u32, group: usize, beta| base.gemm(model, b, group, number, beta);
    let lora = |b: &Batch, number: u32, group: usize, store| {
        b.launches(model, group, number, store).iter().for_each(|l| gpu.launch(l));
    };
    let ours = |b: &Batch, number: u32, group: usize, delta| {
        let w = base.weights[group][number as usize % 2];
        gpu.launch(&b.own_gemm(gpu, model, group, number, w, delta));
    };
    let mut schedules: Vec<(&str, Record<'_>)> = vec![
        ("base", Box::new(|b, number, group| theirs(b, number, group, 0.0))),
        ("base again", Box::new(|b, number, group| theirs(b, number, group, 0.0))),
        (
            "serial",
            Box::new(|b, number, group| {
                theirs(b, number, group, 0.0);
                lora(b, number, group, 0);
            }),
        ),
        (
            "delta first",
            Box::new(|b, number, group| {
                lora(b, number, group, 1);
                theirs(b, number, group, 1.0);
            }),
        ),
        (
            "shrink alone",
            Box::new(|b, number, group| {
                gpu.launch(&b.launches(model, group, number, 0)[0]);
                theirs(b, number, group, 0.0);
            }),
        ),
    ];
    if gpu.arch == Arch::Sm90a {
        let weights: Vec<_> = base.weights.iter().map(|w| w[(model.layers as usize - 1) % 2]).collect();
        let error = batch.check_gemm(gpu, model, &weights, &|b, group, number| theirs(b, number, group, 0.0));
        assert!(error < 1e-2, "{name}: own GEMM wrong by {error}");
        schedules.push(("own GEMM without LoRA", Box::new(|b, number, group| ours(b, number, group, false))));
        schedules.push(("own GEMM", Box::new(|b, number, group| ours(b, number, group, true))));
    }
    for groups in [0..4, 0..1, 1..2, 2..3, 3..4] {
        let graphs: Vec<_> = schedules
            .iter()
            .map(|(_, record)| {
                gpu.capture(|| (0..LAYERS).for_each(|n| groups.clone().for_each(|group| record(batch, n, group))))
            })
            .collect();
        let us = batch.medians(gpu, &graphs, 25, LAYERS);
        let base = (us[0] + us[1]) / 2.0;
        let mut line = format!("{name}, groups {groups:?}: base {:.1} and {:.1} us", us[0], us[1]);
        for ((what, _), us) in schedules.iter().zip(&us).skip(2) {
            line += &format!("; {what} {:+.1}%", (us / base - 1.0) * 100.0);
        }
        println!("{line}");
    }
}
