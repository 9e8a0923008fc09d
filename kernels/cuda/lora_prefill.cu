// y[row, :] += scale * (x[row, :] A) B for long segments, in two launches.
//
// Shrink: v = scale x A, rounded to the element type. A CTA takes rows of one adapter, one part of K and some of its rank tiles;
//   rows are the 16-row operand, 16 to a warp. x goes from memory straight into the operand, 256 bytes of a row at a time; A's
//   tiles come into a ring in shared memory by bulk copies, which a lane for each tile asks for.
//   narrow: 64 rows, the eight warps in two halves of K. wide: 128 rows, where A would be most of the traffic.
//   Parts of K meet in memory: each CTA leaves its sums, and the last to arrive adds all of them, in their order.
// Expand: a CTA takes 128 rows by up to eight units of 64 outputs of one slice; its warps stand side by side, two units each, and
//   go from 16 rows to the next, so that rows are touched 1 KB at a time. B comes by bulk copies while the first of y is on its
//   way; y is read, added to and written in registers.
//
// v: [tile][rank tile of all slices][16 rows][lane][16 bytes], the expand's 16-row operand.
// Limits: K and N multiples of 8; rank at most 256. Counters are zero before the first launch, and left zero.
// Deterministic: every sum has one order; every y element has one writer.
// Bound: bytes of x and y (read and written).
#include "async.cuh"
#include "lora.cuh"

constexpr int TILE_ROWS = 128, UNIT = 64, WARPS = 8;

struct Tile {
  u32 slot;
  u32 row0;      // first entry of rows
  u32 rows;      // 1..128
  u32 unused;
};

struct Prefill {
  const u16* x;
  u16* y;
  Pool pool;
  const Tensor* tensors;
  const int* rows;       // rows of x and y by segment; below zero: no row
  const Tile* tiles;
  uint4* v;
  float4* sums;          // [CTA of one part][part of K][16 rows][rank tile][half of the ranks][lane]
  u32* counters;         // one for each CTA of one part
  u32 splits, unused;    // splits: parts of K
  u32 columns, bundles;  // rank tiles of all slices, at most; what they are cut into for the shrink
  u32 bundle_tiles;      // rank tiles of a bundle
  u32 inputs, blocks_in;
  u32 slices, stride_y;
  u32 outputs[SLICES];
  u32 column[SLICES];              // where a slice's outputs start in a row of y
  u32 block_end[SLICES];           // CTAs of the expand up to and including this slice
  u32 projections, projection, layers, layer;
  u32 store;
  u32 units;             // of a CTA of the expand: 2, 4, 8 or 16
};

DEVICE const Tensor* tensors_of(const Prefill& P, u32 slot) {
  return P.tensors + ((u64)slot * P.layers + P.layer) * P.projections + P.projection;
}

// ---- shrink

// Blocks of 32 inputs in a stage of the ring.
constexpr int STAGE_BLOCKS = 4, STAGES = 3, TILE_BYTES = STAGE_BLOCKS * 1024;

// One of the slices' rank tiles.
struct Column {
  Start start;
  bool there, half;
  float scale;
};

DEVICE Column column_of(const Prefill& P, const Tile& tile, u32 number) {
  Column out = {};
  u32 at = 0;
#pragma unroll
  for (int s = 0; s < SLICES; s++)
    if (s < P.slices) {
      const Tensor t = tensors_of(P, tile.slot)[s];
      const u32 k = number - at, full = full_tiles(t.rank);      // wraps where the column lies before this slice
      if (k < tiles(t.rank)) out = Column{Start{t.a + k * P.blocks_in * 2, t.a / P.pool.page_fragments, t.page_a, t.pages}, true, k == full, t.scale};
      at += tiles(t.rank);
    }
  return out;
}

// Keeps one half of K's ring full: a lane for each rank tile, of one warp.
struct Feeder {
  Reader reader;
  u32 fragment, list, left;      // the next fragment; blocks that are left

  DEVICE void start(const Prefill& P, const Column& column, bool feeds, u32 from, u32 end) {
    reader.start(P.pool, column.start, 0);
    list = column.start.list;
    fragment = column.start.fragment + from * (2 - column.half);
    left = feeds ? end - from : 0;
  }
  // One stage, once nobody reads what it held.
  DEVICE void feed(const Pool& pool, char* to, Barrier& full, Barrier& empty, u32 phase, u32 each) {
    if (left == 0) return;
    const u32 blocks = min(left, (u32)STAGE_BLOCKS);
    empty.wait(phase);
    full.expect(blocks * each * 512);
#pragma unroll 1
    for (u32 rest = blocks * each; rest;) {
      const char* p = reader.at(pool, list, fragment, 0);
      const u32 run = min(rest, reader.end - fragment);
      full.bring(to, p, run * 512);
      to += run * 512;
      fragment += run;
      rest -= run;
    }
    full.brought();
    left -= blocks;
  }
};

// Up to N rank tiles. A lane has DEPTH blocks of both its rows in flight, and asks for BURST of them at a time.
template <class T, int N, int PARTS, int DEPTH, int BURST>
DEVICE void shrink(const Prefill& P, u32 tile_index, u32 half_tile, const int (&row)[2], const Column& column, u32 first, u32 n, u32 halves, char* ring, Barrier* full,
                   Barrier* empty) {
  constexpr int GROUPS = WARPS / PARTS;
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, q = lane & 3, group = warp % GROUPS, part = warp / GROUPS;
  const u32 cut = blockIdx.y * PARTS + part, cuts = P.splits * PARTS, stage_bytes = P.bundle_tiles * TILE_BYTES;
  const u32 from = P.blocks_in * cut / cuts, end = P.blocks_in * (cut + 1) / cuts;
  ring += part * STAGES * stage_bytes;
  full += part * STAGES;
  empty += part * STAGES;
  Feeder feeder;
  feeder.start(P, column, group == 0 && lane < n, from, end);
#pragma unroll 1
  for (int s = 0; s < STAGES; s++) feeder.feed(P.pool, ring + s * stage_bytes + lane * TILE_BYTES, full[s], empty[s], 1, 2 - column.half);
  __syncwarp();
  const u16* x[2];
  u32 live[2];      // blocks that this lane has something of
#pragma unroll
  for (int r = 0; r < 2; r++) {
    x[r] = P.x + (u64)max(row[r], 0) * P.inputs + q * 8;
    live[r] = row[r] < 0 || P.inputs <= q * 8 ? 0 : min(end, (P.inputs - q * 8 + 31) / 32);
  }
  uint4 now[DEPTH][2];
  auto load = [&](int u, u32 block) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      now[u][r] = make_uint4(0, 0, 0, 0);
      if (block < live[r]) now[u][r] = load_row(x[r] + block * 32);
    }
  };
  float acc[N][2][4] = {};
  wait_for_previous();
  let_next_start();
#pragma unroll
  for (int u = 0; u < DEPTH; u++) load(u, from + u);
  u32 stage = 0, phase = 0;
#pragma unroll 1
  for (u32 block = from; block < end; block += DEPTH) {
#pragma unroll
    for (int u = 0; u < DEPTH; u++) {
      if (u % STAGE_BLOCKS == 0 && block + u < end) full[stage].wait(phase);
      if (block + u < end) {
        const char* tiles = ring + stage * stage_bytes + lane * 16;
        const uint4 (&s)[2] = now[u];
#pragma unroll
        for (int m = 0; m < N; m++)
          if (m < n) {
            const char* at = tiles + m * TILE_BYTES;
            if (halves >> m & 1) {
              const uint4 a = *(const uint4*)(at + u % STAGE_BLOCKS * 512);
              T::product(acc[m][0], s[0].x, s[1].x, s[0].y, s[1].y, a.x, a.y);
              T::product(acc[m][0], s[0].z, s[1].z, s[0].w, s[1].w, a.z, a.w);
            } else {
              const uint4 a = *(const uint4*)(at + u % STAGE_BLOCKS * 1024), b = *(const uint4*)(at + u % STAGE_BLOCKS * 1024 + 512);
              T::product(acc[m][0], s[0].x, s[1].x, s[0].y, s[1].y, a.x, a.z);
              T::product(acc[m][1], s[0].x, s[1].x, s[0].y, s[1].y, a.y, a.w);
              T::product(acc[m][0], s[0].z, s[1].z, s[0].w, s[1].w, b.x, b.z);
              T::product(acc[m][1], s[0].z, s[1].z, s[0].w, s[1].w, b.y, b.w);
            }
          }
      }
      if (u % BURST == BURST - 1) {
#pragma unroll
        for (int i = u + 1 - BURST; i <= u; i++) load(i, block + i + DEPTH);
      }
      if (u % STAGE_BLOCKS == STAGE_BLOCKS - 1) {
        __syncwarp();
        empty[stage].arrive();      // every lane for itself: as fast as one for all, and racecheck follows it
        // The stage before this one is filled anew: by now the others are hardly still in it.
        const u32 before = (stage + STAGES - 1) % STAGES;
        if (block + u >= from + STAGE_BLOCKS)
          feeder.feed(P.pool, ring + before * stage_bytes + lane * TILE_BYTES, full[before], empty[before], stage ? phase : phase ^ 1, 2 - column.half);
        __syncwarp();
        if (++stage == STAGES) {
          stage = 0;
          phase ^= 1;
        }
      }
    }
  }
  const u32 width = P.bundle_tiles;
  const u32 tile_rows16 = half_tile * GROUPS + group;
  if (PARTS == 2) {      // the second half of K goes through shared memory to the first
    float4* sums = (float4*)(ring - part * STAGES * width * TILE_BYTES) + group * width * 64 + lane;
    __syncthreads();
    if (part == 1) {
#pragma unroll
      for (int m = 0; m < N; m++)
        if (m < n) {
          sums[m * 64] = wide(acc[m][0]);
          sums[m * 64 + 32] = wide(acc[m][1]);
        }
    }
    __syncthreads();
    if (part == 0) {
#pragma unroll
      for (int m = 0; m < N; m++)
        if (m < n) {
          add(acc[m][0], sums[m * 64]);
          add(acc[m][1], sums[m * 64 + 32]);
        }
    }
  }
  auto place = [&](u32 m) { return P.v + (((u64)tile_index * P.columns + first + m) * (TILE_ROWS / 16) + tile_rows16) * 32 + lane; };
  if (P.splits == 1) {
#pragma unroll
    for (int m = 0; m < N; m++)
      if (m < n) {
        const float scale = __shfl_sync(0xffffffffu, column.scale, m);
        if (part == 0) *place(m) = operand_of<T>(acc[m], scale);
      }
    return;
  }
  auto sums_of = [&](u32 split) { return P.sums + (((u64)blockIdx.x * P.splits + split) * GROUPS + group) * width * 64 + lane; };
  if (part == 0) {
    float4* mine = sums_of(blockIdx.y);
#pragma unroll
    for (int m = 0; m < N; m++)
      if (m < n) {
        mine[m * 64] = wide(acc[m][0]);
        mine[m * 64 + 32] = wide(acc[m][1]);
      }
    __threadfence();
  }
  __shared__ u32 arrived;
  __syncthreads();
  if (threadIdx.x == 0) arrived = atomicAdd(P.counters + blockIdx.x, 1);
  __syncthreads();
  if (arrived != P.splits - 1) return;
  __threadfence();
  if (threadIdx.x == 0) P.counters[blockIdx.x] = 0;
#pragma unroll 1
  for (u32 m = part; m < n; m += PARTS) {
    float c[2][4] = {};
#pragma unroll 4
    for (u32 split = 0; split < P.splits; split++) {
      const float4* one = sums_of(split) + m * 64;
      add(c[0], __ldcg(one));
      add(c[1], __ldcg(one + 32));
    }
    *place(m) = operand_of<T>(c, __shfl_sync(0xffffffffu, column.scale, m));
  }
}

template <class T, int PARTS> DEVICE void prefill_shrink(const Prefill& P) {
  extern __shared__ __align__(128) char ring[];      // [half of K][stage][rank tile][block][fragment]
  __shared__ Barrier full[PARTS * STAGES], empty[PARTS * STAGES];
  const u32 lane = threadIdx.x & 31, work = blockIdx.x / P.bundles, first = blockIdx.x % P.bundles * P.bundle_tiles;
  const u32 tile_index = work / PARTS, half_tile = work % PARTS;
  const Tile tile = P.tiles[tile_index];
  int row[2];      // of x, for this lane
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const u32 local = (half_tile * (WARPS / PARTS) + threadIdx.x / 32 % (WARPS / PARTS)) * 16 + lane / 4 + 8 * r;
    row[r] = local < tile.rows ? P.rows[tile.row0 + local] : -1;
  }
  // A lane for each rank tile of this bundle, twice where K is cut in halves.
  const u32 m = lane & 15;
  const Column column = m < P.bundle_tiles ? column_of(P, tile, first + m) : Column{};
  const u32 n = __popc(__ballot_sync(0xffffffffu, column.there) & 0xffff), halves = __ballot_sync(0xffffffffu, column.half) & 0xffff;
  if (threadIdx.x < PARTS * STAGES) {
    full[threadIdx.x].init(max(n, 1u));
    empty[threadIdx.x].init(WARPS / PARTS * 32);
    barriers_ready();
  }
  __syncthreads();
  if (n == 0 || half_tile * (TILE_ROWS / PARTS) >= tile.rows) {
    wait_for_previous();
    let_next_start();
    return;
  }
#define SHRINK(N, DEPTH) shrink<T, N, PARTS, DEPTH, 4>(P, tile_index, half_tile, row, column, first, n, halves, ring, full, empty)
  if (n == 1) SHRINK(1, 8);
  else if (n == 2) SHRINK(2, 8);
  else if (n == 3) SHRINK(3, 4);
  else if (PARTS == 1 && n == 4) SHRINK(4, 4);
  else if (PARTS == 1) SHRINK(6, 4);
}

// ---- expand

// A group is 16 rows. The warps stand side by side, two units each, as far as the CTA's units go; what is left of the eight are
// further groups at the same time.
template <class T> DEVICE void prefill_expand(const Prefill& P) {
  extern __shared__ __align__(128) char weights[];      // [unit][full tile][4 fragments], [unit][2 fragments] of the half tile; then v
  __shared__ Barrier brought;
  __shared__ int ids[TILE_ROWS];
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  u32 slice = 0, column = 0;
  while (blockIdx.x >= P.block_end[slice]) slice++;
  const Tile tile = P.tiles[blockIdx.y];
  let_next_start();
  if (threadIdx.x < TILE_ROWS) ids[threadIdx.x] = threadIdx.x < tile.rows ? P.rows[tile.row0 + threadIdx.x] : -1;
  const Tensor* table = tensors_of(P, tile.slot);
  for (u32 s = 0; s < slice; s++) column += tiles(table[s].rank);
  const Tensor t = table[slice];
  const u32 full = full_tiles(t.rank), half = has_half(t.rank), all = full + half, units = (P.outputs[slice] + UNIT - 1) / UNIT;
  const u32 unit0 = (blockIdx.x - (slice ? P.block_end[slice - 1] : 0)) * P.units, count = min(units - unit0, P.units);
  if (threadIdx.x == 0) {
    brought.init(32);
    barriers_ready();
  }
  __syncthreads();
  if (t.rank == 0) {
    wait_for_previous();
    return;
  }
  if (warp == 0) {
    // A lane for each piece: four fragments of a whole rank tile, two of a half one.
    const u32 whole = count * full, pieces = whole + count * half;
    u32 bytes = 0;
    for (u32 i = lane; i < pieces; i += 32) bytes += i < whole ? 2048 : 1024;
    brought.expect(bytes);
    for (u32 i = lane; i < pieces; i += 32) {
      Reader reader;
      reader.enter(P.pool, t.b / P.pool.page_fragments, t.page_b, 0);
      if (i < whole) brought.bring(weights + i * 2048, reader.at(P.pool, t.pages, t.b + (unit0 * full + i) * 4, 0), 2048);
      else brought.bring(weights + whole * 1024 + i * 1024, reader.at(P.pool, t.pages, t.b + units * full * 4 + (unit0 + i - whole) * 2, 0), 1024);
    }
    brought.brought();
    __syncwarp();
  }
  const u32 side = P.units / 2, groups = WARPS / side, unit = warp % side * 2;
  u16* place[2];      // of this lane's two rows in y; null: none
  auto find = [&](u32 group) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = group * 16 < TILE_ROWS ? ids[group * 16 + r * 8 + g] : -1;
      place[r] = row < 0 ? nullptr : P.y + (u64)row * P.stride_y + P.column[slice] + unit0 * UNIT + q * 8;
    }
  };
  // Piece e of a unit: row e >> 1, outputs 32 (e & 1) + 8 q and the seven behind.
  auto inside = [&](u32 u, int e) { return unit + u < count && (unit0 + unit + u) * UNIT + (e & 1) * 32 + q * 8 < P.outputs[slice]; };
  uint4 old[2][4];
  auto load = [&](u32 u) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      old[u][e] = make_uint4(0, 0, 0, 0);
      if (!P.store && place[e >> 1] && inside(u, e)) old[u][e] = load_changing(place[e >> 1] + (unit + u) * UNIT + (e & 1) * 32);
    }
  };
  find(warp / side);
  load(0);
  load(1);
  wait_for_previous();
  uint4* v = (uint4*)(weights + P.units * all * 2048);      // [rank tile][group][lane]
  const uint4* from = P.v + ((u64)blockIdx.y * P.columns + column) * (TILE_ROWS / 16 * 32);
  for (u32 i = threadIdx.x; i < all * (TILE_ROWS / 16 * 32); i += WARPS * 32) v[i] = from[i];
  __syncthreads();
  brought.wait(0);
#pragma unroll 1
  for (u32 group = warp / side; group * 16 < tile.rows; group += groups) {
    const uint4* mine = v + group * 32 + lane;
    u16* const here[2] = {place[0], place[1]};
#pragma unroll
    for (u32 u = 0; u < 2; u++) {
      float c[4][2][4] = {};
      const char* b = weights + (unit + u) * full * 2048 + lane * 16;
#pragma unroll 2
      for (u32 k = 0; k < full; k++) {
        const uint4 a = mine[k * 256];
#pragma unroll
        for (int m = 0; m < 4; m++) {
          const uint4 w = *(const uint4*)(b + k * 2048 + m * 512);
          T::product(c[m][0], a.x, a.y, a.z, a.w, w.x, w.z);
          T::product(c[m][1], a.x, a.y, a.z, a.w, w.y, w.w);
        }
      }
      if (half) {
        const uint4 a = mine[full * 256];
        const char* at = weights + count * full * 2048 + (unit + u) * 1024 + lane * 16;
#pragma unroll
        for (int l = 0; l < 2; l++) {
          const uint4 w = *(const uint4*)(at + l * 512);
          T::product8(c[2 * l][0], a.x, a.y, w.x);
          T::product8(c[2 * l][1], a.x, a.y, w.y);
          T::product8(c[2 * l + 1][0], a.x, a.y, w.z);
          T::product8(c[2 * l + 1][1], a.x, a.y, w.w);
        }
      }
#pragma unroll
      for (int e = 0; e < 4; e++) {
        uint4 o = old[u][e];
        o.x = add_pair<T>(o.x, c[0][0][e], c[0][1][e]);
        o.y = add_pair<T>(o.y, c[1][0][e], c[1][1][e]);
        o.z = add_pair<T>(o.z, c[2][0][e], c[2][1][e]);
        o.w = add_pair<T>(o.w, c[3][0][e], c[3][1][e]);
        if (here[e >> 1] && inside(u, e)) *(uint4*)(here[e >> 1] + (unit + u) * UNIT + (e & 1) * 32) = o;
      }
      if (u == 0) find(group + groups);
      load(u);
    }
  }
}

#define KERNELS(T, name)                                                                                                                         \
  extern "C" __global__ void __launch_bounds__(256, 2) lora_prefill_shrink_##name(const __grid_constant__ Prefill P) { prefill_shrink<T, 2>(P); } \
  extern "C" __global__ void __launch_bounds__(256, 2) lora_prefill_shrink_wide_##name(const __grid_constant__ Prefill P) {                       \
    prefill_shrink<T, 1>(P);                                                                                                                     \
  }                                                                                                                                              \
  extern "C" __global__ void __launch_bounds__(256, 2) lora_prefill_expand_##name(const __grid_constant__ Prefill P) { prefill_expand<T>(P); }
KERNELS(Bf16, bf16)
KERNELS(F16, f16)
