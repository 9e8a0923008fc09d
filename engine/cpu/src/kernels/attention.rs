//! Causal attention of some query heads that share one KV head, over paged keys and values.
//!
//! `out = sum over t of softmax(scale * q . k[t]) * v[t]`, t = 0 ..= position. Keys lie as `[dim][16 tokens]`, values as
//! `[16 tokens][dim]` in groups of sixteen tokens. Every query walks its own prefix in the same order, so its bits do
//! not depend on how a prompt was cut into chunks or on its neighbours.

use super::simd::{LANES, Simd};

/// A group of sixteen tokens in its page.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct GroupPtr(pub *mut f32);

// SAFETY: pages never move; a step writes the groups of its new tokens before any kernel reads them.
unsafe impl Send for GroupPtr {}
// SAFETY: as above.
unsafe impl Sync for GroupPtr {}

pub struct AttentionItem<'a> {
    /// One head of one row each.
    pub queries: &'a [Query],
    pub head_dim: usize,
    pub scale: f32,
    /// Where the sequence's groups of sixteen tokens start.
    pub groups: &'a [GroupPtr],
    /// From there to this layer's and KV head's keys, in floats; its values lie `values` floats behind them.
    pub offset: usize,
    pub values: usize,
    /// Room for `queries.len() * scores_stride` floats.
    pub scores: *mut f32,
    /// A multiple of sixteen, at least the longest prefix.
    pub scores_stride: usize,
}

#[derive(Clone, Copy)]
pub struct Query {
    pub q: *const f32,
    pub out: *mut f32,
    pub position: usize,
}

/// # Safety
/// The instruction set of `S`; all pointers valid; groups cover every query's position; `head_dim` a multiple of 16.
#[inline(always)]
pub unsafe fn attention<S: Simd>(item: &AttentionItem<'_>) {
    let mut first = 0;
    while first < item.queries.len() {
        let left = item.queries.len() - first;
        let step = match left {
            6.. => 6,
            3..=5 => 3,
            left => left,
        };
        match step {
            6 => scores::<S, 6>(item, first),
            3 => scores::<S, 3>(item, first),
            2 => scores::<S, 2>(item, first),
            _ => scores::<S, 1>(item, first),
        }
        first += step;
    }
    for (index, query) in item.queries.iter().enumerate() {
        softmax::<S>(item.scores.add(index * item.scores_stride), query.position);
    }
    let mut first = 0;
    while first < item.queries.len() {
        let step = if item.queries.len() - first >= 3 { 3 } else { 1 };
        let mut dim = 0;
        while dim < item.head_dim {
            let wide = item.head_dim - dim >= 4 * LANES;
            match (step, wide) {
                (3, true) => mix::<S, 3, 4>(item, first, dim),
                (3, false) => mix::<S, 3, 1>(item, first, dim),
                (_, true) => mix::<S, 1, 4>(item, first, dim),
                (_, false) => mix::<S, 1, 1>(item, first, dim),
            }
            dim += if wide { 4 * LANES } else { LANES };
        }
        first += step;
    }
}

/// Raw scores of Q queries, sixteen tokens at a time; tokens after a query's own position become minus infinity.
#[inline(always)]
unsafe fn scores<S: Simd, const Q: usize>(item: &AttentionItem<'_>, first: usize) {
    let queries = item.queries.as_ptr().add(first);
    let mut longest = 0;
    for i in 0..Q {
        longest = longest.max((*queries.add(i)).position);
    }
    let scale = S::splat(item.scale);
    for group in 0..=longest / LANES {
        let keys = (*item.groups.as_ptr().add(group)).0.add(item.offset);
        let mut acc = [S::splat(0.0); Q];
        for d in 0..item.head_dim {
            let k = S::load(keys.add(d * LANES));
            each!(i < Q, acc[i] = S::fma(S::splat(*(*queries.add(i)).q.add(d)), k, acc[i]));
        }
        each!(i < Q, {
            let row = item.scores.add((first + i) * item.scores_stride);
            S::store(row.add(group * LANES), S::mul(acc[i], scale));
        });
    }
    for i in 0..Q {
        let row = item.scores.add((first + i) * item.scores_stride);
        let position = (*queries.add(i)).position;
        for t in position + 1..(position / LANES + 1) * LANES {
            *row.add(t) = f32::NEG_INFINITY;
        }
    }
}

/// In place over the groups up to `position`; tokens behind it get exactly zero.
#[inline(always)]
unsafe fn softmax<S: Simd>(row: *mut f32, position: usize) {
    let groups = position / LANES + 1;
    let mut top = S::splat(f32::NEG_INFINITY);
    for group in 0..groups {
        top = S::max(top, S::load(row.add(group * LANES)));
    }
    let top = S::splat(S::largest(top));
    let mut total = S::splat(0.0);
    for group in 0..groups {
        let at = row.add(group * LANES);
        S::store(at, S::exp(S::sub(S::load(at), top)));
        if group + 1 == groups {
            for t in position + 1..groups * LANES {
                *row.add(t) = 0.0;
            }
        }
        total = S::add(total, S::load(at));
    }
    let total = S::splat(S::sum(total));
    for group in 0..groups {
        let at = row.add(group * LANES);
        S::store(at, S::div(S::load(at), total));
    }
}

/// Weighted values of Q queries in V vectors of the head, token by token. A query stops at its own position, so that
/// nothing of a later token, not even an infinity, reaches it.
#[inline(always)]
unsafe fn mix<S: Simd, const Q: usize, const V: usize>(item: &AttentionItem<'_>, first: usize, dim: usize) {
    let queries = item.queries.as_ptr().add(first);
    let weights = item.scores.add(first * item.scores_stride);
    let mut shared = usize::MAX;
    for i in 0..Q {
        shared = shared.min((*queries.add(i)).position + 1);
    }
    let mut acc = [[S::splat(0.0); V]; Q];
    for t in 0..shared {
        let value = value_at(item, t).add(dim);
        let mut vs = [S::load(value); V];
        each!(v < V, vs[v] = S::load(value.add(v * LANES)));
        each!(i < Q, {
            let p = S::splat(*weights.add(i * item.scores_stride + t));
            each!(v < V, acc[i][v] = S::fma(p, vs[v], acc[i][v]));
        });
    }
    each!(i < Q, {
        let query = &*queries.add(i);
        for t in shared..=query.position {
            let value = value_at(item, t).add(dim);
            let p = S::splat(*weights.add(i * item.scores_stride + t));
            each!(v < V, acc[i][v] = S::fma(p, S::load(value.add(v * LANES)), acc[i][v]));
        }
        each!(v < V, S::store(query.out.add(dim + v * LANES), acc[i][v]));
    });
}

#[inline(always)]
unsafe fn value_at(item: &AttentionItem<'_>, t: usize) -> *const f32 {
    (*item.groups.as_ptr().add(t / LANES)).0.add(item.offset + item.values + (t % LANES) * item.head_dim)
}
