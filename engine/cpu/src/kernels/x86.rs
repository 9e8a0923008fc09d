//! AVX-512 and AVX2 lanes.

use std::arch::x86_64::*;

use super::simd::Simd;

#[derive(Clone, Copy)]
pub struct Avx512;

impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    const ROW_TILES: &'static [usize] = &[24, 16, 12, 8, 6, 4, 3, 2, 1];
    const PANELS: usize = 4;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        _mm512_set1_ps(value)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        _mm512_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m512) {
        _mm512_storeu_ps(to, value);
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }
    #[inline(always)]
    unsafe fn load_i32(from: *const u32) -> __m512i {
        _mm512_loadu_si512(from.cast())
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        _mm512_min_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
    }
    #[inline(always)]
    unsafe fn power_of_two(n: __m512) -> __m512 {
        let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
    }
    #[inline(always)]
    unsafe fn nibble(q: __m512i) -> __m512 {
        // The permute reads only the lowest four bits of each index: a table look-up saves the mask and the conversion.
        let table = _mm512_setr_ps(0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.);
        _mm512_permutexvar_ps(q, table)
    }
    #[inline(always)]
    unsafe fn shift_right_4(q: __m512i) -> __m512i {
        _mm512_srli_epi32::<4>(q)
    }
    #[inline(always)]
    unsafe fn signed_byte(q: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(q)))
    }
    #[inline(always)]
    unsafe fn shift_right_8(q: __m512i) -> __m512i {
        _mm512_srli_epi32::<8>(q)
    }
}

/// Two registers of eight lanes stand for one of sixteen.
#[derive(Clone, Copy)]
pub struct Avx2;

#[derive(Clone, Copy)]
pub struct F(__m256, __m256);

#[derive(Clone, Copy)]
pub struct I(__m256i, __m256i);

impl Simd for Avx2 {
    type F = F;
    type I = I;
    const ROW_TILES: &'static [usize] = &[4, 3, 2, 1];
    const PANELS: usize = 2;

    #[inline(always)]
    unsafe fn splat(value: f32) -> F {
        let v = _mm256_set1_ps(value);
        F(v, v)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> F {
        F(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8)))
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: F) {
        _mm256_storeu_ps(to, value.0);
        _mm256_storeu_ps(to.add(8), value.1);
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> F {
        let low = _mm256_cvtph_ps(_mm_loadu_si128(from.cast()));
        F(low, _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> F {
        let low = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())));
        let high = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8).cast())));
        F(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
    }
    #[inline(always)]
    unsafe fn load_i32(from: *const u32) -> I {
        I(_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(8).cast()))
    }
    #[inline(always)]
    unsafe fn add(a: F, b: F) -> F {
        F(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn sub(a: F, b: F) -> F {
        F(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn mul(a: F, b: F) -> F {
        F(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn div(a: F, b: F) -> F {
        F(_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn max(a: F, b: F) -> F {
        F(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn min(a: F, b: F) -> F {
        F(_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn fma(a: F, b: F, c: F) -> F {
        F(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1))
    }
    #[inline(always)]
    unsafe fn round(a: F) -> F {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        F(_mm256_round_ps::<NEAREST>(a.0), _mm256_round_ps::<NEAREST>(a.1))
    }
    #[inline(always)]
    unsafe fn power_of_two(n: F) -> F {
        let bias = _mm256_set1_epi32(127);
        let low = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n.0), bias));
        let high = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n.1), bias));
        F(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
    }
    #[inline(always)]
    unsafe fn nibble(q: I) -> F {
        let mask = _mm256_set1_epi32(15);
        F(_mm256_cvtepi32_ps(_mm256_and_si256(q.0, mask)), _mm256_cvtepi32_ps(_mm256_and_si256(q.1, mask)))
    }
    #[inline(always)]
    unsafe fn shift_right_4(q: I) -> I {
        I(_mm256_srli_epi32::<4>(q.0), _mm256_srli_epi32::<4>(q.1))
    }
    #[inline(always)]
    unsafe fn signed_byte(q: I) -> F {
        let low = _mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(q.0));
        let high = _mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(q.1));
        F(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
    }
    #[inline(always)]
    unsafe fn shift_right_8(q: I) -> I {
        I(_mm256_srli_epi32::<8>(q.0), _mm256_srli_epi32::<8>(q.1))
    }
}
