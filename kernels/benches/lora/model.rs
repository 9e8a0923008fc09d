//! Adapters of a Llama-3-8B in a page pool, a batch over them, and their timing.

use lorafleet_kernels::image::Arch;
use lorafleet_kernels::launch::{DevicePtr, Element, Launch};
use lorafleet_kernels::lora::decode::{DecodeArgs, EXCHANGE_PARTS, Pool, Weights, decode_launch};
use lorafleet_kernels::lora::gemm::{map_of_w, map_of_x, map_of_y};
use lorafleet_kernels::lora::layout::{Layout, Projection, a_place, b_place};
use lorafleet_kernels::lora::{
    GemmArgs, GemmPlan, Group, PIECE_ROWS, PrefillArgs, PrefillPlan, Segment, Tensor, gemm_launch, plan_decode,
    plan_gemm, plan_prefill, plan_prefill_as, prefill_launches, twin,
};
use lorafleet_kernels::plain::bytes_of;
use lorafleet_kernels::tuning::{Company, DecodeTuning, Shrink, decode_tuning};

use super::gpu::{Bits, Gpu, Random, bytes, words};

/// q, k, v, o, gate, up, down.
const SHAPES: [(u32, u32); 7] =
    [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096)];
/// First projection and count of what shares an input.
const GROUPS: [(u32, usize); 4] = [(0, 3), (3, 1), (4, 2), (6, 1)];
const PAGE_BYTES: u64 = 2 << 20;
/// The pool repeats a random block of this size, shifted from page to page.
const BLOCK_BYTES: usize = 32 << 20;
const COLUMNS_MAX: usize = 64 * 1024;

pub struct Model {
    pub groups: Vec<Group>,
    pub layers: u32,
    arch: Arch,
    pool: Pool,
    table: DevicePtr,
    tensors: Vec<Tensor>,
    pages: Vec<u32>,
    block: Vec<u8>,
    ranks: Vec<u32>,
}

impl Model {
    pub fn new(gpu: &Gpu, slots: u32, rank: fn(u32) -> u32, random: &mut Random) -> Self {
        let shapes: Vec<Projection> =
            SHAPES.iter().map(|(inputs, outputs)| Projection { inputs: *inputs, outputs: *outputs }).collect();
        let layer_bytes: u64 = (0..slots)
            .map(|s| 2 * u64::from(rank(s)) * shapes.iter().map(|p| u64::from(p.inputs + p.outputs)).sum::<u64>())
            .sum();
        let layers = (400_000_000 / layer_bytes).clamp(2, 64) as u32;
        let (mut tensors, mut layouts, mut count) = (Vec::new(), Vec::new(), 0);
        for slot in 0..slots {
            let layout = Layout::new(&shapes, layers, PAGE_BYTES, |_, _| rank(slot)).unwrap();
            count += layout.pages;
            layouts.push(layout);
        }
        let mut pages: Vec<u32> = (0..count).collect();
        random.shuffle(&mut pages);
        let mut at = 0;
        for layout in layouts {
            tensors.extend(layout.entries(&pages[at..at + layout.pages as usize], at as u32, 1.0).unwrap());
            at += layout.pages as usize;
        }
        let block = bytes(&Bits::Bf16.random(BLOCK_BYTES / 2, 0.05, random));
        let source = gpu.upload(&block);
        let base = gpu.alloc(count as usize * PAGE_BYTES as usize);
        for page in 0..count {
            gpu.copy(base + u64::from(page) * PAGE_BYTES, source + shift(page) as u64, PAGE_BYTES as usize);
        }
        let pool = Pool {
            base,
            pages: gpu.upload(&bytes_of(&pages)),
            page_bytes: PAGE_BYTES,
            page_fragments: (PAGE_BYTES / 512) as u32,
            unused: 0,
        };
        let groups = GROUPS.iter().map(|(first, n)| {
            let members = &SHAPES[*first as usize..][..*n];
            Group { inputs: members[0].0, outputs: members.iter().map(|m| m.1).collect() }
        });
        let table = gpu.upload(&bytes_of(&tensors));
        Self {
            groups: groups.collect(),
            layers,
            arch: gpu.arch,
            pool,
            table,
            tensors,
            pages,
            block,
            ranks: (0..slots).map(rank).collect(),
        }
    }

