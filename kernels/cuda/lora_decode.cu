// y[row, :] += scale * (x[row, :] A) B for segments of 1..8 rows, each with its own adapter and rank.
//
// One launch serves the projections that share x (q,k,v; gate,up). A CTA takes runs from its block of the plan: first
// shrink runs (a segment's K range), then expand runs (a segment's range of 64-output units). Weights stream from global
// memory into registers and are the 16-row operand of the product; rows are its 8 columns.
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
#include "lora.cuh"

constexpr int WARPS = 8, CTAS_PER_SM = 2, RUNS = 64, INLINE = 3, COLUMNS = 48, PARTS = 4, DEPTH = 2;

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

struct Shared {
  float4 partial[3][WARPS][32];
  u32 v[COLUMNS * 64];             // [column][row of 8][rank pair of 8]
  float2 parts[WARPS * 32];
  Run runs[RUNS];
  Slice slices[RUNS][SLICES];
  int rows[RUNS][8];
};

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

// S.partial[m][warp] = A tile (first + m) times x over this warp's share of the K range.
template <class T, int N, int H>
DEVICE void shrink(const Decode& P, Shared& S, const Run& run, const Slice* t, const int* rows, u32 first, bool& waited) {
  constexpr int U = N * H == 1 ? 4 : N * H <= 3 ? 2 : 1;      // blocks that a warp takes at once
  constexpr bool AHEAD = N * H * U <= 6;         // the next ones are in flight beside them
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  Reader reader[N];
  u32 start[N];
  const u32 list = t[0].a.list;
#pragma unroll
  for (int m = 0; m < N; m++) {
    u32 slice, tile;
    find_tile(t, H == 1, first + m, slice, tile);
    reader[m].start(P.pool, t[slice].a, lane);
    start[m] = t[slice].a.fragment + tile * P.blocks_in * 2;
  }
  const u32 end = run.from + run.count, step = WARPS * U;
  // Zeroed, or the compiler keeps what was never loaded alive through the whole kernel.
  uint4 now[U][N][H] = {}, next[U][N][H] = {};
  auto load = [&](uint4 (&d)[U][N][H], u32 block) {
#pragma unroll
    for (int i = 0; i < U; i++)
      if (block + i < end) {
#pragma unroll
        for (int m = 0; m < N; m++) {
          const char* p = reader[m].at(P.pool, list, start[m] + (block + i) * H, lane);
#pragma unroll
          for (int h = 0; h < H; h++) d[i][m][h] = load_once(p + h * 512);
        }
      }
  };
  u32 block = run.from + warp * U;
  load(now, block);
  if (AHEAD) load(next, block + step);
  if (P.early < X_WHOLE && !waited) {
    wait_for_previous();
    waited = true;
  }
  const int row = rows[g];
  const u16* x = P.x + (u64)max(row, 0) * P.inputs + q * 8;
  float acc[N][4];
#pragma unroll
  for (int m = 0; m < N; m++) acc[m][0] = acc[m][1] = acc[m][2] = acc[m][3] = 0.f;
#pragma unroll 1
  for (; block < end; block += step) {
    uint4 xs[U];
#pragma unroll
    for (int i = 0; i < U; i++) {
      xs[i] = make_uint4(0, 0, 0, 0);
      if (row >= 0 && block + i < end && (block + i) * 32 + q * 8 < P.inputs) xs[i] = *(const uint4*)(x + (block + i) * 32);
    }
#pragma unroll
    for (int i = 0; i < U; i++)
      if (block + i < end) {
#pragma unroll
        for (int m = 0; m < N; m++) {
          const uint4 a = now[i][m][0], b = now[i][m][H - 1];
          if (H == 2) {
            T::product(acc[m], a.x, a.y, a.z, a.w, xs[i].x, xs[i].y);
            T::product(acc[m], b.x, b.y, b.z, b.w, xs[i].z, xs[i].w);
          } else {
            T::product(acc[m], a.x, 0, a.y, 0, xs[i].x, xs[i].y);
            T::product(acc[m], a.z, 0, a.w, 0, xs[i].z, xs[i].w);
          }
        }
      }
    if (AHEAD) {
#pragma unroll
      for (int i = 0; i < U; i++)
#pragma unroll
        for (int m = 0; m < N; m++)
#pragma unroll
          for (int h = 0; h < H; h++) now[i][m][h] = next[i][m][h];
      load(next, block + 2 * step);
    } else {
      load(now, block + step);
    }
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

// Sums the splits of the columns [from, to) and leaves scale * v, rounded, in S.v. All threads take part.
template <class T> DEVICE void gather(const Decode& P, Shared& S, const Run& run, const Slice* t, u32 from, u32 to, const uint4* exchange, u32 tag) {
  constexpr u32 THREADS = WARPS * 32;
  // An entry is a pair of rows of one rank: bits from below: row pair, rank in its half, half, column.
  const u32 tid = threadIdx.x, bits = run.rows > 4 ? 2 : run.rows > 2 ? 1 : 0, entries = (to - from) << (4 + bits);
  const u32 ways = entries >= THREADS ? 1 : THREADS / max(entries, 1u);
  const u32 way = ways == 1 ? 0 : tid / max(entries, 1u), place = tid - way * entries;
  __syncthreads();
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

// What each slice of an expand has of rank tiles: one, full or half, so that a step is a unit or two; or whatever.
constexpr int ONE = 0, ANY = 1;

// A warp's way through an expand run: every eighth unit, tile by tile. One goes ahead and loads, one follows and computes.
struct Cursor {
  u32 unit, end;     // in the slice
  u32 slice, rest;   // units of the run behind this slice
  u32 tile, tiles;   // of the slice
  u32 full;          // of them full ones

  DEVICE void start(const Decode& P, const Run& run, const Slice* t) {
    slice = 0;
    while (run.from >= P.unit_end[slice]) slice++;
    unit = run.from - units_before(P, slice) + (threadIdx.x >> 5);
    rest = run.count;
    enter(P, t, run.from);
  }
  // `from`: the run's first unit in this slice, counted through all slices.
  DEVICE void enter(const Decode& P, const Slice* t, u32 from) {
    const u32 here = min(rest, P.unit_end[slice] - from);
    rest -= here;
    end = t[slice].rank ? from + here - units_before(P, slice) : 0;
    tile = 0;
    tiles = ::tiles(t[slice].rank);
    full = full_tiles(t[slice].rank);
  }
  // To the next slice with units for this warp, if this one has no more. False at the end of the run.
  DEVICE bool settle(const Decode& P, const Slice* t) {
    while (unit >= end) {
      if (rest == 0) return false;
      // The warps go on in turn; what a slice without tensor would have had is passed over.
      unit = end ? unit - (P.unit_end[slice] - units_before(P, slice)) : threadIdx.x >> 5;
      slice++;
      enter(P, t, units_before(P, slice));
    }
    return true;
  }
  DEVICE bool is_half() const { return tile == full; }
  template <int KIND> DEVICE void step() {
    if (KIND == ONE && full == 0 && unit + WARPS < end) unit += WARPS;
    if (KIND == ONE || ++tile == tiles) {
      tile = 0;
      unit += WARPS;
    }
  }
};

// The steps of an expand that a warp has in flight, 2 KB each: 64 outputs by a full tile, or twice 64 by a half tile.
struct Steps {
  uint4 w[DEPTH][4];
  Cursor cursor;
  Reader reader;
  u32 entered;       // the reader's slice

  DEVICE void start(const Decode& P, const Run& run, const Slice* t) {
    cursor.start(P, run, t);
    entered = ~0u;
  }
  DEVICE void load(const Pool& pool, const Slice& s, u32 fragment, uint4 (&d)[4], int to, int count) {
    const char* p = reader.at(pool, s.b.list, fragment, threadIdx.x & 31);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (i < count) d[to + i & 3] = load_once(p + i * 512);
  }
  // The steps move up by one.
  template <int KIND> DEVICE void advance(const Decode& P, const Slice* t) {
#pragma unroll
    for (int d = 0; d + 1 < DEPTH; d++)
#pragma unroll
      for (int i = 0; i < 4; i++) w[d][i] = w[d + 1][i];
    if (!cursor.settle(P, t)) return;
    const Slice& s = t[cursor.slice];
    if (entered != cursor.slice) {
      entered = cursor.slice;
      reader.start(P.pool, s.b, threadIdx.x & 31);
    }
    uint4(&d)[4] = w[DEPTH - 1];
    if (KIND == ONE && !cursor.is_half()) {
      load(P.pool, s, s.b.fragment + cursor.unit * 4, d, 0, 4);
    } else if (KIND == ONE) {
      load(P.pool, s, s.b.fragment + cursor.unit * 2, d, 0, 2);
      if (cursor.unit + WARPS < cursor.end) load(P.pool, s, s.b.fragment + (cursor.unit + WARPS) * 2, d, 2, 2);
    } else {
      const u32 full = cursor.full;
      // Half tiles lie behind all full ones: a reader that meets both goes back and forth.
      if (full && full < cursor.tiles) reader.end = 0;
      if (cursor.tile < full) load(P.pool, s, s.b.fragment + (cursor.unit * full + cursor.tile) * 4, d, 0, 4);
      else load(P.pool, s, s.b.fragment + (P.unit_end[cursor.slice] - units_before(P, cursor.slice)) * full * 4 + cursor.unit * 2, d, 0, 2);
    }
    cursor.step<KIND>();
  }
  template <int KIND> DEVICE void fill(const Decode& P, const Slice* t) {
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) advance<KIND>(P, t);
  }
};

// Where a lane's outputs of two rows go.
struct Target {
  u16* y[2];       // null: no row

  DEVICE void start(const Decode& P, const int* rows) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int row = rows[2 * q + j];
      y[j] = row < 0 ? nullptr : P.y + (u64)row * P.stride_y + ((g & 1) * 4 + (g >> 1)) * 8;
    }
  }
  template <class T> DEVICE void put(const Decode& P, u32 slice, u32 unit, const float (&c)[4][4]) const {
    const int g = (threadIdx.x & 31) >> 2;
    if (unit * 64 + ((g & 1) * 4 + (g >> 1)) * 8 >= P.outputs[slice]) return;
    const u32 at = P.column[slice] + unit * 64;
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (y[j]) {
        const uint4 d = make_uint4(T::pack(c[0][j], c[0][2 + j]), T::pack(c[1][j], c[1][2 + j]), T::pack(c[2][j], c[2][2 + j]), T::pack(c[3][j], c[3][2 + j]));
        if (P.store) *(uint4*)(y[j] + at) = d;
        else add_to<T>(y[j] + at, d);
      }
  }
};

