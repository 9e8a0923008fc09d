//! From the shape of the work to the shape of the launch. Pure; the numbers come from measurements in docs/BENCHMARKS.md.

use crate::decoder::attention::LINES;
use crate::decoder::attention_chunk::{CHUNK_HEAD_DIMS, CHUNK_LINES};
use crate::image::Arch;
use crate::lora::decode::DECODE_CTAS_PER_SM;
use crate::lora::plan::Group;

/// How `plan_decode` divides the work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeTuning {
    /// CTAs of the launch: at most what the device holds at one time. The same for every mix that one graph replays.
    pub grid: u32,
    /// Those that get work.
    pub ctas: u32,
    /// CTAs that one piece can have.
    pub ctas_per_piece: u32,
    /// Parts that a shrink's inputs are cut into: more are faster to compute and slower to sum.
    pub splits: u32,
    /// Pieces are laid end to end where whole CTAs would make the slowest slower than the mean by this factor.
    pub ragged_above: f64,
}

/// `pieces`: segments cut into eight rows each. `sms`: multiprocessors that the kernel may fill. `chained`: LoRA launches
/// follow each other directly, each with x whole beforehand, so that several run side by side if they fit.
pub fn decode_tuning(pieces: u32, sms: u32, chained: bool) -> DecodeTuning {
    let grid = sms * DECODE_CTAS_PER_SM;
    let ctas = match pieces {
        // Five launches side by side: all but the additions are done when their turn comes.
        0..=1 if chained => (sms * 3 / 8).max(1),
        // One CTA to an SM: the next launch's can start beside it; and little work is not worth more.
        0..=1 => sms,
        _ if chained && pieces <= sms / 4 => sms,
        _ => grid,
    };
    DecodeTuning { grid, ctas, ctas_per_piece: ctas, splits: if pieces <= 1 { 16 } else { 8 }, ragged_above: 1.25 }
}

/// How a prefill shrink divides rows and rank tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shrink {
    /// A CTA takes 128 rows, not 64: its part of A is read half as often.
    pub wide: bool,
    pub rows: u32,
    /// Rank tiles of a CTA.
    pub bundle_tiles: u32,
    pub ctas_per_sm: u32,
}

/// `columns`: rank tiles of all slices of the widest adapter.
pub fn prefill_shrink(columns: u32) -> Shrink {
    match columns {
        0..=3 => Shrink { wide: false, rows: 64, bundle_tiles: columns, ctas_per_sm: 2 },
        _ => wide_shrink(columns, 6),
    }
}

/// CTAs of 128 rows and at most so many rank tiles, as even as can be.
pub fn wide_shrink(columns: u32, tiles_max: u32) -> Shrink {
    let bundles = columns.div_ceil(tiles_max.max(1)).max(1);
    Shrink { wide: true, rows: 128, bundle_tiles: columns.div_ceil(bundles), ctas_per_sm: 2 }
}

/// How many parts the inputs of a prefill shrink are cut into, so that a small prefill fills the device too.
/// `ctas`: those of one part. `blocks`: of 32 inputs. `resident`: CTAs that the device holds.
pub fn prefill_splits(ctas: u32, blocks: u32, resident: u32) -> u32 {
    let wanted = (resident + ctas / 2) / ctas.max(1);
    // A CTA may halve its part once more, and wants some blocks to stream.
    wanted.clamp(1, (blocks / 16).clamp(1, 8))
}

/// Units of 64 outputs to a CTA of a prefill expand. Eight are touched side by side, 1 KB of a row at a time, which memory likes;
/// fewer where there is little work, or where two CTAs would not fit an SM. `all`: units of all tiles. `tiles`: of ranks.
pub fn prefill_units(all: u32, tiles: u32, sms: u32) -> u32 {
    let fits = |units: &u32| tiles * (units * 2048 + 4096) <= 113 << 10;
    let wanted = if all >= sms * 28 { 8 } else { 4 };
    [wanted, 4].into_iter().find(fits).unwrap_or(2)
}

