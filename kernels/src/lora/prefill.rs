//! The prefill launches: shrink, then expand, for segments long enough to fill tensor-core tiles with rows.

use super::decode::{DecodeArgs, Pool};
use super::layout::{RANK_MAX, tiles};
use super::plan::{Group, PlanError, Segment};
use super::{SLICES, UNIT_OUTPUTS};
use crate::launch::{DevicePtr, Element, Launch};
use crate::plain::{Plain, plain};
use crate::tuning::{prefill_parts, prefill_splits};

pub const TILE_ROWS: u32 = 128;
/// Units of 64 outputs of one CTA of the expand.
const BLOCK_UNITS: u32 = 16;
/// Rank tiles of one CTA of the shrink.
const BUNDLE_TILES: u32 = 4;
/// Shared memory that one of them takes there: two halves of K, four stages of two blocks, two fragments each.
const SHRINK_RING_BYTES: u32 = 2 * 4 * 2 * 2 * 512;
/// The y dimension of a grid, where a tile is cut in four.
const TILES_MAX: usize = 65_535 / 4;

plain! {
    /// Rows of one adapter for one CTA.
    pub struct Tile {
        pub slot: u32,
        pub row0: u32,
        pub rows: u32,
        pub unused: u32,
    }
}

plain! {
    /// The argument of `lora_prefill_*`.
    pub struct PrefillArgs {
        pub x: DevicePtr,
        pub y: DevicePtr,
        pub pool: Pool,
        pub tensors: DevicePtr,
        pub rows: DevicePtr,
        pub tiles: DevicePtr,
        /// f32, `PrefillPlan::v_bytes` of them.
        pub v: DevicePtr,
        pub tile_count: u32,
        pub splits: u32,
        pub columns: u32,
        pub bundles: u32,
        pub inputs: u32,
        pub blocks_in: u32,
        pub slices: u32,
        pub stride_y: u32,
        pub outputs: [u32; SLICES],
        pub column: [u32; SLICES],
        pub block_end: [u32; SLICES],
        pub projections: u32,
        pub projection: u32,
        pub layers: u32,
        pub layer: u32,
        /// 1: y is overwritten instead of added to.
        pub store: u32,
        /// That a tile's rows are cut into for the expand: 1, 2 or 4.
        pub parts: u32,
    }
}

/// The work of one prefill over one group.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefillPlan {
    pub tiles: Vec<Tile>,
    /// Rank tiles of all slices of the widest adapter.
    pub columns: u32,
    /// Rank tiles of its widest slice.
    pub slice_tiles: u32,
    pub splits: u32,
    /// CTAs that share a tile's rows in the expand.
    pub parts: u32,
    /// Scratch for the shrink's results.
    pub v_bytes: u64,
}

/// Cuts segments into tiles. Empty segments and those of rank 0 take no part.
pub fn plan_prefill(segments: &[Segment], group: &Group, sms: u32) -> Result<PrefillPlan, PlanError> {
    if group.outputs.is_empty() || group.outputs.len() > SLICES {
        return Err(PlanError::Slices { found: group.outputs.len() });
    }
    let (mut cut, mut slice_tiles) = (Vec::new(), 0);
    for (index, segment) in segments.iter().enumerate() {
        if segment.rank > RANK_MAX {
            return Err(PlanError::Rank { segment: index, rank: segment.rank });
        }
        if segment.rank == 0 {
            continue;
        }
        for start in (0..segment.rows).step_by(TILE_ROWS as usize) {
            let rows = TILE_ROWS.min(segment.rows - start);
            cut.push(Tile { slot: segment.slot, row0: segment.row0 + start, rows, unused: 0 });
            slice_tiles = slice_tiles.max(tiles(segment.rank));
        }
    }
    if cut.len() > TILES_MAX {
        return Err(PlanError::Tiles { found: cut.len(), most: TILES_MAX });
    }
    let columns = slice_tiles * group.outputs.len() as u32;
    let ctas = cut.len() as u32 * 2 * columns.div_ceil(BUNDLE_TILES);
    let splits = prefill_splits(ctas, group.inputs.div_ceil(super::BLOCK_INPUTS), sms);
    let v_bytes = u64::from(splits) * u64::from(columns) * cut.len() as u64 * u64::from(TILE_ROWS) * 16 * 4;
    let blocks = group.outputs.iter().map(|n| n.div_ceil(BLOCK_UNITS * UNIT_OUTPUTS)).sum::<u32>();
    let parts = prefill_parts(cut.len() as u32 * blocks, sms);
    Ok(PrefillPlan { tiles: cut, columns, slice_tiles, splits, parts, v_bytes })
}

