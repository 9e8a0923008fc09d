// Of a row's q, k and v: q and k are (normalised by head and) rotated by the row's position; q goes to its place in x, k and v
// go to the sequence's page.
//
//   rotated[i] = a[i] cos - a[i + r/2] sin, rotated[i + r/2] = a[i + r/2] cos + a[i] sin, i < r/2, r the rotary dimensions;
//   the angle is position * frequency[i] in f32; cos and sin are times `attention_scale`. Other dimensions pass as they are.
// A CTA to a row, which works out the angles once for all heads. A lane holds eight pairs that turn together, sixteen bytes of each half, or
// eight dimensions that do not turn, of one head or of three; 4 to 32 lanes hold a head. delta: what LoRA adds to the row, where it lies in a buffer of
// its own.
// Limits: head_dim a multiple of 8, at most 256; rotary a multiple of 16; rows and pages at multiples of 16 bytes; a row of
// position below zero is passed over. Bound: bytes of the row (and delta), twice.
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

// Eight elements as floats.
template <class T> struct Eight {
  float v[8];
  DEVICE explicit Eight(uint4 w) {
    const u32* words = (const u32*)&w;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      v[2 * k] = T::low(words[k]);
      v[2 * k + 1] = T::high(words[k]);
    }
  }
  DEVICE uint4 pack() const {
    return make_uint4(T::pack(v[0], v[1]), T::pack(v[2], v[3]), T::pack(v[4], v[5]), T::pack(v[6], v[7]));
  }
  DEVICE float squares() const {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < 8; k++) sum += v[k] * v[k];
    return sum;
  }
  // The normalised element is rounded, then its product with the weight, as a model in that type does.
  DEVICE void scale(float by, uint4 weight) {
    const Eight w(weight);
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] *= by;
    *this = Eight(pack());
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] *= w.v[k];
    *this = Eight(pack());
  }
};

// One rounding, as where LoRA has added into the row itself.
template <class T> DEVICE uint4 load_row(const Rope& P, u64 at) {
  uint4 v = *(const uint4*)(P.x + at);
  if (P.delta) {
    const uint4 d = *(const uint4*)(P.delta + at);
    v = make_uint4(add_pair<T>(v.x, T::low(d.x), T::high(d.x)), add_pair<T>(v.y, T::low(d.y), T::high(d.y)),
                   add_pair<T>(v.z, T::low(d.z), T::high(d.z)), add_pair<T>(v.w, T::low(d.w), T::high(d.w)));
  }
  return v;
}

template <class T, int HEADS> DEVICE void rope(const Rope& P) {
  __shared__ __align__(16) float cosines[128], sines[128];
  let_next_start();
  wait_for_previous();
  const u32 dim = P.kv.head_dim, half = P.rotary / 2, heads = P.query_heads + 2 * P.kv.heads;
  const u32 pairs = half / 8, items = pairs + (dim - P.rotary) / 8, lanes = items > 1 ? 1u << (32 - __clz(items - 1)) : 1;
  const u32 item = threadIdx.x & (lanes - 1), step = blockDim.x / lanes;
  const bool pair = item < pairs, live = item < items;
  const u32 low = pair ? item * 8 : P.rotary + (item - pairs) * 8;
  const Row row = P.rows[blockIdx.x];
  if (row.position < 0) return;
  const u32 token = row.position % P.kv.page_tokens, page = P.kv.pages[row.list + row.position / P.kv.page_tokens];
  // A lane's heads, `step` apart: all are asked for before the first is written.
  uint4 first[HEADS], second[HEADS];
  auto head_of = [&](u32 base, int i) { return base + i * step + threadIdx.x / lanes; };
  auto load = [&](u32 base) {
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
      const u32 head = head_of(base, i);
      const u64 at = ((u64)blockIdx.x * heads + head) * dim + low;
      first[i] = second[i] = make_uint4(0, 0, 0, 0);
      if (live && head < heads) {
        first[i] = load_row<T>(P, at);
        if (pair) second[i] = load_row<T>(P, at + half);
      }
    }
  };
  // The first heads' bytes come while the angles are worked out.
  load(0);
  for (u32 i = threadIdx.x; i < half; i += blockDim.x) {
    float s, c;
    sincosf((float)row.position * P.frequencies[i], &s, &c);
    cosines[i] = c * P.attention_scale;
    sines[i] = s * P.attention_scale;
  }
  __syncthreads();
  // Whole warps go round together: lanes of a head sum what its norm needs.
#pragma unroll 1
  for (u32 base = 0; base < heads; base += step * HEADS) {
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
      const u32 head = head_of(base, i);
      const bool here = live && head < heads, query = head < P.query_heads, value = head >= P.query_heads + P.kv.heads;
      Eight<T> a(first[i]), b(second[i]);
      const u16* weight = value ? nullptr : query ? P.query_norm : P.key_norm;
      if (P.query_norm || P.key_norm) {
        float sum = a.squares() + b.squares();
        for (u32 d = lanes >> 1; d > 0; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
        const float scale = rsqrtf(sum / dim + P.eps);
        if (weight && here) {
          a.scale(scale, __ldg((const uint4*)(weight + low)));
          if (pair) b.scale(scale, __ldg((const uint4*)(weight + low + half)));
        }
      }
      if (pair && !value) {
#pragma unroll
        for (int k = 0; k < 8; k++) {
          const float c = cosines[low + k], s = sines[low + k], x = a.v[k], y = b.v[k];
          a.v[k] = x * c - y * s;
          b.v[k] = y * c + x * s;
        }
      }
      if (here) {
        u16* out = P.x + ((u64)blockIdx.x * heads + head) * dim;
        if (!query) out = kv_row(P.kv, page, value, head - P.query_heads - (value ? P.kv.heads : 0), token);
        *(uint4*)(out + low) = a.pack();
        if (pair) *(uint4*)(out + low + half) = b.pack();
      }
    }
    if (base + step * HEADS < heads) load(base + step * HEADS);
  }
}

// Few rows wait for their first bytes and want many lanes, many wait for memory and want more asked for by each.
extern "C" __global__ void __launch_bounds__(512) rope_bf16(const __grid_constant__ Rope P) { rope<Bf16, 1>(P); }
extern "C" __global__ void __launch_bounds__(512) rope_f16(const __grid_constant__ Rope P) { rope<F16, 1>(P); }
extern "C" __global__ void __launch_bounds__(512) rope_many_bf16(const __grid_constant__ Rope P) { rope<Bf16, 3>(P); }
extern "C" __global__ void __launch_bounds__(512) rope_many_f16(const __grid_constant__ Rope P) { rope<F16, 3>(P); }