    /// What one layer cannot do without: the adapters' bytes once, x once, y read and written.
    pub fn floor_bytes(&self, segments: &[u32]) -> f64 {
        let rows: u32 = segments.iter().sum();
        let mut total = 0.0;
        for group in &self.groups {
            let outputs: u32 = group.outputs.iter().sum();
            let width = f64::from(group.inputs * group.outputs.len() as u32 + outputs);
            total += self.ranks.iter().map(|r| 2.0 * f64::from(*r) * width).sum::<f64>();
            total += f64::from(rows) * (2.0 * f64::from(group.inputs) + 4.0 * f64::from(outputs));
        }
        total
    }

    /// Of the adapters in one layer's projections of a group.
    pub fn group_bytes(&self, group: &Group) -> u64 {
        let width = u64::from(group.inputs) * group.outputs.len() as u64 + u64::from(group.outputs.iter().sum::<u32>());
        self.ranks.iter().map(|r| 2 * u64::from(*r) * width).sum()
    }

    fn weights(&self, slot: u32, layer: u32, projection: u32) -> twin::Weights {
        let t = self.tensors[((slot * self.layers + layer) * 7 + projection) as usize];
        let (inputs, outputs) = SHAPES[projection as usize];
        let value = |first: u32, place: u64| {
            let at = u64::from(first) * 512 + place;
            let page = self.pages[t.pages as usize + (at / PAGE_BYTES) as usize];
            let at = shift(page) + (at % PAGE_BYTES) as usize;
            Bits::Bf16.value(u16::from_le_bytes([self.block[at], self.block[at + 1]]))
        };
        let a = (0..t.rank)
            .flat_map(|r| (0..inputs).map(move |k| (r, k)))
            .map(|(r, k)| value(t.a, a_place(t.rank, inputs, r, k)));
        let b = (0..outputs)
            .flat_map(|o| (0..t.rank).map(move |r| (o, r)))
            .map(|(o, r)| value(t.b, b_place(t.rank, outputs, o, r)));
        twin::Weights { rank: t.rank as usize, scale: t.scale.into(), a: a.collect(), b: b.collect() }
    }
}

fn shift(page: u32) -> usize {
    page as usize * 7 * 512 % (BLOCK_BYTES - PAGE_BYTES as usize)
}

/// Device buffers of one group.
struct Buffers {
    x: DevicePtr,
    y: DevicePtr,
    x_bytes: usize,
    y_bytes: usize,
    blocks: DevicePtr,
    overflow: DevicePtr,
    tiles: DevicePtr,
    prefill: Option<PrefillPlan>,
    grid: u32,
    weights: Weights,
    /// As in `DecodeArgs`; 1 is true of a LoRA launch behind the base GEMM that read x.
    early: u32,
}

pub struct Batch {
    pub rows: u32,
    pub prefill: bool,
    pub tuning: DecodeTuning,
    segments: Vec<Segment>,
    rows_ptr: DevicePtr,
    buffers: Vec<Buffers>,
    exchange: DevicePtr,
    /// v, sums and counters of prefill launches.
    scratch: [DevicePtr; 3],
    step_ptr: DevicePtr,
    step: u32,
    /// Where our own GEMM makes this batch: its plan, tiles, sums and counters by group.
    gemms: Vec<Option<(GemmPlan, DevicePtr, DevicePtr, DevicePtr)>>,
}

