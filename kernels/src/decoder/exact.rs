//! Arithmetic that gives the same bits here and in `cuda/exact.cuh`: each step is one rounding of IEEE 754, in the same order.

/// e^x for x <= 0; below -87: 0.
pub fn exp(x: f32) -> f32 {
    if x.is_nan() || x < -87.0 {
        return 0.0;
    }
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(1.904_654_3e-9, n.mul_add(-std::f32::consts::LN_2, x));
    let powers = [1.388_888_9e-3, 8.333_333e-3, 4.166_666_7e-2, 1.666_666_7e-1, 0.5, 1.0, 1.0];
    let p = powers.into_iter().fold(1.984_127e-4f32, |p, c| p.mul_add(r, c));
    p * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

/// 2^(31 - t) for t >= 0, rounded down; 0 from t = 32 on.
pub fn weight(t: f32) -> u32 {
    let t = t.min(31.99);
    let f = t - t.floor();
    let powers = [9.345_649e-3, -5.540_945e-2, 0.240_214_87, -0.693_146_94, 1.0];
    let p = powers.into_iter().fold(-1.004_337_3e-3f32, |p, c| p.mul_add(f, c));
    ((1.0 + p).to_bits() - 0x3f80_0000) << 8 >> (t as u32)
}

/// tanh x within 1.2e-7.
pub fn tanh(x: f32) -> f32 {
    let e = exp(x.abs() * -2.0);
    ((1.0 - e) / (1.0 + e)).copysign(x)
}

/// ln x for a normal x > 0.
pub fn ln(x: f32) -> f32 {
    let bits = x.to_bits();
    let n = (bits.wrapping_sub(0x3f35_04f3) as i32) >> 23;
    let m = f32::from_bits(bits.wrapping_sub((n as u32) << 23));
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let p = [0.285_714_3, 0.4, 0.666_666_7].into_iter().fold(0.222_222_22f32, |p, c| p.mul_add(z, c));
    let p = p * z * s;
    (n as f32).mul_add(std::f32::consts::LN_2, 2f32.mul_add(s, p))
}

/// Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for _ in 0..10 {
        let wide = |a: u32, b: u32| {
            let product = u64::from(a) * u64::from(b);
            ((product >> 32) as u32, product as u32)
        };
        let ((high0, low0), (high1, low1)) = (wide(0xD251_1F53, c[0]), wide(0xCD9E_8D57, c[2]));
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

/// Gumbel noise of 32 random bits: -ln(-ln(1 - v)), v = (bits + 1/2) / 2^32.
pub fn gumbel(bits: u32) -> f32 {
    let unit = 1.0 / 4_294_967_296.0f32;
    let v = (bits as f32).mul_add(unit, unit / 2.0).min(1.0 - f32::EPSILON / 2.0);
    let w = 1.0 - v;
    let lost = (1.0 - w) - v;
    -ln(-(ln(w) + lost / w))
}

/// An order on floats as an order on integers.
pub fn ordered(v: f32) -> u32 {
    let bits = v.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_the_true_functions() {
        for i in 0..20_000u32 {
            let x = -(i as f32) * 0.0043;
            let truth = f64::from(x).exp();
            assert!((f64::from(exp(x)) / truth - 1.0).abs() < 3e-7, "exp {x}");
            assert!((f64::from(tanh(x)) - f64::from(x).tanh()).abs() < 1.2e-7, "tanh {x}");
            let x = f32::from_bits(0x0080_0000 + i * 104_729);
            let truth = f64::from(x).ln();
            assert!((f64::from(ln(x)) - truth).abs() < 2.5e-7 * truth.abs().max(1.0), "ln {x}");
        }
        for i in 0..32_000u32 {
            let t = i as f32 * 1e-3;
            let truth = 2f64.powf(31.0 - f64::from(t));
            assert!((f64::from(weight(t)) - truth).abs() < truth * 7e-7 + 1.0, "weight {t}");
        }
        assert_eq!([0.0, 1.0, 31.0, 32.0, f32::INFINITY].map(weight), [1 << 31, 1 << 30, 1, 0, 0]);
        assert_eq!((exp(0.0), exp(-88.0), exp(f32::NEG_INFINITY), ln(1.0)), (1.0, 0.0, 0.0, 0.0));
        assert_eq!((tanh(0.0), tanh(-0.5) == -tanh(0.5), tanh(f32::MAX)), (0.0, true, 1.0));
    }

    /// The known answers that come with the authors' Random123.
    #[test]
    fn philox_gives_the_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox(pi, [0xa409_3822, 0x299f_31d0]), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn noise_is_right_at_both_ends() {
        for bits in [0u32, 1, 77, 1 << 8, 1 << 20, 1 << 28, 1 << 31, u32::MAX - 300, u32::MAX] {
            let v = (f64::from(bits) + 0.5) / 4_294_967_296.0;
            let truth = -(-(-v).ln_1p()).ln();
            let most = if bits > u32::MAX - 400 { 0.4 } else { 1e-5 };
            assert!((f64::from(gumbel(bits)) - truth).abs() < most, "{bits}: {} {truth}", gumbel(bits));
            // What the kernel passes over cannot win.
            assert!(f64::from(gumbel(bits)) < f64::from(bits.leading_zeros() + 1) * 0.6932 + 0.01);
        }
    }

    #[test]
    fn integers_order_floats() {
        let sorted = [f32::NEG_INFINITY, -1.0, -0.5, 0.0, 1e-20, 3.0, f32::INFINITY];
        assert!(sorted.windows(2).all(|w| ordered(w[0]) < ordered(w[1])));
    }
}
