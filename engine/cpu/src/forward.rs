//! One step of a Llama decoder over the rows of a batch, layer by layer.
//!
//! Formulas as in transformers' `LlamaForCausalLM` in f32: RMS norm, rotary embedding of halves, grouped-query causal
//! attention, SiLU-gated feed-forward, and the adapters' deltas on each projection as PEFT adds them.

use std::collections::BTreeMap;
use std::ops::Range;

use lorafleet_artifact::{ModuleId, ModuleKind};
use lorafleet_backend::batch::{Batch, ResidentId};
use lorafleet_backend::model::Shape;

use super::kernels::Kernels;
use super::kernels::attention::{AttentionItem, GroupPtr, Query};
use super::kernels::gemm::Tile;
use super::kernels::rows::{GateItem, NormItem, RotateItem};
use super::kernels::simd::LANES;
use super::kv::KvLayout;
use super::linear::{Delta, Linear, linear};
use super::memory::Shared;
use super::pool::Pool;
use super::resident::Resident;
use super::rows::{Group, Rows, placed};
use super::scratch::{Need, Scratch, logits_stride, qkv_width};
use super::weights::{PackedMatrix, PackedWeights};

/// Columns of a tile that one item gates and packs.
const GATE_COLUMNS: usize = 512;
/// Query heads times rows that one attention item takes side by side.
const ATTENTION_QUERIES: usize = 6;
/// Rows that one item rotates and writes to the pages.
const ROTATE_ROWS: usize = 16;

pub struct Forward<'a> {
    kernels: &'static Kernels,
    pool: &'a mut Pool,
    shape: &'a Shape,
    weights: &'a PackedWeights,
    kv: KvLayout,
    frequencies: &'a [f32],
    residents: &'a BTreeMap<ResidentId, Resident>,
    batch: &'a Batch,
    rows: &'a Rows,
    scratch: &'a mut Scratch,
    tasks: Vec<AttentionTask>,
    low_stride: usize,
    scores_stride: usize,
}

/// Some rows of one segment against one KV head.
#[derive(Clone, Copy)]
struct AttentionTask {
    kv_head: usize,
    first_row: usize,
    rows: usize,
    /// Of the segment's sequence in `Scratch::groups`.
    first_group: usize,
    groups: usize,
}

/// What a [`Forward`] is made from.
pub struct Parts<'a> {
    pub kernels: &'static Kernels,
    pub pool: &'a mut Pool,
    pub shape: &'a Shape,
    pub weights: &'a PackedWeights,
    pub kv: KvLayout,
    pub arena: Shared<u8>,
    pub frequencies: &'a [f32],
    pub residents: &'a BTreeMap<ResidentId, Resident>,
    pub batch: &'a Batch,
    pub rows: &'a Rows,
    pub scratch: &'a mut Scratch,
}

/// Which norm of the decoder.
#[derive(Clone, Copy)]
enum Norm {
    Attention(usize),
    Ffn(usize),
}

impl<'a> Forward<'a> {
    /// Computes the step; the sampled rows' logits are in `scratch.logits` afterwards, [`logits_stride`] apart.
    pub fn run(parts: Parts<'a>) {
        let mut forward = Self::prepare(parts);
        forward.embed();
        for layer in 0..forward.shape.layers {
            forward.norm(Norm::Attention(layer));
            forward.query_key_value(layer);
            forward.rotate_and_store(layer);
            forward.attend(layer);
            forward.output(layer);
            forward.norm(Norm::Ffn(layer));
            forward.gate_and_up(layer);
            forward.gate();
            forward.down(layer);
        }
        forward.head();
    }

