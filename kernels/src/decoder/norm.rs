//! RMS norm of the residual stream after adding to it.

use super::Round;
use crate::launch::{DevicePtr, Element, Launch};
use crate::plain::{Plain, plain};
use crate::tuning::is_many;

plain! {
    /// The argument of `norm_*`. All matrices are rows of `width`; 0 stands for one that is not there.
    pub struct NormArgs {
        pub x: DevicePtr,
        pub delta: DevicePtr,
        pub residual: DevicePtr,
        pub weight: DevicePtr,
        pub y: DevicePtr,
        pub width: u32,
        pub eps: f32,
        pub weight_offset: f32,
        pub unused: u32,
    }
}

/// The widest row: two pieces of eight elements to each of 1,024 threads.
pub const WIDTH_MAX: u32 = 16_384;

/// Nothing where the width is not a multiple of 8 or above `WIDTH_MAX`.
pub fn norm_launch(args: &NormArgs, rows: u32, element: Element) -> Option<Launch> {
    if !args.width.is_multiple_of(8) || args.width == 0 || args.width > WIDTH_MAX {
        return None;
    }
    let threads = (args.width / 8).next_multiple_of(32).min(1024);
    // Rows of two pieces share the work evenly. Many rows wait for memory, and want more asked for by each thread.
    let two = args.width > 8 * 1024 || (args.width >= 2048 && is_many(rows));
    let threads = if two { (args.width / 16).next_multiple_of(32) } else { threads };
    Some(Launch {
        module: "norm",
        function: match element {
            Element::Bf16 => "norm_bf16",
            Element::F16 => "norm_f16",
        },
        grid: [rows, 1, 1],
        block: [threads, 1, 1],
        shared_bytes: 0,
        argument: args.to_bytes(),
        overlaps_previous: true,
    })
}

/// One row: the new residual and y. `added` is x + delta.
pub fn twin(residual: &[f64], added: &[f64], weight: &[f64], eps: f64, round: Round) -> (Vec<f64>, Vec<f64>) {
    let h: Vec<f64> = residual.iter().zip(added).map(|(r, a)| round(r + a)).collect();
    let mean = h.iter().map(|v| v * v).sum::<f64>() / h.len() as f64;
    let scale = 1.0 / (mean + eps).sqrt();
    let y = h.iter().zip(weight).map(|(v, w)| round(round(v * scale) * w)).collect();
    (h, y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        let (h, y) = twin(&[1.0, 2.0], &[2.0, 2.0], &[1.0, 10.0], 0.0, |v| v);
        assert_eq!(h, [3.0, 4.0]);
        let norm = 12.5f64.sqrt();
        assert!((y[0] - 3.0 / norm).abs() < 1e-12 && (y[1] - 40.0 / norm).abs() < 1e-12);
    }

    #[test]
    fn threads_follow_the_shape() {
        let threads = |rows, width| {
            let launch = norm_launch(&NormArgs { width, ..NormArgs::default() }, rows, Element::Bf16);
            launch.map(|l| l.block[0])
        };
        assert_eq!([72, 576, 4096, 8192, 16384].map(|w| threads(1, w)), [32, 96, 512, 1024, 1024].map(Some));
        assert_eq!([72, 576, 4096, 8192, 16384].map(|w| threads(8192, w)), [32, 96, 256, 512, 1024].map(Some));
        assert_eq!([0, 4, 16392].map(|w| threads(1, w)), [None; 3]);
    }
}
