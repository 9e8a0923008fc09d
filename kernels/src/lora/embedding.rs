//! LoRA of an embedding, as PEFT defines it: y += scale B A[:, token]. The token's column of A takes the shrink's place.

use super::PIECE_ROWS;
use super::decode::Pool;
use super::plan::Segment;
use super::twin::Weights;
use crate::launch::{DevicePtr, Element, Launch};
use crate::plain::{Plain, plain};

plain! {
    /// One to eight rows of one adapter.
    pub struct Piece {
        pub slot: u32,
        /// First entry of the list of rows.
        pub row0: u32,
        pub rows: u32,
        pub unused: u32,
    }
}

plain! {
    /// The argument of `embedding_lora_*`.
    pub struct EmbeddingLoraArgs {
        /// Rows of `width`.
        pub y: DevicePtr,
        /// u32, by row of y.
        pub tokens: DevicePtr,
        /// `Piece`
        pub pieces: DevicePtr,
        /// i32: rows of y by piece; below zero: none.
        pub rows: DevicePtr,
        pub pool: Pool,
        /// `Tensor`s: the embedding's is at `slot * stride + place`.
        pub tensors: DevicePtr,
        pub stride: u32,
        pub place: u32,
        pub vocabulary: u32,
        /// A's inputs in the layout: the vocabulary rounded up to a multiple of 8.
        pub inputs: u32,
        /// A multiple of 8.
        pub width: u32,
        /// Times the adapter's own: what the model multiplies its embedding by.
        pub scale: f32,
    }
}

/// Pieces of one launch: the y dimension of a grid.
pub const PIECES_MAX: u32 = 65_535;
/// Outputs to a CTA: a unit to each of eight warps.
const CTA_OUTPUTS: u32 = 8 * super::UNIT_OUTPUTS;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EmbeddingLoraError {
    #[error("rows of {width} elements; they must be a multiple of 8, at least 8")]
    Width { width: u32 },
    #[error("A has {inputs} inputs for a vocabulary of {vocabulary}; they must be a multiple of 8 that holds it")]
    Inputs { inputs: u32, vocabulary: u32 },
    #[error("the batch has {found} pieces of {PIECE_ROWS} rows; at most {PIECES_MAX}")]
    Pieces { found: u32 },
}

/// Segments cut into pieces. Those of rank 0 take no part.
pub fn cut_pieces(segments: &[Segment]) -> Vec<Piece> {
    let pieces = |s: &Segment| {
        let Segment { slot, row0, rows, rank } = *s;
        let rows = if rank == 0 { 0 } else { rows };
        (0..rows).step_by(PIECE_ROWS as usize).map(move |at| Piece {
            slot,
            row0: row0 + at,
            rows: PIECE_ROWS.min(rows - at),
            unused: 0,
        })
    };
    segments.iter().flat_map(pieces).collect()
}

/// Nothing where there are no pieces.
pub fn embedding_lora_launch(
    args: &EmbeddingLoraArgs,
    pieces: u32,
    element: Element,
) -> Result<Option<Launch>, EmbeddingLoraError> {
    let EmbeddingLoraArgs { width, inputs, vocabulary, .. } = *args;
    if width == 0 || !width.is_multiple_of(8) {
        return Err(EmbeddingLoraError::Width { width });
    }
    if !inputs.is_multiple_of(8) || inputs < vocabulary {
        return Err(EmbeddingLoraError::Inputs { inputs, vocabulary });
    }
    if pieces > PIECES_MAX {
        return Err(EmbeddingLoraError::Pieces { found: pieces });
    }
    Ok((pieces > 0).then(|| Launch {
        module: "embedding_lora",
        function: match element {
            Element::Bf16 => "embedding_lora_bf16",
            Element::F16 => "embedding_lora_f16",
        },
        grid: [width.div_ceil(CTA_OUTPUTS), pieces, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        argument: args.to_bytes(),
        overlaps_previous: true,
    }))
}

/// One row's delta: A is rank x vocabulary.
pub fn twin(token: usize, vocabulary: usize, adapter: &Weights) -> Vec<f64> {
    let column: Vec<f64> =
        adapter.a.chunks_exact(vocabulary.max(1)).map(|row| row.get(token).copied().unwrap_or(0.0)).collect();
    let product = |b: &[f64]| adapter.scale * b.iter().zip(&column).map(|(b, a)| b * a).sum::<f64>();
    adapter.b.chunks_exact(adapter.rank.max(1)).map(product).collect()
}

// The kernel declares the same sizes.
const _: () = assert!(Piece::SIZE == 16 && EmbeddingLoraArgs::SIZE == 96);

#[cfg(test)]
mod tests {
    use super::*;

    /// A one-hot row through the definition of LoRA gives the same.
    #[test]
    fn the_column_is_a_one_hot_product() {
        let (rank, vocabulary) = (2, 3);
        let w = Weights { rank, scale: 0.5, a: vec![1., 2., 3., 4., 5., 6.], b: vec![1., 0., 1., 1., 2., -1.] };
        for token in 0..vocabulary {
            let one_hot: Vec<f64> = (0..vocabulary).map(|k| f64::from(u8::from(k == token))).collect();
            assert_eq!(twin(token, vocabulary, &w), super::super::twin::delta(&one_hot, &w));
        }
        assert_eq!(twin(9, vocabulary, &w), [0.0; 3]);
    }

    #[test]
    fn pieces_hold_eight_rows() {
        let segment = |slot, row0, rows, rank| Segment { slot, row0, rows, rank };
        let pieces = cut_pieces(&[segment(3, 5, 17, 16), segment(1, 22, 4, 0), segment(2, 26, 1, 8)]);
        let found: Vec<_> = pieces.iter().map(|p| (p.slot, p.row0, p.rows)).collect();
        assert_eq!(found, [(3, 5, 8), (3, 13, 8), (3, 21, 1), (2, 26, 1)]);
    }

    #[test]
    fn strange_shapes_are_refused() {
        let launch = |width, inputs, vocabulary, pieces| {
            let args = EmbeddingLoraArgs { width, inputs, vocabulary, ..EmbeddingLoraArgs::default() };
            embedding_lora_launch(&args, pieces, Element::Bf16)
        };
        assert_eq!(launch(576, 16, 9, 2).unwrap().map(|l| l.grid), Some([2, 2, 1]));
        assert_eq!(launch(576, 16, 9, 0), Ok(None));
        assert!(launch(12, 16, 9, 1).unwrap_err().to_string().contains("12 elements"));
        assert!(launch(8, 8, 9, 1).unwrap_err().to_string().contains("8 inputs for a vocabulary of 9"));
        assert!(launch(8, 16, 9, 70_000).unwrap_err().to_string().contains("70000 pieces"));
    }
}
