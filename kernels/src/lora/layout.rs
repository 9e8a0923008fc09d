//! How an adapter lies in the pages of the pool. `cuda/lora.cuh` says the same to the kernels.
//!
//! An adapter is a sequence of 512-byte fragments, cut into pages. Every projection has its A, then its B, each starting
//! at a multiple of four fragments, so that no load of the kernels crosses a page. Rank tiles are 16 ranks, and one of 8
//! where that is enough for the rest; what a tile has beyond the rank is zero.

use super::{BLOCK_INPUTS, UNIT_OUTPUTS};
use crate::plain::plain;

pub const RANK_MAX: u32 = 256;
pub const FRAGMENT_BYTES: u64 = 512;
/// Page sizes are a multiple of this.
pub const PAGE_BYTES_STEP: u64 = 4 * FRAGMENT_BYTES;

/// The shape of one projection of the model: y (outputs) = W (outputs x inputs) x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Projection {
    pub inputs: u32,
    pub outputs: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    #[error("rank {rank} of layer {layer}, projection {projection} is above {RANK_MAX}")]
    Rank { layer: u32, projection: u32, rank: u32 },
    #[error("projection {projection} is {inputs} -> {outputs}; both must be multiples of 8 and at least 8")]
    Shape { projection: u32, inputs: u32, outputs: u32 },
    #[error("page size {page_bytes} is not a multiple of {PAGE_BYTES_STEP} bytes")]
    Page { page_bytes: u64 },
    #[error("the adapter lies on {expected} pages, {found} were given")]
    Pages { found: usize, expected: usize },
    #[error("the adapter takes {bytes} bytes; at most {most} can be addressed")]
    Size { bytes: u64, most: u64 },
    #[error("{what} of layer {layer}, projection {projection} has {found} elements, not {expected}")]
    Length { what: &'static str, layer: u32, projection: u32, found: usize, expected: usize },
    #[error("layer {layer}, projection {projection} is outside of {layers} layers of {projections} projections")]
    Place { layer: u32, projection: u32, layers: u32, projections: u32 },
}

plain! {
    /// What the kernels know of one projection of one layer of one resident adapter.
    pub struct Tensor {
        /// First fragment of A, counted through the adapter's pages.
        pub a: u32,
        /// First fragment of B.
        pub b: u32,
        /// 0: the adapter leaves this projection alone.
        pub rank: u32,
        pub scale: f32,
        /// Where the adapter's list of pages starts in the table of all lists.
        pub pages: u32,
        /// The pages of the pool that `a` and `b` are in.
        pub page_a: u32,
        pub page_b: u32,
        pub unused: u32,
    }
}

/// Rank tiles of 16.
pub const fn full_tiles(rank: u32) -> u32 {
    (rank + 7) / 16
}

/// Whether a tile of 8 follows.
pub const fn has_half(rank: u32) -> bool {
    rank > 0 && (rank + 15) % 16 < 8
}

/// Tiles of both kinds.
pub const fn tiles(rank: u32) -> u32 {
    full_tiles(rank) + has_half(rank) as u32
}

/// Fragments of A (rank x inputs).
pub const fn a_fragments(rank: u32, inputs: u32) -> u64 {
    (full_tiles(rank) * 2 + has_half(rank) as u32) as u64 * inputs.div_ceil(BLOCK_INPUTS) as u64
}

/// Fragments of B (outputs x rank).
pub const fn b_fragments(rank: u32, outputs: u32) -> u64 {
    (full_tiles(rank) * 4 + has_half(rank) as u32 * 2) as u64 * outputs.div_ceil(UNIT_OUTPUTS) as u64
}

/// Where element (r, k) of A lies, in bytes from the start of the tensor. `r < rank`, `k < inputs`.
pub const fn a_place(rank: u32, inputs: u32, r: u32, k: u32) -> u64 {
    let (full, blocks) = (full_tiles(rank), inputs.div_ceil(BLOCK_INPUTS));
    let (tile, block, q, h, pair, e) = (r / 16, k / 32, k % 32 / 8, k % 8 / 4, k % 4 / 2, k % 2);
    let (fragment, register) = if tile < full {
        ((tile * blocks + block) * 2 + h, r % 16 / 8 + 2 * pair)
    } else {
        (full * blocks * 2 + block, 2 * h + pair)
    };
    fragment as u64 * FRAGMENT_BYTES + ((r % 8 * 4 + q) * 16 + register * 4 + e * 2) as u64
}

