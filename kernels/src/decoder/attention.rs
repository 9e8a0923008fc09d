//! Attention over a sequence's pages, for decode tokens and chunks of a prompt alike.

use super::Round;
use super::kv::Kv;
use crate::launch::{DevicePtr, Element, Launch};
use crate::plain::{Plain, plain};

/// Rows of the tensor-core product that a tile fills: query heads of one KV head times tokens.
pub const LINES: u32 = 16;
pub const HEAD_DIMS: [u32; 5] = [64, 80, 96, 128, 256];
const WARPS: u32 = 4;
/// Parts that a sequence is cut into, at most.
const SPLITS_MAX: u32 = 64;
/// Tokens of a part, at least: sixteen for each warp of a CTA.
const PART_TOKENS: u32 = 64;
/// CTAs that an SM holds, by their registers.
const CTAS_PER_SM: u32 = 2;

plain! {
    /// Tokens of one sequence that stand side by side in the batch.
    pub struct Tile {
        pub row: u32,
        pub tokens: u32,
        /// Of the first token in its sequence.
        pub position: i32,
        /// Where the sequence's page list starts.
        pub list: u32,
    }
}

plain! {
    /// The argument of `attention_*`.
    pub struct AttentionArgs {
        /// Rows of `stride_q` elements; the query heads come first.
        pub q: DevicePtr,
        /// Rows of query_heads * head_dim.
        pub y: DevicePtr,
        pub tiles: DevicePtr,
        /// f32 scratch of `parts_bytes`.
        pub parts: DevicePtr,
        pub kv: Kv,
        pub query_heads: u32,
        pub stride_q: u32,
        pub splits: u32,
        /// How many tokens back a token sees, itself included; 0: all.
        pub window: u32,
        pub scale: f32,
        /// 0: none.
        pub soft_cap: f32,
        pub tile_count: u32,
        pub unused: u32,
    }
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AttentionError {
    #[error("head dimension {found} is none of {known:?}")]
    HeadDim { found: u32, known: &'static [u32] },
    #[error("{query_heads} query heads over {kv_heads} KV heads; a KV head can have 1 to {LINES}")]
    Heads { query_heads: u32, kv_heads: u32 },
    #[error("pages hold {found} tokens, not a multiple of 16")]
    PageTokens { found: u32 },
    #[error("a sequence cut into {found} parts; at most {most}")]
    Splits { found: u32, most: u32 },
    #[error("{found} tiles; a launch takes {most}")]
    Tiles { found: u32, most: u32 },
    #[error("scale {found} is not above 0 and finite")]
    Scale { found: f32 },
}

/// Tokens of one sequence from `position` on, cut into tiles of `lines`: `LINES`, or another kernel's.
pub fn cut_tiles(
    row: u32,
    tokens: u32,
    position: i32,
    list: u32,
    heads_per_kv: u32,
    lines: u32,
) -> impl Iterator<Item = Tile> {
    let each = (lines / heads_per_kv.max(1)).max(1);
    (0..tokens).step_by(each as usize).map(move |at| Tile {
        row: row + at,
        tokens: each.min(tokens - at),
        position: position + at as i32,
        list,
    })
}

/// Parts that the longest sequence of a batch is cut into: as many as run at the same time.
pub fn attention_splits(tiles: u32, kv_heads: u32, longest: u32, sms: u32) -> u32 {
    let wanted = sms * CTAS_PER_SM / (tiles * kv_heads).max(1);
    wanted.clamp(1, (longest / PART_TOKENS).clamp(1, SPLITS_MAX))
}

/// Scratch for the parts; none is used where there is one part.
pub fn parts_bytes(tiles: u32, kv_heads: u32, splits: u32, head_dim: u32) -> u64 {
    if splits == 1 { 0 } else { u64::from(tiles * kv_heads * splits) * u64::from(LINES * (head_dim + 2)) * 4 }
}

/// What every kernel of attention asks of its arguments; the place of the head dimension among `known`.
pub(super) fn check_shape(args: &AttentionArgs, known: &'static [u32]) -> Result<usize, AttentionError> {
    let (kv, query_heads) = (&args.kv, args.query_heads);
    let index = known.iter().position(|d| *d == kv.head_dim);
    let index = index.ok_or(AttentionError::HeadDim { found: kv.head_dim, known })?;
    if kv.heads == 0 || !query_heads.is_multiple_of(kv.heads) || !(1..=LINES).contains(&(query_heads / kv.heads)) {
        return Err(AttentionError::Heads { query_heads, kv_heads: kv.heads });
    }
    if kv.page_tokens == 0 || !kv.page_tokens.is_multiple_of(16) {
        return Err(AttentionError::PageTokens { found: kv.page_tokens });
    }
    Ok(index)
}

/// One launch, or two where sequences are cut into parts.
pub fn attention_launches(args: &AttentionArgs, element: Element) -> Result<Vec<Launch>, AttentionError> {
    let (kv, index) = (&args.kv, check_shape(args, &HEAD_DIMS)?);
    let names: [&'static str; 5] = match element {
        Element::Bf16 => {
            ["attention_bf16_64", "attention_bf16_80", "attention_bf16_96", "attention_bf16_128", "attention_bf16_256"]
        }
        Element::F16 => {
            ["attention_f16_64", "attention_f16_80", "attention_f16_96", "attention_f16_128", "attention_f16_256"]
        }
    };
    let merge = match element {
        Element::Bf16 => "attention_merge_bf16",
        Element::F16 => "attention_merge_f16",
    };
    if args.splits > SPLITS_MAX {
        return Err(AttentionError::Splits { found: args.splits, most: SPLITS_MAX });
    }
    let launch = |function, depth, shared_bytes| Launch {
        module: "attention",
        function,
        grid: [args.tile_count, kv.heads, depth],
        block: [WARPS * 32, 1, 1],
        shared_bytes,
        argument: args.to_bytes(),
        overlaps_previous: true,
    };
    let mut launches = vec![launch(names[index], args.splits, WARPS * LINES * (kv.head_dim + 2) * 4)];
    if args.splits > 1 {
        launches.push(launch(merge, LINES, 0));
    }
    Ok(launches)
}

/// One query line over the keys and values it may see, oldest first. `cap` 0: none.
pub fn twin(query: &[f64], keys: &[Vec<f64>], values: &[Vec<f64>], scale: f64, cap: f64, round: Round) -> Vec<f64> {
    let score = |key: &Vec<f64>| {
        let s = scale * key.iter().zip(query).map(|(k, q)| k * q).sum::<f64>();
        if cap == 0.0 { s } else { cap * (s / cap).tanh() }
    };
    let scores: Vec<f64> = keys.iter().map(score).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
    let all: f64 = weights.iter().sum();
    let mut out = vec![0.0; query.len()];
    for (weight, value) in weights.iter().zip(values) {
        out.iter_mut().zip(value).for_each(|(o, v)| *o += weight / all * v);
    }
    out.into_iter().map(round).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_scores_average() {
        let (keys, values) = (vec![vec![1.0], vec![1.0]], vec![vec![2.0], vec![4.0]]);
        assert_eq!(twin(&[3.0], &keys, &values, 1.0, 0.0, |v| v), [3.0]);
        // A cap pulls two scores together.
        let keys = vec![vec![0.0], vec![100.0]];
        let capped = twin(&[1.0], &keys, &values, 1.0, 1e-9, |v| v);
        assert!((capped[0] - 3.0).abs() < 1e-6);
    }

    #[test]
    fn tiles_hold_sixteen_lines() {
        let tiles: Vec<_> = cut_tiles(5, 10, 100, 7, 4, LINES).collect();
        let tile = |row, tokens, position| Tile { row, tokens, position, list: 7 };
        assert_eq!(tiles, [tile(5, 4, 100), tile(9, 4, 104), tile(13, 2, 108)]);
        assert_eq!(cut_tiles(0, 3, 0, 0, 16, LINES).count(), 3);
    }

    #[test]
    fn splits_fill_the_device() {
        assert_eq!(attention_splits(1, 8, 8192, 132), 33);
        assert_eq!(attention_splits(16, 8, 4096, 132), 2);
        assert_eq!(attention_splits(1, 8, 1024, 132), 16);
        assert_eq!(attention_splits(256, 8, 8192, 132), 1);
        assert_eq!(attention_splits(1, 8, 100, 132), 1);
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let args = |head_dim, query_heads, heads, page_tokens| AttentionArgs {
            kv: Kv { head_dim, heads, page_tokens, ..Kv::default() },
            query_heads,
            splits: 1,
            ..AttentionArgs::default()
        };
        let text = |a: &AttentionArgs| attention_launches(a, Element::Bf16).unwrap_err().to_string();
        assert!(text(&args(72, 8, 2, 16)).contains("72"));
        assert!(text(&args(64, 7, 2, 16)).contains("7 query heads over 2"));
        assert!(text(&args(64, 34, 2, 16)).contains("1 to 16"));
        assert!(text(&args(64, 8, 2, 24)).contains("24 tokens"));
        assert_eq!(attention_launches(&args(64, 8, 2, 16), Element::F16).unwrap().len(), 1);
    }
}