    fn prepare(parts: Parts<'a>) -> Self {
        let Parts { kernels, pool, shape, weights, kv, arena, frequencies, residents, batch, rows, scratch } = parts;
        let used = rows.groups.iter().filter_map(|group| residents.get(&group.resident));
        let rank_max = used.map(|resident| resident.rank_max).max().unwrap_or(0);
        let longest = rows.positions.iter().copied().max().unwrap_or(0) as usize + 1;
        let scores_stride = longest.next_multiple_of(LANES);
        let heads_shared = shape.heads / shape.kv_heads;
        let queries = ATTENTION_QUERIES.max(heads_shared);
        let low_stride = 3 * rank_max.next_multiple_of(LANES);
        scratch.reserve(shape, rows, &Need { low_stride, scores: pool.threads() * queries * scores_stride });
        let rows_at_once = (ATTENTION_QUERIES / heads_shared).max(1);
        scratch.groups.clear();
        let mut tasks = Vec::new();
        for (segment, span) in batch.segments.iter().zip(&rows.spans) {
            let first_group = scratch.groups.len();
            let groups = (segment.position as usize + span.len()).div_ceil(LANES);
            for group in 0..groups {
                let (page, offset) = kv.group_of(group * LANES);
                // The batch was checked: the table is long enough and its pages are in the pool.
                let page = segment.pages.get(page).map_or(0, |page| page.0 as usize);
                let at = arena.get().wrapping_add(4 * (page * kv.page_floats + offset));
                scratch.groups.push(GroupPtr(at.cast()));
            }
            for kv_head in 0..shape.kv_heads {
                for first_row in span.clone().step_by(rows_at_once) {
                    let count = rows_at_once.min(span.end - first_row);
                    tasks.push(AttentionTask { kv_head, first_row, rows: count, first_group, groups });
                }
            }
        }
        Self {
            kernels,
            pool,
            shape,
            weights,
            kv,
            frequencies,
            residents,
            batch,
            rows,
            scratch,
            tasks,
            low_stride,
            scores_stride,
        }
    }

    /// Token vectors, and the angles of each row's position.
    fn embed(&mut self) {
        let half = self.shape.head_dim / 2;
        for (row, (token, position)) in self.rows.tokens.iter().zip(&self.rows.positions).enumerate() {
            let x = &mut self.scratch.x[row * self.shape.hidden..][..self.shape.hidden];
            self.weights.row(self.weights.embedding, *token as usize, x);
            for (i, frequency) in self.frequencies.iter().enumerate() {
                let angle = *position as f32 * frequency;
                self.scratch.cos[row * half + i] = angle.cos();
                self.scratch.sin[row * half + i] = angle.sin();
            }
        }
    }

    /// Adds what the last block left, norms, and packs for the next matrices.
    fn norm(&mut self, norm: Norm) {
        let (weights, first) = (self.weights, matches!(norm, Norm::Attention(0)));
        let weight = match norm {
            Norm::Attention(layer) => &weights.layers[layer].attention_norm,
            Norm::Ffn(layer) => &weights.layers[layer].ffn_norm,
        };
        let (n, epsilon, kernels) = (self.shape.hidden, self.shape.norm_epsilon, self.kernels);
        let (x, delta) = (Shared::of(&mut self.scratch.x), Shared::of(&mut self.scratch.delta));
        let (out, packed) = (Shared::of(&mut self.scratch.input), Shared::of(&mut self.scratch.packed));
        let tiles = placed(&self.rows.tiles, n);
        let pack = self.rows.len() > 1;
        self.pool.run(tiles.len(), 1, &|item, _| {
            let tile = &tiles[item];
            for row in tile.first_row..tile.first_row + tile.valid {
                // SAFETY: each tile has its own rows of all buffers.
                unsafe {
                    let delta = if first { std::ptr::null() } else { delta.get().add(row * n).cast_const() };
                    let (x, out) = (x.get().add(row * n), out.get().add(row * n));
                    (kernels.norm)(&NormItem { x, delta, weight: weight.as_ptr(), out, n, epsilon });
                }
            }
            if pack {
                // SAFETY: the tile's own rows and its own part of the packed rows.
                unsafe { pack_tile(tile, out.get(), n, packed.get(), 0..n) };
            }
        });
    }

