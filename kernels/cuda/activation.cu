// y = f(gate) * up, where gate and up are the halves of a row; f is SiLU or the tanh form of GELU.
//
// f(gate) is rounded to the element type before the product, as a model in that type does. delta: what LoRA adds to gate and
// up, where it lies in a buffer of its own. A thread takes eight elements of a row, and of each row gridDim.y further on.
// Limits: width (of y) a multiple of 8. Bound: bytes of gate, up, delta and y.
#include "common.cuh"

struct Activation {
  const u16* x;          // rows of 2 * width
  const u16* delta;      // null: none
  u16* y;                // rows of width
  u32 rows, width;
  u32 gelu;              // 0: SiLU
  u32 unused;
};

DEVICE float silu(float v) { return __fdividef(v, 1.f + __expf(-v)); }
DEVICE float gelu(float v) { return 0.5f * v * (1.f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v))); }

template <class T> DEVICE void activation(const Activation& P) {
  let_next_start();
  wait_for_previous();
  const u32 at = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (at >= P.width) return;
  for (u32 row = blockIdx.y; row < P.rows; row += gridDim.y) {
    const u64 gate = (u64)row * 2 * P.width + at, up = gate + P.width;
    const uint4 g = *(const uint4*)(P.x + gate), u = *(const uint4*)(P.x + up);
    uint4 dg = make_uint4(0, 0, 0, 0), du = dg, y;
    if (P.delta) {
      dg = *(const uint4*)(P.delta + gate);
      du = *(const uint4*)(P.delta + up);
    }
    const u32 *gs = (const u32*)&g, *us = (const u32*)&u, *dgs = (const u32*)&dg, *dus = (const u32*)&du;
    u32* ys = (u32*)&y;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float low = T::low(gs[k]) + T::low(dgs[k]), high = T::high(gs[k]) + T::high(dgs[k]);
      const u32 f = P.gelu ? T::pack(gelu(low), gelu(high)) : T::pack(silu(low), silu(high));
      ys[k] = T::pack(T::low(f) * (T::low(us[k]) + T::low(dus[k])), T::high(f) * (T::high(us[k]) + T::high(dus[k])));
    }
    *(uint4*)(P.y + (u64)row * P.width + at) = y;
  }
}

extern "C" __global__ void __launch_bounds__(256) activation_bf16(const __grid_constant__ Activation P) { activation<Bf16>(P); }
extern "C" __global__ void __launch_bounds__(256) activation_f16(const __grid_constant__ Activation P) { activation<F16>(P); }