/// Where element (output, r) of B lies, in bytes from the start of the tensor. `output < outputs`, `r < rank`.
pub const fn b_place(rank: u32, outputs: u32, output: u32, r: u32) -> u64 {
    let (full, units) = (full_tiles(rank), outputs.div_ceil(UNIT_OUTPUTS));
    let (unit, eighth, m, low) = (output / 64, output % 64 / 8, output % 8 / 2, output % 2);
    let g = (eighth & 3) << 1 | eighth >> 2;
    let (tile, q, e) = (r / 16, r % 8 / 2, r % 2);
    let (fragment, register) = if tile < full {
        ((unit * full + tile) * 4 + m, low + 2 * (r % 16 / 8))
    } else {
        (units * full * 4 + unit * 2 + m / 2, m % 2 * 2 + low)
    };
    fragment as u64 * FRAGMENT_BYTES + ((g * 4 + q) * 16 + register * 4 + e * 2) as u64
}

/// One adapter's place plan: which fragments each of its tensors takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    projections: Vec<Projection>,
    layers: u32,
    /// Layer by layer, projection by projection; `scale` and `pages` are still zero.
    tensors: Vec<Tensor>,
    pub fragments: u32,
    pub page_bytes: u64,
    pub pages: u32,
}

impl Layout {
    /// `rank_of(layer, projection)` is 0 where the adapter has nothing.
    pub fn new(
        projections: &[Projection],
        layers: u32,
        page_bytes: u64,
        rank_of: impl Fn(u32, u32) -> u32,
    ) -> Result<Self, LayoutError> {
        if page_bytes == 0 || !page_bytes.is_multiple_of(PAGE_BYTES_STEP) {
            return Err(LayoutError::Page { page_bytes });
        }
        for (p, shape) in (0..).zip(projections) {
            if [shape.inputs, shape.outputs].iter().any(|n| *n == 0 || !n.is_multiple_of(8)) {
                return Err(LayoutError::Shape { projection: p, inputs: shape.inputs, outputs: shape.outputs });
            }
        }
        let (mut next, mut tensors) = (0u64, Vec::with_capacity(layers as usize * projections.len()));
        for layer in 0..layers {
            for (p, shape) in (0..).zip(projections) {
                let rank = rank_of(layer, p);
                if rank > RANK_MAX {
                    return Err(LayoutError::Rank { layer, projection: p, rank });
                }
                let a = next;
                let b = a + a_fragments(rank, shape.inputs).next_multiple_of(4);
                next = b + b_fragments(rank, shape.outputs).next_multiple_of(4);
                // The kernels count fragments in 32 bits.
                if next > u64::from(u32::MAX) {
                    let most = u64::from(u32::MAX) * FRAGMENT_BYTES;
                    return Err(LayoutError::Size { bytes: next * FRAGMENT_BYTES, most });
                }
                tensors.push(Tensor { a: a as u32, b: b as u32, rank, ..Tensor::default() });
            }
        }
        let pages = (next * FRAGMENT_BYTES).div_ceil(page_bytes) as u32;
        Ok(Self { projections: projections.to_vec(), layers, tensors, fragments: next as u32, page_bytes, pages })
    }

    /// The table entries of an adapter on the pages `owned`, whose list starts at `list` in the table of all lists;
    /// layer by layer, projection by projection.
    pub fn entries(&self, owned: &[u32], list: u32, scale: f32) -> Result<Vec<Tensor>, LayoutError> {
        if owned.len() != self.pages as usize {
            return Err(LayoutError::Pages { found: owned.len(), expected: self.pages as usize });
        }
        // An empty tensor at the very end lies on no page.
        let page = |fragment: u32| {
            let index = u64::from(fragment) * FRAGMENT_BYTES / self.page_bytes;
            owned.get(index as usize).copied().unwrap_or(0)
        };
        let entry = |t: &Tensor| Tensor { pages: list, scale, page_a: page(t.a), page_b: page(t.b), ..*t };
        Ok(self.tensors.iter().map(entry).collect())
    }

    /// Writes one projection's A (rank x inputs, row by row) and B (outputs x rank) into `bytes`, which holds the whole
    /// adapter page after page and starts as zeros. Elements are 16-bit patterns of the model's type.
    pub fn pack(&self, layer: u32, projection: u32, a: &[u16], b: &[u16], bytes: &mut [u8]) -> Result<(), LayoutError> {
        let index = layer as usize * self.projections.len() + projection as usize;
        let (Some(shape), Some(t)) = (self.projections.get(projection as usize), self.tensors.get(index)) else {
            let (layers, projections) = (self.layers, self.projections.len() as u32);
            return Err(LayoutError::Place { layer, projection, layers, projections });
        };
        let length = |what, found: usize, expected: usize| match found == expected {
            true => Ok(()),
            false => Err(LayoutError::Length { what, layer, projection, found, expected }),
        };
        length("A", a.len(), (t.rank * shape.inputs) as usize)?;
        length("B", b.len(), (t.rank * shape.outputs) as usize)?;
        length("the adapter's buffer", bytes.len(), self.fragments as usize * FRAGMENT_BYTES as usize)?;
        let mut put = |at: u64, bits: u16| {
            if let Some(place) = bytes.get_mut(at as usize..at as usize + 2) {
                place.copy_from_slice(&bits.to_le_bytes());
            }
        };
        let (start_a, start_b) = (u64::from(t.a) * FRAGMENT_BYTES, u64::from(t.b) * FRAGMENT_BYTES);
        for (r, row) in (0..).zip(a.chunks_exact(shape.inputs as usize)) {
            for (k, bits) in (0..).zip(row) {
                put(start_a + a_place(t.rank, shape.inputs, r, k), *bits);
            }
        }
        for (output, row) in (0..).zip(b.chunks_exact(t.rank.max(1) as usize)) {
            for (r, bits) in (0..).zip(row) {
                put(start_b + b_place(t.rank, shape.outputs, output, r), *bits);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn tiles_are_as_many_as_the_rank_needs() {
        let found: Vec<_> = [0, 1, 8, 9, 16, 17, 24, 25, 100, 256].map(|r| (full_tiles(r), has_half(r))).into();
        let expect = [(0, false), (0, true), (0, true), (1, false), (1, false), (1, true), (1, true), (2, false)];
        assert_eq!(found[..8], expect);
        assert_eq!(found[8..], [(6, true), (16, false)]);
    }

    /// Every element has a place of its own inside the tensor.
    #[test]
    fn places_are_distinct_and_inside() {
        for rank in [1, 3, 7, 8, 9, 16, 24, 31, 64, 100] {
            for (inputs, outputs) in [(32, 64), (72, 8), (96, 200)] {
                let mut seen = HashSet::new();
                for r in 0..rank {
                    for k in 0..inputs {
                        let at = a_place(rank, inputs, r, k);
                        assert!(at.is_multiple_of(2) && at < a_fragments(rank, inputs) * 512 && seen.insert(at));
                    }
                }
                seen.clear();
                for output in 0..outputs {
                    for r in 0..rank {
                        let at = b_place(rank, outputs, output, r);
                        assert!(at.is_multiple_of(2) && at < b_fragments(rank, outputs) * 512 && seen.insert(at));
                    }
                }
            }
        }
    }

    #[test]
    fn tensors_follow_each_other_at_multiples_of_four() {
        let shapes = [Projection { inputs: 96, outputs: 200 }, Projection { inputs: 8, outputs: 8 }];
        let layout = Layout::new(&shapes, 3, 4096, |layer, p| layer * 9 + p * 5).unwrap();
        let owned: Vec<u32> = (0..layout.pages).map(|i| 100 + i).collect();
        let all = layout.entries(&owned, 7, 0.5).unwrap();
        assert!(layout.entries(&owned[1..], 7, 0.5).unwrap_err().to_string().contains("pages"));
        assert_eq!(all.len(), 6);
        let mut next = 0;
        for (i, t) in all.iter().enumerate() {
            let shape = shapes[i % 2];
            assert_eq!((t.a, t.pages, t.scale), (next, 7, 0.5));
            assert!(t.rank == 0 || (t.page_a, t.page_b) == (100 + t.a / 8, 100 + t.b / 8));
            assert_eq!(t.b as u64, t.a as u64 + a_fragments(t.rank, shape.inputs).next_multiple_of(4));
            next = t.b + b_fragments(t.rank, shape.outputs).next_multiple_of(4) as u32;
        }
        assert_eq!(layout.fragments, next);
        assert_eq!(layout.pages as u64, (next as u64 * 512).div_ceil(4096));
    }

    #[test]
    fn refusals_name_both_values() {
        let shapes = [Projection { inputs: 64, outputs: 64 }];
        let text =
            |page, rank: u32, shapes: &[Projection]| Layout::new(shapes, 1, page, |_, _| rank).unwrap_err().to_string();
        assert_eq!(text(4096, 257, &shapes), "rank 257 of layer 0, projection 0 is above 256");
        assert_eq!(text(1000, 8, &shapes), "page size 1000 is not a multiple of 2048 bytes");
        assert!(text(4096, 8, &[Projection { inputs: 12, outputs: 64 }]).contains("12 -> 64"));
        let layout = Layout::new(&shapes, 1, 4096, |_, _| 2).unwrap();
        let mut bytes = vec![0; layout.fragments as usize * 512];
        let e = layout.pack(0, 0, &[0; 127], &[0; 128], &mut bytes).unwrap_err();
        assert_eq!(e.to_string(), "A of layer 0, projection 0 has 127 elements, not 128");
    }
}
