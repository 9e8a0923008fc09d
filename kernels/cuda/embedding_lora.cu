// y[row] += scale B A[:, token[row]] for rows that have an adapter on the embedding.
//
// PEFT's LoRA of an embedding: x is a one-hot row, so that the shrink is the token's column of A, and the expand as elsewhere. A
// piece is 1..8 rows of one adapter, the columns of the tensor-core product; B's units are its 16-row operand (lora.cuh). Sums
// in f32, one rounding. Every y element has one writer.
// Limits: width a multiple of 8; A's inputs (the vocabulary) rounded up to a multiple of 8; rank 1..256; a token outside of the vocabulary and a
// row below zero get nothing. Bound: bytes of B once for each piece (from the L2 where an adapter has many) and of y, twice.
#include "lora.cuh"

constexpr u32 WARPS = 8, TILES = 16;

struct Piece {
  u32 slot, row0, rows, unused;
};

struct EmbeddingLora {
  u16* y;                    // rows of `width`
  const u32* tokens;         // by row of y
  const Piece* pieces;
  const int* rows;           // rows of y by piece; below zero: no row
  Pool pool;
  const Tensor* tensors;     // tensors[slot * stride + place]
  u32 stride, place;
  u32 vocabulary, inputs, width;
  float scale;               // times the adapter's own: what the model multiplies its embedding by
};

template <class T> DEVICE void embedding_lora(const EmbeddingLora& P) {
  __shared__ u16 columns[TILES * 128];      // [tile][row of 8][rank of 16]
  let_next_start();
  const Piece piece = P.pieces[blockIdx.y];
  const Tensor* entry = P.tensors + (u64)piece.slot * P.stride + P.place;
  const uint4 head = __ldg((const uint4*)entry), tail = __ldg((const uint4*)entry + 1);
  const u32 rank = head.z, list = tail.x, full = full_tiles(rank), all = tiles(rank), blocks = (P.inputs + 31) / 32;
  wait_for_previous();
  if (rank == 0) return;
  auto row_of = [&](u32 n) { return n < piece.rows ? P.rows[piece.row0 + n] : -1; };
  // A warp takes a unit. Its y comes while the columns are looked up.
  const u32 lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, units = (P.width + 63) / 64, unit = blockIdx.x * WARPS + (threadIdx.x >> 5);
  const u32 output = unit * 64 + ((g & 1) * 4 + (g >> 1)) * 8;
  uint4* target[2];     // of rows 2 q and 2 q + 1; null: none
  uint4 y[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int row = row_of(2 * q + j);
    target[j] = row < 0 || output >= P.width ? nullptr : (uint4*)(P.y + (u64)row * P.width + output);
    if (target[j]) y[j] = *target[j];
  }
  for (u32 i = threadIdx.x; i < all * 128; i += blockDim.x) {
    const u32 r = i >> 3, n = i & 7, tile = r / 16;
    const int row = row_of(n);
    u16 v = 0;
    const u32 token = row >= 0 ? P.tokens[row] : P.vocabulary;
    if (token < P.vocabulary && r < rank) {
      const u32 block = token / 32, q = token % 32 / 8, h = token % 8 / 4, pair = token % 4 / 2;
      const u32 fragment = head.x + (tile < full ? (tile * blocks + block) * 2 + h : full * blocks * 2 + block);
      const u32 place = tile < full ? r % 16 / 8 + 2 * pair : 2 * h + pair;
      const char* page = P.pool.base + (u64)__ldg(P.pool.pages + list + fragment / P.pool.page_fragments) * P.pool.page_bytes;
      v = *(const u16*)(page + (u64)(fragment % P.pool.page_fragments) * 512 + (r % 8 * 4 + q) * 16 + place * 4 + token % 2 * 2);
    }
    columns[tile * 128 + n * 16 + r % 16] = v;
  }
  __syncthreads();
  if (unit >= units) return;
  const float scale = __uint_as_float(head.w) * P.scale;
  Reader reader;
  reader.start(P.pool, Start{head.y, head.y / P.pool.page_fragments, tail.z, list}, lane);
  float c[4][4] = {};
  const u32* v = (const u32*)columns + g * 8 + q;
#pragma unroll 1
  for (u32 t = 0; t < full; t++) {
    const char* p = reader.at(P.pool, list, head.y + (unit * full + t) * 4, lane);
#pragma unroll
    for (int m = 0; m < 4; m++) {
      const uint4 w = __ldg((const uint4*)(p + m * 512));
      T::product(c[m], w.x, w.y, w.z, w.w, v[t * 64], v[t * 64 + 4]);
    }
  }
  if (all > full) {
    const char* p = reader.at(P.pool, list, head.y + units * full * 4 + unit * 2, lane);
#pragma unroll
    for (int m = 0; m < 4; m += 2) {
      const uint4 w = __ldg((const uint4*)(p + m * 256));
      T::product8(c[m], w.x, w.y, v[full * 64]);
      T::product8(c[m + 1], w.z, w.w, v[full * 64]);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    if (!target[j]) continue;
    uint4& words = y[j];
    words.x = add_pair<T>(words.x, scale * c[0][j], scale * c[0][2 + j]);
    words.y = add_pair<T>(words.y, scale * c[1][j], scale * c[1][2 + j]);
    words.z = add_pair<T>(words.z, scale * c[2][j], scale * c[2][2 + j]);
    words.w = add_pair<T>(words.w, scale * c[3][j], scale * c[3][2 + j]);
    *target[j] = words;
  }
}

extern "C" __global__ void __launch_bounds__(256) embedding_lora_bf16(const __grid_constant__ EmbeddingLora P) { embedding_lora<Bf16>(P); }
extern "C" __global__ void __launch_bounds__(256) embedding_lora_f16(const __grid_constant__ EmbeddingLora P) { embedding_lora<F16>(P); }