/// Lines of an attention tile: those of the kernel to take for sequences that bring `fresh` tokens each.
pub fn attention_lines(arch: Arch, head_dim: u32, heads_per_kv: u32, kv_heads: u32, fresh: &[u32], sms: u32) -> u32 {
    let each = CHUNK_LINES / heads_per_kv.max(1);
    let tiles: u32 = fresh.iter().map(|tokens| tokens.div_ceil(each.max(1))).sum();
    let rows: u32 = fresh.iter().sum();
    // A CTA makes on one SM what the small tiles make on five; tiles that are mostly empty are not worth it.
    let enough = tiles * kv_heads * 5 >= sms && rows * heads_per_kv * 4 >= tiles * CHUNK_LINES;
    if arch == Arch::Sm90a && CHUNK_HEAD_DIMS.contains(&head_dim) && enough { CHUNK_LINES } else { LINES }
}

/// Whether a segment goes to the prefill kernels: their tiles of 128 rows read the adapter once, where the decode
/// kernel reads it, from L2, once for eight rows.
pub fn is_prefill(rows: u32) -> bool {
    rows > 64
}

/// Where a group's LoRA runs relative to its base GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// Behind the GEMM, into y.
    Serial,
    /// Before it, into y; the GEMM adds (beta 1). Rows of the base have to be zeroed first.
    DeltaFirst,
    /// In its sums, by our own GEMM: `plan_gemm`.
    InGemm,
    /// Beside it on another stream, by so many CTAs, into a buffer that the next operation adds.
    SideStream { ctas: u32 },
    /// Beside it on SMs of its own, into such a buffer: the GEMM is told to leave so many SMs and is launched first, LoRA
    /// (`early` 2) as soon as all CTAs of the GEMM have begun, by an edge of that kind in the graph.
    Beside { sms: u32 },
}

/// Up to this rank our own GEMM brings A in time.
const IN_GEMM_RANK: u32 = 16;

/// The fastest schedule of a prefill as measured on an H200, for the widest adapter's rank.
pub fn prefill_schedule(arch: Arch, rank: u32, group: &Group) -> Schedule {
    let fits = group.inputs.is_multiple_of(64) && group.outputs.iter().all(|n| n.is_multiple_of(256));
    if arch == Arch::Sm90a && rank <= IN_GEMM_RANK && fits { Schedule::InGemm } else { Schedule::DeltaFirst }
}

