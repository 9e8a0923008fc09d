//! Adapters in a page pool on the device, a batch over them, and what the twin makes of it.
#![allow(dead_code)]

use lorafleet_kernels::image::Arch;
use lorafleet_kernels::launch::{DevicePtr, Element, Launch};
use lorafleet_kernels::lora::decode::{DecodeArgs, EXCHANGE_PARTS, Pool, Weights, decode_launch};
use lorafleet_kernels::lora::gemm::{map_of_w, map_of_x, map_of_y};
use lorafleet_kernels::lora::layout::{Layout, Projection};
use lorafleet_kernels::lora::plan::{Block, Run};
use lorafleet_kernels::lora::{
    DecodePlan, GemmArgs, Group, PIECE_ROWS, PrefillArgs, Segment, gemm_launch, plan_decode, plan_gemm, plan_prefill,
    prefill_launches, twin,
};
use lorafleet_kernels::plain::{Plain, bytes_of};
use lorafleet_kernels::tuning::{Company, decode_tuning};

use super::gpu::{Bits, Gpu, Random, bytes, words};

pub struct Adapters {
    pub group: Group,
    pub layers: u32,
    pub bits: Bits,
    pub pool: Pool,
    pub tensors: DevicePtr,
    /// By slot, layer and projection.
    pub weights: Vec<twin::Weights>,
    pub slots: u32,
}

impl Adapters {
    /// Random adapters on shuffled pages; what no adapter owns is NaN.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        gpu: &Gpu,
        group: &Group,
        layers: u32,
        slots: u32,
        bits: Bits,
        page_bytes: u64,
        rank: impl Fn(u32, u32, u32) -> u32,
        random: &mut Random,
    ) -> Self {
        let shapes: Vec<Projection> =
            group.outputs.iter().map(|outputs| Projection { inputs: group.inputs, outputs: *outputs }).collect();
        let (mut images, mut layouts, mut entries, mut weights) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut list = 0;
        for slot in 0..slots {
            let layout = Layout::new(&shapes, layers, page_bytes, |l, p| rank(slot, l, p)).unwrap();
            let scale = 0.25 + (slot % 5) as f32;
            let mut image = vec![0u8; layout.fragments as usize * 512];
            for layer in 0..layers {
                for (p, shape) in (0..).zip(&shapes) {
                    let r = rank(slot, layer, p) as usize;
                    let a = bits.random(r * shape.inputs as usize, 0.05, random);
                    let b = bits.random(r * shape.outputs as usize, 0.05, random);
                    layout.pack(layer, p, &a, &b, &mut image).unwrap();
                    let wide = |v: &[u16]| v.iter().map(|b| bits.value(*b)).collect();
                    weights.push(twin::Weights { rank: r, scale: scale.into(), a: wide(&a), b: wide(&b) });
                }
            }
            // The rest of the last page is not the adapter's.
            image.resize(layout.pages as usize * page_bytes as usize, 0xff);
            list += layout.pages;
            images.push(image);
            layouts.push((layout, scale));
        }
        let spare = 3;
        let mut pages: Vec<u32> = (0..list + spare).collect();
        random.shuffle(&mut pages);
        let mut at = 0;
        for (layout, scale) in layouts {
            entries.extend(layout.entries(&pages[at..at + layout.pages as usize], at as u32, scale).unwrap());
            at += layout.pages as usize;
        }
        let mut pool = vec![0xffu8; pages.len() * page_bytes as usize];
        let chunks = images.iter().flat_map(|image| image.chunks_exact(page_bytes as usize));
        for (page, chunk) in pages.iter().zip(chunks) {
            pool[*page as usize * page_bytes as usize..][..page_bytes as usize].copy_from_slice(chunk);
        }
        pages.truncate(list as usize);
        let pool = Pool {
            base: gpu.upload(&pool),
            pages: gpu.upload(&bytes_of(&pages)),
            page_bytes,
            page_fragments: (page_bytes / 512) as u32,
            unused: 0,
        };
        let tensors = gpu.upload(&bytes_of(&entries));
        Self { group: group.clone(), layers, bits, pool, tensors, weights, slots }
    }

    pub fn weights(&self, slot: u32, layer: u32, projection: usize) -> &twin::Weights {
        &self.weights[(slot * self.layers + layer) as usize * self.group.outputs.len() + projection]
    }

    pub fn rank_max(&self, slot: u32) -> u32 {
        let each = self.layers as usize * self.group.outputs.len();
        self.weights[slot as usize * each..][..each].iter().map(|w| w.rank as u32).max().unwrap_or(0)
    }

    pub fn element(&self) -> Element {
        match self.bits {
            Bits::Bf16 => Element::Bf16,
            Bits::F16 => Element::F16,
        }
    }
}