impl PrefillArgs {
    /// The fields that group and plan fix.
    pub fn of_plan(group: &Group, plan: &PrefillPlan) -> Self {
        let shapes = DecodeArgs::of_group(group);
        let mut args = Self {
            tile_count: plan.tiles.len() as u32,
            splits: plan.splits,
            parts: plan.parts,
            columns: plan.columns,
            bundles: plan.columns.div_ceil(BUNDLE_TILES),
            inputs: shapes.inputs,
            blocks_in: shapes.blocks_in,
            slices: shapes.slices,
            stride_y: shapes.stride_y,
            outputs: shapes.outputs,
            column: shapes.column,
            ..Self::default()
        };
        let mut end = 0;
        for (place, outputs) in args.block_end.iter_mut().zip(shapes.outputs) {
            end += outputs.div_ceil(BLOCK_UNITS * UNIT_OUTPUTS);
            *place = end;
        }
        args
    }
}

/// Shrink, then expand; none where there is no work.
pub fn prefill_launches(args: &PrefillArgs, plan: &PrefillPlan, element: Element) -> Vec<Launch> {
    if plan.tiles.is_empty() {
        return Vec::new();
    }
    let launch = |function: [&'static str; 2], grid: [u32; 3], shared_bytes| Launch {
        module: "lora_prefill",
        function: function[(element == Element::F16) as usize],
        grid,
        block: [256, 1, 1],
        shared_bytes,
        argument: args.to_bytes(),
        overlaps_previous: true,
    };
    let blocks = args.block_end[SLICES - 1];
    vec![
        launch(
            ["lora_prefill_shrink_bf16", "lora_prefill_shrink_f16"],
            [args.tile_count * 2 * args.bundles, args.splits, 1],
            args.columns.min(BUNDLE_TILES) * SHRINK_RING_BYTES,
        ),
        launch(
            ["lora_prefill_expand_bf16", "lora_prefill_expand_f16"],
            [blocks, args.tile_count * plan.parts, 1],
            plan.slice_tiles * (TILE_ROWS / 16 / plan.parts) * 512,
        ),
    ]
}

// The kernel declares the same sizes.
const _: () = assert!(Tile::SIZE == 16 && PrefillArgs::SIZE == 176);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_the_rows() {
        let segment = |slot, row0, rows, rank| Segment { slot, row0, rows, rank };
        let segments =
            [segment(4, 0, 129, 16), segment(5, 129, 0, 16), segment(6, 129, 7, 0), segment(7, 136, 128, 24)];
        let group = Group { inputs: 4096, outputs: vec![4096, 1024, 1024] };
        let plan = plan_prefill(&segments, &group, 132).unwrap();
        let tile = |slot, row0, rows| Tile { slot, row0, rows, unused: 0 };
        assert_eq!(plan.tiles, [tile(4, 0, 128), tile(4, 128, 1), tile(7, 136, 128)]);
        assert_eq!((plan.columns, plan.slice_tiles, plan.splits), (6, 2, 8));
        assert_eq!(plan.v_bytes, 8 * 6 * 3 * 128 * 64);
        let args = PrefillArgs::of_plan(&group, &plan);
        assert_eq!((args.bundles, args.block_end), (2, [4, 5, 6]));
        let launches = prefill_launches(&args, &plan, Element::Bf16);
        assert_eq!((launches[0].grid, launches[1].grid), ([12, 8, 1], [6, 12, 1]));
        assert_eq!((plan.parts, launches[1].shared_bytes), (4, 2 * 2 * 512));
    }

    #[test]
    fn no_rows_no_launch() {
        let group = Group { inputs: 64, outputs: vec![64] };
        let plan = plan_prefill(&[], &group, 132).unwrap();
        assert_eq!(plan.v_bytes, 0);
        assert!(prefill_launches(&PrefillArgs::of_plan(&group, &plan), &plan, Element::F16).is_empty());
    }
}