// c += half a step, a half tile.
template <class T> DEVICE void multiply_half(float (&c)[4][4], const uint4& a, const uint4& b, u32 v) {
  T::product8(c[0], a.x, a.y, v);
  T::product8(c[1], a.z, a.w, v);
  T::product8(c[2], b.x, b.y, v);
  T::product8(c[3], b.z, b.w, v);
}
template <class T> DEVICE void multiply_full(float (&c)[4][4], const uint4 (&w)[4], u32 v0, u32 v1) {
#pragma unroll
  for (int m = 0; m < 4; m++) T::product(c[m], w[m].x, w[m].y, w[m].z, w[m].w, v0, v1);
}
DEVICE void clear(float (&c)[4][4]) {
#pragma unroll
  for (int m = 0; m < 4; m++) c[m][0] = c[m][1] = c[m][2] = c[m][3] = 0.f;
}

template <class T, int KIND> DEVICE void expand(const Decode& P, Shared& S, const Run& run, const Slice* t, const int* rows, Steps& steps, bool& waited) {
  const u32* lane_v = S.v + ((threadIdx.x & 31) >> 2) * 8 + (threadIdx.x & 3);
  Cursor at;
  at.start(P, run, t);
  Target target;
  target.start(P, rows);
  float c[4][4];
  clear(c);
  u32 entered = ~0u, v0 = 0, v1 = 0;
#pragma unroll 1
  while (at.settle(P, t)) {
    if (KIND == ANY || entered != at.slice) {
      entered = at.slice;
      const u32* v = lane_v + (t[at.slice].column + at.tile) * 64;
      v0 = v[0];
      v1 = v[4];
    }
    if (at.is_half()) multiply_half<T>(c, steps.w[0][0], steps.w[0][1], v0);
    else multiply_full<T>(c, steps.w[0], v0, v1);
    if (KIND == ONE || at.tile + 1 == at.tiles) {
      if (!waited) {
        wait_for_previous();
        waited = true;
      }
      target.put<T>(P, at.slice, at.unit, c);
      clear(c);
    }
    if (KIND == ONE && at.is_half() && at.unit + WARPS < at.end) {
      multiply_half<T>(c, steps.w[0][2], steps.w[0][3], v0);
      target.put<T>(P, at.slice, at.unit + WARPS, c);
      clear(c);
    }
    at.step<KIND>();
    steps.advance<KIND>(P, t);
  }
}

