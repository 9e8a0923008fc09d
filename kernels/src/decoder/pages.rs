//! Copies between pages, staging buffers and mapped host memory.

use crate::launch::{DevicePtr, Launch};
use crate::plain::{Plain, plain};

/// Addresses and lengths are multiples of this.
pub const STEP: u64 = 16;
/// Pieces of one launch: the y dimension of a grid.
pub const PIECES_MAX: usize = 65_535;
const PIECE_WORDS_OF_A_CTA: u64 = 256 * 4 * 4;

plain! {
    /// One copy. Pieces of a launch must not overlap.
    pub struct Piece {
        pub from: DevicePtr,
        pub to: DevicePtr,
        pub bytes: u64,
    }
}

plain! {
    /// The argument of `pages_copy`.
    pub struct PagesArgs {
        /// `Piece`
        pub pieces: DevicePtr,
        pub count: u32,
        pub unused: u32,
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PagesError {
    #[error("piece {index}: from {from:#x}, to {to:#x} or {bytes} bytes is not a multiple of {STEP}")]
    Step { index: usize, from: u64, to: u64, bytes: u64 },
    #[error("{found} pieces in one launch; at most {PIECES_MAX}")]
    Pieces { found: usize },
}

/// `args.pieces` is where the caller has put these `pieces`; `sms` bounds the CTAs. Nothing where there are none.
pub fn pages_launch(pieces: &[Piece], args: &PagesArgs, sms: u32) -> Result<Option<Launch>, PagesError> {
    if pieces.len() > PIECES_MAX {
        return Err(PagesError::Pieces { found: pieces.len() });
    }
    for (index, piece) in pieces.iter().enumerate() {
        if (piece.from | piece.to | piece.bytes) % STEP != 0 {
            return Err(PagesError::Step { index, from: piece.from, to: piece.to, bytes: piece.bytes });
        }
    }
    let Some(longest) = pieces.iter().map(|p| p.bytes / STEP).max() else { return Ok(None) };
    let each = (u64::from(sms) * 8).div_ceil(pieces.len() as u64).max(1);
    let ctas = longest.div_ceil(PIECE_WORDS_OF_A_CTA).clamp(1, each);
    let args = PagesArgs { count: pieces.len() as u32, ..*args };
    Ok(Some(Launch {
        module: "pages",
        function: "pages_copy",
        grid: [ctas as u32, args.count, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        argument: args.to_bytes(),
        overlaps_previous: true,
    }))
}

/// The pieces that bring an adapter from `staged`, page after page, to the pages `owned` of a pool at `base`.
pub fn scatter(staged: DevicePtr, owned: &[u32], base: DevicePtr, page_bytes: u64) -> Vec<Piece> {
    let piece = |(i, page): (u64, &u32)| Piece {
        from: staged + i * page_bytes,
        to: base + u64::from(*page) * page_bytes,
        bytes: page_bytes,
    };
    (0..).zip(owned).map(piece).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scatter_follows_the_list() {
        let pieces = scatter(1024, &[7, 0], 1 << 20, 512);
        let expect = [(1024, (1 << 20) + 7 * 512), (1536, 1 << 20)];
        assert_eq!(pieces, expect.map(|(from, to)| Piece { from, to, bytes: 512 }));
    }

    #[test]
    fn the_grid_follows_the_work() {
        let piece = |bytes| Piece { from: 0, to: 1 << 30, bytes };
        let grid = |pieces: &[Piece]| pages_launch(pieces, &PagesArgs::default(), 132).unwrap().map(|l| l.grid);
        assert_eq!(grid(&[]), None);
        assert_eq!(grid(&[piece(16)]), Some([1, 1, 1]));
        assert_eq!(grid(&[piece(2 << 20); 40]), Some([27, 40, 1]));
        let e = pages_launch(&[piece(24)], &PagesArgs::default(), 132).unwrap_err();
        assert!(e.to_string().contains("24 bytes"));
    }
}
