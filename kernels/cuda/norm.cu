// h = residual + x (+ delta), kept as the new residual; y = weight * (h / sqrt(mean(h^2) + eps)).
//
// One CTA to a row; a thread holds up to two pieces of eight elements. h and the normalised row are rounded to the element
// type, as a model in that type does; sums are in f32. delta: what LoRA adds to x, where it lies in a buffer of its own.
// Limits: width a multiple of 8, at most 16 times the threads. Bound: bytes of x, residual (twice), delta, y.
#include "common.cuh"

struct Norm {
  const u16* x;          // null: h is the residual as it is
  const u16* delta;      // null: none
  u16* residual;
  const u16* weight;
  u16* y;
  u32 width;
  float eps;
  float weight_offset;   // 1 where the model stores weight - 1
  u32 unused;
};

template <class T> DEVICE void norm(const Norm& P) {
  __shared__ float sums[32];
  let_next_start();
  const u32 threads = blockDim.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u64 row = (u64)blockIdx.x * P.width;
  uint4 weights[2] = {}, h[2] = {};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 at = (i * threads + threadIdx.x) * 8;
    if (at < P.width) weights[i] = __ldg((const uint4*)(P.weight + at));
  }
  wait_for_previous();
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 at = (i * threads + threadIdx.x) * 8;
    if (at >= P.width) continue;
    h[i] = *(const uint4*)(P.residual + row + at);
    u32* pairs = (u32*)&h[i];
    if (P.x) {
      const uint4 x = *(const uint4*)(P.x + row + at);
      const uint4 d = P.delta ? *(const uint4*)(P.delta + row + at) : make_uint4(0, 0, 0, 0);
      const u32 *xs = (const u32*)&x, *ds = (const u32*)&d;
#pragma unroll
      for (int k = 0; k < 4; k++) pairs[k] = add_pair<T>(pairs[k], T::low(xs[k]) + T::low(ds[k]), T::high(xs[k]) + T::high(ds[k]));
      *(uint4*)(P.residual + row + at) = h[i];
    }
#pragma unroll
    for (int k = 0; k < 4; k++) sum += T::low(pairs[k]) * T::low(pairs[k]) + T::high(pairs[k]) * T::high(pairs[k]);
  }
  sum = warp_sum(sum);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  sum = warp_sum(lane < threads / 32 ? sums[lane] : 0.f);
  const float scale = rsqrtf(sum / P.width + P.eps);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 at = (i * threads + threadIdx.x) * 8;
    if (at >= P.width) continue;
    uint4 y;
    const u32 *hs = (const u32*)&h[i], *ws = (const u32*)&weights[i];
    u32* ys = (u32*)&y;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u32 n = T::pack(T::low(hs[k]) * scale, T::high(hs[k]) * scale);
      ys[k] = T::pack(T::low(n) * (T::low(ws[k]) + P.weight_offset), T::high(n) * (T::high(ws[k]) + P.weight_offset));
    }
    *(uint4*)(P.y + row + at) = y;
  }
}

extern "C" __global__ void __launch_bounds__(1024) norm_bf16(const __grid_constant__ Norm P) { norm<Bf16>(P); }
extern "C" __global__ void __launch_bounds__(1024) norm_f16(const __grid_constant__ Norm P) { norm<F16>(P); }
