//! LoRA as it would be scheduled beside the base GEMMs (cuBLAS), and what it adds to them.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::Range;

use cudarc::cublas::{result, sys};

use lorafleet_kernels::tuning::{DecodeTuning, decode_tuning};

use super::gpu::Gpu;
use super::model::{Batch, Model};

const WORKSPACE: usize = 64 << 20;
/// Layers of one graph.
const LAYERS: u32 = 16;

pub struct Base {
    handle: sys::cublasHandle_t,
    /// By group; two sets, so that a layer's weights are never warm.
    pub weights: Vec<[u64; 2]>,
}

impl Base {
    fn new(gpu: &Gpu, model: &Model) -> Self {
        let handle = result::create_handle().unwrap();
        let workspace = gpu.alloc(WORKSPACE);
        unsafe {
            result::set_stream(handle, gpu.stream.cast()).unwrap();
            sys::cublasSetWorkspace_v2(handle, workspace as *mut c_void, WORKSPACE).result().unwrap();
        }
        let noise =
            gpu.upload(&super::gpu::bytes(&super::gpu::Bits::Bf16.random(1 << 22, 0.02, &mut super::gpu::Random(9))));
        let fill = |bytes: usize| {
            let w = gpu.alloc(bytes);
            (0..bytes).step_by(8 << 20).for_each(|at| gpu.copy(w + at as u64, noise, (bytes - at).min(8 << 20)));
            w
        };
        let weights = model.groups.iter().map(|g| {
            let bytes = (g.inputs * g.outputs.iter().sum::<u32>() * 2) as usize;
            [fill(bytes), fill(bytes)]
        });
        Self { handle, weights: weights.collect() }
    }

    /// SMs that GEMMs may fill; 0: all.
    fn limit(&self, sms: u32) {
        unsafe { sys::cublasSetSmCountTarget(self.handle, sms as i32).result().unwrap() };
    }

    /// y = x W (beta 0), or y += x W (beta 1).
    pub fn gemm(&self, model: &Model, batch: &Batch, group: usize, number: u32, beta: f32) {
        let (shape, layer, one) = (&model.groups[group], number % model.layers, 1.0f32);
        let (m, n, k) = (batch.rows as i32, shape.outputs.iter().sum::<u32>() as i32, shape.inputs as i32);
        let (w, x, y) = (self.weights[group][number as usize % 2], batch.x(group, layer), batch.y(group, layer));
        use sys::cudaDataType_t::CUDA_R_16BF as BF16;
        let (t, not) = (sys::cublasOperation_t::CUBLAS_OP_T, sys::cublasOperation_t::CUBLAS_OP_N);
        let (alpha, beta) = ((&raw const one).cast::<c_void>(), (&raw const beta).cast::<c_void>());
        unsafe {
            sys::cublasGemmEx(
                self.handle,
                t,
                not,
                n,
                m,
                k,
                alpha,
                w as *const c_void,
                BF16,
                k,
                x as *const c_void,
                BF16,
                k,
                beta,
                y as *mut c_void,
                BF16,
                n,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
            .result()
            .unwrap();
        }
    }
}

impl Drop for Base {
    fn drop(&mut self) {
        unsafe { result::destroy_handle(self.handle) }.unwrap();
    }
}

/// Microseconds per layer of what `record` captures for each layer and each of `groups`.
fn measure(gpu: &Gpu, batch: &mut Batch, groups: Range<usize>, record: &dyn Fn(&Batch, u32, usize)) -> f64 {
    let graph = gpu.capture(|| (0..LAYERS).for_each(|number| groups.clone().for_each(|g| record(batch, number, g))));
    batch.median(gpu, &graph, LAYERS)
}

/// Prints the base alone and what each schedule adds to it, in percent.
pub fn beside(gpu: &Gpu, model: &Model, batch: &mut Batch, name: &str) {
    let base = Base::new(gpu, model);
    base.gemm(model, batch, 0, 0, 0.0);
    gpu.sync();
    if batch.prefill {
        return super::beside::prefill(gpu, model, batch, &base, name);
    }
    let lora = |batch: &Batch, stream, number, group, store| {
        for launch in batch.launches(model, group, number, store) {
            gpu.launch_on(stream, &launch, true);
        }
    };
    let alone = measure(gpu, batch, 0..4, &|b, number, group| base.gemm(model, b, group, number, 0.0));
    let mut line = format!("{name}: base {alone:.1} us");
    let mut add = |what: &str, us: f64| line += &format!("; {what} +{:.1}%", (us / alone - 1.0) * 100.0);
    let pieces = batch.pieces();
    batch.set_tuning(gpu, model, decode_tuning(pieces, gpu.sms, false));
    let us = measure(gpu, batch, 0..4, &|b, number, group| {
        base.gemm(model, b, group, number, 0.0);
        lora(b, gpu.stream, number, group, 0);
    });
    add("serial", us);
    let us = measure(gpu, batch, 0..4, &|b, number, group| {
        lora(b, gpu.stream, number, group, 1);
        base.gemm(model, b, group, number, 1.0);
    });
    add("delta first", us);
    // Deltas overwrite y here; the next operation would read them from a buffer of its own.
    for sms in [32, 64, 132] {
        let tuning = decode_tuning(pieces, sms, false);
        batch.set_tuning(gpu, model, DecodeTuning { grid: tuning.ctas, ..tuning });
        let us = measure(gpu, batch, 0..4, &|b, number, group| {
            gpu.fork(gpu.stream, gpu.side);
            lora(b, gpu.side, number, group, 1);
            base.gemm(model, b, group, number, 0.0);
            gpu.fork(gpu.side, gpu.stream);
        });
        add(&format!("side stream of {}", tuning.ctas), us);
    }
    let mut best = [(f64::INFINITY, 0); 4];
    for sms in [16, 24, 32, 40, 48, 56, 64, 68, 76] {
        if pieces > sms * 8 {
            continue;
        }
        add(&format!("beside on {sms} SMs"), beside_on(gpu, model, batch, &base, [sms; 4], 0..4));
        for (group, best) in best.iter_mut().enumerate() {
            let us = beside_on(gpu, model, batch, &base, [sms; 4], group..group + 1);
            if us < best.0 {
                *best = (us, sms);
            }
        }
    }
    let sms = best.map(|b| b.1);
    add(&format!("beside on {sms:?} SMs"), beside_on(gpu, model, batch, &base, sms, 0..4));
    batch.set_tuning(gpu, model, decode_tuning(pieces, gpu.sms, true));
    println!("{line}");
}

/// Each group's LoRA on SMs of its own, which the GEMM leaves.
fn beside_on(gpu: &Gpu, model: &Model, batch: &mut Batch, base: &Base, sms: [u32; 4], groups: Range<usize>) -> f64 {
    for (group, sms) in sms.into_iter().enumerate() {
        batch.set_group_tuning(gpu, model, group, decode_tuning(batch.pieces(), sms, false));
    }
    batch.early = 2;
    let us = measure(gpu, batch, groups, &|b, number, group| {
        base.limit(gpu.sms - sms[group]);
        gpu.beside(
            gpu.stream,
            || base.gemm(model, b, group, number, 0.0),
            || b.launches(model, group, number, 1).iter().for_each(|l| gpu.launch_on(gpu.stream, l, false)),
        );
    });
    base.limit(0);
    batch.early = 1;
    us
}