impl Batch {
    pub fn new(gpu: &Gpu, model: &Model, lengths: &[u32], prefill: bool, random: &mut Random) -> Self {
        let rows: u32 = lengths.iter().sum();
        let mut order: Vec<i32> = (0..rows as i32).collect();
        if !prefill {
            random.shuffle(&mut order);
        }
        let (mut segments, mut row0) = (Vec::new(), 0);
        for (slot, n) in (0..).zip(lengths) {
            segments.push(Segment { slot, row0, rows: *n, rank: model.ranks[slot as usize] });
            row0 += n;
        }
        let pieces = lengths.iter().map(|n| n.div_ceil(PIECE_ROWS)).sum();
        let exchange = gpu.alloc(COLUMNS_MAX * 1024);
        gpu.fill(exchange, 0, COLUMNS_MAX * 1024);
        let (mut buffers, mut scratch) = (Vec::new(), [0; 3]);
        for group in &model.groups {
            let (x_bytes, y_bytes) =
                ((rows * group.inputs * 2) as usize, (rows * group.outputs.iter().sum::<u32>() * 2) as usize);
            let sets = model.layers as usize;
            let noise = bytes(&Bits::Bf16.random((x_bytes / 2).max(1 << 20), 1.0, random));
            let x = gpu.alloc(x_bytes * sets);
            (0..sets).for_each(|i| gpu.write(x + (i * x_bytes) as u64, &noise[..x_bytes]));
            let plan = prefill.then(|| plan_prefill(&segments, group, gpu.sms).unwrap());
            if let Some(p) = &plan {
                let wanted = [p.v_bytes, p.sums_bytes, u64::from(p.counters) * 4];
                scratch.iter_mut().zip(wanted).for_each(|(most, wanted)| *most = wanted.max(*most));
            }
            buffers.push(Buffers {
                x,
                y: gpu.alloc(y_bytes * sets),
                x_bytes,
                y_bytes,
                blocks: 0,
                overflow: 0,
                tiles: gpu.upload(&plan.as_ref().map_or(Vec::new(), |p| bytes_of(&p.tiles))),
                prefill: plan,
                grid: 0,
                weights: Weights::Ring,
                early: 1,
            });
        }
        let mut batch = Self {
            rows,
            prefill,
            tuning: decode_tuning(pieces, gpu.sms, Company::Lora),
            segments,
            rows_ptr: gpu.upload(&bytes_of(&order)),
            buffers,
            exchange,
            scratch: scratch.map(|bytes| gpu.upload(&vec![0; bytes as usize])),
            step_ptr: gpu.upload(&[0; 8]),
            step: 0,
            gemms: Vec::new(),
        };
        for group in &model.groups {
            let plan = plan_gemm(&batch.segments, group).ok().filter(|_| prefill);
            batch.gemms.push(plan.map(|plan| {
                let [sums, zeros] = [plan.sums_bytes as usize, plan.counters as usize * 4];
                let tiles = gpu.upload(&bytes_of(&plan.tiles));
                (plan, tiles, gpu.alloc(sums), gpu.upload(&vec![0; zeros]))
            }));
        }
        batch.set_tuning(gpu, model, batch.tuning);
        batch
    }

    pub fn pieces(&self) -> u32 {
        self.segments.iter().map(|s| s.rows.div_ceil(PIECE_ROWS)).sum()
    }

    pub fn set_tuning(&mut self, gpu: &Gpu, model: &Model, tuning: DecodeTuning) {
        self.tuning = tuning;
        (0..model.groups.len()).for_each(|group| self.set_group_tuning(gpu, model, group, tuning));
    }

    pub fn set_early(&mut self, early: u32) {
        (0..self.buffers.len()).for_each(|group| self.set_group_early(group, early));
    }

    pub fn set_group_early(&mut self, group: usize, early: u32) {
        self.buffers[group].early = early;
    }

    pub fn set_group_tuning(&mut self, gpu: &Gpu, model: &Model, group: usize, tuning: DecodeTuning) {
        if self.prefill {
            return;
        }
        let plan = plan_decode(&self.segments, &model.groups[group], &tuning).unwrap();
        assert!(plan.exchange_columns as usize <= COLUMNS_MAX / EXCHANGE_PARTS as usize);
        let buffers = &mut self.buffers[group];
        buffers.grid = tuning.grid;
        buffers.weights = tuning.weights;
        // Buffers of their own: graphs that were captured with another plan keep it.
        buffers.blocks = gpu.upload(&bytes_of(&plan.blocks));
        buffers.overflow = gpu.upload(&bytes_of(&plan.overflow));
    }

    /// Another width of the CTAs of the prefill's expand.
    pub fn set_units(&mut self, units: u32) {
        self.buffers.iter_mut().filter_map(|b| b.prefill.as_mut()).for_each(|plan| plan.units = units);
    }

    /// Another shrink; `free_all` gives its scratch back.
    pub fn set_shrink(&mut self, gpu: &Gpu, model: &Model, shrink_of: impl Fn(u32) -> Shrink) {
        let mut wanted = [0; 3];
        for (group, buffers) in model.groups.iter().zip(&mut self.buffers) {
            let plan = plan_prefill_as(&self.segments, group, gpu.sms, &shrink_of).unwrap();
            let sizes = [plan.v_bytes, plan.sums_bytes, u64::from(plan.counters) * 4];
            wanted.iter_mut().zip(sizes).for_each(|(most, size)| *most = size.max(*most));
            buffers.prefill = Some(plan);
        }
        self.scratch = wanted.map(|bytes| gpu.upload(&vec![0; bytes as usize]));
    }

