// to[n, k] = from[n, k] + scale (B A)[n, k]: an adapter's tensor goes into a weight matrix of N outputs by K inputs.
//
// Products of 16-bit elements, sums in f32, one rounding. from and to may be one matrix: merged in place. Rounding cannot be
// undone by arithmetic, so whoever wants the old weights back keeps a copy, merges from it, and restores by `pages_copy`; then nothing
// adds up over many merges either.
// A warp takes 64 outputs by 32 inputs: a B unit (lora.cuh) is the 16-row operand as it lies, a block of A becomes the 8-column operand by
// a transposition between lanes. A lane then has eight neighbouring inputs of eight outputs: 16 bytes of each row.
// Limits: N, K multiples of 8; rank 1..256 (rank 0 copies); rows of K elements at multiples of 16 bytes.
// Bound: bytes of the matrix, twice.
#include "lora.cuh"

constexpr u32 WARPS = 8;

struct Merge {
  const u16* from;
  u16* to;
  Pool pool;
  const Tensor* tensor;      // of the adapter and this matrix
  u32 inputs, outputs;
};

DEVICE u32 transposed(u32 v) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

template <class T> DEVICE void merge(const Merge& P) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const u32 unit = blockIdx.y, units = (P.outputs + 63) / 64;
  const u32 block = blockIdx.x * WARPS + (threadIdx.x >> 5), blocks = (P.inputs + 31) / 32;
  let_next_start();
  wait_for_previous();
  if (block >= blocks) return;
  const u32 input = block * 32 + q * 8, output = unit * 64 + ((g & 1) * 4 + (g >> 1)) * 8;
  const bool live = input < P.inputs && output < P.outputs;
  const u64 at = (u64)output * P.inputs + input;
  uint4 weights[8];
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (live) weights[i] = load_wide(P.from + at + (u64)i * P.inputs);
  const uint4 head = __ldg((const uint4*)P.tensor), tail = __ldg((const uint4*)P.tensor + 1);
  const u32 rank = head.z, list = tail.x, full = full_tiles(rank);
  const float scale = __uint_as_float(head.w);
  Reader a, b;
  a.start(P.pool, Start{head.x, head.x / P.pool.page_fragments, tail.y, list}, lane);
  b.start(P.pool, Start{head.y, head.y / P.pool.page_fragments, tail.z, list}, lane);
  float sums[4][4][4] = {};      // two outputs 2m, 2m + 1; two inputs 2o, 2o + 1
#pragma unroll 1
  for (u32 t = 0; t < full; t++) {
    const char *pa = a.at(P.pool, list, head.x + (t * blocks + block) * 2, lane), *pb = b.at(P.pool, list, head.y + (unit * full + t) * 4, lane);
    uint4 columns[2], rows[4];
#pragma unroll
    for (int h = 0; h < 2; h++) columns[h] = __ldg((const uint4*)(pa + h * 512));
#pragma unroll
    for (int m = 0; m < 4; m++) rows[m] = __ldg((const uint4*)(pb + m * 512));
#pragma unroll
    for (int o = 0; o < 4; o++) {
      const uint4& c = columns[o >> 1];
      const u32 low = transposed(o & 1 ? c.z : c.x), high = transposed(o & 1 ? c.w : c.y);
#pragma unroll
      for (int m = 0; m < 4; m++) T::product(sums[m][o], rows[m].x, rows[m].y, rows[m].z, rows[m].w, low, high);
    }
  }
  if (has_half(rank)) {
    const uint4 columns = __ldg((const uint4*)a.at(P.pool, list, head.x + full * blocks * 2 + block, lane));
    const char* pb = b.at(P.pool, list, head.y + units * full * 4 + unit * 2, lane);
    const uint4 rows[2] = {__ldg((const uint4*)pb), __ldg((const uint4*)(pb + 512))};
#pragma unroll
    for (int o = 0; o < 4; o++) {
      const u32 c = transposed(o == 0 ? columns.x : o == 1 ? columns.y : o == 2 ? columns.z : columns.w);
#pragma unroll
      for (int m = 0; m < 4; m++) T::product8(sums[m][o], m & 1 ? rows[m / 2].z : rows[m / 2].x, m & 1 ? rows[m / 2].w : rows[m / 2].y, c);
    }
  }
  if (!live) return;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32* words = (u32*)&weights[i];
#pragma unroll
    for (int o = 0; o < 4; o++) {
      const float* sum = &sums[i / 2][o][i % 2 * 2];
      words[o] = T::pack(fmaf(scale, sum[0], T::low(words[o])), fmaf(scale, sum[1], T::high(words[o])));
    }
    store_streaming(P.to + at + (u64)i * P.inputs, weights[i]);
  }
}

extern "C" __global__ void __launch_bounds__(256, 2) merge_bf16(const __grid_constant__ Merge P) { merge<Bf16>(P); }
extern "C" __global__ void __launch_bounds__(256, 2) merge_f16(const __grid_constant__ Merge P) { merge<F16>(P); }
