//! The base product of a prefill that takes the LoRA delta on: y = x W^T + scale (x A) B, on Hopper. The shrink of
//! `prefill_launches` comes first; this launch stands where its expand and the base GEMM would.

use super::decode::Pool;
use super::layout::RANK_MAX;
use super::plan::{Group, PlanError};
use super::prefill::PrefillPlan;
use super::{SLICES, UNIT_OUTPUTS};
use crate::launch::{DevicePtr, Element, Launch};
use crate::plain::{Plain, plain};

/// The boxes of both tensor maps: inputs and rows. Two dimensions, inputs first; 128-byte swizzle.
pub const MAP_BOX: [u32; 2] = [64, 128];
const TILE_OUTPUTS: u32 = 256;
/// Shared memory: four stages of x and W, and up to 1,023 bytes to align them.
const SHARED_BYTES: u32 = 4 * (128 + TILE_OUTPUTS) * 128 + 1024;

plain! {
    /// The argument of `gemm_lora_*`.
    pub struct GemmArgs {
        /// The driver's tensor map (`cuTensorMapEncodeTiled`) of x.
        pub x: [u64; 16],
        /// The same of W: outputs of all slices, one after the other, by inputs.
        pub w: [u64; 16],
        pub y: DevicePtr,
        pub pool: Pool,
        pub tensors: DevicePtr,
        /// Those of the plan, whose `row0` is the first of rows that stand side by side in x and y.
        pub tiles: DevicePtr,
        /// What the shrink left.
        pub v: DevicePtr,
        pub tile_count: u32,
        pub columns: u32,
        pub inputs: u32,
        /// Of 64 ranks, that the widest slice takes; 0: the base alone.
        pub stages: u32,
        pub slices: u32,
        pub stride_y: u32,
        pub outputs: [u32; SLICES],
        pub projections: u32,
        pub projection: u32,
        pub layers: u32,
        pub layer: u32,
        pub unused: [u32; 3],
    }
}

impl GemmArgs {
    /// The fields that group and plan fix. `delta`: whether the adapters take part.
    pub fn of_plan(group: &Group, plan: &PrefillPlan, delta: bool) -> Self {
        let mut outputs = [0; SLICES];
        outputs.iter_mut().zip(&group.outputs).for_each(|(to, n)| *to = *n);
        Self {
            tile_count: plan.tiles.len() as u32,
            columns: plan.columns,
            inputs: group.inputs,
            stages: if delta { plan.slice_tiles.div_ceil(4) } else { 0 },
            slices: group.outputs.len() as u32,
            stride_y: group.outputs.iter().sum(),
            outputs,
            ..Self::default()
        }
    }
}

/// One launch of as many CTAs as there are SMs; none where there are no tiles.
pub fn gemm_launch(args: &GemmArgs, element: Element, sms: u32) -> Result<Option<Launch>, PlanError> {
    let [wide, deep] = [TILE_OUTPUTS, MAP_BOX[0]];
    if let Some(found) = args.outputs.iter().find(|n| !n.is_multiple_of(wide)) {
        return Err(PlanError::Multiple { what: "outputs", found: *found, of: wide });
    }
    if args.inputs == 0 || !args.inputs.is_multiple_of(deep) {
        return Err(PlanError::Multiple { what: "inputs", found: args.inputs, of: deep });
    }
    if args.tile_count == 0 {
        return Ok(None);
    }
    Ok(Some(Launch {
        module: "gemm_lora_sm90a",
        function: if element == Element::F16 { "gemm_lora_f16" } else { "gemm_lora_bf16" },
        grid: [(sms / 2 * 2).max(2), 1, 1],
        block: [384, 1, 1],
        shared_bytes: SHARED_BYTES,
        argument: args.to_bytes(),
        overlaps_previous: true,
    }))
}

// The kernel declares the same size; a stage holds four rank tiles of 16.
const _: () = assert!(GemmArgs::SIZE == 384 && UNIT_OUTPUTS * 4 == TILE_OUTPUTS && RANK_MAX <= 256);

#[cfg(test)]
mod tests {
    use super::super::plan::Segment;
    use super::super::prefill::plan_prefill;
    use super::*;

    #[test]
    fn one_launch_or_a_reason() {
        let segments = [Segment { slot: 0, row0: 0, rows: 300, rank: 100 }];
        let launch = |group: &Group| {
            let plan = plan_prefill(&segments, group, 132).unwrap();
            gemm_launch(&GemmArgs::of_plan(group, &plan, true), Element::Bf16, 133)
        };
        let good = Group { inputs: 4096, outputs: vec![512, 256] };
        assert_eq!(launch(&good).unwrap().unwrap().grid, [132, 1, 1]);
        assert_eq!(GemmArgs::of_plan(&good, &plan_prefill(&segments, &good, 132).unwrap(), true).stages, 2);
        let odd = launch(&Group { inputs: 4096, outputs: vec![512, 128] }).unwrap_err();
        assert_eq!(odd.to_string(), "128 outputs are not a multiple of 256");
        let odd = launch(&Group { inputs: 72, outputs: vec![512] }).unwrap_err();
        assert_eq!(odd.to_string(), "72 inputs are not a multiple of 64");
    }
}
