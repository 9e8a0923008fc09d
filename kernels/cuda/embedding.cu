// y[row] = scale * table[token[row]].
//
// A warp takes a piece of a row. Limits: width a multiple of 8; a token outside of the table gives a row of zeros, never a
// read outside. Bound: bytes of y, twice.
#include "common.cuh"

struct Embedding {
  const u16* table;
  const u32* tokens;
  u16* y;
  u32 rows, width, vocabulary;
  float scale;           // 1: a plain copy
};

template <class T> DEVICE void embedding(const Embedding& P) {
  let_next_start();
  wait_for_previous();
  const u32 token = P.tokens[blockIdx.y], at = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (at >= P.width) return;
  uint4 v = make_uint4(0, 0, 0, 0);
  if (token < P.vocabulary) v = __ldg((const uint4*)(P.table + (u64)token * P.width + at));
  if (P.scale != 1.f) {
    u32* pairs = (u32*)&v;
#pragma unroll
    for (int k = 0; k < 4; k++) pairs[k] = T::pack(T::low(pairs[k]) * P.scale, T::high(pairs[k]) * P.scale);
  }
  *(uint4*)(P.y + (u64)blockIdx.y * P.width + at) = v;
}

extern "C" __global__ void __launch_bounds__(256) embedding_bf16(const __grid_constant__ Embedding P) { embedding<Bf16>(P); }
extern "C" __global__ void __launch_bounds__(256) embedding_f16(const __grid_constant__ Embedding P) { embedding<F16>(P); }
