//! A batch as rows: which token stands where, which rows share an adapter, how rows fall into tiles. Pure.

use std::ops::Range;

use lorafleet_backend::batch::{Batch, ResidentId};

use super::kernels::gemm::Tile;

/// Consecutive rows that use one adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    pub resident: ResidentId,
    pub rows: Range<usize>,
}

/// Every new token of the step is a row, in the order of the segments.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    pub tokens: Vec<u32>,
    pub positions: Vec<u32>,
    /// The rows of each segment.
    pub spans: Vec<Range<usize>>,
    pub groups: Vec<Group>,
    pub tiles: Vec<Tile>,
    /// The rows whose logits are asked for, as rows of their own.
    pub sampled: Sampled,
}

#[derive(Clone, Debug, Default)]
pub struct Sampled {
    /// Row of the step, and its segment.
    pub rows: Vec<(usize, usize)>,
    pub groups: Vec<Group>,
    pub tiles: Vec<Tile>,
}

impl Rows {
    pub fn of(batch: &Batch, tile_sizes: &[usize]) -> Self {
        let mut rows = Self::default();
        for (index, segment) in batch.segments.iter().enumerate() {
            let first = rows.tokens.len();
            rows.tokens.extend(&segment.tokens);
            rows.positions.extend((segment.position..).take(segment.tokens.len()));
            let end = rows.tokens.len();
            rows.spans.push(first..end);
            extend(&mut rows.groups, segment.adapter, first..end);
            if segment.sample.is_some() {
                let sampled = rows.sampled.rows.len();
                rows.sampled.rows.push((end - 1, index));
                extend(&mut rows.sampled.groups, segment.adapter, sampled..sampled + 1);
            }
        }
        rows.tiles = tiles(rows.tokens.len(), tile_sizes);
        rows.sampled.tiles = tiles(rows.sampled.rows.len(), tile_sizes);
        rows
    }

    pub fn len(&self) -> usize {
        self.tokens.len()
    }
}

fn extend(groups: &mut Vec<Group>, adapter: Option<ResidentId>, rows: Range<usize>) {
    let Some(resident) = adapter else { return };
    match groups.last_mut() {
        Some(last) if last.resident == resident && last.rows.end == rows.start => last.rows.end = rows.end,
        _ => groups.push(Group { resident, rows }),
    }
}

/// Cuts rows into tiles: as many of the largest as fill, then the smallest one that holds the rest, or the largest that
/// the rest fills. `sizes` is largest first and ends with 1.
pub fn tiles(rows: usize, sizes: &[usize]) -> Vec<Tile> {
    let mut tiles = Vec::new();
    let mut first_row = 0;
    while first_row < rows {
        let left = rows - first_row;
        let holds = sizes.iter().rev().copied().find(|size| *size >= left);
        let fills = sizes.iter().copied().find(|size| *size <= left).unwrap_or(1);
        // A padded tile costs as much as a full one: taken where less than a third of it is padding.
        let size = match holds {
            Some(size) if 3 * (size - left) < size => size,
            _ => fills,
        };
        let valid = size.min(left);
        tiles.push(Tile { rows: size, first_row, valid, offset: 0 });
        first_row += valid;
    }
    tiles
}

/// The tiles for rows of `k` floats: where each begins in the packed rows.
pub fn placed(tiles: &[Tile], k: usize) -> Vec<Tile> {
    let mut offset = 0;
    let place = |tile: &Tile| {
        let placed = Tile { offset, ..*tile };
        offset += tile.rows * k;
        placed
    };
    tiles.iter().map(place).collect()
}

/// Floats that packed rows of `k` take.
pub fn packed_floats(tiles: &[Tile], k: usize) -> usize {
    tiles.iter().map(|tile| tile.rows * k).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_row_once() {
        for sizes in [&[24usize, 16, 12, 8, 6, 4, 3, 2, 1][..], &[4, 3, 2, 1], &[1]] {
            for rows in 0..200 {
                let tiles = tiles(rows, sizes);
                let mut next = 0;
                for tile in &tiles {
                    assert!(sizes.contains(&tile.rows) && tile.valid >= 1 && tile.valid <= tile.rows);
                    assert_eq!(tile.first_row, next);
                    next += tile.valid;
                }
                assert_eq!(next, rows);
            }
        }
    }
}
