// y[row, :] += scale * (x[row, :] A) B for segments of 1..8 rows, each with its own adapter and rank.
//
// One launch serves the projections that share x (q,k,v; gate,up). A CTA takes runs from its block of the plan: first
// shrink runs (a segment's K range), then expand runs (a segment's range of 64-output units). Weights stream by cp.async into
// a ring of each warp, are waited for by count, and are the 16-row operand of the product; rows are its 8 columns.
// Shrink results cross CTAs through `exchange` as {value, tag, value, tag}: a reader polls the data itself, so there is no
// counter, no fence and nothing to clear. tag = step * 1024 + launch.
// With dependent launch the next launches begin at once beside this one and go as far as they can: all but the additions to
// y, if x is known to be whole. So launches take turns in four parts of the exchange, and one that does not know the last
// user of its part to be complete waits for the launch before it.
//
// Limits: every CTA must be resident at once (`CTAS_PER_SM`); no two streams that share `exchange`; launch < 1024 and ascending
// within a step; the host clears `exchange` when step wraps at 2^22; K and N multiples of 8; rank at most 256;
// at most 64 runs to a CTA.
// Deterministic: every sum has one order, fixed by the plan; every y element has one writer.
#include "lora_expand.cuh"

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
    for (int m = 0; m < N; m++) {
      const uint4 a = bite[m * 64], b = bite[m * 64 + 32];
      if (H == 2) {
        T::product(acc[m], a.x, a.y, a.z, a.w, x0.x, x0.y);
        T::product(acc[m], b.x, b.y, b.z, b.w, x0.z, x0.w);
      } else {
        T::product(acc[m], a.x, 0, a.y, 0, x0.x, x0.y);
        T::product(acc[m], a.z, 0, a.w, 0, x0.z, x0.w);
        if (block + 1 < end) {
          T::product(acc[m], b.x, 0, b.y, 0, x1.x, x1.y);
          T::product(acc[m], b.z, 0, b.w, 0, x1.z, x1.w);
        }
      }
    }
    fetch(at, block + DEEP * step);
    fetch_x(at, block + DEEP * step);
    at = at == ring + (DEEP - 1) * BITE ? ring : at + BITE;
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < N; m++) S.partial[m][warp][lane] = make_float4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
}

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

DEVICE u32 units_before(const Decode& P, u32 slice) { return slice ? P.unit_end[slice - 1] : 0; }

// The CTA's runs, and what they need to know of their adapters, into shared memory.
DEVICE u32 read_plan(const Decode& P, Shared& S, u32& shrinks) {
  const Block* block = P.blocks + blockIdx.x;
  const u32 tid = threadIdx.x, threads = WARPS * 32;
  const uint4 head = __ldg((const uint4*)block);
  if (tid < INLINE * 2) ((uint4*)S.runs)[tid] = __ldg((const uint4*)block->runs + tid);
  shrinks = head.x;
  const u32 runs = head.x + head.y;
  if (tid == 0 && P.next_blocks) prefetch_l2(P.next_blocks + blockIdx.x);
  for (u32 i = tid; i + INLINE * 2 < runs * 2; i += threads) ((uint4*)(S.runs + INLINE))[i] = __ldg((const uint4*)(P.overflow + head.z) + i);
  __syncthreads();
  // Whole warps, so that slices can hand on how many tiles they have.
  for (u32 i = tid; i < (runs * 8 + 31 & ~31u); i += threads) {
    const u32 r = min(i >> 3, runs - 1), k = i & 7;
    const Tensor* t = P.tensors + ((u64)S.runs[r].slot * P.layers + P.layer) * P.projections + P.projection + k;
    uint4 low = make_uint4(0, 0, 0, 0), high = low;
    if (k < P.slices) {
      low = __ldg((const uint4*)t);
      high = __ldg((const uint4*)t + 1);
      // The next launch will ask for what follows.
      prefetch_l2(t + P.slices);
    }
    const u32 one = __shfl_up_sync(~0u, tiles(low.z), 1), two = __shfl_up_sync(~0u, tiles(low.z), 2);
    S.rows[r][k] = k < S.runs[r].rows ? __ldg(P.rows + S.runs[r].row0 + k) : -1;
    if (k < SLICES) {
      Slice& s = S.slices[r][k];
      s.a = Start{low.x, low.x / P.pool.page_fragments, high.y, high.x};
      s.b = Start{low.y, low.y / P.pool.page_fragments, high.z, high.x};
      s.rank = low.z;
      s.scale = __uint_as_float(low.w);
      s.column = (k > 0 ? one : 0) + (k > 1 ? two : 0);
    }
  }
  __syncthreads();
  return runs;
}

