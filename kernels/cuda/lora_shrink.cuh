// The shrink of a decode launch: a run's rank tiles of A times x over its range of inputs, each warp its share of the blocks. What
// is next arrives in the warp's ring by cp.async and is waited for by count.
#pragma once
#include "lora_decode.cuh"

DEVICE void copy_async_or_zero(void* shared, const void* global, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(shared)), "l"(global), "r"(there ? 16 : 0) : "memory");
}

// Up to three tiles of one kind, shrunk in one pass over x.
struct Bundle {
  u32 run, first, count, half;
};

// The n-th full (or half) tile: its slice and its tile.
DEVICE void find_tile(const Slice* t, u32 half, u32 n, u32& slice, u32& tile) {
  const u32 n0 = half ? has_half(t[0].rank) : full_tiles(t[0].rank), n1 = half ? has_half(t[1].rank) : full_tiles(t[1].rank);
  slice = (n >= n0) + (n >= n0 + n1);
  tile = half ? full_tiles(t[slice].rank) : n - (slice > 0 ? n0 : 0) - (slice > 1 ? n1 : 0);
}

// A reader of one rank tile of A by ascending blocks.
struct Walk {
  const char* base;      // of the current page, less its first fragment, plus the lane's 16 bytes
  u32 start;             // the tile's first fragment
  u32 index, end;        // the current page, counted in the adapter, and the fragment behind it

  DEVICE void begin(const Pool& pool, const Start& at, u32 fragments, int lane) {
    start = at.fragment + fragments;
    index = at.index;
    end = (index + 1) * pool.page_fragments;
    base = pool.base + ((u64)at.page - index) * pool.page_bytes + lane * 16;
  }
  DEVICE const char* at(const Pool& pool, u32 list, u32 fragment, int lane) {
    fragment += start;
    if (fragment >= end) {
      do {
        index++;
        end += pool.page_fragments;
      } while (fragment >= end);
      base = pool.base + ((u64)__ldg(pool.pages + list + index) - index) * pool.page_bytes + lane * 16;
    }
    return base + (u64)fragment * 512;
  }
};

// One tile's part of a bite: a block of a full tile with x0, or two blocks of a half tile with x0 and, if it is there, x1.
template <class T, int H> DEVICE void multiply_bite(float (&acc)[4], const uint4& a, const uint4& b, const uint4& x0, const uint4& x1, bool both) {
  if (H == 2) {
    T::product(acc, a.x, a.y, a.z, a.w, x0.x, x0.y);
    T::product(acc, b.x, b.y, b.z, b.w, x0.z, x0.w);
    return;
  }
  T::product(acc, a.x, 0, a.y, 0, x0.x, x0.y);
  T::product(acc, a.z, 0, a.w, 0, x0.z, x0.w);
  if (!both) return;
  T::product(acc, b.x, 0, b.y, 0, x1.x, x1.y);
  T::product(acc, b.z, 0, b.w, 0, x1.z, x1.w);
}

// S.partial[m][warp] = A tile (first + m) times x over this warp's share of the K range.
template <class T, int N, int H>
DEVICE void shrink(const Decode& P, Shared& S, const Run& run, const Slice* t, const int* rows, u32 first, bool& waited) {
  constexpr int U = 3 - H, BITE = N * 1024 + U * 512, DEEP = RING / BITE;      // a bite: U blocks, 1 KB of each tile, then x
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  Walk walk[N];
  const u32 list = t[0].a.list;
#pragma unroll
  for (int m = 0; m < N; m++) {
    u32 slice, tile;
    find_tile(t, H == 1, first + m, slice, tile);
    walk[m].begin(P.pool, t[slice].a, tile * P.blocks_in * 2, lane);
  }
  const u32 end = run.from + run.count, step = WARPS * U;
  const int row = rows[g];
  const u16* x = P.x + (u64)max(row, 0) * P.inputs + q * 8;
  const u32 x_end = row < 0 ? 0 : min(end, (P.inputs + 31 - q * 8) / 32);      // blocks of which this lane has inputs
  auto fetch = [&](char* to, u32 block) {
    if (block >= end) return;
#pragma unroll
    for (int m = 0; m < N; m++) {
      const char* p = walk[m].at(P.pool, list, block * H, lane);
      copy_async(to + m * 1024, p);
      if (H == 2) copy_async(to + m * 1024 + 512, p + 512);
      else if (block + 1 < end) copy_async(to + m * 1024 + 512, walk[m].at(P.pool, list, block + 1, lane));
    }
  };
  auto fetch_x = [&](char* to, u32 block) {
    if (block < end) {
#pragma unroll
      for (int i = 0; i < U; i++) copy_async_or_zero(to + N * 1024 + i * 512, x + (block + i) * 32, block + i < x_end);
    }
    commit_copies();
  };
  char* const ring = own_ring();
  u32 block = run.from + warp * U;
  const bool known = P.early >= X_WHOLE || waited;
  if (!known) {
#pragma unroll 1
    for (int d = 0; d < DEEP; d++) fetch(ring + d * BITE, block + d * step);
    wait_for_previous();
    waited = true;
  }
#pragma unroll 1
  for (int d = 0; d < DEEP; d++) {
    if (known) fetch(ring + d * BITE, block + d * step);
    fetch_x(ring + d * BITE, block + d * step);
  }
  float acc[N][4];
#pragma unroll
  for (int m = 0; m < N; m++) acc[m][0] = acc[m][1] = acc[m][2] = acc[m][3] = 0.f;
  char* at = ring;
#pragma unroll 1
  for (; block < end; block += step) {
    wait_for_copies<DEEP - 1>();
    const uint4* bite = (const uint4*)at;
    const uint4 x0 = bite[N * 64], x1 = bite[N * 64 + (U - 1) * 32];
#pragma unroll
    for (int m = 0; m < N; m++) multiply_bite<T, H>(acc[m], bite[m * 64], bite[m * 64 + 32], x0, x1, block + 1 < end);
    fetch(at, block + DEEP * step);
    fetch_x(at, block + DEEP * step);
    at = at == ring + (DEEP - 1) * BITE ? ring : at + BITE;
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < N; m++) S.partial[m][warp][lane] = make_float4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
}

