//! Rows of the embedding table.

use crate::launch::{DevicePtr, Element, Launch};
use crate::plain::{Plain, plain};

plain! {
    /// The argument of `embedding_*`. y = scale * table[token]; a token outside of the vocabulary gives zeros.
    pub struct EmbeddingArgs {
        pub table: DevicePtr,
        /// u32
        pub tokens: DevicePtr,
        pub y: DevicePtr,
        pub rows: u32,
        /// A multiple of 8.
        pub width: u32,
        pub vocabulary: u32,
        pub scale: f32,
    }
}

/// Rows of one launch: the y dimension of a grid.
pub const ROWS_MAX: u32 = 65_535;

/// Nothing where the width is not a multiple of 8, or there are no rows or more than `ROWS_MAX`.
pub fn embedding_launch(args: &EmbeddingArgs, element: Element) -> Option<Launch> {
    if args.width == 0 || !args.width.is_multiple_of(8) || args.rows == 0 || args.rows > ROWS_MAX {
        return None;
    }
    let threads = (args.width / 8).next_multiple_of(32).min(256);
    Some(Launch {
        module: "embedding",
        function: match element {
            Element::Bf16 => "embedding_bf16",
            Element::F16 => "embedding_f16",
        },
        grid: [(args.width / 8).div_ceil(threads), args.rows, 1],
        block: [threads, 1, 1],
        shared_bytes: 0,
        argument: args.to_bytes(),
        overlaps_previous: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grid_covers_the_row() {
        let launch =
            |width, rows| embedding_launch(&EmbeddingArgs { width, rows, ..EmbeddingArgs::default() }, Element::F16);
        let covered = launch(4096, 3).map(|l| (l.grid, l.block));
        assert_eq!(covered, Some(([2, 3, 1], [256, 1, 1])));
        assert!(launch(12, 1).is_none() && launch(64, 0).is_none() && launch(64, 70_000).is_none());
    }
}
