// o = softmax(scale q K^T) V over a sequence's pages, causal, for query heads that share a KV head.
//
// A tile is 16 lines of the product: the query heads of one KV head, for one token (decode) or for several of a chunk. A CTA of
// four warps takes one tile, one KV head and one part of the sequence; its warps take 16 tokens in turn, keep their own maximum,
// sum and output, and merge at the end. Where a sequence is cut into parts, `attention_merge_*` merges those.
// K goes from memory straight into the operand of q K^T: a lane's 16 bytes of a token's row feed two products, because the lines
// of q are laid out in the same order of dimensions. V is turned in registers: two tokens' 16 bytes make eight operands.
// Limits: head_dim 64, 80, 96, 128 or 256; page_tokens a multiple of 16; at most 16 query heads to a KV head. Scores, sums and
// outputs in f32; probabilities are rounded to the element type. Tokens behind the last are never multiplied, whatever they hold.
// Bound (decode): bytes of K and V.
#include "attention.cuh"

constexpr int WARPS = 4, LINES = 16;

DEVICE float* part_of(const Attention& P, u32 tile, u32 head, u32 split, u32 dim) {
  return P.parts + (((u64)tile * P.kv.heads + head) * P.splits + split) * (LINES * (dim + 2));
}

DEVICE u32 pick(u32 a, u32 b, u32 high) { return __byte_perm(a, b, high ? 0x7632 : 0x5410); }

// Sixteen lines of one tile, their maxima, sums and outputs, in one warp's registers. Element (b, j) of output column c is
// dimension 64 b + 8 c + j.
template <class T, int D> struct Lines {
  static constexpr int BLOCKS = (D + 31) / 32, GROUPS = (D + 63) / 64;
  uint4 q[2][BLOCKS];
  int limit[2];          // the last token that a line sees; below zero: no line
  float o[GROUPS * 8][4], top[2], sum[2];

  DEVICE void start(const Attention& P, const Tile& tile, u32 head, u32 per) {
    const int lane = threadIdx.x & 31, at = (lane & 3) * 8;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 line = (lane >> 2) + 8 * r, token = line / per;
      const bool live = line < tile.tokens * per;
      const u16* row = P.q + (u64)(tile.row + token) * P.stride_q + (head * per + line % per) * D + at;
      limit[r] = live ? tile.position + (int)token : -1;
      top[r] = -INFINITY;
      sum[r] = 0.f;
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        q[r][b] = make_uint4(0, 0, 0, 0);
        if (live && b * 32 + at < D) q[r][b] = *(const uint4*)(row + b * 32);
      }
    }
#pragma unroll
    for (int i = 0; i < GROUPS * 8; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
  }

  // Sixteen tokens of the sequence.
  DEVICE void take(const Attention& P, const Tile& tile, u32 head, int step, int length) {
    const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    const u32 page = P.kv.pages[tile.list + step * 16 / P.kv.page_tokens], in_page = step * 16 % P.kv.page_tokens;
    const u16* keys = kv_row(P.kv, page, 0, head, in_page) + c * 8;
    const u16* values = kv_row(P.kv, page, 1, head, in_page) + g * 8;
    uint4 k[2][BLOCKS], v[4][GROUPS];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        k[n][b] = make_uint4(0, 0, 0, 0);
        if (b * 32 + c * 8 < D) k[n][b] = load_once(keys + (n * 8 + g) * D + b * 32);
      }
    auto read_values = [&]() {
#pragma unroll
      for (int t = 0; t < 4; t++) {
        const int token = 2 * c + (t & 1) + (t >> 1) * 8;
#pragma unroll
        for (int b = 0; b < GROUPS; b++) {
          v[t][b] = make_uint4(0, 0, 0, 0);
          if (step * 16 + token < length && b * 64 + g * 8 < D) v[t][b] = load_once(values + token * D + b * 64);
        }
      }
    };
    // Values are asked for before the scores are made, where registers allow.
    if (D <= 128) read_values();
    float s[2][4] = {};
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
      for (int n = 0; n < 2; n++) {
        T::product(s[n], q[0][b].x, q[1][b].x, q[0][b].y, q[1][b].y, k[n][b].x, k[n][b].y);
        T::product(s[n], q[0][b].z, q[1][b].z, q[0][b].w, q[1][b].w, k[n][b].z, k[n][b].w);
      }
    u32 p[2][2];      // [half of the tokens][line g or g + 8]
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float most = top[r];
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[n][r * 2 + e];
          x *= P.scale;
          if (P.soft_cap != 0.f) x = P.soft_cap * tanhf(x / P.soft_cap);
          const int token = step * 16 + n * 8 + 2 * c + e;
          if (token > limit[r] || (P.window && token + (int)P.window <= limit[r])) x = -INFINITY;
          most = fmaxf(most, x);
        }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      // A line that has seen nothing yet has nothing to rescale.
      const float shift = most == -INFINITY ? 0.f : most, keep = __expf(top[r] - shift);
      top[r] = most;
      sum[r] *= keep;
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const float a = __expf(s[n][r * 2] - shift), b = __expf(s[n][r * 2 + 1] - shift);
        sum[r] += a + b;
        p[n][r] = T::pack(a, b);
      }
