// y[row, :] = x[row, :] W^T + v[row] B: the base product of a prefill whose sums take the LoRA delta on, on Hopper. v is what
// lora_prefill_shrink left: scale x A.
//
// A CTA makes 128 rows of one adapter (or of none) by 256 outputs; a cluster of two CTAs has the same outputs and shares W's tiles: each
// brings half of them, for both. One thread brings x and W by tensor maps, 64 inputs to a stage of a ring; two warpgroups multiply
// 64 rows each. Behind the last inputs come the adapter's ranks, 64 to a stage: three warps turn B's fragments into the same
// swizzled form, and v, which lies in the operand's order, goes from memory into registers.
// Tiles go by panels of eight pairs of row tiles, outputs by outputs, so that x and W stay in the L2.
//
// Stage: x 128 rows of 128 bytes, then W 256 rows of 128 bytes, 16-byte piece c of row r at c ^ (r & 7).
// Limits: K a multiple of 64; outputs of a slice multiples of 256; a tile's rows stand side by side in x and y; rank at most 256.
// Bound: 2 x rows x N x (K + rank) operations.
#include "async.cuh"
#include "lora.cuh"
#include "turn.cuh"

constexpr int TILE_ROWS = 128, TILE_OUTPUTS = 256, STAGES = 4, X_BYTES = 16384, STAGE_BYTES = 49152, PANEL = 8;

struct Tile {
  u32 slot;
  u32 row0;      // first row of x and y
  u32 rows;      // 1..128
  u32 unused;
};

struct alignas(128) TensorMap {
  u64 words[16];
};

struct Gemm {
  TensorMap x, w;        // x: 128 rows by 64 inputs; w: 128 outputs by 64 inputs; both in the 128-byte swizzle
  u16* y;
  Pool pool;
  const Tensor* tensors;
  const Tile* tiles;
  const uint4* v;
  u32 tile_count, columns;      // columns: rank tiles of all slices of the widest adapter, as many for each slice
  u32 inputs, stages;    // stages: of ranks, for the widest slice of the widest adapter
  u32 slices, stride_y;
  u32 outputs[SLICES];
  u32 projections, projection, layers, layer;
  u32 unused[3];
};

#define SUMS8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS32(d, i) SUMS8(d, i), SUMS8(d, i + 8), SUMS8(d, i + 16), SUMS8(d, i + 24)
#define NAMES \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63," \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121," \
  "%122,%123,%124,%125,%126,%127"
#define PRODUCTS(NAME)                                                                                                                \
  static DEVICE void base(float(&d)[128], u64 a, u64 b, int add) {                                                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32." NAME "." NAME " {" NAMES    \
                 "}, %128, %129, p, 1, 1, 0, 0;\n}"                                                                                   \
                 : SUMS32(d, 0), SUMS32(d, 32), SUMS32(d, 64), SUMS32(d, 96)                                                          \
                 : "l"(a), "l"(b), "r"(add));                                                                                         \
  }                                                                                                                                   \
  static DEVICE void delta(float(&d)[128], const uint4& a, u64 b) {                                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." NAME "." NAME " {" NAMES "}, {%128,%129,%130,%131}, %132, 1, 1, 1, 0;" \
                 : SUMS32(d, 0), SUMS32(d, 32), SUMS32(d, 64), SUMS32(d, 96)                                                          \
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));                                                                   \
  }
struct WideBf16 : Bf16 {
  PRODUCTS("bf16")
};
struct WideF16 : F16 {
  PRODUCTS("f16")
};

// Rows of 128 bytes in the 128-byte swizzle.
DEVICE u64 descriptor(u32 at) { return (u64)(at >> 4 & 0x3fff) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62; }

