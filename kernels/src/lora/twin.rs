//! What the LoRA kernels must compute, in f64 over the stored weights. The definition of right.

/// One projection of one adapter: `a` is rank x inputs, `b` is outputs x rank, both row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights {
    pub rank: usize,
    pub scale: f64,
    pub a: Vec<f64>,
    pub b: Vec<f64>,
}

/// scale B (A x): one row's delta, `outputs` long.
pub fn delta(x: &[f64], w: &Weights) -> Vec<f64> {
    let v: Vec<f64> = w.a.chunks_exact(x.len().max(1)).take(w.rank).map(|a| dot(a, x)).collect();
    w.b.chunks_exact(w.rank.max(1)).map(|b| w.scale * dot(b, &v)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// ||found - expected|| / ||expected||; not a number stays one.
pub fn relative_error(found: impl IntoIterator<Item = f64>, expected: impl IntoIterator<Item = f64>) -> f64 {
    let (mut gap, mut norm) = (0.0, 0.0);
    for (f, e) in found.into_iter().zip(expected) {
        gap += (f - e) * (f - e);
        norm += e * e;
    }
    if gap == 0.0 { 0.0 } else { (gap / norm).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ranks_by_hand() {
        let w = Weights { rank: 2, scale: 0.5, a: vec![1., 0., 0., 2.], b: vec![1., 1., 0., 3.] };
        // v = (x0, 2 x1) = (3, 8); B v = (11, 24).
        assert_eq!(delta(&[3., 4.], &w), [5.5, 12.]);
    }

    #[test]
    fn errors_are_relative_and_keep_nan() {
        assert_eq!(relative_error([1.0, 1.0], [1.0, 1.0]), 0.0);
        assert_eq!(relative_error([3.0], [2.0]), 0.5);
        assert!(relative_error([f64::NAN], [1.0]).is_nan());
    }
}
