// How an adapter lies on the device.
//
// An adapter is a sequence of 512-byte fragments, one 16-byte load for each lane of a warp, cut into pages of the pool
// wherever they are free. A tensor pair of rank r has r / 16 full tiles, and one half tile of 8 where r % 16 is in 1..8
// (rounded up to a full tile where it is above); what a tile has beyond r is zero.
//   A (r x K):  tile by tile, in it K / 32 blocks of 2 fragments (half tile: 1), in the operand order of m16n8k16.
//               Fragment h of block b, lane 4g+q, register i, element e:
//               rank g + 8 (i & 1), k = 32 b + 8 q + 4 h + 2 (i >> 1) + e. So one lane's 16 bytes of x feed two products.
//   B (N x r):  units of 64 outputs, in a unit tile by tile, 4 fragments each; the half tiles of all units follow, 2 each.
//               Fragment m, lane 4g+q, register i, element e: output 8 p(g) + 2 m + (i & 1), rank 2 q + e + 8 (i >> 1),
//               p(g) = 4 (g & 1) + g / 2, so that both decode and prefill touch whole 32-byte sectors of y.
// src/lora/layout.rs writes this layout and says the same in Rust.
#pragma once
#include "common.cuh"

constexpr int SLICES = 3;      // projections that share an input: q, k, v

// One projection of one layer of one resident adapter. Rank 0: the adapter has none here.
struct Tensor {
  u32 a, b;      // first fragments
  u32 rank;
  float scale;
  u32 pages;     // where the adapter's page list starts
  u32 page_a, page_b;      // the pages that a and b are in
  u32 unused;
};

struct Pool {
  const char* base;
  const u32* pages;      // page lists of all residents
  u64 page_bytes;
  u32 page_fragments;
  u32 unused;
};

DEVICE u32 full_tiles(u32 rank) { return (rank + 7) >> 4; }
DEVICE u32 has_half(u32 rank) { return ((rank + 15) & 15) < 8 && rank > 0; }
DEVICE u32 tiles(u32 rank) { return full_tiles(rank) + has_half(rank); }

// Where a tensor starts: its first fragment, that fragment's page counted in the adapter, and in the pool.
struct Start {
  u32 fragment, index, page, list;
};

// A reader of ascending fragments: looks a page up only when it leaves the one before.
struct Reader {
  const char* base;      // of the current page, less its first fragment, plus the lane's 16 bytes
  u32 end;               // first fragment of the next page

  DEVICE void enter(const Pool& pool, u32 index, u32 page, int lane) {
    end = (index + 1) * pool.page_fragments;
    base = pool.base + ((u64)page - index) * pool.page_bytes + lane * 16;
  }
  DEVICE void start(const Pool& pool, const Start& at, int lane) { enter(pool, at.index, at.page, lane); }
  // Only for fragments at or behind the current page.
  DEVICE const char* at(const Pool& pool, u32 list, u32 fragment, int lane) {
    if (fragment >= end) {
      const u32 index = fragment / pool.page_fragments;
      enter(pool, index, __ldg(pool.pages + list + index), lane);
    }
    return base + (u64)fragment * 512;
  }
};

// Sums on their way between CTAs, four of a lane together.
DEVICE float4 wide(const float (&c)[4]) { return make_float4(c[0], c[1], c[2], c[3]); }
DEVICE void add(float (&c)[4], const float4& v) {
  c[0] += v.x;
  c[1] += v.y;
  c[2] += v.z;
  c[3] += v.w;
}
// Sums of 16 rows by 16 ranks, the lower eight first, as the operand of the product with B.
template <class T> DEVICE uint4 operand_of(const float (&c)[2][4], float scale) {
  return make_uint4(T::pack(c[0][0] * scale, c[0][1] * scale), T::pack(c[0][2] * scale, c[0][3] * scale), T::pack(c[1][0] * scale, c[1][1] * scale),
                    T::pack(c[1][2] * scale, c[1][3] * scale));
}
