// What a decode launch is given, and what a CTA keeps of it.
#pragma once
#include "lora.cuh"

constexpr int WARPS = 8, CTAS_PER_SM = 2, RUNS = 64, INLINE = 3, COLUMNS = 48, PARTS = 4;
// Bytes of a warp's ring, in which its weights arrive, and rank tiles that are shrunk in one pass over x.
#if __CUDA_ARCH__ >= 900
constexpr int RING = 8192, BUNDLE = 3;
#else
constexpr int RING = 5120, BUNDLE = 1;
#endif
constexpr int STEP_BYTES = 2048, DEPTH = RING / STEP_BYTES;      // of an expand, and how many of them a ring holds
constexpr int WARP_STEPS = 64;                                   // of an expand, that are laid out at one time

// What `early` says.
constexpr u32 X_WHOLE = 1;     // x was whole before the previous kernel began, and only y has to be waited for
constexpr u32 BESIDE = 2;      // nor y, a buffer of its own; and no launch that shares the exchange is under way

struct Run {
  u32 slot;          // resident adapter
  u32 row0;          // first entry of rows
  u32 rows;          // 1..8
  u32 from, count;   // shrink: blocks of 32 inputs; expand: units of 64 outputs, counted through all slices
  u32 exchange;      // first column (64 words of 16 bytes) of this shrink's split; expand: of split 0
  u32 stride;        // columns from one split to the next
  u32 splits;        // expand: how many shrinks to sum
};

struct Block {
  u32 shrinks, expands, overflow, unused[5];
  Run runs[INLINE];
};

struct Decode {
  const u16* x;
  u16* y;
  Pool pool;
  const Tensor* tensors;
  const int* rows;       // rows of x and y by segment; below zero: no row
  const Block* blocks;   // one per CTA
  const Run* overflow;   // the runs that a block has no place for
  const Block* next_blocks;      // those of the launch after this one, or null
  uint4* exchange;
  u32* step;             // of the host; behind it the tag of the last launch that knew all before it complete
  u32 inputs, blocks_in;           // K, and K / 32 rounded up
  u32 slices, stride_y;
  u32 outputs[SLICES];             // N of each slice
  u32 column[SLICES];              // where its outputs start in a row of y
  u32 unit_end[SLICES];            // units up to and including this slice
  u32 projections, projection, layers, layer;      // tensors[(slot * layers + layer) * projections + projection + slice]
  u32 launch, store;               // store: y is overwritten instead of added to
  u32 early;                       // 0: the previous kernel makes x
  u32 part;                        // columns of one part of the exchange
};

// What a run has to know of one slice.
struct Slice {
  Start a, b;
  u32 rank;
  float scale;
  u32 column;    // of its first rank tile: columns are the tiles of all slices, one after the other
};

// What a warp does at once in an expand, up to 2 KB of B: 64 outputs by a full tile, by a half tile, or twice 64 by half tiles.
struct alignas(16) Step {
  const char* weights;
  u32 column;      // of y: where the outputs start
  u32 what;        // its kind; LAST; eighths of the last 64 outputs that there are, from EIGHTHS on; column of v from TILE on
};
constexpr u32 FULL = 0, HALF = 1, PAIR = 2, KIND = 3, LAST = 4, EIGHTHS = 4, TILE = 8;

struct Shared {
  Step steps[WARP_STEPS * WARPS];      // in turn for each warp
  float4 partial[BUNDLE][WARPS][32];
  u32 v[COLUMNS * 64];             // [column][row of 8][rank pair of 8]
  float2 parts[WARPS * 32];
  Run runs[RUNS];
  Slice slices[RUNS][SLICES];
  int rows[RUNS][8];
};

// This lane's 16 bytes of its warp's ring: what a lane copies it reads itself, so nobody has to be waited for but the copy.
DEVICE char* own_ring() {
  extern __shared__ __align__(16) char rings[];
  return rings + (threadIdx.x >> 5) * RING + (threadIdx.x & 31) * 16;
}
