//! The base product of a prefill with its LoRA delta in the same sums, y = x W^T + scale (x A) B, on Hopper: one launch, that
//! neither reads x nor touches y a second time.

use super::decode::Pool;
use super::layout::tiles;
use super::plan::{Group, PlanError, Segment};
use super::prefill::{TILE_ROWS, Tile};
use super::{SLICES, UNIT_OUTPUTS};
use crate::launch::{DevicePtr, Element, Launch};
use crate::plain::{Plain, plain};

/// What the sums of x A have room for.
pub const GEMM_RANK_MAX: u32 = 64;
/// The slot of a tile of base rows.
pub const NO_SLOT: u32 = u32::MAX;
/// Outputs of a tile.
const TILE_OUTPUTS: u32 = 256;
/// Inputs of a stage.
const STAGE_INPUTS: u32 = 64;
/// Parts that the inputs of x A are cut into, at most.
const PARTS: u32 = 8;
/// Shared memory: four stages of x and W, three of A at rank 32, 2 KB of sums to a warp (the first of which A takes above that), and up
/// to 1,023 bytes to align them.
const SHARED_BYTES: u32 = 4 * (TILE_ROWS + TILE_OUTPUTS) * 128 + 3 * 32 * 128 + 8 * 2048 + 1024;

plain! {
    /// The argument of `gemm_lora_*`.
    pub struct GemmArgs {
        /// The driver's tensor map (`cuTensorMapEncodeTiled`) of x, as `map_of_x`.
        pub x: [u64; 16],
        /// The same of W, outputs of all slices one after the other, as `map_of_w`.
        pub w: [u64; 16],
        /// The same of y, as `map_of_y`.
        pub out: [u64; 16],
        pub y: DevicePtr,
        pub pool: Pool,
        pub tensors: DevicePtr,
        /// `GemmPlan::tiles`.
        pub tiles: DevicePtr,
        /// Scratch of `GemmPlan::sums_bytes`.
        pub sums: DevicePtr,
        /// u32, `GemmPlan::counters` of them: zero before the first launch, and left zero by every one.
        pub counters: DevicePtr,
        pub tile_count: u32,
        /// Rank tiles of a slice; 0: the base alone.
        pub columns: u32,
        pub inputs: u32,
        pub slices: u32,
        pub stride_y: u32,
        pub outputs: [u32; SLICES],
        pub projections: u32,
        pub projection: u32,
        pub layers: u32,
        pub layer: u32,
        pub unused: [u32; 2],
    }
}

/// A tensor map of 16-bit elements in the 128-byte swizzle: for each dimension, innermost first, elements, bytes from one to the
/// next, and elements of the box.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Map {
    pub sizes: Vec<u64>,
    pub strides: Vec<u64>,
    pub boxes: Vec<u32>,
}

impl Map {
    fn new(dimensions: &[(u64, u64, u32)]) -> Self {
        Self {
            sizes: dimensions.iter().map(|d| d.0).collect(),
            strides: dimensions.iter().map(|d| d.1).collect(),
            boxes: dimensions.iter().map(|d| d.2).collect(),
        }
    }
}

/// Rows of x.
pub fn map_of_x(rows: u32, inputs: u32) -> Map {
    Map::new(&[(inputs.into(), 2, STAGE_INPUTS), (rows.into(), u64::from(inputs) * 2, TILE_ROWS)])
}

/// Rows of W, which is outputs by inputs, 128 to a box. Output 32 h + 8 l + e of a unit of 64 comes to row 8 e + 2 l + h, so that a lane's
/// sums are of outputs side by side, in the order that the adapters' B has.
pub fn map_of_w(outputs: u32, inputs: u32) -> Map {
    let row = u64::from(inputs) * 2;
    let units = u64::from(outputs / UNIT_OUTPUTS);
    Map::new(&[(inputs.into(), 2, STAGE_INPUTS), (2, 32 * row, 2), (4, 8 * row, 4), (8, row, 8), (units, 64 * row, 2)])
}

/// Rows of y.
pub fn map_of_y(rows: u32, stride: u32) -> Map {
    Map::new(&[(stride.into(), 2, UNIT_OUTPUTS), (rows.into(), u64::from(stride) * 2, 16)])
}

/// The work of one product over one group.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmPlan {
    /// Of up to 128 rows; `row0` is the first of them in x and y.
    pub tiles: Vec<Tile>,
    /// Rank tiles of the widest slice of the widest adapter; 0 where no row has one.
    pub columns: u32,
    pub sums_bytes: u64,
    pub counters: u32,
}

