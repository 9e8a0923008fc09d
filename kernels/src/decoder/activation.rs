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

/// Nothing where the width is not a multiple of 8. `sms` bounds the grid: threads go round.
pub fn activation_launch(args: &ActivationArgs, sms: u32, element: Element) -> Option<Launch> {
    if args.width == 0 || !args.width.is_multiple_of(8) {
        return None;
    }
    let ctas = (u64::from(args.rows) * u64::from(args.width) / 8).div_ceil(256).clamp(1, u64::from(sms) * 16);
    Some(Launch {
        module: "activation",
        function: match element {
            Element::Bf16 => "activation_bf16",
            Element::F16 => "activation_f16",
        },
        grid: [ctas as u32, 1, 1],
        block: [256, 1, 1],
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
    fn known_values() {
        assert_eq!(twin(0.0, 5.0, false, |v| v), 0.0);
        assert!((twin(1.0, 2.0, false, |v| v) - 1.4621171572600098).abs() < 1e-12);
        assert!((twin(1.0, 1.0, true, |v| v) - 0.8411919906082768).abs() < 1e-12);
    }
}
