// What `gemm_lora_sm90a.cu` is asked, its products, and which tile is whose. src/lora/gemm.rs has the arguments in Rust.
#pragma once
#include "async.cuh"
#include "lora.cuh"

constexpr int ROWS16 = 8, TILE_OUTPUTS = 256, STAGES = 4, X_BYTES = 16384, STAGE_BYTES = 49152, PANEL = 8;
constexpr int PARTS = 8, RANK_TILES = 4;
constexpr int LOW_STAGES = 3, LOW_TILE = 2048;      // A's ring: a stage is 64 inputs of each rank tile, and one warp's to fill
constexpr int INFOS = 2 * STAGES;                    // tiles that may be begun while one is multiplied, and more
constexpr u32 LEAD = 6;                              // steps before x A is made, in which A's first come
constexpr u32 NO_SLOT = 0xffffffffu;

struct Tile {
  u32 slot;      // NO_SLOT: rows of the base
  u32 row0;      // first row of x and y
  u32 rows;      // 1..128
  u32 unused;
};

struct alignas(128) TensorMap {
  u64 words[16];
};

struct Gemm {
  TensorMap x, w, out;       // boxes: x 64 inputs by 128 rows, w by 128 outputs; out 64 outputs by 16 rows; all in the 128-byte swizzle
  u16* y;
  Pool pool;
  const Tensor* tensors;
  const Tile* tiles;
  float4* sums;              // [tile][slice][rank tile][part of K][16 rows][half of the ranks][lane]
  u32* counters;             // [tile][slice][16 rows]
  u32 tile_count, columns;   // columns: rank tiles of a slice of the widest adapter; 0: the base alone
  u32 inputs, slices;
  u32 stride_y;
  u32 outputs[SLICES];
  u32 projections, projection, layers, layer;
};

#define SUMS4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define SUMS8(d, i) SUMS4(d[(i) / 4]), SUMS4(d[(i) / 4 + 1])
#define SUMS32(d, i) SUMS8(d, i), SUMS8(d, i + 8), SUMS8(d, i + 16), SUMS8(d, i + 24)
#define NAMES8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NAMES32 NAMES8 ",%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES128 \
  NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63," \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121," \
  "%122,%123,%124,%125,%126,%127"
// 64 rows by 16 inputs (or ranks), by 256 outputs or 16 or 64 ranks. `add` 0: the sums start anew.
#define PRODUCTS(NAME)                                                                                                                 \
  static DEVICE void base(float(&d)[32][4], u64 a, u64 b, int add) {                                                                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32." NAME "." NAME " {" NAMES128  \
                 "}, %128, %129, p, 1, 1, 0, 0;\n}"                                                                                    \
                 : SUMS32(d, 0), SUMS32(d, 32), SUMS32(d, 64), SUMS32(d, 96)                                                           \
                 : "l"(a), "l"(b), "r"(add));                                                                                          \
  }                                                                                                                                    \
  static DEVICE void shrink(float(&d)[2][4], u64 a, u64 b, int add) {                                                                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32." NAME "." NAME " {" NAMES8      \
                 "}, %8, %9, p, 1, 1, 0, 0;\n}"                                                                                        \
                 : SUMS8(d, 0)                                                                                                         \
                 : "l"(a), "l"(b), "r"(add));                                                                                          \
  }                                                                                                                                    \
  static DEVICE void shrink(float(&d)[8][4], u64 a, u64 b, int add) {                                                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" NAMES32     \
                 "}, %32, %33, p, 1, 1, 0, 0;\n}"                                                                                      \
                 : SUMS32(d, 0)                                                                                                        \
                 : "l"(a), "l"(b), "r"(add));                                                                                          \
  }
struct WideBf16 : Bf16 {
  PRODUCTS("bf16")
};
struct WideF16 : F16 {
  PRODUCTS("f16")
};

// Rows of 128 bytes in the 128-byte swizzle.
DEVICE u64 descriptor(u32 at) { return (u64)(at >> 4 & 0x3fff) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62; }

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Keeps the compiler from reading sums before a wait.
template <int N> DEVICE void pin(float (&d)[N][4]) {
#pragma unroll
  for (int i = 0; i < N * 4; i++) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}

