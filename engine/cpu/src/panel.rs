//! Matrices in panels: sixteen outputs side by side, one in each lane, values as the file stores them.
//!
//! | type | panel of sixteen outputs |
//! |---|---|
//! | F32, F16, BF16 | `[k][16]` |
//! | Q4_1 | per 32 k: 16 d, 16 m (f16), then 4 x 16 words: word g of a lane is bytes 4g..4g+4 of its block |
//! | Q8_0 | 16 d (f16) per 32 k, padded to 64 bytes; then per 32 k 8 x 16 words, likewise |
//!
//! Words are moved as they are, so packing runs at the speed of memory and a packed matrix is as large as a stored one.

use lorafleet_backend::model::{MatrixView, StoredType};

use super::kernels::simd::LANES;

pub use lorafleet_backend::model::StoredType as Packing;

/// Bytes before the quantised values of a panel.
pub fn quants_offset(packing: Packing, columns: usize) -> usize {
    match packing {
        StoredType::Q4_1 => 4 * LANES,
        StoredType::Q8_0 => (columns / 32 * 2 * LANES).next_multiple_of(64),
        StoredType::F32 | StoredType::F16 | StoredType::Bf16 => 0,
    }
}

pub fn panel_bytes(packing: Packing, columns: usize) -> usize {
    match packing {
        StoredType::Q8_0 => quants_offset(packing, columns) + columns * LANES,
        other => other.row_bytes(columns) * LANES,
    }
}

/// Writes panel number `panel` of the matrix. `to` is [`panel_bytes`] long and zero, which is what lanes behind the last
/// output keep.
pub fn pack_panel(matrix: &MatrixView<'_>, panel: usize, to: &mut [u8]) {
    for lane in 0..LANES {
        let Some(row) = matrix.row(panel * LANES + lane) else { return };
        match matrix.stored {
            StoredType::F32 => scatter::<4>(row, lane, to),
            StoredType::F16 | StoredType::Bf16 => scatter::<2>(row, lane, to),
            StoredType::Q4_1 => {
                for (block, to) in row.chunks_exact(20).zip(to.chunks_exact_mut(320)) {
                    let (d, rest) = block.split_at(2);
                    let (m, words) = rest.split_at(2);
                    let (heads, groups) = to.split_at_mut(4 * LANES);
                    heads[2 * lane..][..2].copy_from_slice(d);
                    heads[2 * (LANES + lane)..][..2].copy_from_slice(m);
                    scatter::<4>(words, lane, groups);
                }
            }
            StoredType::Q8_0 => {
                let (heads, quants) = to.split_at_mut(quants_offset(StoredType::Q8_0, matrix.columns));
                let blocks =
                    row.chunks_exact(34).zip(heads.chunks_exact_mut(2 * LANES)).zip(quants.chunks_exact_mut(512));
                for ((block, head), groups) in blocks {
                    let (d, words) = block.split_at(2);
                    head[2 * lane..][..2].copy_from_slice(d);
                    scatter::<4>(words, lane, groups);
                }
            }
        }
    }
}

/// Element number i of a row goes to lane `lane` of vector i.
fn scatter<const BYTES: usize>(row: &[u8], lane: usize, to: &mut [u8]) {
    for (element, vector) in row.chunks_exact(BYTES).zip(to.chunks_exact_mut(BYTES * LANES)) {
        vector[BYTES * lane..][..BYTES].copy_from_slice(element);
    }
}

/// One output's weights as floats: an embedding row. The same formulas as in the matrix kernel.
pub fn unpack_row(packing: Packing, panel: &[u8], lane: usize, out: &mut [f32]) {
    let half_at = |at: usize| half::f16::from_le_bytes([panel[at], panel[at + 1]]).to_f32();
    let quants = quants_offset(packing, out.len());
    for (k, out) in out.iter_mut().enumerate() {
        let (block, within) = (k / 32, k % 32);
        *out = match packing {
            StoredType::F32 => {
                let at = 4 * (k * LANES + lane);
                f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
            }
            StoredType::F16 => half_at(2 * (k * LANES + lane)),
            StoredType::Bf16 => {
                let at = 2 * (k * LANES + lane);
                half::bf16::from_le_bytes([panel[at], panel[at + 1]]).to_f32()
            }
            StoredType::Q4_1 => {
                let byte = within % 16;
                let at = quants + block * 320 + (byte / 4) * 64 + 4 * lane + byte % 4;
                let q = if within < 16 { panel[at] & 15 } else { panel[at] >> 4 };
                half_at(block * 320 + 2 * lane).mul_add(f32::from(q), half_at(block * 320 + 2 * (LANES + lane)))
            }
            StoredType::Q8_0 => {
                let at = quants + block * 512 + (within / 4) * 64 + 4 * lane + within % 4;
                half_at(block * 32 + 2 * lane) * f32::from(panel[at] as i8)
            }
        };
    }
}