    fn query_key_value(&mut self, layer: usize) {
        let (query, kv) = (self.shape.query_width(), self.shape.kv_width());
        let columns = [(ModuleKind::Q, 0), (ModuleKind::K, query), (ModuleKind::V, query + kv)];
        let (x, y) = (Shared::of(&mut self.scratch.input), Shared::of(&mut self.scratch.qkv));
        self.project(layer, &columns, (x, self.shape.hidden), (y, qkv_width(self.shape)));
    }

    fn output(&mut self, layer: usize) {
        let width = self.shape.query_width();
        self.pack(width);
        let (x, y) = (Shared::of(&mut self.scratch.input), Shared::of(&mut self.scratch.delta));
        self.project(layer, &[(ModuleKind::O, 0)], (x, width), (y, self.shape.hidden));
    }

    fn gate_and_up(&mut self, layer: usize) {
        let ffn = self.shape.ffn;
        let (x, y) = (Shared::of(&mut self.scratch.input), Shared::of(&mut self.scratch.gate_up));
        self.project(layer, &[(ModuleKind::Gate, 0), (ModuleKind::Up, ffn)], (x, self.shape.hidden), (y, 2 * ffn));
    }

    fn down(&mut self, layer: usize) {
        let (x, y) = (Shared::of(&mut self.scratch.gate_up), Shared::of(&mut self.scratch.delta));
        self.project(layer, &[(ModuleKind::Down, 0)], (x, 2 * self.shape.ffn), (y, self.shape.hidden));
    }

    /// Some projections of a layer that share an input, each at its column of `y`.
    fn project(
        &mut self,
        layer: usize,
        projections: &[(ModuleKind, usize)],
        (x, x_stride): (Shared<f32>, usize),
        (y, y_stride): (Shared<f32>, usize),
    ) {
        let layer_weights = &self.weights.layers[layer];
        let matrices: Vec<(PackedMatrix, usize)> =
            projections.iter().map(|(projection, column)| (layer_weights.projection(*projection), *column)).collect();
        let modules: Vec<ModuleId> =
            projections.iter().map(|(kind, _)| ModuleId::in_layer(layer as u32, *kind)).collect();
        let k = matrices.first().map_or(0, |(matrix, _)| matrix.columns);
        let tiles = placed(&self.rows.tiles, k);
        // One row is its own tile.
        let packed = if self.rows.len() > 1 { Shared::of(&mut self.scratch.packed) } else { x };
        let low = Shared::of(&mut self.scratch.low);
        let work = Linear {
            matrices: &matrices,
            x,
            x_stride,
            packed,
            tiles: &tiles,
            y,
            y_stride,
            low,
            low_stride: self.low_stride,
        };
        let deltas = deltas(self.residents, &self.rows.groups, &modules, &matrices, self.low_stride);
        linear(self.kernels, self.pool, self.weights, &work, &deltas);
    }

    /// Rotates queries and keys, and writes keys and values to the pages.
    fn rotate_and_store(&mut self, layer: usize) {
        let (shape, kv, kernels, rows) = (self.shape, self.kv, self.kernels, self.rows);
        let (stride, half, dim) = (qkv_width(shape), shape.head_dim / 2, shape.head_dim);
        let (query, kv_width) = (shape.query_width(), shape.kv_width());
        let qkv = Shared::of(&mut self.scratch.qkv);
        let (cos, sin) = (&self.scratch.cos, &self.scratch.sin);
        let groups = &self.scratch.groups;
        let mut first_group = 0;
        let mut group_of_row = Vec::with_capacity(rows.len());
        for (segment, span) in self.batch.segments.iter().zip(&rows.spans) {
            group_of_row.extend(span.clone().map(|row| first_group + rows.positions[row] as usize / LANES));
            first_group += (segment.position as usize + span.len()).div_ceil(LANES);
        }
        self.pool.run(rows.len().div_ceil(ROTATE_ROWS), 1, &|item, _| {
            for row in item * ROTATE_ROWS..((item + 1) * ROTATE_ROWS).min(rows.len()) {
                // SAFETY: each row has its own part of every buffer and its own slot of its sequence's pages.
                unsafe {
                    let at = qkv.get().add(row * stride);
                    let (cos, sin) = (cos.as_ptr().add(row * half), sin.as_ptr().add(row * half));
                    for head in 0..shape.heads + shape.kv_heads {
                        (kernels.rotate)(&RotateItem { head: at.add(head * dim), cos, sin, dim });
                    }
                    let slot = rows.positions[row] as usize % LANES;
                    for head in 0..shape.kv_heads {
                        let keys = groups[group_of_row[row]].0.add(kv.head_offset(layer, head));
                        let (key, value) = (at.add(query + head * dim), at.add(query + kv_width + head * dim));
                        for d in 0..dim {
                            *keys.add(d * LANES + slot) = *key.add(d);
                        }
                        std::ptr::copy_nonoverlapping(value, keys.add(kv.keys() + slot * dim), dim);
                    }
                }
            }
        });
    }

