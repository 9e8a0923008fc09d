//! `y[row][output] = sum over k of weight[output][k] * x[row][k]`, weights as stored in panels of sixteen outputs.
//!
//! Each output of each row is one chain of fused multiply-adds over k in the order of storage, started from zero. The
//! chain is the same in every tile size, so a row's bits depend on nothing but the row and the weights.

use super::simd::{LANES, Simd};
use crate::panel::{Packing, quants_offset};

/// A tile of rows: x lies as `[k][rows]` from `offset`, so that one address steps through all rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// One of `Simd::ROW_TILES`.
    pub rows: usize,
    pub first_row: usize,
    /// Rows that exist; the rest of the tile is padding and is computed but not written.
    pub valid: usize,
    /// In floats from the start of the packed rows.
    pub offset: usize,
}

/// Consecutive panels of one matrix against all rows.
pub struct GemmItem<'a> {
    pub packing: Packing,
    /// First panel.
    pub panels: *const u8,
    pub panel_bytes: usize,
    pub panel_count: usize,
    pub k: usize,
    pub tiles: &'a [Tile],
    pub x: *const f32,
    /// Column of the first panel in row 0.
    pub y: *mut f32,
    pub y_stride: usize,
}

/// How one storage type lies in a panel and becomes floats.
trait Packed<S: Simd>: Copy {
    /// Values of k that share a head.
    const BLOCK: usize;
    const GROUPS: usize;
    /// Values of k in one group, taken out one after the other.
    const STEPS: usize;
    const HEAD_STRIDE: usize;
    const BLOCK_STRIDE: usize;
    type Head: Copy;
    type Group: Copy;
    unsafe fn head(at: *const u8) -> Self::Head;
    unsafe fn group(at: *const u8, group: usize) -> Self::Group;
    unsafe fn take(group: &mut Self::Group, head: Self::Head) -> S::F;
    /// Index within the block of a group's step.
    fn k_of(group: usize, step: usize) -> usize;
}

#[derive(Clone, Copy)]
struct Q4_1;
#[derive(Clone, Copy)]
struct Q8_0;
#[derive(Clone, Copy)]
struct F16;
#[derive(Clone, Copy)]
struct Bf16;
#[derive(Clone, Copy)]
struct F32;

impl<S: Simd> Packed<S> for Q4_1 {
    const BLOCK: usize = 32;
    const GROUPS: usize = 4;
    const STEPS: usize = 8;
    const HEAD_STRIDE: usize = 320;
    const BLOCK_STRIDE: usize = 320;
    type Head = (S::F, S::F);
    type Group = S::I;

    #[inline(always)]
    unsafe fn head(at: *const u8) -> Self::Head {
        (S::load_f16(at.cast()), S::load_f16(at.add(2 * LANES).cast()))
    }
    #[inline(always)]
    unsafe fn group(at: *const u8, group: usize) -> S::I {
        S::load_i32(at.add(group * 64).cast())
    }
    #[inline(always)]
    unsafe fn take(group: &mut S::I, (d, m): Self::Head) -> S::F {
        let q = S::nibble(*group);
        *group = S::shift_right_4(*group);
        S::fma(d, q, m)
    }
    #[inline(always)]
    fn k_of(group: usize, step: usize) -> usize {
        // Byte j of a block holds k = j in its low and k = 16 + j in its high half.
        4 * group + step / 2 + 16 * (step % 2)
    }
}

impl<S: Simd> Packed<S> for Q8_0 {
    const BLOCK: usize = 32;
    const GROUPS: usize = 8;
    const STEPS: usize = 4;
    const HEAD_STRIDE: usize = 32;
    const BLOCK_STRIDE: usize = 512;
    type Head = S::F;
    type Group = S::I;

    #[inline(always)]
    unsafe fn head(at: *const u8) -> S::F {
        S::load_f16(at.cast())
    }
    #[inline(always)]
    unsafe fn group(at: *const u8, group: usize) -> S::I {
        S::load_i32(at.add(group * 64).cast())
    }
    #[inline(always)]
    unsafe fn take(group: &mut S::I, d: S::F) -> S::F {
        let q = S::signed_byte(*group);
        *group = S::shift_right_8(*group);
        S::mul(d, q)
    }
    #[inline(always)]
    fn k_of(group: usize, step: usize) -> usize {
        4 * group + step
    }
}

macro_rules! plain {
    ($name:ident, $bytes:literal, $load:ident) => {
        impl<S: Simd> Packed<S> for $name {
            const BLOCK: usize = 8;
            const GROUPS: usize = 8;
            const STEPS: usize = 1;
            const HEAD_STRIDE: usize = 0;
            const BLOCK_STRIDE: usize = 8 * LANES * $bytes;
            type Head = ();
            type Group = S::F;

            #[inline(always)]
            unsafe fn head(_: *const u8) {}
            #[inline(always)]
            unsafe fn group(at: *const u8, group: usize) -> S::F {
                S::$load(at.add(group * LANES * $bytes).cast())
            }
            #[inline(always)]
            unsafe fn take(group: &mut S::F, (): ()) -> S::F {
                *group
            }
            #[inline(always)]
            fn k_of(group: usize, _: usize) -> usize {
                group
            }
        }
    };
}
plain!(F32, 4, load);
plain!(F16, 2, load_f16);
plain!(Bf16, 2, load_bf16);