    /// The base product by our own GEMM, with the delta in it or without.
    pub fn own_gemm(&self, gpu: &Gpu, model: &Model, group: usize, number: u32, w: DevicePtr, delta: bool) -> Launch {
        let (layer, shape) = (number % model.layers, &model.groups[group]);
        let (plan, tiles, sums, counters) = self.gemms[group].as_ref().unwrap();
        let (x, y, width) = (self.x(group, layer), self.y(group, layer), shape.outputs.iter().sum());
        let mut args = GemmArgs {
            x: gpu.tensor_map(x, Bits::Bf16, &map_of_x(self.rows, shape.inputs)),
            w: gpu.tensor_map(w, Bits::Bf16, &map_of_w(width, shape.inputs)),
            out: gpu.tensor_map(y, Bits::Bf16, &map_of_y(self.rows, width)),
            y,
            pool: model.pool,
            tensors: model.table,
            tiles: *tiles,
            sums: *sums,
            counters: *counters,
            projections: 7,
            projection: GROUPS[group].0,
            layers: model.layers,
            layer,
            ..GemmArgs::of_plan(shape, plan)
        };
        if !delta {
            args.columns = 0;
        }
        gemm_launch(&args, Element::Bf16, gpu.sms).unwrap()
    }

    pub fn splits(&self) -> Vec<u32> {
        self.buffers.iter().filter_map(|b| Some(b.prefill.as_ref()?.splits)).collect()
    }

    pub fn x(&self, group: usize, layer: u32) -> DevicePtr {
        self.buffers[group].x + (layer as usize * self.buffers[group].x_bytes) as u64
    }

    pub fn y(&self, group: usize, layer: u32) -> DevicePtr {
        self.buffers[group].y + (layer as usize * self.buffers[group].y_bytes) as u64
    }

    /// The launches of one group in one layer; `number` counts layers of the step.
    pub fn launches(&self, model: &Model, group: usize, number: u32, store: u32) -> Vec<Launch> {
        let (layer, shape, buffers) = (number % model.layers, &model.groups[group], &self.buffers[group]);
        if let Some(plan) = &buffers.prefill {
            let args = PrefillArgs {
                x: self.x(group, layer),
                y: self.y(group, layer),
                pool: model.pool,
                tensors: model.table,
                rows: self.rows_ptr,
                tiles: buffers.tiles,
                v: self.scratch[0],
                sums: self.scratch[1],
                counters: self.scratch[2],
                projections: 7,
                projection: GROUPS[group].0,
                layers: model.layers,
                layer,
                store,
                ..PrefillArgs::of_plan(shape, plan)
            };
            return prefill_launches(&args, plan, Element::Bf16);
        }
        let args = DecodeArgs {
            x: self.x(group, layer),
            y: self.y(group, layer),
            pool: model.pool,
            tensors: model.table,
            rows: self.rows_ptr,
            blocks: buffers.blocks,
            overflow: buffers.overflow,
            next_blocks: self.buffers[(group + 1) % 4].blocks,
            exchange: self.exchange,
            step: self.step_ptr,
            projections: 7,
            projection: GROUPS[group].0,
            layers: model.layers,
            layer,
            launch: number * 4 + group as u32,
            store,
            early: buffers.early,
            part: (COLUMNS_MAX / EXCHANGE_PARTS as usize) as u32,
            ..DecodeArgs::of_group(shape)
        };
        vec![decode_launch(&args, Element::Bf16, buffers.grid, buffers.weights, model.arch)]
    }

    pub fn next_step(&mut self, gpu: &Gpu) {
        self.step += 1;
        gpu.set_u32(self.step_ptr, self.step);
    }

    /// One row of every group of the last layer against the twin, y starting as zeros.
    pub fn check(&mut self, gpu: &Gpu, model: &Model) -> f64 {
        let layer = model.layers - 1;
        let order: Vec<u32> = gpu
            .read(self.rows_ptr, self.rows as usize * 4)
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        self.next_step(gpu);
        let mut worst: f64 = 0.0;
        for (group, shape) in model.groups.iter().enumerate() {
            gpu.fill(self.y(group, layer), 0, self.buffers[group].y_bytes);
            self.launches(model, group, layer, 0).iter().for_each(|l| gpu.launch(l));
            for segment in [self.segments.first(), self.segments.last()].into_iter().flatten() {
                let row = order[(segment.row0 + segment.rows / 2) as usize];
                let (inputs, width) = (shape.inputs as usize, shape.outputs.iter().sum::<u32>() as usize);
                let x = words(&gpu.read(self.x(group, layer) + u64::from(row) * inputs as u64 * 2, inputs * 2));
                let x: Vec<f64> = x.iter().map(|b| Bits::Bf16.value(*b)).collect();
                let y = words(&gpu.read(self.y(group, layer) + u64::from(row) * width as u64 * 2, width * 2));
                let expected = (0..shape.outputs.len() as u32)
                    .flat_map(|p| twin::delta(&x, &model.weights(segment.slot, layer, GROUPS[group].0 + p)));
                let error = twin::relative_error(y.iter().map(|b| Bits::Bf16.value(*b)), expected);
                worst = if error.is_nan() { f64::NAN } else { worst.max(error) };
            }
        }
        worst
    }