    /// Into `scratch.input`, `query_width` wide.
    fn attend(&mut self, layer: usize) {
        let (shape, kv, kernels, rows) = (self.shape, self.kv, self.kernels, self.rows);
        let (dim, width, shared) = (shape.head_dim, shape.query_width(), shape.heads / shape.kv_heads);
        let (qkv, out) = (Shared::of(&mut self.scratch.qkv), Shared::of(&mut self.scratch.input));
        let (stride, scores_stride) = (qkv_width(shape), self.scores_stride);
        let per_thread = ATTENTION_QUERIES.max(shared) * scores_stride;
        let scores = Shared::of(&mut self.scratch.scores);
        let (groups, tasks) = (&self.scratch.groups, &self.tasks);
        self.pool.run(tasks.len(), 1, &|item, thread| {
            let task = &tasks[item];
            let mut queries = Vec::with_capacity(task.rows * shared);
            for row in task.first_row..task.first_row + task.rows {
                for head in task.kv_head * shared..(task.kv_head + 1) * shared {
                    // SAFETY: within the row of either buffer; each task has its own rows and heads.
                    let (q, out) =
                        unsafe { (qkv.get().add(row * stride + head * dim), out.get().add(row * width + head * dim)) };
                    queries.push(Query { q, out, position: rows.positions[row] as usize });
                }
            }
            // SAFETY: the groups cover the rows' positions, and each thread has its own scores.
            unsafe {
                (kernels.attention)(&AttentionItem {
                    queries: &queries,
                    head_dim: dim,
                    scale: 1.0 / (dim as f32).sqrt(),
                    groups: &groups[task.first_group..task.first_group + task.groups],
                    offset: kv.head_offset(layer, task.kv_head),
                    values: kv.keys(),
                    scores: scores.get().add(thread * per_thread),
                    scores_stride,
                });
            }
        });
    }

    /// `scratch.input`, `width` wide, into tiles.
    fn pack(&mut self, width: usize) {
        if self.rows.len() == 1 {
            return;
        }
        let tiles = placed(&self.rows.tiles, width);
        let (from, to) = (Shared::of(&mut self.scratch.input), Shared::of(&mut self.scratch.packed));
        self.pool.run(tiles.len(), 1, &|item, _| {
            // SAFETY: each tile has its own rows and its own part of the packed rows.
            unsafe { pack_tile(&tiles[item], from.get(), width, to.get(), 0..width) };
        });
    }

    /// `silu(gate) * up` in the gate half, and packed.
    fn gate(&mut self) {
        let (ffn, kernels) = (self.shape.ffn, self.kernels);
        let tiles = placed(&self.rows.tiles, ffn);
        let (gate_up, packed) = (Shared::of(&mut self.scratch.gate_up), Shared::of(&mut self.scratch.packed));
        let pack = self.rows.len() > 1;
        let parts = ffn.div_ceil(GATE_COLUMNS);
        self.pool.run(tiles.len() * parts, 1, &|item, _| {
            let (tile, first) = (&tiles[item / parts], item % parts * GATE_COLUMNS);
            let columns = first..(first + GATE_COLUMNS).min(ffn);
            for row in tile.first_row..tile.first_row + tile.valid {
                // SAFETY: each item has its own columns of its own rows.
                unsafe {
                    let gate = gate_up.get().add(row * 2 * ffn + first);
                    (kernels.gate)(&GateItem { gate, up: gate.add(ffn), n: columns.len() });
                }
            }
            if pack {
                // SAFETY: as above.
                unsafe { pack_tile(tile, gate_up.get(), 2 * ffn, packed.get(), columns) };
            }
        });
    }

