//! The gate of an MLP: y = f(gate) * up.

use super::Round;
use crate::launch::{DevicePtr, Element, Launch};
use crate::plain::{Plain, plain};

plain! {
    /// The argument of `activation_*`. x and delta: rows of 2 * `width`, gate before up; delta 0 stands for none.
    pub struct ActivationArgs {
        pub x: DevicePtr,
        pub delta: DevicePtr,
        pub y: DevicePtr,
        pub rows: u32,
        /// Of y; a multiple of 8.
        pub width: u32,
        /// 0: SiLU, 1: GELU in its tanh form.
        pub gelu: u32,
        pub unused: u32,
    }
}

const THREADS_MAX: u32 = 256;
/// The y dimension of a grid: rows beyond are taken by the CTAs of the first.
const GRID_Y_MAX: u32 = 65_535;

/// Nothing where the width is not a multiple of 8. A CTA to each row and 2,048 elements: CTAs that read, write and go reach more of
/// the memory than those that stay and go from row to row.
pub fn activation_launch(args: &ActivationArgs, element: Element) -> Option<Launch> {
    if args.width == 0 || !args.width.is_multiple_of(8) {
        return None;
    }
    let threads = (args.width / 8).next_multiple_of(32).min(THREADS_MAX);
    let across = (args.width / 8).div_ceil(threads);
    Some(Launch {
        module: "activation",
        function: match element {
            Element::Bf16 => "activation_bf16",
            Element::F16 => "activation_f16",
        },
        grid: [across, args.rows.clamp(1, GRID_Y_MAX), 1],
        block: [threads, 1, 1],
        shared_bytes: 0,
        argument: args.to_bytes(),
        overlaps_previous: true,
    })
}

/// One element.
pub fn twin(gate: f64, up: f64, gelu: bool, round: Round) -> f64 {
    let f = if gelu {
        0.5 * gate * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3))).tanh())
    } else {
        gate / (1.0 + (-gate).exp())
    };
    round(round(f) * up)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grid_covers_the_rows() {
        let shape = |width, rows| {
            let args = ActivationArgs { width, rows, ..ActivationArgs::default() };
            activation_launch(&args, Element::Bf16).map(|l| (l.grid, l.block[0]))
        };
        assert_eq!(shape(14336, 256), Some(([7, 256, 1], 256)));
        assert_eq!(shape(14336, 8192), Some(([7, 8192, 1], 256)));
        assert_eq!(shape(72, 70_000), Some(([1, 65_535, 1], 32)));
        assert_eq!(shape(72, 0), Some(([1, 1, 1], 32)));
        assert_eq!(shape(12, 1), None);
    }

    #[test]
    fn known_values() {
        assert_eq!(twin(0.0, 5.0, false, |v| v), 0.0);
        assert!((twin(1.0, 2.0, false, |v| v) - 1.4621171572600098).abs() < 1e-12);
        assert!((twin(1.0, 1.0, true, |v| v) - 0.8411919906082768).abs() < 1e-12);
    }
}
