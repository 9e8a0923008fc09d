//! Sixteen float lanes, on whatever the machine has.
//!
//! Every operation is a correctly rounded IEEE-754 single operation (or an exact integer one), and `fma` rounds once on
//! all of them, so that each implementation gives the same bits. A kernel is written once against [`Simd`] and
//! instantiated inside a function that enables the instruction set; that is why everything here is `inline(always)`.

/// Lanes of a vector: outputs of a panel, tokens of a KV group.
pub const LANES: usize = 16;

/// # Safety
/// The instruction set of the implementor must be present, and pointers must be readable (writable) for sixteen
/// elements. No alignment is asked for.
pub trait Simd: Copy + 'static {
    /// Sixteen `f32`.
    type F: Copy;
    /// Sixteen `i32`.
    type I: Copy;
    /// Row counts of the matrix kernel's tiles that fit this machine's registers, largest first, the last one 1.
    const ROW_TILES: &'static [usize];
    /// Panels that the matrix kernel takes at once with up to four rows: 1, 2 or 4.
    const PANELS: usize;

    unsafe fn splat(value: f32) -> Self::F;
    unsafe fn load(from: *const f32) -> Self::F;
    unsafe fn store(to: *mut f32, value: Self::F);
    unsafe fn load_f16(from: *const u16) -> Self::F;
    unsafe fn load_bf16(from: *const u16) -> Self::F;
    unsafe fn load_i32(from: *const u32) -> Self::I;
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `b` where either is no number.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// `b` where either is no number.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// To the nearest integer, ties to even.
    unsafe fn round(a: Self::F) -> Self::F;
    /// `2^n` for integral `n` in -126..=127; zero for -127 and infinity for 128.
    unsafe fn power_of_two(n: Self::F) -> Self::F;
    /// The lowest four bits of each lane as an unsigned number.
    unsafe fn nibble(q: Self::I) -> Self::F;
    unsafe fn shift_right_4(q: Self::I) -> Self::I;
    /// The lowest byte of each lane as a signed number.
    unsafe fn signed_byte(q: Self::I) -> Self::F;
    unsafe fn shift_right_8(q: Self::I) -> Self::I;

    /// Sum over the lanes in one fixed order (a tree of halves).
    #[inline(always)]
    unsafe fn sum(a: Self::F) -> f32 {
        let mut lane = [0f32; LANES];
        Self::store(lane.as_mut_ptr(), a);
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                lane[i] += lane[i + half];
            }
            half /= 2;
        }
        lane[0]
    }

    #[inline(always)]
    unsafe fn largest(a: Self::F) -> f32 {
        let mut lane = [0f32; LANES];
        Self::store(lane.as_mut_ptr(), a);
        lane.iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }

    /// `e^x` within 2 units in the last place on -87..=88; then zero and infinity. What is no number stays none: a sequence
    /// whose values have overflowed must not look like one that is well.
    #[inline(always)]
    unsafe fn exp(x: Self::F) -> Self::F {
        let x = Self::max(Self::splat(-88.0), Self::min(Self::splat(89.0), x));
        let n = Self::round(Self::mul(x, Self::splat(std::f32::consts::LOG2_E)));
        // ln 2 in two parts, so that the remainder keeps its low bits.
        let r = Self::fma(n, Self::splat(-0.693_359_4), x);
        let r = Self::fma(n, Self::splat(2.121_944_4e-4), r);
        let mut p = Self::splat(1.987_569_1e-4);
        p = Self::fma(p, r, Self::splat(1.398_2e-3));
        p = Self::fma(p, r, Self::splat(8.333_452e-3));
        p = Self::fma(p, r, Self::splat(4.166_579_6e-2));
        p = Self::fma(p, r, Self::splat(1.666_666_5e-1));
        p = Self::fma(p, r, Self::splat(0.5));
        let e = Self::add(Self::fma(p, Self::mul(r, r), r), Self::splat(1.0));
        Self::mul(e, Self::power_of_two(n))
    }
}

/// For machines without a vector unit that we know: right everywhere, fast where `f32::mul_add` is one instruction.
#[derive(Clone, Copy)]
pub struct Portable;

macro_rules! lanewise {
    ($a:expr, $b:expr, $op:expr) => {{
        let (a, b) = ($a, $b);
        let mut out = [0f32; LANES];
        for i in 0..LANES {
            out[i] = $op(a[i], b[i]);
        }
        out
    }};
}

impl Simd for Portable {
    type F = [f32; LANES];
    type I = [u32; LANES];
    const ROW_TILES: &'static [usize] = &[4, 2, 1];
    const PANELS: usize = 1;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        from.cast::<[f32; LANES]>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::F) {
        to.cast::<[f32; LANES]>().write_unaligned(value);
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::F {
        from.cast::<[u16; LANES]>().read_unaligned().map(|bits| half::f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::F {
        from.cast::<[u16; LANES]>().read_unaligned().map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
    #[inline(always)]
    unsafe fn load_i32(from: *const u32) -> Self::I {
        from.cast::<[u32; LANES]>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x: f32, y: f32| x + y)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x: f32, y: f32| x - y)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x: f32, y: f32| x * y)
    }
    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x: f32, y: f32| x / y)
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x: f32, y: f32| if x > y { x } else { y })
    }
    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x: f32, y: f32| if x < y { x } else { y })
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let mut out = [0f32; LANES];
        for i in 0..LANES {
            out[i] = a[i].mul_add(b[i], c[i]);
        }
        out
    }
    #[inline(always)]
    unsafe fn round(a: Self::F) -> Self::F {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn power_of_two(n: Self::F) -> Self::F {
        n.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn nibble(q: Self::I) -> Self::F {
        q.map(|q| (q & 15) as f32)
    }
    #[inline(always)]
    unsafe fn shift_right_4(q: Self::I) -> Self::I {
        q.map(|q| q >> 4)
    }
    #[inline(always)]
    unsafe fn signed_byte(q: Self::I) -> Self::F {
        q.map(|q| f32::from(q as u8 as i8))
    }
    #[inline(always)]
    unsafe fn shift_right_8(q: Self::I) -> Self::I {
        q.map(|q| q >> 8)
    }
}
