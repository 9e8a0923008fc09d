//! Attention for chunks of a prompt on Hopper: tiles of 128 lines by warpgroup products. The arguments are attention's.

use super::attention::{AttentionArgs, AttentionError, Tile, check_shape};
use crate::launch::{Element, Launch};
use crate::plain::Plain;

/// Rows of the tensor-core product that a tile fills, for `cut_tiles`.
pub const CHUNK_LINES: u32 = 128;
pub const CHUNK_HEAD_DIMS: [u32; 2] = [64, 128];
/// Tokens of a block of keys or values, and stages of each in shared memory.
const BLOCK_TOKENS: u32 = 128;
const STAGES: u32 = 2;
/// So many times the KV heads are counted in 32 bits.
const TILES_MAX: u32 = 65_535;

/// The tiles that take longest first, so that the last to finish are short.
pub fn longest_first(tiles: &mut [Tile]) {
    tiles.sort_by_key(|tile| std::cmp::Reverse(tile.position));
}

/// One launch over tiles of `CHUNK_LINES`, by a CTA to each of `sms` multiprocessors. Only for images of sm_90a; `splits` is 1.
pub fn attention_chunk_launch(args: &AttentionArgs, element: Element, sms: u32) -> Result<Launch, AttentionError> {
    check_shape(args, &CHUNK_HEAD_DIMS)?;
    if args.splits != 1 {
        return Err(AttentionError::Splits { found: args.splits, most: 1 });
    }
    if args.tile_count > TILES_MAX {
        return Err(AttentionError::Tiles { found: args.tile_count, most: TILES_MAX });
    }
    if !(args.scale > 0.0 && args.scale.is_finite()) {
        return Err(AttentionError::Scale { found: args.scale });
    }
    let function = match (element, args.kv.head_dim) {
        (Element::Bf16, 64) => "attention_chunk_bf16_64",
        (Element::Bf16, _) => "attention_chunk_bf16_128",
        (Element::F16, 64) => "attention_chunk_f16_64",
        (Element::F16, _) => "attention_chunk_f16_128",
    };
    Ok(Launch {
        module: "attention_chunk_sm90a",
        function,
        grid: [(args.kv.heads * args.tile_count).clamp(1, sms.max(1)), 1, 1],
        block: [384, 1, 1],
        // Queries of two tiles, then stages of keys and of values; and up to 1,023 bytes to align them.
        shared_bytes: (2 + 2 * STAGES) * BLOCK_TOKENS * args.kv.head_dim * 2 + 1024,
        argument: args.to_bytes(),
        overlaps_previous: true,
    })
}

#[cfg(test)]
mod tests {
    use super::super::attention::cut_tiles;
    use super::super::kv::Kv;
    use super::*;

    fn args() -> AttentionArgs {
        let kv = Kv { head_dim: 128, heads: 8, page_tokens: 16, ..Kv::default() };
        AttentionArgs { kv, query_heads: 32, splits: 1, scale: 0.1, tile_count: 4, ..AttentionArgs::default() }
    }

    #[test]
    fn tiles_hold_128_lines_longest_first() {
        let mut tiles: Vec<_> = cut_tiles(0, 70, 0, 0, 4, CHUNK_LINES).chain(cut_tiles(70, 9, 50, 5, 4, 128)).collect();
        longest_first(&mut tiles);
        let shape: Vec<_> = tiles.iter().map(|t| (t.row, t.tokens, t.position)).collect();
        assert_eq!(shape, [(64, 6, 64), (70, 9, 50), (32, 32, 32), (0, 32, 0)]);
    }

    #[test]
    fn one_launch() {
        let launch = attention_chunk_launch(&args(), Element::F16, 132).unwrap();
        assert_eq!((launch.function, launch.grid), ("attention_chunk_f16_128", [32, 1, 1]));
        assert_eq!(attention_chunk_launch(&args(), Element::Bf16, 20).unwrap().grid, [20, 1, 1]);
        // What an SM of sm_90 gives to one CTA.
        assert!(launch.shared_bytes <= 227 << 10);
    }

    #[test]
    fn what_it_cannot_is_refused() {
        let text = |a| attention_chunk_launch(&a, Element::Bf16, 132).unwrap_err().to_string();
        assert!(text(AttentionArgs { kv: Kv { head_dim: 96, ..args().kv }, ..args() }).contains("96"));
        assert!(text(AttentionArgs { splits: 3, ..args() }).contains("3 parts"));
        assert!(text(AttentionArgs { tile_count: 70_000, ..args() }).contains("70000"));
        assert!(text(AttentionArgs { scale: f32::NAN, ..args() }).contains("NaN"));
    }
}