DEVICE u32 cluster_rank() {
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE void cluster_meet() { asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory"); }

// Which tile a cluster makes as its number `i`: pair of row tiles, and outputs.
struct Place {
  u32 pair, block;
};
DEVICE Place place_of(u32 i, u32 pairs, u32 blocks) {
  const u32 panel = i / (PANEL * blocks), first = panel * PANEL, height = min(pairs - first, (u32)PANEL), in = i - first * blocks;
  return {first + in % height, in / height};
}

// B's part of a stage: rank tiles from `k` on of 256 outputs, as rows of 128 bytes. 96 threads.
DEVICE void turn_ranks(const Gemm& P, const Tensor& t, u32 unit0, u32 units, u32 k0, u32 thread, u32 to) {
  const u32 full = full_tiles(t.rank), all = full + has_half(t.rank), warp = thread >> 5, lane = thread & 31, g = lane >> 2, q = lane & 3;
  const u32 p = 4 * (g & 1) + g / 2;
  for (u32 i = warp; i < min(P.columns / P.slices - k0, 4u) * 16; i += 3) {
    const u32 k = k0 + i / 16, unit = i / 4 % 4, m = i % 4;
    Reader reader;
    reader.enter(P.pool, t.b / P.pool.page_fragments, t.page_b, lane);
    uint4 b = make_uint4(0, 0, 0, 0);      // an adapter may have fewer tiles than the widest
    if (k < full) {
      b = load_once(reader.at(P.pool, t.pages, t.b + ((unit0 + unit) * full + k) * 4 + m, lane));
    } else if (k < all) {
      const uint4 pair = load_once(reader.at(P.pool, t.pages, t.b + units * full * 4 + (unit0 + unit) * 2 + m / 2, lane));
      b = m & 1 ? make_uint4(pair.z, pair.w, 0, 0) : make_uint4(pair.x, pair.y, 0, 0);
    }
    const u32 parts[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const u32 row = unit * 64 + 8 * p + 2 * m + (r & 1), piece = (k - k0) * 2 + (r >> 1);
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + row * 128 + (piece ^ (row & 7)) * 16 + q * 4), "r"(parts[r]) : "memory");
    }
  }
}