/// # Safety
/// The instruction set of `S`; all pointers of the item valid for what its counts say.
#[inline(always)]
pub unsafe fn gemm<S: Simd>(item: &GemmItem<'_>) {
    match item.packing {
        Packing::Q4_1 => all_tiles::<S, Q4_1>(item),
        Packing::Q8_0 => all_tiles::<S, Q8_0>(item),
        Packing::F16 => all_tiles::<S, F16>(item),
        Packing::Bf16 => all_tiles::<S, Bf16>(item),
        Packing::F32 => all_tiles::<S, F32>(item),
    }
}

#[inline(always)]
unsafe fn all_tiles<S: Simd, W: Packed<S>>(item: &GemmItem<'_>) {
    for tile in item.tiles {
        // Many rows are chains enough to hide the latency of the multiply-add, and need the registers; few rows are
        // computed against several panels at once.
        let wide = if tile.rows <= 4 { S::PANELS } else { 1 };
        let mut panel = 0;
        while panel < item.panel_count {
            let step = if item.panel_count - panel >= wide { wide } else { 1 };
            match (tile.rows, step) {
                (1, 1) => one_tile::<S, W, 1, 1>(item, panel, tile),
                (2, 1) => one_tile::<S, W, 2, 1>(item, panel, tile),
                (3, 1) => one_tile::<S, W, 3, 1>(item, panel, tile),
                (4, 1) => one_tile::<S, W, 4, 1>(item, panel, tile),
                (_, 1) => many_rows::<S, W>(item, panel, tile),
                _ => several_panels::<S, W>(item, panel, tile),
            }
            panel += step;
        }
    }
}

// What a machine's registers cannot hold is never asked for there: the constants leave it out of the instantiation.

#[inline(always)]
unsafe fn several_panels<S: Simd, W: Packed<S>>(item: &GemmItem<'_>, panel: usize, tile: &Tile) {
    match tile.rows {
        1 if S::PANELS == 4 => one_tile::<S, W, 1, 4>(item, panel, tile),
        2 if S::PANELS == 4 => one_tile::<S, W, 2, 4>(item, panel, tile),
        3 if S::PANELS == 4 => one_tile::<S, W, 3, 4>(item, panel, tile),
        4 if S::PANELS == 4 => one_tile::<S, W, 4, 4>(item, panel, tile),
        1 if S::PANELS == 2 => one_tile::<S, W, 1, 2>(item, panel, tile),
        2 if S::PANELS == 2 => one_tile::<S, W, 2, 2>(item, panel, tile),
        3 if S::PANELS == 2 => one_tile::<S, W, 3, 2>(item, panel, tile),
        4 if S::PANELS == 2 => one_tile::<S, W, 4, 2>(item, panel, tile),
        _ => {}
    }
}

#[inline(always)]
unsafe fn many_rows<S: Simd, W: Packed<S>>(item: &GemmItem<'_>, panel: usize, tile: &Tile) {
    if S::ROW_TILES[0] <= 4 {
        return;
    }
    match tile.rows {
        6 => one_tile::<S, W, 6, 1>(item, panel, tile),
        8 => one_tile::<S, W, 8, 1>(item, panel, tile),
        12 => one_tile::<S, W, 12, 1>(item, panel, tile),
        16 => one_tile::<S, W, 16, 1>(item, panel, tile),
        24 => one_tile::<S, W, 24, 1>(item, panel, tile),
        _ => {}
    }
}

#[inline(always)]
unsafe fn one_tile<S: Simd, W: Packed<S>, const R: usize, const P: usize>(
    item: &GemmItem<'_>,
    panel: usize,
    tile: &Tile,
) {
    let base = item.panels.add(panel * item.panel_bytes);
    let quants = quants_offset(item.packing, item.k);
    let mut acc = [[S::splat(0.0); R]; P];
    for block in 0..item.k / W::BLOCK {
        let head_at = base.add(block * W::HEAD_STRIDE);
        let block_at = base.add(quants + block * W::BLOCK_STRIDE);
        let x = item.x.add(tile.offset + block * W::BLOCK * R);
        let mut heads = [W::head(head_at); P];
        each!(p < P, heads[p] = W::head(head_at.add(p * item.panel_bytes)));
        for g in 0..W::GROUPS {
            let mut groups = [W::group(block_at, g); P];
            each!(p < P, groups[p] = W::group(block_at.add(p * item.panel_bytes), g));
            for step in 0..W::STEPS {
                let x = x.add(W::k_of(g, step) * R);
                each!(p < P, {
                    let w = W::take(&mut groups[p], heads[p]);
                    each!(r < R, acc[p][r] = S::fma(w, S::splat(*x.add(r)), acc[p][r]));
                });
            }
        }
    }
    each!(p < P, {
        let y = item.y.add(tile.first_row * item.y_stride + (panel + p) * LANES);
        each!(r < R, {
            if r < tile.valid {
                S::store(y.add(r * item.y_stride), acc[p][r]);
            }
        });
    });
}