DEVICE u32 cluster_rank() {
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE void cluster_meet() { asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory"); }

DEVICE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE u32 load_relaxed(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// ---- which work is whose

// One tile of 128 rows by 256 outputs, and its share of x A.
struct Work {
  u32 index;                // of the row tile
  u32 block, slice, unit;   // of 256 outputs in all slices; the slice, and the first of 64 outputs in it
  u32 parts;                // that K is cut into for x A
  u32 from, shrinks;        // of the steps of 64 inputs: the first whose part of x A is made here, and how many
  u32 lead;                 // steps before these
  u32 tiles;                // of ranks; 0: no delta
  Tile tile;
  Tensor tensor;
};

// A cluster's tiles, in their order. What a warpgroup multiplies depends on the arguments and the order alone.
struct Walk {
  u32 pairs, blocks, clusters, at, end, rank;

  DEVICE explicit Walk(const Gemm& P) {
    blocks = 0;
    for (u32 s = 0; s < P.slices; s++) blocks += P.outputs[s] / TILE_OUTPUTS;
    pairs = (P.tile_count + 1) / 2;
    clusters = gridDim.x / 2;
    at = blockIdx.x / 2;
    end = pairs * blocks;
    rank = cluster_rank();
  }
  DEVICE bool next(const Gemm& P, Work& w) {
    if (at >= end) return false;
    const u32 panel = at / (PANEL * blocks), first = panel * PANEL, height = min(pairs - first, (u32)PANEL), in = at - first * blocks;
    w.index = (first + in % height) * 2 + rank;
    w.block = in / height;
    u32 before = 0;      // blocks of the slices before
    for (w.slice = 0; w.block - before >= P.outputs[w.slice] / TILE_OUTPUTS; w.slice++) before += P.outputs[w.slice] / TILE_OUTPUTS;
    const u32 block = w.block - before, all = P.outputs[w.slice] / TILE_OUTPUTS;
    w.unit = block * (TILE_OUTPUTS / 64);
    w.parts = w.from = w.shrinks = w.lead = 0;
    if (P.columns) {
      // The slice's tiles that are made at the same time as its first: none of them waits for a later one.
      const u32 number = at - block * height, together = (clusters - 1 - number % clusters) / height + 1, steps = P.inputs / 64;
      w.parts = min(min((u32)PARTS, all), min(together, steps));
      if (block < w.parts) {
        w.from = steps * block / w.parts;
        w.shrinks = steps * (block + 1) / w.parts - w.from;
        w.lead = min(LEAD, steps - w.shrinks);
      }
    }
    at += clusters;
    return true;
  }
  // What the tile is of, from memory.
  DEVICE void look_up(const Gemm& P, Work& w) const {
    w.tile = w.index < P.tile_count ? P.tiles[w.index] : no_tile();
    w.tensor.rank = 0;
    if (P.columns && w.tile.slot != NO_SLOT) w.tensor = *tensor_of(P, w.tile.slot, w.slice);
    w.tiles = tiles(w.tensor.rank);
  }
  static DEVICE Tile no_tile() { return Tile{NO_SLOT, 0, 0, 0}; }
  static DEVICE const Tensor* tensor_of(const Gemm& P, u32 slot, u32 slice) {
    return P.tensors + ((u64)slot * P.layers + P.layer) * P.projections + P.projection + slice;
  }
};

// What the tiles are of, in shared memory, for those who multiply. One thread brings it without waiting: first the tile, some steps later
// its tensor.
struct Infos {
  Tile tile[INFOS];
  Tensor tensor[INFOS];

  DEVICE void ask_tile(const Gemm& P, const Work& w, u32 turn) {
    if (w.index < P.tile_count) copy_async(&tile[turn], P.tiles + w.index);
    else tile[turn] = Walk::no_tile();
  }
  DEVICE void ask_tensor(const Gemm& P, const Work& w, u32 turn) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    const u32 slot = tile[turn].slot;
    if (P.columns && slot != NO_SLOT) {
      const char* from = (const char*)Walk::tensor_of(P, slot, w.slice);
      copy_async(&tensor[turn], from);
      copy_async((char*)&tensor[turn] + 16, from + 16);
    } else {
      tensor[turn].rank = 0;
    }
  }
  DEVICE void take(Work& w, u32 turn) const {
    w.tile = tile[turn];
    w.tensor = tensor[turn];
    w.tiles = tiles(w.tensor.rank);
  }
};
