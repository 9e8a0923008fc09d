//! The buffers of a step, kept from one to the next and grown where a step is larger than any before.

use lorafleet_backend::model::Shape;

use super::kernels::attention::GroupPtr;
use super::kernels::simd::LANES;
use super::rows::{Rows, packed_floats};

/// All row-major `[rows][width]` unless said otherwise; one step's contents mean nothing to the next.
#[derive(Default)]
pub struct Scratch {
    /// The residual stream.
    pub x: Vec<f32>,
    /// What the last block adds to it, not yet added.
    pub delta: Vec<f32>,
    /// Normed rows, or the attention's result: what the next matrices take.
    pub input: Vec<f32>,
    /// The same in tiles, `[k][rows]` each.
    pub packed: Vec<f32>,
    /// Query, key and value side by side.
    pub qkv: Vec<f32>,
    /// Gate and up side by side; the gate half becomes the input of the down projection.
    pub gate_up: Vec<f32>,
    /// Low-rank intermediates of one group of matrices.
    pub low: Vec<f32>,
    pub logits: Vec<f32>,
    /// `[rows][head_dim / 2]`.
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    /// Attention weights, one part for each thread.
    pub scores: Vec<f32>,
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
        grow(&mut self.x, count * shape.hidden);
        grow(&mut self.delta, count * shape.hidden);
        grow(&mut self.input, count * widest);
        grow(&mut self.packed, packed_floats(&rows.tiles, widest.max(shape.ffn)));
        grow(&mut self.qkv, count * qkv_width(shape));
        grow(&mut self.gate_up, count * 2 * shape.ffn);
        grow(&mut self.low, count * need.low_stride);
        grow(&mut self.logits, rows.sampled.rows.len() * logits_stride(shape));
        grow(&mut self.cos, count * shape.head_dim / 2);
        grow(&mut self.sin, count * shape.head_dim / 2);
        grow(&mut self.scores, need.scores);
    }
}

pub fn qkv_width(shape: &Shape) -> usize {
    shape.query_width() + 2 * shape.kv_width()
}

/// Rows of logits are padded, so that kernels may write whole vectors.
pub fn logits_stride(shape: &Shape) -> usize {
    shape.vocabulary.next_multiple_of(LANES)
}

fn grow(buffer: &mut Vec<f32>, floats: usize) {
    if buffer.len() < floats {
        buffer.resize(floats, 0.0);
    }
}
