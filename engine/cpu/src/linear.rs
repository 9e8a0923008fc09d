//! Matrices that share an input, and what the rows' adapters add to them: two jobs for the pool.
//!
//! The first computes the base products and, beside them, `A x` of every adapter; the second adds `scale * B (A x)`.

use super::kernels::Kernels;
use super::kernels::gemm::{GemmItem, Tile};
use super::kernels::lora::{ExpandItem, ShrinkItem};
use super::kernels::simd::LANES;
use super::memory::Shared;
use super::pool::Pool;
use super::resident::Module;
use super::weights::{PackedMatrix, PackedWeights};

/// Neighbouring panels that one item computes; small enough to share out, long enough to stream.
const ITEM_PANELS: usize = 4;
/// Floats of packed rows that one item reads, once for each panel: they stay in a core's own cache from item to item, and
/// many rows make items small enough that no thread waits long for the last one.
const ITEM_FLOATS: usize = 128 << 10;
const SHRINK_RANKS: usize = 8;
const EXPAND_COLUMNS: usize = 16 * LANES;
/// Rows of one adapter that one item computes.
const LORA_ROWS: usize = 64;

/// `y[row][column..] = weight x[row]` for several matrices.
pub struct Linear<'a> {
    /// Each with the column of `y` where its first output goes.
    pub matrices: &'a [(PackedMatrix, usize)],
    /// Row-major, for the adapters.
    pub x: Shared<f32>,
    pub x_stride: usize,
    /// In tiles, for the base.
    pub packed: Shared<f32>,
    pub tiles: &'a [Tile],
    pub y: Shared<f32>,
    pub y_stride: usize,
    pub low: Shared<f32>,
    pub low_stride: usize,
}

/// What one adapter adds to one of the matrices for its rows.
pub struct Delta<'a> {
    pub module: &'a Module,
    pub first_row: usize,
    pub rows: usize,
    /// Column in `low` of its first rank.
    pub low_column: usize,
    pub y_column: usize,
    pub outputs: usize,
}

/// A part of a delta: `first` rank or column, and some rows.
struct Part {
    delta: usize,
    first: usize,
    first_row: usize,
    rows: usize,
}

pub fn linear(kernels: &Kernels, pool: &mut Pool, weights: &PackedWeights, work: &Linear<'_>, deltas: &[Delta<'_>]) {
    let shrinks = parts(deltas, |delta| delta.module.a.len(), SHRINK_RANKS);
    let panels: usize = work.matrices.iter().map(|(matrix, _)| matrix.panels).sum();
    let k = work.matrices.first().map_or(0, |(matrix, _)| matrix.columns);
    let tile_floats = k * work.tiles.iter().map(|tile| tile.rows).max().unwrap_or(0);
    let chunks: Vec<&[Tile]> = work.tiles.chunks((ITEM_FLOATS / tile_floats.max(1)).max(1)).collect();
    let groups = panels.div_ceil(ITEM_PANELS);
    let items = shrinks.len() + chunks.len() * groups;
    pool.run(items, 1, &|item, _| match shrinks.get(item) {
        Some(part) => shrink(kernels, work, &deltas[part.delta], part),
        None => {
            let item = item - shrinks.len();
            products(kernels, weights, work, item % groups * ITEM_PANELS, chunks[item / groups]);
        }
    });
    let expands = parts(deltas, |delta| delta.outputs, EXPAND_COLUMNS);
    pool.run(expands.len(), 1, &|item, _| {
        let part = &expands[item];
        expand(kernels, work, &deltas[part.delta], part);
    });
}

fn parts(deltas: &[Delta<'_>], length: impl Fn(&Delta<'_>) -> usize, step: usize) -> Vec<Part> {
    let mut parts = Vec::new();
    for (index, delta) in deltas.iter().enumerate() {
        for first in (0..length(delta)).step_by(step) {
            for row in (0..delta.rows).step_by(LORA_ROWS) {
                let rows = LORA_ROWS.min(delta.rows - row);
                parts.push(Part { delta: index, first, first_row: delta.first_row + row, rows });
            }
        }
    }
    parts
}

/// The panels `first..first + ITEM_PANELS` of all matrices laid end to end, for some of the tiles.
fn products(kernels: &Kernels, weights: &PackedWeights, work: &Linear<'_>, first: usize, tiles: &[Tile]) {
    let mut start = 0;
    for (matrix, column) in work.matrices {
        let from = first.max(start) - start;
        let to = (first + ITEM_PANELS).min(start + matrix.panels).saturating_sub(start);
        if from < to {
            // SAFETY: the panels are within the matrix, the rows within the buffers that `Scratch::reserve` sized, and
            // no other item writes these columns.
            unsafe {
                (kernels.gemm)(&GemmItem {
                    packing: matrix.packing,
                    panels: weights.panels(*matrix).add(from * matrix.panel_bytes),
                    panel_bytes: matrix.panel_bytes,
                    panel_count: to - from,
                    k: matrix.columns,
                    tiles,
                    x: work.packed.get(),
                    y: work.y.get().add(column + from * LANES),
                    y_stride: work.y_stride,
                });
            }
        }
        start += matrix.panels;
    }
}

fn shrink(kernels: &Kernels, work: &Linear<'_>, delta: &Delta<'_>, part: &Part) {
    let ranks = part.first..(part.first + SHRINK_RANKS).min(delta.module.a.len());
    // SAFETY: rows and ranks are within the buffers, and no other item writes these ranks of these rows.
    unsafe {
        (kernels.shrink)(&ShrinkItem {
            element: delta.module.a_type,
            a: &delta.module.a[ranks],
            k: work.matrices[0].0.columns,
            x: work.x.get().add(part.first_row * work.x_stride),
            x_stride: work.x_stride,
            rows: part.rows,
            t: work.low.get().add(part.first_row * work.low_stride + delta.low_column + part.first),
            t_stride: work.low_stride,
        });
    }
}

fn expand(kernels: &Kernels, work: &Linear<'_>, delta: &Delta<'_>, part: &Part) {
    // SAFETY: rows and columns are within the buffers (padded to whole vectors), and no other item writes them.
    unsafe {
        (kernels.expand)(&ExpandItem {
            element: delta.module.b_type,
            b: &delta.module.b,
            first_column: part.first,
            vectors: EXPAND_COLUMNS.min(delta.outputs - part.first).div_ceil(LANES),
            scale: delta.module.scale,
            t: work.low.get().add(part.first_row * work.low_stride + delta.low_column),
            t_stride: work.low_stride,
            rows: part.rows,
            y: work.y.get().add(part.first_row * work.y_stride + delta.y_column),
            y_stride: work.y_stride,
        });
    }
}
