//! The two halves of `y += scale * B (A x)`, adapters as stored in pages.
//!
//! `t[row][j] = sum over k of A[j][k] * x[row][k]`: sixteen chains over k (lane i takes k = i, i + 16, ...), then a tree.
//! `y[row][o] += scale * (sum over j of B[o][j] * t[row][j])`: one chain over j from zero, then one multiply-add.
//! The order is the same however many rows and ranks are computed side by side.

use lorafleet_artifact::FloatType;

use super::simd::{LANES, Simd};

/// A row of an adapter in its page.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct RowPtr(pub *const u8);

// SAFETY: pages never move, and are written only while no kernel runs.
unsafe impl Send for RowPtr {}
// SAFETY: as above.
unsafe impl Sync for RowPtr {}

/// Some ranks of one module against the rows of one adapter.
pub struct ShrinkItem<'a> {
    pub element: FloatType,
    /// One A row of `k` elements for each rank of this item.
    pub a: &'a [RowPtr],
    pub k: usize,
    /// First row, row-major.
    pub x: *const f32,
    pub x_stride: usize,
    pub rows: usize,
    /// Where the first row's result of the first rank goes.
    pub t: *mut f32,
    pub t_stride: usize,
}

/// Some outputs of one module for the rows of one adapter.
pub struct ExpandItem<'a> {
    pub element: FloatType,
    /// One row of B transposed for each rank of the module.
    pub b: &'a [RowPtr],
    pub first_column: usize,
    /// In vectors of sixteen; may reach into the padding behind the last output.
    pub vectors: usize,
    pub scale: f32,
    pub t: *const f32,
    pub t_stride: usize,
    pub rows: usize,
    /// Column 0 of the module's output in the first row.
    pub y: *mut f32,
    pub y_stride: usize,
}

trait Stored<S: Simd> {
    unsafe fn load(row: *const u8, column: usize) -> S::F;
}

struct F32;
struct F16;
struct Bf16;

impl<S: Simd> Stored<S> for F32 {
    #[inline(always)]
    unsafe fn load(row: *const u8, column: usize) -> S::F {
        S::load(row.add(4 * column).cast())
    }
}

impl<S: Simd> Stored<S> for F16 {
    #[inline(always)]
    unsafe fn load(row: *const u8, column: usize) -> S::F {
        S::load_f16(row.add(2 * column).cast())
    }
}

impl<S: Simd> Stored<S> for Bf16 {
    #[inline(always)]
    unsafe fn load(row: *const u8, column: usize) -> S::F {
        S::load_bf16(row.add(2 * column).cast())
    }
}

/// # Safety
/// The instruction set of `S`; all pointers valid for what the counts say; `k` a multiple of sixteen.
#[inline(always)]
pub unsafe fn shrink<S: Simd>(item: &ShrinkItem<'_>) {
    match item.element {
        FloatType::F32 => shrink_stored::<S, F32>(item),
        FloatType::F16 => shrink_stored::<S, F16>(item),
        FloatType::Bf16 => shrink_stored::<S, Bf16>(item),
    }
}

#[inline(always)]
unsafe fn shrink_stored<S: Simd, E: Stored<S>>(item: &ShrinkItem<'_>) {
    let mut rank = 0;
    while rank < item.a.len() {
        let ranks = match item.a.len() - rank {
            8.. if item.rows < 4 && S::PANELS == 4 => 8,
            4.. => 4,
            _ => 1,
        };
        let mut row = 0;
        while row < item.rows {
            let rows = if item.rows - row >= 4 { 4 } else { 1 };
            match (ranks, rows) {
                (8, _) => shrink_tile::<S, E, 8, 1>(item, rank, row),
                (4, 4) => shrink_tile::<S, E, 4, 4>(item, rank, row),
                (4, _) => shrink_tile::<S, E, 4, 1>(item, rank, row),
                (_, 4) => shrink_tile::<S, E, 1, 4>(item, rank, row),
                _ => shrink_tile::<S, E, 1, 1>(item, rank, row),
            }
            row += rows;
        }
        rank += ranks;
    }
}

#[inline(always)]
unsafe fn shrink_tile<S: Simd, E: Stored<S>, const J: usize, const R: usize>(
    item: &ShrinkItem<'_>,
    rank: usize,
    row: usize,
) {
    let mut acc = [[S::splat(0.0); R]; J];
    let x = item.x.add(row * item.x_stride);
    let a = item.a.as_ptr().add(rank);
    let mut k = 0;
    while k < item.k {
        let mut xs = [S::load(x.add(k)); R];
        each!(r < R, xs[r] = S::load(x.add(r * item.x_stride + k)));
        each!(j < J, {
            let w = E::load((*a.add(j)).0, k);
            each!(r < R, acc[j][r] = S::fma(w, xs[r], acc[j][r]));
        });
        k += LANES;
    }
    let t = item.t.add(row * item.t_stride + rank);
    each!(j < J, each!(r < R, *t.add(r * item.t_stride + j) = S::sum(acc[j][r])));
}

/// # Safety
/// As [`shrink`]; `y` writable for `vectors` from `first_column`.
#[inline(always)]
pub unsafe fn expand<S: Simd>(item: &ExpandItem<'_>) {
    match item.element {
        FloatType::F32 => expand_stored::<S, F32>(item),
        FloatType::F16 => expand_stored::<S, F16>(item),
        FloatType::Bf16 => expand_stored::<S, Bf16>(item),
    }
}

#[inline(always)]
unsafe fn expand_stored<S: Simd, E: Stored<S>>(item: &ExpandItem<'_>) {
    let mut vector = 0;
    while vector < item.vectors {
        let vectors = match item.vectors - vector {
            16.. if item.rows < 4 && S::PANELS == 4 => 16,
            4.. => 4,
            _ => 1,
        };
        let column = item.first_column + vector * LANES;
        let mut row = 0;
        while row < item.rows {
            let rows = if item.rows - row >= 4 { 4 } else { 1 };
            match (vectors, rows) {
                (16, _) => expand_tile::<S, E, 16, 1>(item, column, row),
                (4, 4) => expand_tile::<S, E, 4, 4>(item, column, row),
                (4, _) => expand_tile::<S, E, 4, 1>(item, column, row),
                (_, 4) => expand_tile::<S, E, 1, 4>(item, column, row),
                _ => expand_tile::<S, E, 1, 1>(item, column, row),
            }
            row += rows;
        }
        vector += vectors;
    }
}

#[inline(always)]
unsafe fn expand_tile<S: Simd, E: Stored<S>, const V: usize, const R: usize>(
    item: &ExpandItem<'_>,
    column: usize,
    row: usize,
) {
    let mut acc = [[S::splat(0.0); R]; V];
    let t = item.t.add(row * item.t_stride);
    for (j, b) in item.b.iter().enumerate() {
        let mut ts = [S::splat(*t.add(j)); R];
        each!(r < R, ts[r] = S::splat(*t.add(r * item.t_stride + j)));
        each!(v < V, {
            let w = E::load(b.0, column + v * LANES);
            each!(r < R, acc[v][r] = S::fma(w, ts[r], acc[v][r]));
        });
    }
    let scale = S::splat(item.scale);
    let y = item.y.add(row * item.y_stride + column);
    each!(r < R, {
        each!(v < V, {
            let y = y.add(r * item.y_stride + v * LANES);
            S::store(y, S::fma(scale, acc[v][r], S::load(y)));
        });
    });
}
