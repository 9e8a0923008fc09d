//! The prefill launches: shrink, then expand, for segments long enough to fill tensor-core tiles with rows.

use super::decode::{DecodeArgs, Pool};
use super::layout::{RANK_MAX, tiles};
use super::plan::{Group, PlanError, Segment};
use super::{SLICES, UNIT_OUTPUTS};
use crate::launch::{DevicePtr, Element, Launch};
use crate::plain::{Plain, plain};
use crate::tuning::{Shrink, prefill_shrink, prefill_splits, prefill_units};

pub const TILE_ROWS: u32 = 128;
/// Shared memory of one rank tile in the shrink's ring: three stages of four blocks of two fragments.
const RING_TILE_BYTES: u32 = 3 * 4 * 2 * 512;
/// The y dimension of a grid.
const TILES_MAX: usize = 65_535;

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
        /// Scratch of `PrefillPlan::v_bytes`.
        pub v: DevicePtr,
        /// Scratch of `PrefillPlan::sums_bytes`.
        pub sums: DevicePtr,
        /// u32, `PrefillPlan::counters` of them: zero before the first launch, and left zero by every one.
        pub counters: DevicePtr,
        pub splits: u32,
        pub unused: u32,
        pub columns: u32,
        pub bundles: u32,
        pub bundle_tiles: u32,
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
        /// Of 64 outputs, that a CTA of the expand takes: 2, 4, 8 or 16.
        pub units: u32,
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
    pub shrink: Shrink,
    /// Parts that the inputs are cut into for the shrink.
    pub splits: u32,
    /// Of 64 outputs, that a CTA of the expand takes.
    pub units: u32,
    /// Scratch for the shrink's results.
    pub v_bytes: u64,
    /// Scratch for the sums of parts; none where there is one part.
    pub sums_bytes: u64,
    /// Counters of arrivals at them.
    pub counters: u32,
}

/// Cuts segments into tiles, by the shrink that measurements chose. Empty segments and those of rank 0 take no part.
pub fn plan_prefill(segments: &[Segment], group: &Group, sms: u32) -> Result<PrefillPlan, PlanError> {
    plan_prefill_as(segments, group, sms, prefill_shrink)
}

/// The same by another shrink, chosen from the rank tiles of all slices.
pub fn plan_prefill_as(
    segments: &[Segment],
    group: &Group,
    sms: u32,
    shrink_of: impl Fn(u32) -> Shrink,
) -> Result<PrefillPlan, PlanError> {
    if group.outputs.is_empty() || group.outputs.len() > SLICES {
        return Err(PlanError::Slices { found: group.outputs.len() });
    }
    let (mut cut, mut slice_tiles) = (Vec::new(), 0);
    for (index, segment) in segments.iter().enumerate() {
        if segment.rank > RANK_MAX {
            return Err(PlanError::Rank { segment: index, rank: segment.rank, most: RANK_MAX });
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
    let (tile_count, columns) = (cut.len() as u64, slice_tiles * group.outputs.len() as u32);
    let shrink = shrink_of(columns);
    let ctas = cut.len() as u32 * (TILE_ROWS / shrink.rows) * columns.div_ceil(shrink.bundle_tiles.max(1));
    let splits = prefill_splits(ctas, group.inputs.div_ceil(super::BLOCK_INPUTS), shrink.ctas_per_sm * sms);
    let units: u32 = group.outputs.iter().map(|n| n.div_ceil(UNIT_OUTPUTS)).sum();
    let tile_bytes = u64::from(TILE_ROWS) * 16 * 2;
    let sums = u64::from(ctas * splits * (shrink.rows / 16) * shrink.bundle_tiles) * 16 * 16 * 4;
    Ok(PrefillPlan {
        tiles: cut,
        columns,
        slice_tiles,
        shrink,
        splits,
        units: prefill_units(tile_count as u32 * units, slice_tiles, sms),
        v_bytes: tile_count * u64::from(columns) * tile_bytes,
        sums_bytes: if splits == 1 { 0 } else { sums },
        counters: ctas,
    })
}

impl PrefillArgs {
    /// The fields that group and plan fix.
    pub fn of_plan(group: &Group, plan: &PrefillPlan) -> Self {
        let shapes = DecodeArgs::of_group(group);
        let mut args = Self {
            splits: plan.splits,
            columns: plan.columns,
            bundles: plan.columns.div_ceil(plan.shrink.bundle_tiles.max(1)),
            bundle_tiles: plan.shrink.bundle_tiles,
            units: plan.units,
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
            end += outputs.div_ceil(plan.units * UNIT_OUTPUTS);
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
    let (shrink, tiles) = (&plan.shrink, plan.tiles.len() as u32);
    let (names, parts) = match shrink.wide {
        true => (["lora_prefill_shrink_wide_bf16", "lora_prefill_shrink_wide_f16"], 1),
        false => (["lora_prefill_shrink_bf16", "lora_prefill_shrink_f16"], 2),
    };
    vec![
        launch(
            names,
            [tiles * (TILE_ROWS / shrink.rows) * args.bundles, args.splits, 1],
            parts * shrink.bundle_tiles * RING_TILE_BYTES,
        ),
        launch(
            ["lora_prefill_expand_bf16", "lora_prefill_expand_f16"],
            [args.block_end[SLICES - 1], tiles, 1],
            plan.slice_tiles * (plan.units * 4 * 512 + TILE_ROWS * 16 * 2),
        ),
    ]
}

// The kernel declares the same sizes.
const _: () = assert!(Tile::SIZE == 16 && PrefillArgs::SIZE == 192);

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
        assert_eq!((plan.v_bytes, plan.sums_bytes, plan.counters), (3 * 6 * 4096, 3 * 8 * 8 * 6 * 1024, 3));
        let args = PrefillArgs::of_plan(&group, &plan);
        assert_eq!((args.bundles, args.block_end), (1, [16, 20, 24]));
        let launches = prefill_launches(&args, &plan, Element::Bf16);
        assert_eq!((launches[0].grid, launches[1].grid), ([3, 8, 1], [24, 3, 1]));
        assert_eq!((launches[0].shared_bytes, launches[1].shared_bytes), (6 * 12_288, 2 * (4 * 2048 + 4096)));
    }

    #[test]
    fn no_rows_no_launch() {
        let group = Group { inputs: 64, outputs: vec![64] };
        let plan = plan_prefill(&[], &group, 132).unwrap();
        assert_eq!(plan.v_bytes, 0);
        assert!(prefill_launches(&PrefillArgs::of_plan(&group, &plan), &plan, Element::F16).is_empty());
    }
}