#pragma unroll
      for (int i = 0; i < GROUPS * 8; i++) {
        o[i][r * 2] *= keep;
        o[i][r * 2 + 1] *= keep;
      }
    }
    if (D > 128) read_values();
#pragma unroll
    for (int b = 0; b < GROUPS; b++) {
      const u32 *v0 = (const u32*)&v[0][b], *v1 = (const u32*)&v[1][b], *v2 = (const u32*)&v[2][b], *v3 = (const u32*)&v[3][b];
#pragma unroll
      for (int j = 0; j < 8; j++)
        T::product(o[b * 8 + j], p[0][0], p[0][1], p[1][0], p[1][1], pick(v0[j >> 1], v1[j >> 1], j & 1), pick(v2[j >> 1], v3[j >> 1], j & 1));
    }
  }

  // Sums over the four lanes of a line.
  DEVICE void finish() {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
    }
  }
};

DEVICE int first_step(const Attention& P, const Tile& tile) { return P.window ? max(tile.position + 1 - (int)P.window, 0) / 16 : 0; }

template <class T, int D> DEVICE void attention(const Attention& P) {
  constexpr int GROUPS = (D + 63) / 64;
  extern __shared__ float shared[];      // [warp][line][D], then [warp][line] maximum and sum
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  // The merge may read tiles before this is complete: what wrote them is.
  wait_for_previous();
  let_next_start();
  const Tile tile = P.tiles[blockIdx.x];
  const u32 head = blockIdx.y, per = P.query_heads / P.kv.heads, lines = tile.tokens * per;
  const int length = tile.position + (int)tile.tokens, first = first_step(P, tile), steps = (length + 15) / 16 - first;
  const int from = first + steps * (int)blockIdx.z / (int)P.splits, to = first + steps * ((int)blockIdx.z + 1) / (int)P.splits;
  Lines<T, D> mine;
  mine.start(P, tile, head, per);
#pragma unroll 1
  for (int step = from + warp; step < to; step += WARPS) mine.take(P, tile, head, step, length);
  mine.finish();
  float* tops = shared + WARPS * LINES * D;
  float* sums = tops + WARPS * LINES;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int line = g + 8 * r;
    if (q == 0) {
      tops[warp * LINES + line] = mine.top[r];
      sums[warp * LINES + line] = mine.sum[r];
    }
#pragma unroll
    for (int b = 0; b < GROUPS; b++)
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int d = b * 64 + (2 * q + e) * 8 + j;
          if (d < D) shared[(warp * LINES + line) * D + d] = mine.o[b * 8 + j][r * 2 + e];
        }
  }
  __syncthreads();
  float* part = part_of(P, blockIdx.x, head, blockIdx.z, D);
  for (u32 i = threadIdx.x; i < lines * D; i += WARPS * 32) {
    const u32 line = i / D, d = i % D;
    float most = -INFINITY, all = 0.f, value = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) most = fmaxf(most, tops[w * LINES + line]);
    const float shift = most == -INFINITY ? 0.f : most;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float keep = __expf(tops[w * LINES + line] - shift);
      all += keep * sums[w * LINES + line];
      value += keep * shared[(w * LINES + line) * D + d];
    }
    if (P.splits == 1) {
      P.y[((u64)(tile.row + line / per) * P.query_heads + head * per + line % per) * D + d] = (u16)T::pack(value / all, 0.f);
    } else {
      part[line * D + d] = value;
      if (d == 0) {
        part[LINES * D + line * 2] = most;
        part[LINES * D + line * 2 + 1] = all;
      }
    }
  }
}

