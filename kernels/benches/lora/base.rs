//! LoRA as it would be scheduled beside the base GEMMs (cuBLAS), and what it adds to them.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::Range;

use cudarc::cublas::{result, sys};

use lorafleet_kernels::lora::decode::DECODE_CTAS_PER_SM;
use lorafleet_kernels::tuning::{Company, Schedule, decode_tuning, schedule};

use super::gpu::{Gpu, Graph};
use super::model::{Batch, Model};

const WORKSPACE: usize = 64 << 20;
/// Layers of one graph.
const LAYERS: u32 = 16;
/// Each graph is replayed so often.
const ROUNDS: usize = 21;

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

/// Captures what `record` launches for each layer and each of `groups`.
fn graph(gpu: &Gpu, batch: &Batch, groups: Range<usize>, record: &dyn Fn(&Batch, u32, usize)) -> Graph {
    gpu.capture(|| (0..LAYERS).for_each(|number| groups.clone().for_each(|g| record(batch, number, g))))
}

/// SMs that a GEMM is asked to leave.
const LEFT: [u32; 13] = [12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64, 68];

/// Prints the base alone and what each schedule adds to it, in percent; by group where LORAFLEET_BENCH_GROUPS is set.
/// All of a row are measured in turn.
pub fn beside(gpu: &Gpu, model: &Model, batch: &mut Batch, name: &str) {
    let base = Base::new(gpu, model);
    base.gemm(model, batch, 0, 0, 0.0);
    gpu.sync();
    if batch.prefill {
        return super::beside::prefill(gpu, model, batch, &base, name);
    }
    let mut tried =
        vec![("serial".to_owned(), [Schedule::Serial; 4]), ("delta first".to_owned(), [Schedule::DeltaFirst; 4])];
    for ctas in [64, 128, 264] {
        tried.push((format!("side stream of {ctas}"), [Schedule::SideStream { ctas }; 4]));
    }
    for sms in LEFT.into_iter().filter(|sms| batch.pieces() <= sms * 8) {
        tried.push((format!("beside on {sms} SMs"), [Schedule::Beside { sms }; 4]));
    }
    if std::env::var("LORAFLEET_BENCH_GROUPS").is_ok() {
        let best = by_group(gpu, model, batch, &base, &tried, name);
        tried.push((format!("best {best:?}"), best));
    }
    let chosen =
        [0, 1, 2, 3].map(|g| schedule(batch.rows, model.group_bytes(&model.groups[g]), &model.groups[g], gpu.sms));
    tried.push((format!("chosen {chosen:?}"), chosen));
    let mut graphs = vec![graph(gpu, batch, 0..4, &|b, number, group| base.gemm(model, b, group, number, 0.0))];
    graphs.extend(tried.iter().map(|(_, schedules)| scheduled(gpu, model, batch, &base, *schedules, 0..4)));
    let times = batch.medians(gpu, &graphs, ROUNDS, LAYERS);
    let alone = times[0];
    let more = |us: f64| format!("+{:.1}%", (us / alone - 1.0) * 100.0);
    let mut line = format!("{name}: base {alone:.1} us");
    tried.iter().zip(&times[1..]).for_each(|((what, _), us)| line += &format!("; {what} {}", more(*us)));
    batch.set_early(1);
    batch.set_tuning(gpu, model, decode_tuning(batch.pieces(), gpu.sms, Company::Lora));
    println!("{line}");
}

/// Prints each schedule's time and the GEMM's without LoRA, group by group; the best of each.
fn by_group(
    gpu: &Gpu,
    model: &Model,
    batch: &mut Batch,
    base: &Base,
    tried: &[(String, [Schedule; 4])],
    name: &str,
) -> [Schedule; 4] {
    [0, 1, 2, 3].map(|group| {
        let mut graphs = Vec::new();
        for (_, schedules) in tried {
            graphs.push(scheduled(gpu, model, batch, base, *schedules, group..group + 1));
            base.limit(if let Schedule::Beside { sms } = schedules[0] { gpu.sms - sms } else { 0 });
            graphs
                .push(graph(gpu, batch, group..group + 1, &|b, number, group| base.gemm(model, b, group, number, 0.0)));
            base.limit(0);
        }
        let times = batch.medians(gpu, &graphs, ROUNDS, LAYERS);
        let mut line = format!("{name}, group {group}, with LoRA / the GEMM:");
        let mut best = (f64::INFINITY, Schedule::Serial);
        for ((what, schedules), us) in tried.iter().zip(times.chunks_exact(2)) {
            line += &format!(" {what} {:.1}/{:.1};", us[0], us[1]);
            if us[0] < best.0 {
                best = (us[0], schedules[group]);
            }
        }
        println!("{line}");
        best.1
    })
}

/// Each group's GEMM and LoRA as its schedule says. Where LoRA writes a delta for the next operation it overwrites y here.
fn scheduled(
    gpu: &Gpu,
    model: &Model,
    batch: &mut Batch,
    base: &Base,
    schedules: [Schedule; 4],
    groups: Range<usize>,
) -> Graph {
    let pieces = batch.pieces();
    for (group, schedule) in schedules.into_iter().enumerate() {
        let (sms, early, company) = match schedule {
            Schedule::Serial | Schedule::DeltaFirst | Schedule::InGemm => (gpu.sms, 1, Company::Nothing),
            Schedule::SideStream { ctas } => (ctas / DECODE_CTAS_PER_SM, 1, Company::Gemm),
            Schedule::Beside { sms } => (sms, 2, Company::Gemm),
        };
        batch.set_group_early(group, early);
        batch.set_group_tuning(gpu, model, group, decode_tuning(pieces, sms, company));
    }
    graph(gpu, batch, groups, &|b, number, group| {
        let gemm = |beta| base.gemm(model, b, group, number, beta);
        let lora = |stream, store, overlap| {
            b.launches(model, group, number, store).iter().for_each(|l| gpu.launch_on(stream, l, overlap));
        };
        match schedules[group] {
            Schedule::Serial => {
                gemm(0.0);
                lora(gpu.stream, 0, true);
            }
            Schedule::DeltaFirst => {
                lora(gpu.stream, 1, true);
                gemm(1.0);
            }
            Schedule::InGemm => panic!("a prefill's schedule"),
            Schedule::SideStream { .. } => {
                gpu.fork(gpu.stream, gpu.side);
                lora(gpu.side, 1, true);
                gemm(0.0);
                gpu.fork(gpu.side, gpu.stream);
            }
            Schedule::Beside { sms } => {
                base.limit(gpu.sms - sms);
                gpu.beside(gpu.stream, || gemm(0.0), || lora(gpu.stream, 1, false));
                base.limit(0);
            }
        }
    })
}