template <class T> DEVICE void gemm_lora(const Gemm& P) {
  extern __shared__ char raw[];
  __shared__ Barrier full[STAGES], empty[STAGES], ranks[STAGES];      // ranks: the stage is the three warps' to fill
  const u32 ring = (shared_address(raw) + 1023) & ~1023u, rank = cluster_rank(), group = threadIdx.x >> 7, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      full[s].init(1);
      empty[s].init(16);      // eight warps of both CTAs
      ranks[s].init(1);
    }
    barriers_ready();
  }
  cluster_meet();
  let_next_start();
  wait_for_previous();
  u32 blocks = 0;
  for (u32 s = 0; s < P.slices; s++) blocks += P.outputs[s] / TILE_OUTPUTS;
  const u32 pairs = (P.tile_count + 1) / 2, all = pairs * blocks, clusters = gridDim.x / 2, steps = P.inputs / 64;
  auto slice_of = [&](u32 block, u32& slice) {      // the slice that outputs are in, and their unit in it
    u32 at = block * TILE_OUTPUTS;
    for (slice = 0; at >= P.outputs[slice]; slice++) at -= P.outputs[slice];
    return at / 64;
  };
  auto tile_of = [&](u32 pair) {
    const u32 index = pair * 2 + rank;
    return index < P.tile_count ? P.tiles[index] : Tile{0, P.tiles[P.tile_count - 1].row0, 0, 0};
  };
  auto tensors_of = [&](const Tile& tile) { return P.tensors + ((u64)tile.slot * P.layers + P.layer) * P.projections + P.projection; };
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 8) {
      if (lane == 0) {
        u32 number = 0;
        for (u32 i = blockIdx.x / 2; i < all; i += clusters) {
          const Place place = place_of(i, pairs, blocks);
          const u32 row = tile_of(place.pair).row0, output = place.block * TILE_OUTPUTS + rank * 128;
          for (u32 step = 0; step < steps; step++, number++) {
            const u32 stage = number % STAGES, at = ring + stage * STAGE_BYTES;
            empty[stage].wait((number / STAGES & 1) ^ 1);
            full[stage].expect(STAGE_BYTES);
            asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4}], [%2];" ::"r"(at), "l"(&P.x),
                         "r"(full[stage].at()), "r"(step * 64), "r"(row)
                         : "memory");
            asm volatile(
                "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3,%4}], [%2], %5;" ::"r"(
                    at + X_BYTES + rank * 16384),
                "l"(&P.w), "r"(full[stage].at()), "r"(step * 64), "r"(output), "h"((u16)3)
                : "memory");
          }
          for (u32 k = 0; k < P.stages; k++, number++) {
            empty[number % STAGES].wait((number / STAGES & 1) ^ 1);
            ranks[number % STAGES].arrive();
          }
        }
      }
    } else if (P.stages) {
      u32 number = 0, phases = 0;      // phases: a bit for each stage
      for (u32 i = blockIdx.x / 2; i < all; i += clusters) {
        const Place place = place_of(i, pairs, blocks);
        const Tile tile = tile_of(place.pair);
        u32 slice;
        const u32 unit0 = slice_of(place.block, slice);
        const Tensor t = tensors_of(tile)[slice];
        number += steps;
        for (u32 k = 0; k < P.stages; k++, number++) {
          const u32 stage = number % STAGES;
          ranks[stage].wait(phases >> stage & 1);
          phases ^= 1 << stage;
          turn_ranks(P, t, unit0, P.outputs[slice] / 64, k * 4, threadIdx.x - 288, ring + stage * STAGE_BYTES + X_BYTES);
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          asm volatile("bar.sync 1, 96;" ::: "memory");
          if (threadIdx.x == 288) full[stage].arrive();
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const u32 g = lane >> 2, q = lane & 3, row16 = group * 4 + (warp & 3);
    float sums[128];
    u32 number = 0;
    auto release = [&](u32 stage) {      // to both CTAs
      if (lane < 2) {
        u32 there;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(empty[stage].at()), "r"(lane));
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
      }
    };
#pragma unroll
    for (int i = 0; i < 128; i++) sums[i] = 0.f;
    for (u32 i = blockIdx.x / 2; i < all; i += clusters) {
      const Place place = place_of(i, pairs, blocks);
      const Tile tile = tile_of(place.pair);
      u32 slice, column = 0;
      slice_of(place.block, slice);
      const Tensor* table = tensors_of(tile);
      u32 tiles_here = 0;
      if (P.stages && tile.rows) {
        for (u32 s = 0; s < slice; s++) column += tiles(table[s].rank);
        tiles_here = tiles(table[slice].rank);
      }
      const uint4* v = P.v + (((u64)(place.pair * 2 + rank) * P.columns + column) * (TILE_ROWS / 16) + row16) * 32 + lane;
      uint4 kept[4];
#pragma unroll
      for (u32 k = 0; k < 4; k++) kept[k] = k < tiles_here ? v[k * 256] : make_uint4(0, 0, 0, 0);
#pragma unroll 1
      for (u32 step = 0; step < steps; step++, number++) {
        const u32 stage = number % STAGES, x = ring + stage * STAGE_BYTES + group * 8192, w = ring + stage * STAGE_BYTES + X_BYTES;
        full[stage].wait(number / STAGES & 1);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) T::base(sums, descriptor(x + k * 32), descriptor(w + k * 32), step > 0 || k > 0);
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (step > 0) release((number - 1) % STAGES);
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      release((number - 1) % STAGES);
#pragma unroll 1
      for (u32 k0 = 0; k0 < P.stages; k0++, number++) {
        const u32 stage = number % STAGES, b = ring + stage * STAGE_BYTES + X_BYTES;
        if (k0) {
#pragma unroll
          for (u32 k = 0; k < 4; k++) kept[k] = k0 * 4 + k < tiles_here ? v[(k0 * 4 + k) * 256] : make_uint4(0, 0, 0, 0);
        }
        full[stage].wait(number / STAGES & 1);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (u32 k = 0; k < 4; k++)
          if (k0 * 4 + k < P.columns / P.slices) T::delta(sums, kept[k], descriptor(b + k * 32));
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
        release(stage);
      }
#pragma unroll
      for (int j = 0; j < 128; j++) asm volatile("" : "+f"(sums[j])::"memory");
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const u32 line = row16 * 16 + g + 8 * r;
        u16* y = P.y + (u64)(tile.row0 + line) * P.stride_y + place.block * TILE_OUTPUTS + q * 8;
#pragma unroll
        for (int b = 0; b < 8; b++) {
          u32 pieces[4];
#pragma unroll
          for (int k = 0; k < 4; k++) pieces[k] = T::pack(sums[(b * 4 + k) * 4 + 2 * r], sums[(b * 4 + k) * 4 + 2 * r + 1]);
          const uint4 piece = turn(pieces);
          if (line < tile.rows) *(uint4*)(y + b * 32) = piece;
        }
      }
    }
  }
  __syncwarp();
  cluster_meet();
}

#define KERNEL(T, name) \
  extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) gemm_lora_##name(const __grid_constant__ Gemm P) { gemm_lora<T>(P); }
KERNEL(WideBf16, bf16)
KERNEL(WideF16, f16)