DEVICE bool is_one(const Slice* t) { return tiles(t[0].rank) <= 1 && tiles(t[1].rank) <= 1 && tiles(t[2].rank) <= 1; }

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
    if (b.count == 1) shrink<T, 1, 1>(P, S, run, t, rows, 0, waited);
    else if (b.count == 2) shrink<T, 2, 1>(P, S, run, t, rows, 0, waited);
    else shrink<T, 3, 1>(P, S, run, t, rows, 0, waited);
  } else {
    if (b.count == 1) shrink<T, 1, 2>(P, S, run, t, rows, b.first, waited);
    else if (b.count == 2) shrink<T, 2, 2>(P, S, run, t, rows, b.first, waited);
    else shrink<T, 3, 2>(P, S, run, t, rows, b.first, waited);
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
      pending.first = pending.half ? 0 : c;
      pending.count = pending.half ? half : min(full - c, 3u);
      c += pending.count;
      shrink_bundle<T>(P, S, pending, waited);
    }
  }
  Steps steps;
  auto fill = [&](u32 r) {
    const Slice* t = S.slices[r];
    steps.start(P, S.runs[r], t);
    if (is_one(t)) steps.fill<ONE>(P, t);
    else steps.fill<ANY>(P, t);
  };
  if (shrinks < runs) fill(shrinks);
  if (pending.count) {
    claim();
    publish(P, S, pending, exchange, tag);
  }
  if (!P.early) let_next_start();

#pragma unroll 1
  for (u32 r = shrinks; r < runs; r++) {
    const Run& run = S.runs[r];
    const Slice* t = S.slices[r];
    u32 first = 0, last = 0;      // slices that the run touches
    while (run.from >= P.unit_end[first]) first++;
    last = first;
    while (run.from + run.count > P.unit_end[last]) last++;
    gather<T>(P, S, run, t, t[first].column, t[last].column + tiles(t[last].rank), exchange, tag);
    if (is_one(t)) expand<T, ONE>(P, S, run, t, S.rows[r], steps, waited);
    else expand<T, ANY>(P, S, run, t, S.rows[r], steps, waited);
    if (r + 1 < runs) fill(r + 1);
  }
  // One CTA waits whatever there is to do, so that a launch is never complete before those before it.
  if (blockIdx.x > 0) return;
  wait_for_previous();
  if (threadIdx.x == 0) *(volatile u32*)(P.step + 1) = tag;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS_PER_SM) lora_decode_bf16(const __grid_constant__ Decode P) { decode<Bf16>(P); }
extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS_PER_SM) lora_decode_f16(const __grid_constant__ Decode P) { decode<F16>(P); }
