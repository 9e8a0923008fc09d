//! The decode launch: one for the projections that share an input.

use super::plan::{Block, Group, Run};
use super::{BLOCK_INPUTS, SLICES};
use crate::image::Arch;
use crate::launch::{DevicePtr, Element, Launch};
use crate::plain::{Plain, plain};

/// Threads of a CTA of the decode kernel.
pub const DECODE_THREADS: u32 = 256;
/// CTAs of the decode kernel that an SM holds; all must be resident, since they wait for each other.
pub const DECODE_CTAS_PER_SM: u32 = 2;
/// The exchange buffer must be cleared when the step counter wraps to zero at this many.
pub const STEP_WRAP: u32 = 1 << 22;
/// Launches that can be under way at once: each has another part of the exchange buffer.
pub const EXCHANGE_PARTS: u32 = 4;
/// Launches in one step that share an exchange buffer.
pub const LAUNCHES_MAX: u32 = 1024;

/// Where a decode launch keeps weights that are on their way. The same bits come out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// In a ring of shared memory for each warp: much is on its way.
    Ring,
    /// In registers: little stands between a load and its product.
    Registers,
}

plain! {
    /// The page pool as the kernels see it.
    pub struct Pool {
        pub base: DevicePtr,
        /// u32 page numbers: the lists of all residents.
        pub pages: DevicePtr,
        pub page_bytes: u64,
        pub page_fragments: u32,
        pub unused: u32,
    }
}

plain! {
    /// The argument of `lora_decode_*`. Row lengths: `inputs` for x, `stride_y` for y.
    pub struct DecodeArgs {
        pub x: DevicePtr,
        pub y: DevicePtr,
        pub pool: Pool,
        pub tensors: DevicePtr,
        pub rows: DevicePtr,
        pub blocks: DevicePtr,
        pub overflow: DevicePtr,
        /// The blocks of the launch that follows, or 0: they are brought into the L2.
        pub next_blocks: DevicePtr,
        /// 16-byte words, 64 to a column; `EXCHANGE_PARTS` parts. Cleared once, and where the step counter wraps.
        pub exchange: DevicePtr,
        /// Two u32. The first counts steps from 1; each launch of a step has a higher `launch`. The second is the kernel's, and
        /// starts as 0.
        pub step: DevicePtr,
        pub inputs: u32,
        pub blocks_in: u32,
        pub slices: u32,
        pub stride_y: u32,
        pub outputs: [u32; SLICES],
        /// Where each slice's outputs start in a row of y; a multiple of 8, as is `stride_y`.
        pub column: [u32; SLICES],
        pub unit_end: [u32; SLICES],
        pub projections: u32,
        pub projection: u32,
        pub layers: u32,
        pub layer: u32,
        pub launch: u32,
        /// 1: y is overwritten instead of added to.
        pub store: u32,
        /// 0: the previous kernel of the stream makes x. 1: x was whole before that kernel began (it read x, say), so that
        /// only y has to be waited for, and all but the additions may run beside it. 2: y too, and no other launch that
        /// shares `exchange` is under way.
        pub early: u32,
        /// Columns of one part of `exchange`, at least the plan's `exchange_columns`: launches take turns.
        pub part: u32,
    }
}

impl DecodeArgs {
    /// The fields that the group fixes: shapes, and y as one matrix of all outputs side by side.
    pub fn of_group(group: &Group) -> Self {
        let mut args = Self {
            inputs: group.inputs,
            blocks_in: group.inputs.div_ceil(BLOCK_INPUTS),
            slices: group.outputs.len() as u32,
            stride_y: group.outputs.iter().sum(),
            ..Self::default()
        };
        let (mut column, mut unit) = (0, 0);
        for s in 0..SLICES {
            let outputs = group.outputs.get(s).copied().unwrap_or(0);
            args.outputs[s] = outputs;
            args.column[s] = column;
            column += outputs;
            unit += outputs.div_ceil(super::UNIT_OUTPUTS);
            args.unit_end[s] = unit;
        }
        args
    }
}

/// Shared memory of a CTA in which its warps' weights arrive, 8 KB each where an SM has enough for two CTAs.
fn ring_bytes(weights: Weights, arch: Arch) -> u32 {
    match (weights, arch) {
        (Weights::Registers, _) => 0,
        (Weights::Ring, Arch::Sm80) => DECODE_THREADS / 32 * 5120,
        (Weights::Ring, Arch::Sm90a | Arch::Sm100) => DECODE_THREADS / 32 * 8192,
    }
}

/// `grid` as in the tuning: it does not depend on the mix, so one graph replays any. `weights` as there.
pub fn decode_launch(args: &DecodeArgs, element: Element, grid: u32, weights: Weights, arch: Arch) -> Launch {
    Launch {
        module: "lora_decode",
        function: match (weights, element) {
            (Weights::Ring, Element::Bf16) => "lora_decode_bf16",
            (Weights::Ring, Element::F16) => "lora_decode_f16",
            (Weights::Registers, Element::Bf16) => "lora_decode_registers_bf16",
            (Weights::Registers, Element::F16) => "lora_decode_registers_f16",
        },
        grid: [grid, 1, 1],
        block: [DECODE_THREADS, 1, 1],
        shared_bytes: ring_bytes(weights, arch),
        argument: args.to_bytes(),
        overlaps_previous: true,
    }
}

// The kernel declares the same sizes.
const _: () = assert!(Run::SIZE == 32 && Block::SIZE == 128 && DecodeArgs::SIZE == 192);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_fixes_shapes() {
        let args = DecodeArgs::of_group(&Group { inputs: 72, outputs: vec![200, 8] });
        assert_eq!((args.blocks_in, args.slices, args.stride_y), (3, 2, 208));
        assert_eq!((args.outputs, args.column, args.unit_end), ([200, 8, 0], [0, 200, 208], [4, 5, 5]));
        let launch = decode_launch(&args, Element::F16, 264, Weights::Ring, Arch::Sm90a);
        assert_eq!((launch.function, launch.grid, launch.argument.len()), ("lora_decode_f16", [264, 1, 1], 192));
        // Beside what the kernel has of its own, two CTAs fit the 164 KB of an A100 and the 228 KB of later SMs.
        assert_eq!([Arch::Sm80, Arch::Sm90a].map(|arch| ring_bytes(Weights::Ring, arch)), [40 << 10, 64 << 10]);
    }
}