    /// The same of only the first or only the second launch of a prefill, of all groups or one.
    pub fn time_part(&mut self, gpu: &Gpu, model: &Model, part: usize, only: Option<usize>) -> f64 {
        let layers = model.layers.max(16);
        let graph = gpu.capture(|| {
            for number in 0..layers {
                let groups = (0..4).filter(|group| only.is_none_or(|only| *group == only));
                groups.for_each(|group| gpu.launch(&self.launches(model, group, number, 0)[part]));
            }
        });
        self.median(gpu, &graph, layers)
    }

    /// Median microseconds per layer of LoRA alone.
    pub fn time(&mut self, gpu: &Gpu, model: &Model) -> f64 {
        let layers = model.layers.max(16);
        let graph = gpu.capture(|| {
            for number in 0..layers {
                for group in 0..4 {
                    self.launches(model, group, number, 0).iter().for_each(|l| gpu.launch(l));
                }
            }
        });
        self.median(gpu, &graph, layers)
    }

    pub fn median(&mut self, gpu: &Gpu, graph: &super::gpu::Graph, layers: u32) -> f64 {
        self.medians(gpu, std::slice::from_ref(graph), 21, layers)[0]
    }

    /// The same of several graphs that take turns, in another order each time: what draws much power slows what comes behind.
    pub fn medians(&mut self, gpu: &Gpu, graphs: &[super::gpu::Graph], rounds: usize, layers: u32) -> Vec<f64> {
        let (mut times, mut random) = (vec![Vec::new(); graphs.len()], Random(rounds as u64));
        for round in 0..rounds + 3 {
            let mut order: Vec<usize> = (0..graphs.len()).collect();
            random.shuffle(&mut order);
            for at in order {
                let us = gpu.time(&graphs[at], 1, || self.next_step(gpu));
                if round >= 3 {
                    times[at].extend(us);
                }
            }
        }
        let median = |mut t: Vec<f64>| {
            t.sort_by(f64::total_cmp);
            t[t.len() / 2] / f64::from(layers)
        };
        times.into_iter().map(median).collect()
    }

    /// Our own GEMM against y += x W^T by cuBLAS and the twin's delta: the worst of some rows, relative.
    pub fn check_gemm(
        &mut self,
        gpu: &Gpu,
        model: &Model,
        weights: &[DevicePtr],
        base: &dyn Fn(&Batch, usize, u32),
    ) -> f64 {
        let layer = model.layers - 1;
        let mut worst: f64 = 0.0;
        for (group, shape) in model.groups.iter().enumerate() {
            let (inputs, width) = (shape.inputs as usize, shape.outputs.iter().sum::<u32>() as usize);
            base(self, group, layer);
            let expected = gpu.read(self.y(group, layer), self.buffers[group].y_bytes);
            gpu.fill(self.y(group, layer), 0xff, self.buffers[group].y_bytes);
            gpu.launch(&self.own_gemm(gpu, model, group, layer, weights[group], true));
            let found = gpu.read(self.y(group, layer), self.buffers[group].y_bytes);
            for segment in &self.segments {
                let row = (segment.row0 + segment.rows / 2) as usize;
                let x = words(&gpu.read(self.x(group, layer) + (row * inputs) as u64 * 2, inputs * 2));
                let x: Vec<f64> = x.iter().map(|b| Bits::Bf16.value(*b)).collect();
                let row_of = |bytes: &[u8]| -> Vec<f64> {
                    words(&bytes[row * width * 2..][..width * 2]).iter().map(|b| Bits::Bf16.value(*b)).collect()
                };
                let delta = (0..shape.outputs.len() as u32)
                    .flat_map(|p| twin::delta(&x, &model.weights(segment.slot, layer, GROUPS[group].0 + p)));
                let both = row_of(&expected).into_iter().zip(delta).map(|(b, d)| b + d).collect::<Vec<_>>();
                let error = twin::relative_error(row_of(&found), both);
                worst = if error.is_nan() { f64::NAN } else { worst.max(error) };
            }
        }
        worst
    }
}