/// Cuts segments into tiles; those of rank 0 are the base's. Rows of a segment stand side by side in x and y, from `row0` on.
pub fn plan_gemm(segments: &[Segment], group: &Group) -> Result<GemmPlan, PlanError> {
    if group.outputs.is_empty() || group.outputs.len() > SLICES {
        return Err(PlanError::Slices { found: group.outputs.len() });
    }
    if let Some(found) = group.outputs.iter().find(|n| !n.is_multiple_of(TILE_OUTPUTS)) {
        return Err(PlanError::Multiple { what: "outputs", found: *found, of: TILE_OUTPUTS });
    }
    if group.inputs == 0 || !group.inputs.is_multiple_of(STAGE_INPUTS) {
        return Err(PlanError::Multiple { what: "inputs", found: group.inputs, of: STAGE_INPUTS });
    }
    let (mut cut, mut columns) = (Vec::new(), 0);
    for (index, segment) in segments.iter().enumerate() {
        if segment.rank > GEMM_RANK_MAX {
            return Err(PlanError::Rank { segment: index, rank: segment.rank, most: GEMM_RANK_MAX });
        }
        let slot = if segment.rank == 0 { NO_SLOT } else { segment.slot };
        columns = columns.max(if segment.rows == 0 { 0 } else { tiles(segment.rank) });
        cut.extend((0..segment.rows).step_by(TILE_ROWS as usize).map(|at| Tile {
            slot,
            row0: segment.row0 + at,
            rows: TILE_ROWS.min(segment.rows - at),
            unused: 0,
        }));
    }
    let slices = cut.len() as u32 * group.outputs.len() as u32;
    let part_bytes = u64::from(TILE_ROWS) * 16 * 4;
    Ok(GemmPlan {
        sums_bytes: u64::from(slices * columns * PARTS) * part_bytes,
        counters: if columns == 0 { 0 } else { slices * TILE_ROWS / 16 },
        tiles: cut,
        columns,
    })
}

impl GemmArgs {
    /// The fields that group and plan fix.
    pub fn of_plan(group: &Group, plan: &GemmPlan) -> Self {
        let mut outputs = [0; SLICES];
        outputs.iter_mut().zip(&group.outputs).for_each(|(to, n)| *to = *n);
        Self {
            tile_count: plan.tiles.len() as u32,
            columns: plan.columns,
            inputs: group.inputs,
            slices: group.outputs.len() as u32,
            stride_y: group.outputs.iter().sum(),
            outputs,
            ..Self::default()
        }
    }
}

/// One launch of as many CTAs as there are SMs, all of which must be resident; none where there are no tiles.
pub fn gemm_launch(args: &GemmArgs, element: Element, sms: u32) -> Option<Launch> {
    (args.tile_count > 0).then(|| Launch {
        module: "gemm_lora_sm90a",
        function: if element == Element::F16 { "gemm_lora_f16" } else { "gemm_lora_bf16" },
        grid: [(sms / 2 * 2).max(2), 1, 1],
        block: [384, 1, 1],
        shared_bytes: SHARED_BYTES,
        argument: args.to_bytes(),
        overlaps_previous: true,
    })
}

// The kernel declares the same size.
const _: () = assert!(GemmArgs::SIZE == 512 && SHARED_BYTES <= 227 << 10);

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(slot: u32, row0: u32, rows: u32, rank: u32) -> Segment {
        Segment { slot, row0, rows, rank }
    }

    #[test]
    fn tiles_cover_all_rows() {
        let segments = [segment(0, 0, 300, 17), segment(5, 300, 9, 0), segment(6, 309, 0, 64)];
        let group = Group { inputs: 4096, outputs: vec![512, 256] };
        let plan = plan_gemm(&segments, &group).unwrap();
        let shape: Vec<_> = plan.tiles.iter().map(|t| (t.slot, t.row0, t.rows)).collect();
        assert_eq!(shape, [(0, 0, 128), (0, 128, 128), (0, 256, 44), (NO_SLOT, 300, 9)]);
        assert_eq!((plan.columns, plan.sums_bytes, plan.counters), (2, 8 * 2 * 8 * 8192, 64));
        let launch = gemm_launch(&GemmArgs::of_plan(&group, &plan), Element::Bf16, 133).unwrap();
        assert_eq!(launch.grid, [132, 1, 1]);
        let base = plan_gemm(&segments[1..], &group).unwrap();
        assert_eq!((base.columns, base.sums_bytes, base.counters), (0, 0, 0));
        let none = plan_gemm(&segments[2..], &group).unwrap();
        assert!(gemm_launch(&GemmArgs::of_plan(&group, &none), Element::F16, 132).is_none());
    }

    #[test]
    fn what_it_cannot_is_refused() {
        let text = |rank, inputs, outputs| {
            plan_gemm(&[segment(0, 0, 9, rank)], &Group { inputs, outputs: vec![outputs] }).unwrap_err().to_string()
        };
        assert_eq!(text(16, 4096, 128), "128 outputs are not a multiple of 256");
        assert_eq!(text(16, 72, 256), "72 inputs are not a multiple of 64");
        assert_eq!(text(65, 64, 256), "segment 0 has rank 65, above 64");
    }

    /// Where each output of a unit comes to, in the order that a box is filled: what the kernel's sums stand for.
    #[test]
    fn outputs_of_a_lane_stand_side_by_side() {
        let map = map_of_w(256, 64);
        let row = map.strides[3];
        for p in 0..64u64 {
            let (h, l, e) = (p % 2, p / 2 % 4, p / 8);
            let output = (h * map.strides[1] + l * map.strides[2] + e * map.strides[3]) / row;
            // Column c of the product has the outputs of piece p(c), as `lora.cuh` says.
            let column = p % 8;
            assert_eq!(output, 8 * (4 * (column & 1) + column / 2) + e);
        }
    }
}
