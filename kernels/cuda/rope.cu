// Of a row's q, k and v: q and k are (normalised by head and) rotated by the row's position; q goes to its place in x, k and v
// go to the sequence's page.
//
//   rotated[i] = a[i] cos - a[i + r/2] sin, rotated[i + r/2] = a[i + r/2] cos + a[i] sin, i < r/2, r the rotary dimensions;
//   the angle is position * frequency[i] in f32; cos and sin are times `attention_scale`. Other dimensions pass as they are.
// One warp to a head; delta: what LoRA adds to the row, where it lies in a buffer of its own.
// Limits: head_dim even, at most 256; a row of position below zero is passed over. Bound: bytes of the row, twice.
#include "kv.cuh"

struct Row {
  int position;
  u32 list;              // where the sequence's page list starts
};

struct Rope {
  u16* x;                // rows of (query_heads + 2 * kv.heads) * head_dim
  const u16* delta;      // null: none
  const Row* rows;
  const float* frequencies;      // rotary / 2
  const u16* query_norm;         // head_dim, or null
  const u16* key_norm;
  Kv kv;
  u32 query_heads, rotary;
  float attention_scale, eps;
};

template <class T> DEVICE void rope(const Rope& P) {
  let_next_start();
  wait_for_previous();
  const u32 lane = threadIdx.x & 31, head = blockIdx.y * (blockDim.x >> 5) + (threadIdx.x >> 5), dim = P.kv.head_dim;
  const Row row = P.rows[blockIdx.x];
  const u32 heads = P.query_heads + 2 * P.kv.heads;
  if (row.position < 0) return;
  // The angles are the same for all heads.
  __shared__ float2 turns[128];
  const u32 half = P.rotary / 2;
  for (u32 i = threadIdx.x; i < half; i += blockDim.x) {
    float s, c;
    sincosf((float)row.position * P.frequencies[i], &s, &c);
    turns[i] = make_float2(c * P.attention_scale, s * P.attention_scale);
  }
  __syncthreads();
  if (head >= heads) return;
  const u64 at = ((u64)blockIdx.x * heads + head) * dim;
  const bool query = head < P.query_heads, value = head >= P.query_heads + P.kv.heads;
  // Element i of the lane is dimension 32 i + lane.
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 d = i * 32 + lane;
    v[i] = 0.f;
    if (d < dim) {
      v[i] = T::one(P.x[at + d]);
      // One rounding, as where LoRA has added into the row itself.
      if (P.delta) v[i] = T::low(T::pack(v[i] + T::one(P.delta[at + d]), 0.f));
    }
  }
  const u16* weight = value ? nullptr : query ? P.query_norm : P.key_norm;
  if (weight) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += v[i] * v[i];
    const float scale = rsqrtf(warp_sum(sum) / dim + P.eps);
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (i * 32 + lane < dim) v[i] = T::low(T::pack(T::low(T::pack(v[i] * scale, 0.f)) * T::one(weight[i * 32 + lane]), 0.f));
  }
  u16* out = P.x + at;
  if (!query) {
    const u32 token = row.position % P.kv.page_tokens, page = P.kv.pages[row.list + row.position / P.kv.page_tokens];
    out = kv_row(P.kv, page, value, value ? head - P.query_heads - P.kv.heads : head - P.query_heads, token);
  }
  // The other half of a pair is in another lane or register: through shared memory.
  __shared__ float rows[8][256];
  float* mine = rows[threadIdx.x >> 5];
#pragma unroll
  for (int i = 0; i < 8; i++) mine[i * 32 + lane] = v[i];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 d = i * 32 + lane;
    if (d >= dim) continue;
    float r = v[i];
    if (!value && d < P.rotary) {
      const bool upper = d >= half;
      const float2 turn = turns[upper ? d - half : d];
      r = upper ? v[i] * turn.x + mine[d - half] * turn.y : v[i] * turn.x - mine[d + half] * turn.y;
    }
    out[d] = (u16)T::pack(r, 0.f);
  }
}

extern "C" __global__ void __launch_bounds__(256) rope_bf16(const __grid_constant__ Rope P) { rope<Bf16>(P); }
extern "C" __global__ void __launch_bounds__(256) rope_f16(const __grid_constant__ Rope P) { rope<F16>(P); }