    /// Logits of the sampled rows.
    fn head(&mut self) {
        let (sampled, hidden) = (&self.rows.sampled, self.shape.hidden);
        if sampled.rows.is_empty() {
            return;
        }
        let (kernels, epsilon, stride) = (self.kernels, self.shape.norm_epsilon, logits_stride(self.shape));
        let weight = self.weights.final_norm.as_ptr();
        for (index, (row, _)) in sampled.rows.iter().enumerate() {
            let (x, delta) = (&mut self.scratch.x[row * hidden..], &self.scratch.delta[row * hidden..]);
            let out = self.scratch.input[index * hidden..].as_mut_ptr();
            let item = NormItem { x: x.as_mut_ptr(), delta: delta.as_ptr(), weight, out, n: hidden, epsilon };
            // SAFETY: whole rows of buffers that are at least as long.
            unsafe { (kernels.norm)(&item) };
        }
        let tiles = placed(&sampled.tiles, hidden);
        let x = Shared::of(&mut self.scratch.input);
        let packed = Shared::of(&mut self.scratch.packed);
        let alone = sampled.rows.len() == 1;
        if !alone {
            for tile in &tiles {
                // SAFETY: rows and tiles are within the buffers.
                unsafe { pack_tile(tile, x.get(), hidden, packed.get(), 0..hidden) };
            }
        }
        let matrices = [(self.weights.head, 0)];
        let work = Linear {
            matrices: &matrices,
            x,
            x_stride: hidden,
            packed: if alone { x } else { packed },
            tiles: &tiles,
            y: Shared::of(&mut self.scratch.logits),
            y_stride: stride,
            low: Shared::of(&mut self.scratch.low),
            low_stride: self.low_stride,
        };
        let deltas = deltas(self.residents, &sampled.groups, &[ModuleId::head()], &matrices, self.low_stride);
        linear(kernels, self.pool, self.weights, &work, &deltas);
    }
}

/// What the groups' adapters add to the matrices, which stand for `modules`.
fn deltas<'a>(
    residents: &'a BTreeMap<ResidentId, Resident>,
    groups: &[Group],
    modules: &[ModuleId],
    matrices: &[(PackedMatrix, usize)],
    low_stride: usize,
) -> Vec<Delta<'a>> {
    let mut deltas = Vec::new();
    for group in groups {
        let Some(resident) = residents.get(&group.resident) else { continue };
        for (index, (id, (matrix, y_column))) in modules.iter().zip(matrices).enumerate() {
            let Some(module) = resident.module(*id) else { continue };
            deltas.push(Delta {
                module,
                first_row: group.rows.start,
                rows: group.rows.len(),
                low_column: index * (low_stride / 3),
                y_column: *y_column,
                outputs: matrix.outputs,
            });
        }
    }
    deltas
}

/// Columns of a tile's rows, from row-major with `stride` to `[column][row]`; rows that do not exist become zero.
///
/// # Safety
/// `from` and `to` hold the tile's rows.
unsafe fn pack_tile(tile: &Tile, from: *const f32, stride: usize, to: *mut f32, columns: Range<usize>) {
    // A cache line of each row at a time: the lines of one column, a large power of two apart, would push each other out.
    for first in columns.clone().step_by(LANES) {
        let count = LANES.min(columns.end - first);
        for r in 0..tile.rows {
            // SAFETY: the caller's.
            let to = unsafe { to.add(tile.offset + first * tile.rows + r) };
            for column in 0..count {
                // SAFETY: as above.
                unsafe {
                    let row = from.add((tile.first_row + r) * stride + first);
                    *to.add(column * tile.rows) = if r < tile.valid { *row.add(column) } else { 0.0 };
                }
            }
        }
    }
}
