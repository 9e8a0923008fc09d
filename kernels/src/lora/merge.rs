//! An adapter's tensor into a weight matrix, and back.
//!
//! Rounding loses bits that no arithmetic gives back, so exact restoring is a copy: the caller keeps the old weights (in
//! device memory, or pinned on the host), merges from there into the live matrix, and restores with `decoder::pages`.

use super::UNIT_OUTPUTS;
use super::decode::Pool;
use super::layout::Projection;
use crate::launch::{DevicePtr, Element, Launch};
use crate::plain::{Plain, plain};

plain! {
    /// The argument of `merge_*`: to = from + scale B A, outputs x inputs, row by row.
    pub struct MergeArgs {
        pub from: DevicePtr,
        /// May be `from`.
        pub to: DevicePtr,
        pub pool: Pool,
        /// The `Tensor` of the adapter and this matrix.
        pub tensor: DevicePtr,
        pub inputs: u32,
        pub outputs: u32,
    }
}

/// Inputs to a CTA: a block to each of eight warps.
const CTA_INPUTS: u32 = 8 * super::BLOCK_INPUTS;
/// The y dimension of a grid.
pub const OUTPUTS_MAX: u32 = 65_535 * UNIT_OUTPUTS;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    #[error(
        "a matrix of {outputs} outputs by {inputs} inputs; both must be multiples of 8, at least 8, and outputs at most {OUTPUTS_MAX}"
    )]
    Shape { outputs: u32, inputs: u32 },
    #[error("weights at {from:#x} and {to:#x} are not at multiples of 16")]
    Place { from: DevicePtr, to: DevicePtr },
}

/// One launch for one matrix.
pub fn merge_launch(args: &MergeArgs, element: Element) -> Result<Launch, MergeError> {
    let (outputs, inputs) = (args.outputs, args.inputs);
    if [outputs, inputs].iter().any(|n| *n == 0 || !n.is_multiple_of(8)) || outputs > OUTPUTS_MAX {
        return Err(MergeError::Shape { outputs, inputs });
    }
    if !(args.from | args.to).is_multiple_of(16) {
        return Err(MergeError::Place { from: args.from, to: args.to });
    }
    Ok(Launch {
        module: "merge",
        function: match element {
            Element::Bf16 => "merge_bf16",
            Element::F16 => "merge_f16",
        },
        grid: [inputs.div_ceil(CTA_INPUTS), outputs.div_ceil(UNIT_OUTPUTS), 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        argument: args.to_bytes(),
        overlaps_previous: true,
    })
}

/// The merged weights before their one rounding: `weights` is outputs x inputs.
pub fn twin(weights: &[f64], shape: Projection, adapter: &super::twin::Weights) -> Vec<f64> {
    let (inputs, rank) = (shape.inputs as usize, adapter.rank);
    let mut merged = weights.to_vec();
    for (row, b) in merged.chunks_exact_mut(inputs.max(1)).zip(adapter.b.chunks_exact(rank.max(1))) {
        for (b, a) in b.iter().zip(adapter.a.chunks_exact(inputs.max(1))) {
            row.iter_mut().zip(a).for_each(|(w, a)| *w += adapter.scale * b * a);
        }
    }
    merged
}

// The kernel declares the same size.
const _: () = assert!(MergeArgs::SIZE == 64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ranks_by_hand() {
        let adapter =
            super::super::twin::Weights { rank: 2, scale: 0.5, a: vec![1., 2., 0., 4.], b: vec![2., 0., 1., 1.] };
        // B A = [[2, 4], [1, 6]].
        let merged = twin(&[10., 20., 30., 40.], Projection { inputs: 2, outputs: 2 }, &adapter);
        assert_eq!(merged, [11., 22., 30.5, 43.]);
    }

    #[test]
    fn the_grid_covers_the_matrix_and_strange_ones_are_refused() {
        let args = |outputs, inputs, from| MergeArgs { outputs, inputs, from, ..MergeArgs::default() };
        assert_eq!(merge_launch(&args(200, 4096, 16), Element::F16).map(|l| l.grid), Ok([16, 4, 1]));
        assert!(
            merge_launch(&args(200, 4, 16), Element::F16).unwrap_err().to_string().contains("200 outputs by 4 inputs")
        );
        assert!(merge_launch(&args(8, 8, 8), Element::Bf16).unwrap_err().to_string().contains("0x8 and 0x0"));
    }
}
