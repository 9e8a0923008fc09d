//! What the benchmarks of single ops share: graph replay over buffers larger than the L2, medians.

use super::gpu::{Bits, Gpu, Random, bytes};
use lorafleet_kernels::launch::Launch;

/// Bytes in a microsecond: what a copy on an H200 reaches.
pub const BANDWIDTH: f64 = 4.2e6;
pub const SETS: u64 = 8;

/// `SETS` variants of a launch after each other, so that none finds its bytes in the L2.
pub fn row(gpu: &Gpu, name: &str, moved: f64, launches: impl Fn(u64) -> Vec<Launch>) -> f64 {
    let graph = gpu.capture(|| (0..SETS).for_each(|set| launches(set).iter().for_each(|l| gpu.launch(l))));
    gpu.time(&graph, 3, || ());
    let mut times = gpu.time(&graph, 21, || ());
    times.sort_by(f64::total_cmp);
    let us = times[times.len() / 2] / SETS as f64;
    let floor = moved / BANDWIDTH;
    println!("{name:52} {us:8.1} {floor:8.1} {:6.2} {:6.0}%", us / floor, 100.0 * floor / us);
    us
}

/// Random elements, `SETS` times.
pub fn noise(gpu: &Gpu, elements: usize) -> u64 {
    let block = bytes(&Bits::Bf16.random(1 << 20, 1.0, &mut Random(elements as u64 | 1)));
    let total = elements * 2 * SETS as usize;
    let p = gpu.alloc(total);
    (0..total).step_by(block.len()).for_each(|at| gpu.write(p + at as u64, &block[..block.len().min(total - at)]));
    p
}
