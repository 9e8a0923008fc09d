//! What happens to single rows: norm, gate, rotation.

use super::simd::{LANES, Simd};

/// `x += delta` (if there is one), then `out = x / sqrt(mean(x^2) + epsilon) * weight`.
pub struct NormItem {
    pub x: *mut f32,
    /// Null: nothing to add.
    pub delta: *const f32,
    pub weight: *const f32,
    pub out: *mut f32,
    /// A multiple of sixteen.
    pub n: usize,
    pub epsilon: f32,
}

/// # Safety
/// The instruction set of `S`; pointers valid for `n`.
#[inline(always)]
pub unsafe fn norm<S: Simd>(item: &NormItem) {
    let mut squares = S::splat(0.0);
    let mut i = 0;
    while i < item.n {
        let mut x = S::load(item.x.add(i));
        if !item.delta.is_null() {
            x = S::add(x, S::load(item.delta.add(i)));
            S::store(item.x.add(i), x);
        }
        squares = S::fma(x, x, squares);
        i += LANES;
    }
    let mean = S::sum(squares) / item.n as f32;
    let factor = S::splat(1.0 / (mean + item.epsilon).sqrt());
    let mut i = 0;
    while i < item.n {
        let x = S::mul(S::load(item.x.add(i)), factor);
        S::store(item.out.add(i), S::mul(x, S::load(item.weight.add(i))));
        i += LANES;
    }
}

/// `gate = gate / (1 + e^-gate) * up`, in place.
pub struct GateItem {
    pub gate: *mut f32,
    pub up: *const f32,
    /// A multiple of sixteen.
    pub n: usize,
}

/// # Safety
/// The instruction set of `S`; pointers valid for `n`.
#[inline(always)]
pub unsafe fn gate<S: Simd>(item: &GateItem) {
    let mut i = 0;
    while i < item.n {
        let g = S::load(item.gate.add(i));
        let sigmoid = S::add(S::splat(1.0), S::exp(S::sub(S::splat(0.0), g)));
        let silu = S::div(g, sigmoid);
        S::store(item.gate.add(i), S::mul(silu, S::load(item.up.add(i))));
        i += LANES;
    }
}

/// Rotates the pairs `(i, i + dim / 2)` of one head in place.
pub struct RotateItem {
    pub head: *mut f32,
    /// `dim / 2` each.
    pub cos: *const f32,
    pub sin: *const f32,
    pub dim: usize,
}

/// # Safety
/// Pointers valid for `dim` (`dim / 2` for the tables).
#[inline(always)]
pub unsafe fn rotate<S: Simd>(item: &RotateItem) {
    let half = item.dim / 2;
    let mut i = 0;
    while i + LANES <= half {
        let (a, b) = (S::load(item.head.add(i)), S::load(item.head.add(half + i)));
        let (cos, sin) = (S::load(item.cos.add(i)), S::load(item.sin.add(i)));
        S::store(item.head.add(i), S::sub(S::mul(a, cos), S::mul(b, sin)));
        S::store(item.head.add(half + i), S::add(S::mul(b, cos), S::mul(a, sin)));
        i += LANES;
    }
    while i < half {
        let (a, b) = (*item.head.add(i), *item.head.add(half + i));
        let (cos, sin) = (*item.cos.add(i), *item.sin.add(i));
        *item.head.add(i) = a * cos - b * sin;
        *item.head.add(half + i) = b * cos + a * sin;
        i += 1;
    }
}
