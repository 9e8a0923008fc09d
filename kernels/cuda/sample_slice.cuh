// A slice of a row in shared memory, by N threads.
#pragma once
#include "sample.cuh"

// The best of a thread's own tokens. They ascend, so that an equal one never replaces.
struct Best {
  float logit;
  u32 token;
  DEVICE void take(float v, u32 at) {
    if (v > logit) {
      logit = v;
      token = at;
    }
  }
  DEVICE u64 key() const { return logit > OUT ? key_of(logit, token) : 0; }
};

// All loads are in flight before the first is used.
template <class L, u32 N> DEVICE Best load_slice(const Sample& P, float* slice, u32 row, u32 from, u32 tokens) {
  constexpr int W = L::WIDE, LOADS = SLICE / N / W;
  const char* in = (const char*)P.logits + ((u64)row * P.stride + from) * (16 / W);
  uint4 v[LOADS];
#pragma unroll
  for (int u = 0; u < LOADS; u++) {
    const u32 at = (u * N + threadIdx.x) * W;
    if (at < tokens) v[u] = load_once(in + at * (16 / W));
  }
  Best best{OUT, 0};
#pragma unroll
  for (int u = 0; u < LOADS; u++) {
    const u32 at = (u * N + threadIdx.x) * W;
    float out[W];
#pragma unroll
    for (int k = 0; k < W; k++) {
      out[k] = at + k < tokens ? finite(L::part(v[u], k)) : OUT;
      best.take(out[k], from + at + k);
    }
#pragma unroll
    for (int k = 0; k < W; k += 4) *(float4*)&slice[at + k] = make_float4(out[k], out[k + 1], out[k + 2], out[k + 3]);
  }
  __syncthreads();
  return best;
}

// Makes every logit f(its place, it), and finds the best again.
template <u32 N, class F> DEVICE Best change_each(float* slice, u32 from, F f) {
  Best best{OUT, 0};
#pragma unroll 4
  for (u32 i = threadIdx.x; i < SLICE; i += N) best.take(slice[i] = f(i, slice[i]), from + i);
  __syncthreads();
  return best;
}

template <u32 N> DEVICE Best cap_slice(const Sample& P, float* slice, u32 from) {
  return change_each<N>(slice, from, [&](u32, float v) { return capped(v, P.soft_cap); });
}

// Penalties and biases, then the mask.
template <u32 N> DEVICE Best change_slice(const Sample& P, float* slice, const Ask& ask, u32 from, u32 tokens) {
  for (u32 i = threadIdx.x; i < ask.edits; i += N) {
    const Edit e = P.edits[ask.edit + i];
    if (e.token >= from && e.token - from < tokens) slice[e.token - from] = edited(ask, e, slice[e.token - from]);
  }
  __syncthreads();
  return change_each<N>(slice, from, [&](u32 i, float v) { return i < tokens && allowed(P, ask, from + i) ? v : OUT; });
}