#[derive(Clone, Copy)]
pub struct Place {
    pub layer: u32,
    pub launch: u32,
    pub step: u32,
    pub early: u32,
}

pub struct Case {
    pub segments: Vec<Segment>,
    pub rows: Vec<i32>,
    pub all_rows: u32,
    pub ctas: u32,
    pub arch: Arch,
    pub company: Company,
    pub weights: Weights,
    pub store: u32,
    pub x_bits: Vec<u16>,
    pub x: DevicePtr,
    pub y: DevicePtr,
    pub y_bytes: usize,
    pub rows_ptr: DevicePtr,
    pub blocks: DevicePtr,
    pub overflow: DevicePtr,
    pub exchange: DevicePtr,
    pub step: DevicePtr,
}

const OVERFLOW_RUNS: usize = 8192;
/// As many columns as the worst plan of these tests takes.
const EXCHANGE_PART: usize = 3 * 16 * 1024;

impl Case {
    pub fn new(
        gpu: &Gpu,
        adapters: &Adapters,
        segments: Vec<Segment>,
        rows: Vec<i32>,
        all_rows: u32,
        random: &mut Random,
    ) -> Self {
        let group = &adapters.group;
        let width: u32 = group.outputs.iter().sum();
        let x_bits = adapters.bits.random((all_rows * group.inputs) as usize, 1.0, random);
        let y = bytes(&adapters.bits.random((all_rows * width) as usize, 0.1, random));
        let ctas = gpu.sms * 2;
        let columns: usize = EXCHANGE_PARTS as usize * EXCHANGE_PART;
        let exchange = gpu.alloc(columns * 1024);
        gpu.fill(exchange, 0, columns * 1024);
        let mut case = Self {
            segments: Vec::new(),
            all_rows,
            ctas,
            arch: gpu.arch,
            company: Company::Nothing,
            weights: Weights::Ring,
            store: 0,
            x: gpu.upload(&bytes(&x_bits)),
            x_bits,
            y: gpu.upload(&y),
            y_bytes: y.len(),
            rows_ptr: gpu.upload(&bytes_of(&rows)),
            rows,
            blocks: gpu.alloc(ctas as usize * Block::SIZE),
            overflow: gpu.alloc(OVERFLOW_RUNS * Run::SIZE),
            exchange,
            step: gpu.upload(&[0; 8]),
        };
        case.set_segments(gpu, adapters, segments);
        case
    }

    pub fn set_segments(&mut self, gpu: &Gpu, adapters: &Adapters, segments: Vec<Segment>) {
        self.segments = segments.into_iter().map(|s| Segment { rank: adapters.rank_max(s.slot), ..s }).collect();
        let plan = self.plan(&adapters.group);
        assert!(plan.exchange_columns as usize <= EXCHANGE_PART && plan.overflow.len() <= OVERFLOW_RUNS);
        gpu.sync();
        gpu.write(self.blocks, &bytes_of(&plan.blocks));
        gpu.write(self.overflow, &bytes_of(&plan.overflow));
    }

