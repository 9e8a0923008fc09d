//! From the shape of the work to the shape of the launch. Pure; the numbers come from measurements in docs/BENCHMARKS.md.

use crate::decoder::attention::LINES;
use crate::decoder::attention_chunk::{CHUNK_HEAD_DIMS, CHUNK_LINES};
use crate::image::Arch;
use crate::lora::Group;
use crate::lora::decode::{DECODE_CTAS_PER_SM, Weights};

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
    /// Like the grid a matter of the launch, so the same for every mix that one graph replays.
    pub weights: Weights,
}

/// What a decode launch shares the device with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Company {
    /// LoRA launches before and behind it, each with x whole beforehand, so that several run side by side if they fit.
    Lora,
    /// Nothing: it stands between other kernels.
    Nothing,
    /// A GEMM, which has all SMs but those that the launch may fill.
    Gemm,
}

/// `pieces`: segments cut into eight rows each. `sms`: multiprocessors that the kernel may fill.
pub fn decode_tuning(pieces: u32, sms: u32, company: Company) -> DecodeTuning {
    let grid = sms * DECODE_CTAS_PER_SM;
    let chained = company == Company::Lora;
    let ctas = match pieces {
        // Five launches side by side: all but the additions are done when their turn comes.
        0..=1 if chained => (sms * 3 / 8).max(1),
        // One CTA to an SM: the next launch's can start beside it; and little work is not worth more.
        0..=1 => sms,
        _ if chained && pieces <= sms / 4 => sms,
        _ => grid,
    };
    // Where a CTA has little, latency counts; where it has much, or few SMs have to ask for all, what is on its way.
    let weights = match company {
        Company::Lora | Company::Nothing if pieces <= sms / 2 => Weights::Registers,
        _ => Weights::Ring,
    };
    let splits = if pieces <= 1 { 16 } else { 8 };
    DecodeTuning { grid, ctas, ctas_per_piece: ctas, splits, ragged_above: 1.25, weights }
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

/// Whether small ops wait for memory, so that each thread should ask for more at a time, and not for their first bytes, which come
/// sooner to more threads: 256 rows of a Llama-3-8B are few, 2,048 are many.
pub fn is_many(rows: u32) -> bool {
    rows >= 1024
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

/// The fastest schedule of one group's LoRA in a decode batch as measured on an H200. `bytes`: of the distinct adapters, in this group of one
/// layer. An SM takes at most some 60 KB in a microsecond, so that much to read wants many; what they cost is the GEMM's.
pub fn schedule(rows: u32, bytes: u64, group: &Group, sms: u32) -> Schedule {
    let outputs: u32 = group.outputs.iter().sum();
    // Adapters to weights, in hundredths.
    let share = bytes.saturating_mul(100) / (u64::from(group.inputs) * u64::from(outputs) * 2).max(1);
    let of_132 = |n: u32| Schedule::Beside { sms: (sms * n / 132).max(1) };
    match share {
        // So many adapters take longer than the GEMM many times over: both get all SMs.
        401.. => Schedule::SideStream { ctas: sms * DECODE_CTAS_PER_SM },
        // At few rows a GEMM is as fast on half of the SMs: it waits for memory. So does LoRA, and what it gets of it goes by
        // the SMs that ask.
        _ if rows < 128 && group.inputs > outputs.saturating_mul(2) => of_132(64),
        // More tiles of 128 outputs than SMs: a third round costs more than LoRA gains, up to as much as there is of weights.
        0..100 if rows < 128 && outputs > sms * 128 => of_132(if (30..50).contains(&share) { 32 } else { 48 }),
        0..20 if rows < 128 => of_132(48),
        _ if rows < 128 => of_132(64),
        // At many rows it computes, and misses each SM that it leaves.
        0..50 => of_132(16),
        50..80 => of_132(32),
        80..170 => of_132(48),
        _ => of_132(64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_h200_holds_264() {
        let ctas = |pieces, company| decode_tuning(pieces, 132, company).ctas;
        assert_eq!([1, 13, 64].map(|pieces| ctas(pieces, Company::Nothing)), [132, 264, 264]);
        assert_eq!([1, 13, 64].map(|pieces| ctas(pieces, Company::Lora)), [49, 132, 264]);
        let one = decode_tuning(1, 132, Company::Nothing);
        assert_eq!((one.grid, one.splits, decode_tuning(2, 132, Company::Nothing).splits), (264, 16, 8));
        assert_eq!(decode_tuning(0, 1, Company::Lora).ctas, 1);
    }

    #[test]
    fn weights_of_little_work_go_to_registers() {
        let weights = |pieces, sms, company| decode_tuning(pieces, sms, company).weights;
        for company in [Company::Lora, Company::Nothing] {
            assert_eq!(
                [1, 64, 128].map(|n| weights(n, 132, company)),
                [Weights::Registers, Weights::Registers, Weights::Ring]
            );
        }
        assert_eq!(weights(64, 64, Company::Gemm), Weights::Ring);
    }

    /// By group of a Llama-3-8B (q k v, o, gate up, down): near the best of docs/BENCHMARKS.md in each.
    #[test]
    fn schedules_as_measured() {
        let groups =
            [(4096, vec![4096, 1024, 1024]), (4096, vec![4096]), (4096, vec![14336, 14336]), (14336, vec![4096])];
        let all = |rows: u32, ranks: u64| {
            groups.clone().map(|(inputs, outputs)| {
                let width = u64::from(inputs) * outputs.len() as u64 + u64::from(outputs.iter().sum::<u32>());
                schedule(rows, ranks * width * 2, &Group { inputs, outputs }, 132)
            })
        };
        let beside = |sms: [u32; 4]| sms.map(|sms| Schedule::Beside { sms });
        assert_eq!(all(1, 16), beside([48, 48, 48, 64]));
        // 64 rows over nine and 64 adapters of rank 16, 64 of rank 8 and of rank 64.
        assert_eq!(all(64, 9 * 16), beside([48, 48, 48, 64]));
        assert_eq!(all(64, 64 * 16), beside([64, 64, 32, 64]));
        assert_eq!(all(64, 64 * 8), beside([64, 64, 48, 64]));
        assert_eq!(all(64, 64 * 64), beside([64, 64, 64, 64]));
        // 256 rows.
        assert_eq!(all(256, 32 * 16), beside([16, 16, 16, 16]));
        assert_eq!(all(256, 128 * 16), beside([48, 48, 32, 32]));
        assert_eq!(all(256, 256 * 16), beside([64, 64, 48, 48]));
        assert_eq!(all(256, 256 * 64), [Schedule::SideStream { ctas: 264 }; 4]);
        // Nothing divides by zero, and LoRA has an SM.
        let none = Group { inputs: 0, outputs: vec![] };
        assert_eq!(schedule(1, 0, &none, 1), Schedule::Beside { sms: 1 });
        assert_eq!(schedule(200, 1, &Group { inputs: 8, outputs: vec![8] }, 0), Schedule::Beside { sms: 1 });
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