/// The fastest schedule of a batch as measured on an H200; `prefill_schedule` knows a prefill better. `layer_bytes`: of the distinct adapters, in one layer.
pub fn schedule(rows: u32, layer_bytes: u64, prefill: bool, sms: u32) -> Schedule {
    const MB: u64 = 1 << 20;
    match rows {
        _ if prefill => Schedule::DeltaFirst,
        // At few rows a GEMM is as fast on half of the SMs: it waits for memory. So does LoRA, and what it gets of it goes by
        // the SMs that ask.
        ..=8 if layer_bytes <= 224 * MB => Schedule::Beside { sms: sms * 17 / 33 },
        ..128 if layer_bytes <= 224 * MB => Schedule::Beside { sms: sms * 16 / 33 },
        // At many rows it misses each SM that it leaves.
        128.. if layer_bytes <= 128 * MB => Schedule::Beside { sms: sms * 4 / 33 },
        128.. if layer_bytes <= 448 * MB => Schedule::Beside { sms: sms * 12 / 33 },
        // So many adapters take longer than the GEMM: both get all SMs, one after the other.
        _ => Schedule::SideStream { ctas: sms * DECODE_CTAS_PER_SM },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_h200_holds_264() {
        let ctas = |pieces, chained| decode_tuning(pieces, 132, chained).ctas;
        assert_eq!([1, 13, 64].map(|pieces| ctas(pieces, false)), [132, 264, 264]);
        assert_eq!([1, 13, 64].map(|pieces| ctas(pieces, true)), [49, 132, 264]);
        let one = decode_tuning(1, 132, false);
        assert_eq!((one.grid, one.splits, decode_tuning(2, 132, false).splits), (264, 16, 8));
        assert_eq!(decode_tuning(0, 1, true).ctas, 1);
    }

    /// The best of docs/BENCHMARKS.md with one number for all groups, by adapters of rank 16: 2.6 MB each.
    #[test]
    fn schedules_as_measured() {
        let rank16 = |adapters: u64| adapters * 2_621_440;
        assert_eq!(schedule(1, rank16(1), false, 132), Schedule::Beside { sms: 68 });
        assert_eq!(schedule(64, rank16(9), false, 132), Schedule::Beside { sms: 64 });
        assert_eq!(schedule(64, rank16(64), false, 132), Schedule::Beside { sms: 64 });
        assert_eq!(schedule(64, 4 * rank16(64), false, 132), Schedule::SideStream { ctas: 264 });
        assert_eq!(schedule(256, rank16(32), false, 132), Schedule::Beside { sms: 16 });
        assert_eq!(schedule(256, rank16(128), false, 132), Schedule::Beside { sms: 48 });
        assert_eq!(schedule(256, rank16(256), false, 132), Schedule::SideStream { ctas: 264 });
        assert_eq!(schedule(8192, rank16(16), true, 132), Schedule::DeltaFirst);
    }

    #[test]
    fn a_prefill_goes_into_the_gemm_where_it_can() {
        let schedule =
            |arch, rank, inputs, output| prefill_schedule(arch, rank, &Group { inputs, outputs: vec![output] });
        assert_eq!(schedule(Arch::Sm90a, 16, 4096, 1024), Schedule::InGemm);
        assert_eq!(schedule(Arch::Sm90a, 17, 4096, 1024), Schedule::DeltaFirst);
        assert_eq!(schedule(Arch::Sm90a, 16, 576, 192), Schedule::DeltaFirst);
        assert_eq!(schedule(Arch::Sm80, 16, 4096, 1024), Schedule::DeltaFirst);
    }

    #[test]
    fn chunks_of_prompts_take_large_tiles() {
        let lines = |arch, dim, fresh: &[u32]| attention_lines(arch, dim, 4, 8, fresh, 132);
        assert_eq!(lines(Arch::Sm90a, 128, &[2048]), 128);
        assert_eq!(lines(Arch::Sm90a, 64, &[1, 1, 512]), 128);
        // Decode, one short chunk, other devices, other head dimensions.
        assert_eq!(lines(Arch::Sm90a, 128, &[1; 256]), 16);
        assert_eq!(lines(Arch::Sm90a, 128, &[33]), 16);
        assert_eq!(lines(Arch::Sm80, 128, &[2048]), 16);
        assert_eq!(lines(Arch::Sm90a, 96, &[2048]), 16);
    }

    #[test]
    fn a_prefill_fills_the_device() {
        // 2048 rows: 32 CTAs; 8192 rows: 128; a long one needs no split.
        assert_eq!([32, 128, 1000].map(|ctas| prefill_splits(ctas, 128, 264)), [8, 2, 1]);
        assert_eq!(prefill_splits(1, 3, 264), 1);
        assert_eq!(prefill_splits(0, 128, 264), 8);
        assert_eq!([16 * 64, 64 * 64].map(|units| prefill_units(units, 1, 132)), [4, 8]);
        assert_eq!([4, 5, 7, 16].map(|tiles| prefill_units(64 * 448, tiles, 132)), [8, 8, 4, 2]);
        assert_eq!([1, 3, 4, 48].map(|columns| prefill_shrink(columns).bundle_tiles), [1, 3, 4, 6]);
    }
}