    pub fn plan(&self, group: &Group) -> DecodePlan {
        let pieces = self.segments.iter().map(|s| s.rows.div_ceil(PIECE_ROWS)).sum();
        plan_decode(&self.segments, group, &decode_tuning(pieces, self.ctas / 2, self.company)).unwrap()
    }

    pub fn launch(&self, adapters: &Adapters, place: Place) -> Launch {
        let args = DecodeArgs {
            x: self.x,
            y: self.y,
            pool: adapters.pool,
            tensors: adapters.tensors,
            rows: self.rows_ptr,
            blocks: self.blocks,
            overflow: self.overflow,
            exchange: self.exchange,
            step: self.step,
            projections: adapters.group.outputs.len() as u32,
            projection: 0,
            layers: adapters.layers,
            layer: place.layer,
            launch: place.launch,
            store: self.store,
            early: place.early,
            part: EXCHANGE_PART as u32,
            ..DecodeArgs::of_group(&adapters.group)
        };
        decode_launch(&args, adapters.element(), self.ctas, self.weights, self.arch)
    }

    /// y before and after one launch; by either kernel, which give the same bits.
    pub fn run(&mut self, gpu: &Gpu, adapters: &Adapters, place: Place) -> (Vec<u16>, Vec<u16>) {
        let before = words(&gpu.read(self.y, self.y_bytes));
        let [after, other] = [Weights::Registers, Weights::Ring].map(|weights| {
            self.weights = weights;
            gpu.write(self.y, &bytes(&before));
            // Steps go upwards, and what a step has left in the exchange must not pass for the next one's.
            gpu.set_u32(self.step, place.step * 2 + u32::from(weights == Weights::Ring));
            gpu.launch(&self.launch(adapters, place));
            words(&gpu.read(self.y, self.y_bytes))
        });
        assert!(after == other, "weights in registers and in a ring gave other bits");
        (before, after)
    }

    /// The same by the prefill kernels.
    pub fn run_prefill(&mut self, gpu: &Gpu, adapters: &Adapters, layer: u32) -> (Vec<u16>, Vec<u16>) {
        let before = words(&gpu.read(self.y, self.y_bytes));
        let plan = plan_prefill(&self.segments, &adapters.group, gpu.sms).unwrap();
        let v = gpu.alloc(plan.v_bytes as usize);
        gpu.fill(v, 0xff, plan.v_bytes as usize);
        let sums = gpu.alloc(plan.sums_bytes as usize);
        gpu.fill(sums, 0xff, plan.sums_bytes as usize);
        let counters = gpu.upload(&vec![0; plan.counters as usize * 4]);
        let args = PrefillArgs {
            x: self.x,
            y: self.y,
            pool: adapters.pool,
            tensors: adapters.tensors,
            rows: self.rows_ptr,
            tiles: gpu.upload(&bytes_of(&plan.tiles)),
            v,
            sums,
            counters,
            projections: adapters.group.outputs.len() as u32,
            layers: adapters.layers,
            layer,
            ..PrefillArgs::of_plan(&adapters.group, &plan)
        };
        let [after, again] = [0; 2].map(|_| {
            gpu.write(self.y, &bytes(&before));
            prefill_launches(&args, &plan, adapters.element()).iter().for_each(|l| gpu.launch(l));
            assert!(gpu.read(counters, plan.counters as usize * 4).iter().all(|b| *b == 0), "counters not left zero");
            words(&gpu.read(self.y, self.y_bytes))
        });
        assert!(after == again, "the same launches gave other bits");
        (before, after)
    }

