//! y += scale (x A) B for a batch in which each row may have another adapter of another rank.
//!
//! The way: `layout` puts an adapter into pages; `plan` turns a step's segments into work lists; `decode` and `prefill`
//! are the launches; `gemm` is a base product with a prefill's delta in its sums; `embedding` is LoRA on the embedding; `merge` puts
//! an adapter into weights; `twin` is what they must compute.

pub mod decode;
pub mod embedding;
pub mod layout;
pub mod merge;
pub mod plan;
pub mod prefill;

pub mod gemm;

pub mod twin;

pub use decode::{DecodeArgs, decode_launch};
pub use gemm::{GemmArgs, GemmPlan, gemm_launch, plan_gemm};
pub use layout::{Layout, LayoutError, Projection, RANK_MAX, Tensor};
pub use plan::{DecodePlan, Group, PlanError, Segment, plan_decode};
pub use prefill::{PrefillArgs, PrefillPlan, plan_prefill, plan_prefill_as, prefill_launches};

/// Projections that share an input, at most: q, k and v.
pub const SLICES: usize = 3;
/// Rows that one piece of a segment has in the decode kernel: the columns of its tensor-core product.
pub const PIECE_ROWS: u32 = 8;
/// Inputs to a block of a shrink.
pub const BLOCK_INPUTS: u32 = 32;
/// Outputs to a unit of an expand.
pub const UNIT_OUTPUTS: u32 = 64;