// One CTA to a line. Threads are groups of a row's width, four dimensions to a thread; groups take parts in turn, ask for many at a time and
// before they know their weights, and add up in order.
constexpr int PARTS_MAX = 64, MERGE = 128, AT_ONCE = 10;

template <class T> DEVICE void attention_merge(const Attention& P) {
  __shared__ float4 sums[MERGE];
  let_next_start();
  const uint4 words = __ldcg((const uint4*)(P.tiles + blockIdx.x));
  const u32 row = words.x, tokens = words.y;
  const u32 head = blockIdx.y, line = blockIdx.z, per = P.query_heads / P.kv.heads, dim = P.kv.head_dim;
  if (line >= tokens * per) return;
  const float* first = part_of(P, blockIdx.x, head, 0, dim);
  const u32 stride = LINES * (dim + 2), lane = threadIdx.x & 31;
  const u32 wide = dim / 4, groups = MERGE / wide, group = threadIdx.x / wide, at = threadIdx.x % wide;
  wait_for_previous();
  float weight[PARTS_MAX / 32], sum[PARTS_MAX / 32];
#pragma unroll
  for (int i = 0; i < PARTS_MAX / 32; i++) {
    const u32 s = lane + i * 32;
    const float2 both = s < P.splits ? __ldcg((const float2*)(first + s * stride + LINES * dim + line * 2)) : make_float2(-INFINITY, 0.f);
    weight[i] = both.x;
    sum[i] = both.y;
  }
  float4 value = make_float4(0.f, 0.f, 0.f, 0.f), v[AT_ONCE];
  const float4* in = (const float4*)(first + line * dim) + at;
  auto ask = [&](u32 from) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const u32 s = from + i * groups;
      v[i] = group < groups && s < P.splits ? __ldcg(in + (u64)s * (stride / 4)) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  };
  ask(group);
  float most = weight[0], all = 0.f;
#pragma unroll
  for (int i = 1; i < PARTS_MAX / 32; i++) most = fmaxf(most, weight[i]);
  most = warp_max(most);
#pragma unroll
  for (int i = 0; i < PARTS_MAX / 32; i++) {
    weight[i] = __expf(weight[i] - most);
    all += weight[i] * sum[i];
  }
  all = warp_sum(all);
  // All lanes of a warp go as far as any, since they ask each other for weights.
#pragma unroll 1
  for (u32 turn = 0; turn < P.splits; turn += AT_ONCE * groups) {
    if (turn > 0) ask(turn + group);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const u32 s = turn + group + i * groups;
      float w = 0.f;
#pragma unroll
      for (int k = 0; k < PARTS_MAX / 32; k++) {
        const float other = __shfl_sync(0xffffffffu, weight[k], s & 31);
        if (s >> 5 == k) w = other;
      }
      value.x += w * v[i].x;
      value.y += w * v[i].y;
      value.z += w * v[i].z;
      value.w += w * v[i].w;
    }
  }
  sums[threadIdx.x] = value;
  __syncthreads();
  if (group > 0) return;
#pragma unroll 1
  for (u32 k = 1; k < groups; k++) {
    const float4 other = sums[k * wide + at];
    value.x += other.x;
    value.y += other.y;
    value.z += other.z;
    value.w += other.w;
  }
  u16* y = P.y + ((u64)(row + line / per) * P.query_heads + head * per + line % per) * dim + at * 4;
  *(uint2*)y = make_uint2(T::pack(value.x / all, value.y / all), T::pack(value.z / all, value.w / all));
}

#define KERNEL(T, name, D) \
  extern "C" __global__ void __launch_bounds__(WARPS * 32) attention_##name##_##D(const __grid_constant__ Attention P) { attention<T, D>(P); }
KERNEL(Bf16, bf16, 64)
KERNEL(Bf16, bf16, 80)
KERNEL(Bf16, bf16, 96)
KERNEL(Bf16, bf16, 128)
KERNEL(Bf16, bf16, 256)
KERNEL(F16, f16, 64)
KERNEL(F16, f16, 80)
KERNEL(F16, f16, 96)
KERNEL(F16, f16, 128)
KERNEL(F16, f16, 256)
extern "C" __global__ void __launch_bounds__(MERGE) attention_merge_bf16(const __grid_constant__ Attention P) { attention_merge<Bf16>(P); }
extern "C" __global__ void __launch_bounds__(MERGE) attention_merge_f16(const __grid_constant__ Attention P) { attention_merge<F16>(P); }