    /// The base product of rows that stand side by side with their delta in it; the relative error of all of y. `w`: outputs by inputs.
    pub fn run_gemm(&mut self, gpu: &Gpu, adapters: &Adapters, w: &[u16], layer: u32) -> f64 {
        let (group, bits) = (&adapters.group, adapters.bits);
        let (inputs, width) = (group.inputs as usize, group.outputs.iter().sum::<u32>() as usize);
        let plan = plan_gemm(&self.segments, group).unwrap();
        let counters = gpu.upload(&vec![0; plan.counters as usize * 4]);
        let gemm = GemmArgs {
            x: gpu.tensor_map(self.x, bits, &map_of_x(self.all_rows, group.inputs)),
            w: gpu.tensor_map(gpu.upload(&bytes(w)), bits, &map_of_w(width as u32, group.inputs)),
            out: gpu.tensor_map(self.y, bits, &map_of_y(self.all_rows, width as u32)),
            y: self.y,
            pool: adapters.pool,
            tensors: adapters.tensors,
            tiles: gpu.upload(&bytes_of(&plan.tiles)),
            sums: gpu.upload(&vec![0xff; plan.sums_bytes as usize]),
            counters,
            projections: group.outputs.len() as u32,
            layers: adapters.layers,
            layer,
            ..GemmArgs::of_plan(group, &plan)
        };
        let [y, again] = [0; 2].map(|_| {
            gpu.fill(self.y, 0xff, self.y_bytes);
            gpu.launch(&gemm_launch(&gemm, adapters.element(), gpu.sms).unwrap());
            assert!(gpu.read(counters, plan.counters as usize * 4).iter().all(|b| *b == 0), "counters not left zero");
            words(&gpu.read(self.y, self.y_bytes))
        });
        assert!(y == again, "two launches differ");
        let w: Vec<f64> = w.iter().map(|b| bits.value(*b)).collect();
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        for s in &self.segments {
            for row in (s.row0..s.row0 + s.rows).step_by(if s.rows < 500 { 7 } else { 37 }).map(|row| row as usize) {
                let x: Vec<f64> = self.x_bits[row * inputs..][..inputs].iter().map(|b| bits.value(*b)).collect();
                let base = w.chunks_exact(inputs).map(|w| w.iter().zip(&x).map(|(w, x)| w * x).sum::<f64>());
                let delta = (0..group.outputs.len()).flat_map(|p| match adapters.weights(s.slot, layer, p) {
                    w if w.rank == 0 => vec![0.0; group.outputs[p] as usize],
                    w => twin::delta(&x, w),
                });
                expected.extend(base.zip(delta).map(|(b, d)| b + d));
                found.extend(y[row * width..][..width].iter().map(|b| bits.value(*b)));
            }
        }
        twin::relative_error(found, expected)
    }

    /// The relative error of what was added; rows of no segment must be as they were.
    pub fn check(&self, adapters: &Adapters, layer: u32, before: &[u16], after: &[u16]) -> f64 {
        let group = &adapters.group;
        let (inputs, width) = (group.inputs as usize, group.outputs.iter().sum::<u32>() as usize);
        let mut slot_of: Vec<Option<u32>> = vec![None; self.all_rows as usize];
        for s in &self.segments {
            for row in &self.rows[s.row0 as usize..][..s.rows as usize] {
                if *row >= 0 {
                    slot_of[*row as usize] = Some(s.slot);
                }
            }
        }
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        for (row, slot) in slot_of.iter().enumerate() {
            let (old, new) = (&before[row * width..][..width], &after[row * width..][..width]);
            let Some(slot) = slot else {
                assert_eq!(old, new, "row {row} has no adapter, but changed");
                continue;
            };
            let x: Vec<f64> = self.x_bits[row * inputs..][..inputs].iter().map(|b| adapters.bits.value(*b)).collect();
            for p in 0..group.outputs.len() {
                let w = adapters.weights(*slot, layer, p);
                if w.rank == 0 {
                    expected.extend(std::iter::repeat_n(0.0, group.outputs[p] as usize));
                } else {
                    expected.extend(twin::delta(&x, w));
                }
            }
            found.extend(new.iter().zip(old).map(|(n, o)| adapters.bits.value(*n) - adapters.bits.value(*o)));
        }
        twin::relative_error(found, expected)
    }
}
