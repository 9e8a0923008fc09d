// Arithmetic that gives the same bits here and in src/decoder/exact.rs: every step is one rounding of IEEE 754, and the
// compiler may fuse nothing. So a twin draws the same token, and not only nearly always.
#pragma once
#include "common.cuh"

// e^x for x <= 0, within 2 ulp; below -87: 0. Cody-Waite reduction, Taylor to the seventh power.
DEVICE float exact_exp(float x) {
  if (!(x >= -87.f)) return 0.f;
  const float n = rintf(__fmul_rn(x, 1.44269504f));
  const float r = __fmaf_rn(n, 1.90465430e-9f, __fmaf_rn(n, -0.693147182f, x));
  float p = 1.98412698e-4f;
  p = __fmaf_rn(p, r, 1.38888889e-3f);
  p = __fmaf_rn(p, r, 8.33333333e-3f);
  p = __fmaf_rn(p, r, 4.16666667e-2f);
  p = __fmaf_rn(p, r, 1.66666667e-1f);
  p = __fmaf_rn(p, r, 0.5f);
  p = __fmaf_rn(p, r, 1.f);
  p = __fmaf_rn(p, r, 1.f);
  return __fmul_rn(p, __uint_as_float((u32)((int)n + 127) << 23));
}

// 2^(31 - t) for t >= 0, within 6e-7 of it, rounded down; 0 from t = 32 on. A polynomial for 2^-f of t's fraction, whose 23 bits are shifted
// by its whole part: no conversion, since this is done for every token.
DEVICE u32 exact_weight(float t) {
  t = fminf(t, 31.99f);
  const float whole = __fadd_rd(t, 8388608.f), f = __fadd_rn(t, -__fadd_rn(whole, -8388608.f));
  float p = -0.00100433733f;
  p = __fmaf_rn(p, f, 0.00934564881f);
  p = __fmaf_rn(p, f, -0.0554094501f);
  p = __fmaf_rn(p, f, 0.240214869f);
  p = __fmaf_rn(p, f, -0.693146944f);
  p = __fmaf_rn(p, f, 1.f);
  return (__float_as_uint(__fadd_rn(p, 1.f)) - 0x3f800000u) << 8 >> (__float_as_uint(whole) - 0x4b000000u);
}

// (1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x: tanh x within 1.2e-7.
DEVICE float exact_tanh(float x) {
  const float e = exact_exp(__fmul_rn(fabsf(x), -2.f));
  return copysignf(__fdiv_rn(__fadd_rn(1.f, -e), __fadd_rn(1.f, e)), x);
}

// ln x for a normal x > 0, within 2e-7 of the larger of it and 1: x = 2^n m with m in [sqrt(1/2), sqrt(2)), and
// ln m = 2 (s + s^3 / 3 + s^5 / 5 + ...), s = (m - 1) / (m + 1).
DEVICE float exact_ln(float x) {
  const u32 bits = __float_as_uint(x), shifted = bits - 0x3f3504f3u;
  const int n = (int)shifted >> 23;
  const float m = __uint_as_float(bits - ((u32)n << 23));
  const float s = __fdiv_rn(__fadd_rn(m, -1.f), __fadd_rn(m, 1.f)), z = __fmul_rn(s, s);
  float p = 0.222222222f;
  p = __fmaf_rn(p, z, 0.285714286f);
  p = __fmaf_rn(p, z, 0.4f);
  p = __fmaf_rn(p, z, 0.666666667f);
  p = __fmul_rn(__fmul_rn(p, z), s);
  return __fmaf_rn((float)n, 0.693147181f, __fmaf_rn(2.f, s, p));
}

// Philox4x32-10 of Salmon, Moraes, Dror and Shaw (SC 2011): four random words from a counter and a key.
struct Philox {
  u32 v[4];
  DEVICE Philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) : v{c0, c1, c2, c3} {
#pragma unroll
    for (int i = 0; i < 10; i++) {
      const u32 high0 = __umulhi(0xD2511F53u, v[0]), low0 = 0xD2511F53u * v[0];
      const u32 high1 = __umulhi(0xCD9E8D57u, v[2]), low1 = 0xCD9E8D57u * v[2];
      v[0] = high1 ^ v[1] ^ k0;
      v[1] = low1;
      v[2] = high0 ^ v[3] ^ k1;
      v[3] = low0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
  }
};

// Gumbel noise of 32 random bits: -ln(-ln(1 - v)), v = (bits + 1/2) / 2^32. Where v is small, which is where noise is large,
// it keeps all bits of v: what 1 - v loses is added behind the logarithm.
DEVICE float gumbel(u32 bits) {
  const float v = fminf(__fmaf_rn(__uint2float_rn(bits), 2.32830644e-10f, 1.16415322e-10f), 0.99999994f);
  const float w = __fadd_rn(1.f, -v), lost = __fadd_rn(__fadd_rn(1.f, -w), -v);
  return -exact_ln(-__fadd_rn(exact_ln(w), __fdiv_rn(lost, w)));
}

// No noise of these bits is above it, nor of these with higher ones below the lowest bit that is set.
DEVICE float gumbel_bound(u32 bits) { return __fmul_rn((float)(__clz(bits) + 1), 0.6932f) + 0.01f; }

// An order on floats as an order on integers.
DEVICE u32 ordered(float v) {
  const u32 bits = __float_as_uint(v);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float of_ordered(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }
