// y[row, :] += scale * (x[row, :] A) B for long segments, in two launches.
//
// Shrink: a CTA takes 64 rows by one part of K by up to four rank tiles; rows are the 16-row operand. Partial sums go to
//   v[split][column][row][16] in f32.
// Expand: a CTA takes 128, 64 or 32 rows by 1,024 outputs of one slice: eight warps side by side, so that a row is touched 2 KB
//   at a time. It sums the splits, rounds scale * v, and reads, adds to and writes y in registers.
//
// Limits: K and N multiples of 8; rank at most 256; v holds `columns` columns for every tile of 128 rows.
// Deterministic: every sum has one order; every y element has one writer.
#include "lora.cuh"

constexpr int TILE_ROWS = 128, SHRINK_ROWS = 64, BLOCK_UNITS = 16;

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
  float* v;
  u32 tile_count, splits;
  u32 columns, bundles;  // rank tiles of all slices, at most; bundles of four of them
  u32 inputs, blocks_in;
  u32 slices, stride_y;
  u32 outputs[SLICES];
  u32 column[SLICES];              // where a slice's outputs start in a row of y
  u32 block_end[SLICES];           // CTAs of the expand up to and including this slice
  u32 projections, projection, layers, layer;
  u32 store;
  u32 parts;             // that a tile's rows are cut into for the expand: 1, 2 or 4
};

DEVICE const Tensor* tensors_of(const Prefill& P, u32 slot) {
  return P.tensors + ((u64)slot * P.layers + P.layer) * P.projections + P.projection;
}

DEVICE float* v_of(const Prefill& P, u32 split, u32 column, u32 row) {
  return P.v + (((u64)split * P.columns + column) * P.tile_count * TILE_ROWS + row) * 16;
}

// Column n of the slices' rank tiles.
struct Column {
  Start start;
  u32 half;
};

// A ring of A's tiles for the four warps that share a half of K: a stage is two blocks of up to four tiles.
constexpr int STAGES = 4, STAGE_BLOCKS = 2;

template <class T, int N> DEVICE void shrink(const Prefill& P, const Tile& tile, u32 first, const Column (&columns)[4], uint4* ring) {
  constexpr int U = STAGE_BLOCKS * 2;      // blocks of x in flight, in registers
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, group = warp & 3, part = warp >> 2;
  const u32 base = (blockIdx.x / P.bundles & 1) * SHRINK_ROWS + group * 16;
  const u32 from = P.blocks_in * (blockIdx.y * 2 + part) / (P.splits * 2), end = P.blocks_in * (blockIdx.y * 2 + part + 1) / (P.splits * 2);
  const int row[2] = {base + g < tile.rows ? P.rows[tile.row0 + base + g] : -1, base + g + 8 < tile.rows ? P.rows[tile.row0 + base + g + 8] : -1};
  const u16* x[2] = {P.x + (u64)max(row[0], 0) * P.inputs + q * 8, P.x + (u64)max(row[1], 0) * P.inputs + q * 8};
  // A thread brings one 16-byte piece of every tile of a stage: block `mine`, piece `piece` of 64.
  const u32 half_thread = threadIdx.x & 127, mine = half_thread >> 6, piece = half_thread & 63, list = columns[0].start.list;
  uint4* my_ring = ring + part * STAGES * STAGE_BLOCKS * N * 64;
  Reader reader[N];
#pragma unroll
  for (int m = 0; m < N; m++) reader[m].start(P.pool, columns[m].start, piece & 31);
  auto bring = [&](u32 block, u32 stage) {
    if (block + mine < end) {
#pragma unroll
      for (int m = 0; m < N; m++) {
        const u32 fragments = 2 - columns[m].half;
        if (piece < fragments * 32) {
          const char* p = reader[m].at(P.pool, list, columns[m].start.fragment + (block + mine) * fragments + (piece >> 5), piece & 31);
          copy_async(my_ring + ((stage * STAGE_BLOCKS + mine) * N + m) * 64 + piece, p);
        }
      }
    }
    commit_copies();
  };
  auto load = [&](uint4 (&d)[2], u32 block) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      d[r] = make_uint4(0, 0, 0, 0);
      if (row[r] >= 0 && block < end && block * 32 + q * 8 < P.inputs) d[r] = load_once(x[r] + block * 32);
    }
  };
  float acc[N][2][4] = {};
  uint4 now[U][2];
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) bring(from + s * STAGE_BLOCKS, s);
  wait_for_previous();
  let_next_start();
#pragma unroll
  for (int u = 0; u < U; u++) load(now[u], from + u);
  u32 stage = 0;
#pragma unroll 1
  for (u32 block = from; block < end; block += U) {
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (u % STAGE_BLOCKS == 0) {
        wait_for_copies<STAGES - 2>();
        if (part) asm volatile("bar.sync 2, 128;" ::: "memory");
        else asm volatile("bar.sync 1, 128;" ::: "memory");
        bring(block + u + (STAGES - 1) * STAGE_BLOCKS, (stage + STAGES - 1) % STAGES);
      }
      if (block + u < end) {
        const uint4* tiles = my_ring + (stage * STAGE_BLOCKS + u % STAGE_BLOCKS) * N * 64 + lane;
        const uint4 (&s)[2] = now[u];
#pragma unroll
        for (int m = 0; m < N; m++) {
          const uint4 a = tiles[m * 64];
          if (columns[m].half) {
            T::product(acc[m][0], s[0].x, s[1].x, s[0].y, s[1].y, a.x, a.y);
            T::product(acc[m][0], s[0].z, s[1].z, s[0].w, s[1].w, a.z, a.w);
          } else {
            const uint4 b = tiles[m * 64 + 32];
            T::product(acc[m][0], s[0].x, s[1].x, s[0].y, s[1].y, a.x, a.z);
            T::product(acc[m][1], s[0].x, s[1].x, s[0].y, s[1].y, a.y, a.w);
            T::product(acc[m][0], s[0].z, s[1].z, s[0].w, s[1].w, b.x, b.z);
            T::product(acc[m][1], s[0].z, s[1].z, s[0].w, s[1].w, b.y, b.w);
          }
        }
        load(now[u], block + U + u);
      }
      if (u % STAGE_BLOCKS == STAGE_BLOCKS - 1) stage = (stage + 1) % STAGES;
    }
  }
  // The second half of K goes through shared memory to the first.
  wait_for_copies<0>();
  __syncthreads();
  float* sums = (float*)ring + group * N * 8 * 32 + lane;
  if (part == 1) {
#pragma unroll
    for (int m = 0; m < N; m++)
#pragma unroll
      for (int i = 0; i < 8; i++) sums[(m * 8 + i) * 32] = acc[m][i >> 2][i & 3];
  }
  __syncthreads();
  if (part == 1) return;
  const u32 tile_row = (blockIdx.x / P.bundles >> 1) * TILE_ROWS;
#pragma unroll
  for (int m = 0; m < N; m++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float c[4];
#pragma unroll
      for (int i = 0; i < 4; i++) c[i] = acc[m][j][i] + sums[(m * 8 + j * 4 + i) * 32];
      if (j && columns[m].half) continue;
      float* v = v_of(P, blockIdx.y, first + m, tile_row + base + g) + j * 8 + 2 * q;
      if (row[0] >= 0) *(float2*)v = make_float2(c[0], c[1]);
      if (row[1] >= 0) *(float2*)(v + 8 * 16) = make_float2(c[2], c[3]);
    }
}

template <class T> DEVICE void prefill_shrink(const Prefill& P) {
  extern __shared__ uint4 ring[];
  const u32 work = blockIdx.x / P.bundles, first = blockIdx.x % P.bundles * 4;
  const Tile tile = P.tiles[work >> 1];
  const Tensor* t = tensors_of(P, tile.slot);
  Column columns[4] = {};
  u32 n = 0, at = 0;
#pragma unroll
  for (int s = 0; s < SLICES; s++)
    if (s < P.slices) {
      const Tensor w = t[s];
      const u32 rank = w.rank, full = full_tiles(rank), index = w.a / P.pool.page_fragments;
#pragma unroll
      for (int m = 0; m < 4; m++) {
        const u32 k = first + m - at;      // wraps where the column lies before this slice
        if (k < tiles(rank)) {
          columns[m] = Column{Start{w.a + k * P.blocks_in * 2, index, w.page_a, w.pages}, k == full};
          n = m + 1;
        }
      }
      at += tiles(rank);
    }
  if (n == 0 || (work & 1) * SHRINK_ROWS >= tile.rows) {
    wait_for_previous();
    let_next_start();
    return;
  }
  if (n == 1) shrink<T, 1>(P, tile, first, columns, ring);
  else if (n == 2) shrink<T, 2>(P, tile, first, columns, ring);
  else if (n == 3) shrink<T, 3>(P, tile, first, columns, ring);
  else if (n == 4) shrink<T, 4>(P, tile, first, columns, ring);
}

template <class T> DEVICE void prefill_expand(const Prefill& P) {
  extern __shared__ uint4 operand[];      // [group of 16 rows][rank tile][lane]: scale * v as the 16-row operand
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const u32 tile_index = blockIdx.y / P.parts, groups = TILE_ROWS / 16 / P.parts, group0 = blockIdx.y % P.parts * groups;
  const Tile tile = P.tiles[tile_index];
  u32 slice = 0, column = 0;
  while (blockIdx.x >= P.block_end[slice]) slice++;
  const Tensor* table = tensors_of(P, tile.slot);
  for (u32 s = 0; s < slice; s++) column += tiles(table[s].rank);
  const Tensor t = table[slice];
  const u32 full = full_tiles(t.rank), half = has_half(t.rank), all = full + half, units = (P.outputs[slice] + 63) / 64;
  const u32 unit0 = ((blockIdx.x - (slice ? P.block_end[slice - 1] : 0)) * (BLOCK_UNITS / 2) + warp) * 2;
  const u32 rows = tile.rows > group0 * 16 ? min(tile.rows - group0 * 16, groups * 16) : 0;
  let_next_start();
  if (t.rank == 0 || rows == 0) {
    wait_for_previous();
    return;
  }
  const int* ids = P.rows + tile.row0 + group0 * 16;
  uint4 old[2][4];
  u16* place[2] = {};      // of this lane's two rows in y; null: none
  auto find = [&](u32 group) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 local = group * 16 + r * 8 + g;
      const int row = local < rows ? ids[local] : -1;
      place[r] = row < 0 ? nullptr : P.y + (u64)row * P.stride_y + P.column[slice] + q * 8;
    }
  };
  // Piece e of a unit: row e >> 1, outputs 32 (e & 1) + 8 q and the seven behind.
  auto live = [&](u32 unit, int e) { return place[e >> 1] && unit * 64 + (e & 1) * 32 + q * 8 < P.outputs[slice]; };
  auto load = [&](int u) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      old[u][e] = make_uint4(0, 0, 0, 0);
      if (!P.store && live(unit0 + u, e)) old[u][e] = load_wide(place[e >> 1] + (unit0 + u) * 64 + (e & 1) * 32);
    }
  };
  find(0);
  load(0);
  load(1);
  wait_for_previous();
  const u64 split = (u64)P.columns * P.tile_count * TILE_ROWS * 16;
#pragma unroll 1
  for (u32 i = warp; i < groups * all; i += 8) {
    const u32 group = i / all, k = i % all;
    if (group * 16 >= rows) break;
    const float* v = v_of(P, 0, column + k, tile_index * TILE_ROWS + (group0 + group) * 16 + g) + 2 * q;
    float2 s[4] = {};
#pragma unroll 2
    for (u32 n = 0; n < P.splits; n++, v += split) {
#pragma unroll
      for (int m = 0; m < 4; m++)
        if (m < 2 || k < full) {
          const float2 add = *(const float2*)(v + (m & 1) * 8 * 16 + (m >> 1) * 8);
          s[m].x += add.x;
          s[m].y += add.y;
        }
    }
    uint4 a;
    a.x = T::pack(s[0].x * t.scale, s[0].y * t.scale);
    a.y = T::pack(s[1].x * t.scale, s[1].y * t.scale);
    a.z = T::pack(s[2].x * t.scale, s[2].y * t.scale);
    a.w = T::pack(s[3].x * t.scale, s[3].y * t.scale);
    operand[i * 32 + lane] = a;
  }
  __syncthreads();
  if (unit0 >= units) return;
  const u32 start = t.b / P.pool.page_fragments;
#pragma unroll 1
  for (u32 group = 0; group * 16 < rows; group++) {
    const uint4* mine = operand + group * all * 32 + lane;
    u16* const here[2] = {place[0], place[1]};
#pragma unroll
    for (int u = 0; u < 2; u++) {
      const u32 unit = unit0 + u;
      float c[4][2][4] = {};
      if (unit < units) {
        Reader reader;
        reader.enter(P.pool, start, t.page_b, lane);
#pragma unroll 1
        for (u32 k = 0; k < full; k++) {
          const uint4 a = mine[k * 32];
          const char* p = reader.at(P.pool, t.pages, t.b + (unit * full + k) * 4, lane);
#pragma unroll
          for (int m = 0; m < 4; m++) {
            const uint4 b = __ldg((const uint4*)(p + m * 512));
            T::product(c[m][0], a.x, a.y, a.z, a.w, b.x, b.z);
            T::product(c[m][1], a.x, a.y, a.z, a.w, b.y, b.w);
          }
        }
        if (half) {
          const uint4 a = mine[full * 32];
          const char* p = reader.at(P.pool, t.pages, t.b + units * full * 4 + unit * 2, lane);
#pragma unroll
          for (int l = 0; l < 2; l++) {
            const uint4 b = __ldg((const uint4*)(p + l * 512));
            T::product8(c[2 * l][0], a.x, a.y, b.x);
            T::product8(c[2 * l][1], a.x, a.y, b.y);
            T::product8(c[2 * l + 1][0], a.x, a.y, b.z);
            T::product8(c[2 * l + 1][1], a.x, a.y, b.w);
          }
        }
      }
#pragma unroll
      for (int e = 0; e < 4; e++) {
        uint4 o = old[u][e];
        o.x = add_pair<T>(o.x, c[0][0][e], c[0][1][e]);
        o.y = add_pair<T>(o.y, c[1][0][e], c[1][1][e]);
        o.z = add_pair<T>(o.z, c[2][0][e], c[2][1][e]);
        o.w = add_pair<T>(o.w, c[3][0][e], c[3][1][e]);
        if (here[e >> 1] && unit * 64 + (e & 1) * 32 + q * 8 < P.outputs[slice]) store_streaming(here[e >> 1] + unit * 64 + (e & 1) * 32, o);
      }
      if (u == 0) find(group + 1);
      load(u);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, 2) lora_prefill_shrink_bf16(const __grid_constant__ Prefill P) { prefill_shrink<Bf16>(P); }
extern "C" __global__ void __launch_bounds__(256, 2) lora_prefill_shrink_f16(const __grid_constant__ Prefill P) { prefill_shrink<F16>(P); }
extern "C" __global__ void __launch_bounds__(256, 2) lora_prefill_expand_bf16(const __grid_constant__ Prefill P) { prefill_expand<Bf16>(P); }
extern "C" __global__ void __launch_bounds__(256, 2) lora_prefill_expand_f16(const __grid_constant__ Prefill P) { prefill_expand<F16>(P); }
