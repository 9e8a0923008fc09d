//! The buffers of a step, kept from one to the next and grown where a step is larger than any before.

use lorafleet_backend::model::Shape;

use super::kernels::attention::GroupPtr;
use super::kernels::simd::LANES;
use super::memory::Floats;
use super::rows::{Rows, packed_floats};

/// All row-major `[rows][width]` unless said otherwise; one step's contents mean nothing to the next.
#[derive(Default)]
pub struct Scratch {
    /// The residual stream.
    pub x: Floats,
    /// What the last block adds to it, not yet added.
    pub delta: Floats,
    /// Normed rows, or the attention's result: what the next matrices take.
    pub input: Floats,
    /// The same in tiles, `[k][rows]` each.
    pub packed: Floats,
    /// Query, key and value side by side.
    pub qkv: Floats,
    /// Gate and up side by side; the gate half becomes the input of the down projection.
    pub gate_up: Floats,
    /// Low-rank intermediates of one group of matrices.
    pub low: Floats,
    pub logits: Floats,
    /// `[rows][head_dim / 2]`.
    pub cos: Floats,
    pub sin: Floats,
    /// Attention weights, one part for each thread.
    pub scores: Floats,
    /// The groups of sixteen tokens of every segment's sequence, one segment after the other.
    pub groups: Vec<GroupPtr>,
}

/// Widths that the buffers of a step need.
pub struct Need {
    pub low_stride: usize,
    pub scores: usize,
}

impl Scratch {
    pub fn reserve(&mut self, shape: &Shape, rows: &Rows, need: &Need) {
        let count = rows.len();
        let widest = shape.hidden.max(shape.query_width());
        self.x.grow(count * shape.hidden);
        self.delta.grow(count * shape.hidden);
        self.input.grow(count * widest);
        self.packed.grow(packed_floats(&rows.tiles, widest.max(shape.ffn)));
        self.qkv.grow(count * qkv_width(shape));
        self.gate_up.grow(count * 2 * shape.ffn);
        self.low.grow(count * need.low_stride);
        self.logits.grow(rows.sampled.rows.len() * logits_stride(shape));
        self.cos.grow(count * shape.head_dim / 2);
        self.sin.grow(count * shape.head_dim / 2);
        self.scores.grow(need.scores);
    }
}

pub fn qkv_width(shape: &Shape) -> usize {
    shape.query_width() + 2 * shape.kv_width()
}

/// Rows of logits are padded, so that kernels may write whole vectors.
pub fn logits_stride(shape: &Shape) -> usize {
    shape.vocabulary.next_multiple_of(LANES)
}
