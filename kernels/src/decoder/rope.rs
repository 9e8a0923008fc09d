//! Rotary positions of q and k, and the write of k and v into the sequence's page.

use super::Round;
use super::kv::Kv;
use crate::launch::{DevicePtr, Element, Launch};
use crate::plain::{Plain, plain};
use crate::tuning::is_many;

plain! {
    /// The argument of `rope_*`. 0 stands for what is not there.
    pub struct RopeArgs {
        /// Rows of (query_heads + 2 * kv.heads) * head_dim: q, k, v. q is rotated in place.
        pub x: DevicePtr,
        pub delta: DevicePtr,
        /// `kv::Row`
        pub rows: DevicePtr,
        /// f32, rotary / 2.
        pub frequencies: DevicePtr,
        /// RMS norm of each head before the rotation.
        pub query_norm: DevicePtr,
        pub key_norm: DevicePtr,
        pub kv: Kv,
        pub query_heads: u32,
        /// Dimensions that turn, from the first.
        pub rotary: u32,
        pub attention_scale: f32,
        pub eps: f32,
    }
}

pub const HEAD_DIM_MAX: u32 = 256;
const THREADS_MAX: u32 = 512;
/// Heads to a lane where there are many rows.
const HEADS_MANY: u32 = 3;

/// Lanes that hold a head: eight pairs that turn together to one, or eight dimensions that do not turn.
pub fn lanes(head_dim: u32, rotary: u32) -> u32 {
    (rotary / 16 + (head_dim - rotary) / 8).next_power_of_two()
}

/// Nothing where the head is no multiple of 8 or too wide, or where the dimensions that turn are no multiple of 16 or
/// more than there are.
pub fn rope_launch(args: &RopeArgs, rows: u32, element: Element) -> Option<Launch> {
    rope_launch_as(args, rows, is_many(rows), element)
}

/// The same by the kernel for many rows, in which a lane has three heads, or by that for few.
pub fn rope_launch_as(args: &RopeArgs, rows: u32, many: bool, element: Element) -> Option<Launch> {
    let dim = args.kv.head_dim;
    let steps = dim.is_multiple_of(8) && args.rotary.is_multiple_of(16);
    if dim == 0 || dim > HEAD_DIM_MAX || args.rotary > dim || !steps {
        return None;
    }
    let threads = (args.query_heads + 2 * args.kv.heads) * lanes(dim, args.rotary);
    let threads = if many { threads.div_ceil(HEADS_MANY) } else { threads };
    Some(Launch {
        module: "rope",
        function: match (element, many) {
            (Element::Bf16, false) => "rope_bf16",
            (Element::F16, false) => "rope_f16",
            (Element::Bf16, true) => "rope_many_bf16",
            (Element::F16, true) => "rope_many_f16",
        },
        grid: [rows, 1, 1],
        block: [threads.next_multiple_of(32).min(THREADS_MAX), 1, 1],
        shared_bytes: 0,
        argument: args.to_bytes(),
        overlaps_previous: true,
    })
}

/// Llama 3's stretching of long wavelengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3Scaling {
    pub factor: f64,
    pub low_frequency_factor: f64,
    pub high_frequency_factor: f64,
    pub original_context: f64,
}

/// theta^(-2 i / rotary) for i below rotary / 2, stretched as Llama 3.1's configuration asks: wavelengths above
/// context / low are slowed by `factor`, those below context / high stay, those between are blended.
pub fn frequencies(theta: f64, rotary: u32, scaling: Option<Llama3Scaling>) -> Vec<f32> {
    let plain = (0..rotary / 2).map(|i| theta.powf(-2.0 * f64::from(i) / f64::from(rotary)));
    let stretch = |f: f64| {
        let Some(s) = scaling else { return f };
        let turns = s.original_context * f / (2.0 * std::f64::consts::PI);
        let smooth = (turns - s.low_frequency_factor) / (s.high_frequency_factor - s.low_frequency_factor);
        let smooth = smooth.clamp(0.0, 1.0);
        f * (smooth + (1.0 - smooth) / s.factor)
    };
    plain.map(|f| stretch(f) as f32).collect()
}

/// One head: normalised where there is a weight, then rotated by the row's `position`, cos and sin times `scale`. The angle is
/// the f32 product, as in the kernel.
pub fn twin(
    head: &[f64],
    norm: Option<(&[f64], f64)>,
    frequencies: &[f32],
    (position, scale): (i32, f64),
    round: Round,
) -> Vec<f64> {
    let mut v = head.to_vec();
    if let Some((weight, eps)) = norm {
        let scale = 1.0 / (v.iter().map(|v| v * v).sum::<f64>() / v.len() as f64 + eps).sqrt();
        v = v.iter().zip(weight).map(|(v, w)| round(round(v * scale) * w)).collect();
    }
    let half = frequencies.len();
    let mut out = v.clone();
    for (i, f) in frequencies.iter().enumerate() {
        let (sin, cos) = f64::from(position as f32 * f).sin_cos();
        let (sin, cos) = (sin * scale, cos * scale);
        out[i] = v[i] * cos - v[i + half] * sin;
        out[i + half] = v[i + half] * cos + v[i] * sin;
    }
    out.into_iter().map(round).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_turn() {
        let quarter = std::f32::consts::FRAC_PI_2;
        let out = twin(&[1.0, 2.0, 3.0], None, &[quarter], (1, 1.0), |v| v);
        assert!((out[0] + 2.0).abs() < 1e-6 && (out[1] - 1.0).abs() < 1e-6);
        assert_eq!(out[2], 3.0);
    }

    #[test]
    fn llama3_stretches_only_long_waves() {
        let s = Llama3Scaling {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_context: 8192.0,
        };
        let (plain, scaled) = (frequencies(500_000.0, 128, None), frequencies(500_000.0, 128, Some(s)));
        assert_eq!(plain[0], 1.0);
        assert_eq!(plain[..28], scaled[..28]);
        assert!((plain[63] / scaled[63] - 8.0).abs() < 1e-4);
        assert!(scaled[32] < plain[32] && scaled[32] > plain[32] / 8.0);
    }

    #[test]
    fn heads_fill_whole_warps_and_impossible_ones_are_refused() {
        let args = |head_dim, rotary| RopeArgs {
            kv: Kv { head_dim, heads: 2, ..Kv::default() },
            query_heads: 4,
            rotary,
            ..RopeArgs::default()
        };
        let shape = rope_launch(&args(80, 32), 3, Element::Bf16).map(|l| (l.grid, l.block));
        assert_eq!(shape, Some(([3, 1, 1], [64, 1, 1])));
        let many = rope_launch(&args(80, 32), 5000, Element::Bf16).map(|l| (l.function, l.block));
        assert_eq!(many, Some(("rope_many_bf16", [32, 1, 1])));
        assert_eq!(
            [(64, 64), (80, 32), (96, 96), (128, 128), (256, 64), (256, 0)].map(|(d, r)| lanes(d, r)),
            [4, 8, 8, 8, 32, 32]
        );
        for (head_dim, rotary) in [(0, 0), (264, 16), (60, 16), (64, 80), (64, 8)] {
            assert!(rope_launch(&args(head_dim, rotary), 1, Element::Bf16).is_none());
        }
    }
}