template <class T> DEVICE void shrink_bundle(const Decode& P, Shared& S, const Bundle& b, bool& waited) {
  const Run& run = S.runs[b.run];
  const Slice* t = S.slices[b.run];
  const int* rows = S.rows[b.run];
  if (b.half) {
    if (b.count == 1) shrink<T, 1, 1>(P, S, run, t, rows, b.first, waited);
    else if (b.count == 2) shrink<T, 2, 1>(P, S, run, t, rows, b.first, waited);
    else if (BUNDLE > 2) shrink<T, 3, 1>(P, S, run, t, rows, b.first, waited);
  } else {
    if (b.count == 1) shrink<T, 1, 2>(P, S, run, t, rows, b.first, waited);
    else if (b.count == 2) shrink<T, 2, 2>(P, S, run, t, rows, b.first, waited);
    else if (BUNDLE > 2) shrink<T, 3, 2>(P, S, run, t, rows, b.first, waited);
  }
}

// Whether the launch that had this part of the exchange before is complete, so that nobody reads it any more.
DEVICE bool part_is_free(const Decode& P, u32 tag) { return (int)(tag - *(volatile u32*)(P.step + 1)) < PARTS; }

template <class T> DEVICE void decode(const Decode& P) {
  __shared__ __align__(16) Shared S;
  if (P.early) let_next_start();
  uint4* exchange = P.exchange + (u64)(P.launch % PARTS) * P.part * 64;
  const u32 tag = *P.step * 1024u + P.launch;
  bool waited = P.early == BESIDE, free = waited || part_is_free(P, tag);
  u32 shrinks;
  const u32 runs = read_plan(P, S, shrinks);
  if (runs == 0 && blockIdx.x > 0) return;
  auto claim = [&] {
    if (free || waited) return;
    free = part_is_free(P, tag);
    if (free) return;
    wait_for_previous();
    waited = true;
  };

  // Each bundle is published when the next one starts; the last, when the first weights of the expand are on their way.
  Bundle pending;
  pending.count = 0;
#pragma unroll 1
  for (u32 r = 0; r < shrinks; r++) {
    const Slice* t = S.slices[r];
    u32 full = 0, half = 0;
#pragma unroll
    for (int s = 0; s < SLICES; s++) {
      full += full_tiles(t[s].rank);
      half += has_half(t[s].rank);
    }
#pragma unroll 1
    for (u32 c = 0; c < full + half;) {
      if (pending.count) {
        claim();
        publish(P, S, pending, exchange, tag);
      }
      pending.run = r;
      pending.half = c >= full;
      pending.first = pending.half ? c - full : c;
      pending.count = min((pending.half ? full + half : full) - c, (u32)BUNDLE);
      c += pending.count;
      shrink_bundle<T>(P, S, pending, waited);
    }
  }
  if (!P.early) let_next_start();
  auto hand_on = [&] {
    if (pending.count == 0) return;
    claim();
    publish(P, S, pending, exchange, tag);
    pending.count = 0;
  };
  Target target;
#pragma unroll 1
  for (u32 r = shrinks, item = 0; r < runs;) {
    const Run& run = S.runs[r];
    const Slice* t = S.slices[r];
    Items items;
    items.count(P, run, t);
    const u32 steps = lay_steps(P, S, run, t, items, item), all = items.first[SLICES], next = item + items.some();
    __syncthreads();
#pragma unroll 1
    for (u32 i = 0; i < DEPTH; i++) fetch_step(S, own_ring(), i, steps);
    hand_on();
    if (item == 0) {
      u32 first = 0, last = 0;      // slices that the run touches
      while (run.from >= P.unit_end[first]) first++;
      last = first;
      while (run.from + run.count > P.unit_end[last]) last++;
      gather<T>(P, S, run, t, t[first].column, t[last].column + tiles(t[last].rank), exchange, tag);
      target.start(S.rows[r]);
    }
    if (!waited) {
      wait_for_previous();
      waited = true;
    }
    if (items.one) expand<T, true>(P, S, target, steps);
    else expand<T, false>(P, S, target, steps);
    item = next < all ? next : 0;
    if (item == 0) r++;
    if (r < runs) __syncthreads();
  }
  hand_on();
  // One CTA waits whatever there is to do, so that a launch is never complete before those before it.
  if (blockIdx.x > 0) return;
  wait_for_previous();
  if (threadIdx.x == 0) *(volatile u32*)(P.step + 1) = tag;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS_PER_SM) lora_decode_bf16(const __grid_constant__ Decode P) { decode<Bf16>(P); }
extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS_PER_SM) lora_decode_f16(const __grid_constant__ Decode P) { decode<F16>(P); }
