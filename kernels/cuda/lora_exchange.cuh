// How shrink results cross from CTA to CTA: as {value, tag, value, tag} words that readers poll.
#pragma once
#include "lora_shrink.cuh"

// Sums the warps' shares of a bundle and hands them to the readers of other CTAs.
DEVICE void publish(const Decode& P, Shared& S, const Bundle& bundle, uint4* exchange, u32 tag) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, q = lane & 3;
  const Run& run = S.runs[bundle.run];
  const Slice* t = S.slices[bundle.run];
  __syncthreads();
#pragma unroll 1
  for (u32 i = warp; i < bundle.count * 2; i += WARPS) {
    const u32 m = i >> 1, upper = i & 1;      // ranks 0..7 and 8..15 of a tile
    if ((upper && bundle.half) || 2 * q >= run.rows) continue;
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float2 v = ((const float2*)&S.partial[m][w][lane])[upper];
      sum.x += v.x;
      sum.y += v.y;
    }
    u32 slice, tile;
    find_tile(t, bundle.half, bundle.first + m, slice, tile);
    uint4* out = exchange + (u64)(run.exchange + t[slice].column + tile) * 64 + upper * 32 + lane;
    store_volatile(out, make_uint4(__float_as_uint(sum.x), tag, __float_as_uint(sum.y), tag));
  }
}

// Sums the splits of the columns [from, to) and leaves scale * v, rounded, in S.v. All threads take part; none may still read S.v.
template <class T> DEVICE void gather(const Decode& P, Shared& S, const Run& run, const Slice* t, u32 from, u32 to, const uint4* exchange, u32 tag) {
  constexpr u32 THREADS = WARPS * 32;
  // An entry is a pair of rows of one rank: bits from below: row pair, rank in its half, half, column.
  const u32 tid = threadIdx.x, bits = run.rows > 4 ? 2 : run.rows > 2 ? 1 : 0, entries = (to - from) << (4 + bits);
  const u32 ways = entries >= THREADS ? 1 : THREADS / max(entries, 1u);
  const u32 way = ways == 1 ? 0 : tid / max(entries, 1u), place = tid - way * entries;
#pragma unroll 1
  for (u32 base = 0; base < entries; base += THREADS) {
    const u32 e = base + place, q = e & ((1 << bits) - 1), g = e >> bits & 7, half = e >> (bits + 3) & 1, column = from + (e >> (bits + 4));
    const u32 slice = (column >= t[1].column) + (column >= t[2].column), tile = column - t[slice].column;
    const bool live = e < entries && way < ways && 2 * q < run.rows && (half == 0 || tile < full_tiles(t[slice].rank));
    float2 sum = make_float2(0.f, 0.f);
    if (live) {
      const uint4* in = exchange + (u64)(run.exchange + column) * 64 + half * 32 + g * 4 + q;
      const u64 stride = (u64)run.stride * 64;
#pragma unroll 1
      for (u32 j = way; j < run.splits; j += 4 * ways) {
        uint4 v[4] = {};
#pragma unroll
        for (int u = 0; u < 4; u++)
          if (j + u * ways < run.splits) v[u] = load_volatile(in + (j + u * ways) * stride);
#pragma unroll
        for (int u = 0; u < 4; u++)
          if (j + u * ways < run.splits) {
            while (v[u].y != tag || v[u].w != tag) v[u] = load_volatile(in + (j + u * ways) * stride);
            sum.x += __uint_as_float(v[u].x);
            sum.y += __uint_as_float(v[u].z);
          }
      }
    }
    if (ways > 1) {
      S.parts[tid] = sum;
      __syncthreads();
      if (way == 0 && live)
#pragma unroll 1
        for (u32 k = 1; k < ways; k++) {
          sum.x += S.parts[k * entries + e].x;
          sum.y += S.parts[k * entries + e].y;
        }
    }
    if (way == 0 && live) {
      u16* v = (u16*)S.v + column * 128 + half * 8 + g;
      const u32 both = T::pack(sum.x * t[slice].scale, sum.y * t[slice].scale);
      v[(2 * q) * 16] = (u16)both;
      v[(2 * q + 1) * 16] = (u16)(both >> 16);
    }
  }
  __syncthreads();
}
