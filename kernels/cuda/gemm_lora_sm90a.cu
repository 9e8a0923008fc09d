// y[row, :] = x[row, :] W^T + scale (x[row, :] A) B: the base product of a prefill with its LoRA delta in the same sums, on Hopper.
//
// A CTA makes 128 rows of one adapter (or of none) by 256 outputs; a cluster of two CTAs has the same outputs and shares W's tiles: each
// brings half of them, for both. One thread brings x and W by tensor maps, 64 inputs to a stage of a ring; two warpgroups multiply
// 64 rows each. Sums leave by way of shared memory and bulk stores, while the other warpgroup multiplies.
// x A is made from the x that lies in shared memory anyway, once for all outputs of a slice: the first tiles of a slice, as many as
// are made at the same time, begin with another part of the inputs each and leave their sums in memory. B's fragments come behind the inputs,
// as they lie. Three warps turn A's fragments into the swizzled form, and add the parts.
// Tiles go by panels of eight pairs of row tiles, outputs by outputs, so that x and W stay in the L2.
//
// Stage: x 128 rows of 128 bytes, then W 256 rows of 128 bytes, 16-byte piece c of row r at c ^ (r & 7). W's rows come in the order of
// `map_of_w`: column c of product e of a unit is its output 8 p(c) + e, p as in lora.cuh, so a lane has eight outputs side by side.
// Limits: K a multiple of 64; outputs of a slice multiples of 256; a tile's rows stand side by side in x and y; rank at most 64.
// Every CTA must be resident, since tiles wait for parts. Counters are zero before the first launch, and left zero.
// Deterministic: every sum has one order.
// Bound: 2 x rows x N x (K + rank) operations.
#include "gemm_lora.cuh"

// ---- the copying warps

// Asks the L2 for what will be read.
DEVICE void announce(const char* p, u32 bytes) { asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory"); }

// A's part of 64 inputs, on its way from fragments to rows of 128 bytes, one for each rank: up to N rank tiles.
template <int N> struct LowStage {
  uint4 held[N][4];

  static DEVICE u32 each(const Work& w, u32 k) { return k >= w.tiles ? 0 : k < full_tiles(w.tensor.rank) ? 4 : 2; }      // fragments
  static DEVICE u32 fragment(const Gemm& P, const Work& w, u32 k, u32 step) { return w.tensor.a + k * (P.inputs / 16) + step * each(w, k); }

  // All of a rank tile that this tile takes.
  static DEVICE void announce_all(const Gemm& P, const Work& w, u32 k) {
    u32 from = fragment(P, w, k, w.from), left = w.shrinks * each(w, k);
    while (left) {
      const u32 index = from / P.pool.page_fragments, in = from - index * P.pool.page_fragments, run = min(left, P.pool.page_fragments - in);
      const char* p = P.pool.base + (u64)__ldg(P.pool.pages + w.tensor.pages + index) * P.pool.page_bytes + (u64)in * 512;
      announce(p, run * 512);
      from += run;
      left -= run;
    }
  }
  DEVICE void load(const Gemm& P, const Work& w, u32 step, u32 lane) {
#pragma unroll
    for (int k = 0; k < N; k++) {
      const u32 count = each(w, k), first = fragment(P, w, k, step), index = first / P.pool.page_fragments;
      if (count == 0) continue;
      Reader reader;
      reader.enter(P.pool, index, __ldg(P.pool.pages + w.tensor.pages + index), lane);
#pragma unroll
      for (int n = 0; n < 4; n++)
        if (n < count) held[k][n] = load_once(reader.at(P.pool, w.tensor.pages, first + n, lane));
    }
  }
  DEVICE void store(const Work& w, u32 to, u32 lane) const {
    const u32 g = lane >> 2, q = lane & 3, zero = 0;
#pragma unroll
    for (int k = 0; k < N; k++) {
      const u32 row = to + k * LOW_TILE + g * 128, count = each(w, k);
      if (count == 4) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const uint4& v = held[k][n];
          const u32 at = row + ((n / 2 * 4 + q) ^ g) * 16 + n % 2 * 8;
          asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(at), "r"(v.x), "r"(v.z) : "memory");
          asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(at + 1024), "r"(v.y), "r"(v.w) : "memory");
        }
      } else if (count == 2) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const uint4& v = held[k][n];
          const u32 at = row + ((n * 4 + q) ^ g) * 16;
          asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
          asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(at + 1024), "r"(zero) : "memory");
        }
      }
    }
  }
};

// ---- x A on its way to other tiles

// What becomes of a warp's x A, in memory: the parts of K, then, in the place of the first, their scaled sum as an operand of 64 rows
// by 16 ranks. The counter counts parts, then the sum, then those that have taken it.
struct Exchange {
  float4* sums;      // of this lane
  u32* counter;

  DEVICE Exchange(const Gemm& P, const Work& w, u32 row16, u32 lane) {
    const u64 place = (u64)w.index * P.slices + w.slice;
    sums = P.sums + (place * P.columns * PARTS * ROWS16 + row16) * 64 + lane;
    counter = P.counters + place * ROWS16 + row16;
  }
  DEVICE float4* at(u32 tile, u32 part) const { return sums + (tile * PARTS + part) * ROWS16 * 64; }

  template <int N> DEVICE void give(const float (&low)[N][4], const Work& w) const {
#pragma unroll
    for (int k = 0; k < N / 2; k++)
      if (k < w.tiles) {
        at(k, w.unit / 4)[0] = wide(low[2 * k]);
        at(k, w.unit / 4)[32] = wide(low[2 * k + 1]);
      }
  }
  DEVICE void given(u32 lane) const {
    fence();
    __syncwarp();
    if (lane == 0) asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
  }
  // All parts, in their order.
  template <class T> DEVICE void add_parts(const Work& w, u32 lane) const {
    while (load_acquire(counter) < w.parts) {
    }
#pragma unroll 1
    for (u32 k = 0; k < w.tiles; k++) {
      float c[2][4] = {};
#pragma unroll
      for (int p = 0; p < PARTS; p++)
        if (p < w.parts) {
          add(c[0], __ldcg(at(k, p)));
          add(c[1], __ldcg(at(k, p) + 32));
        }
      *(uint4*)at(k, 0) = operand_of<T>(c, w.tensor.scale);
    }
    given(lane);
  }
  DEVICE bool ready(const Work& w, u32 seen) const { return seen > w.parts; }
  // How many were counted before, for `done`.
  DEVICE u32 take(uint4 (&kept)[RANK_TILES], const Work& w, u32 lane) const {
#pragma unroll
    for (int k = 0; k < RANK_TILES; k++)
      if (k < w.tiles) kept[k] = __ldcg((const uint4*)at(k, 0));
    return lane == 0 ? atomicAdd(counter, 1) : 0;
  }
  // The last to have taken it leaves the counter as it was at first.
  DEVICE void done(const Gemm& P, const Work& w, u32 before) const {
    if (w.tiles && before == w.parts + P.outputs[w.slice] / TILE_OUTPUTS) *counter = 0;
  }
};

// Fills one stage of A's ring, every third step, and holds the next D of its own meanwhile: a load takes long beside the bulk copies.
// Where the first part is made, it adds the parts of every third of the tile's 16 rows as well.
template <class T, int N, int D> DEVICE void fill_low(const Gemm& P, Walk& walk, Work& w, u32 mine, u32 ring, Barrier& full, Barrier& empty) {
  const u32 lane = threadIdx.x & 31;
  u32 number = 0, fills = 0;      // steps of all warps before this tile; stages that this one has filled
  while (walk.next(P, w)) {
    const u32 first = (mine + LOW_STAGES - number % LOW_STAGES) % LOW_STAGES;
    number += w.shrinks;
    if (w.shrinks == 0) continue;
    walk.look_up(P, w);
    if (mine == 0 && lane < w.tiles) LowStage<N>::announce_all(P, w, lane);
    LowStage<N> low[D];
#pragma unroll
    for (int d = 0; d < D; d++)
      if (first + d * LOW_STAGES < w.shrinks) low[d].load(P, w, w.from + first + d * LOW_STAGES, lane);
#pragma unroll 1
    for (u32 step = first; step < w.shrinks;) {
#pragma unroll
      for (int d = 0; d < D; d++, step += LOW_STAGES) {
        if (step >= w.shrinks) break;
        empty.wait((fills++ & 1) ^ 1);
        low[d].store(w, ring + mine * P.columns * LOW_TILE, lane);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) full.arrive();
        if (step + D * LOW_STAGES < w.shrinks) low[d].load(P, w, w.from + step + D * LOW_STAGES, lane);
      }
    }
    if (w.tiles && w.unit == 0)
      for (u32 row16 = mine; row16 < ROWS16; row16 += LOW_STAGES) Exchange(P, w, row16, lane).template add_parts<T>(w, lane);
  }
}

// B's fragments of 256 outputs as they lie: those of whole rank tiles unit by unit, then those of a half one. `take` gets them run by
// run: the first of the run, its address, its length.
DEVICE u32 rank_fragments(const Work& w) { return full_tiles(w.tensor.rank) * 16 + has_half(w.tensor.rank) * 8; }
template <class F> DEVICE void runs_of_ranks(const Gemm& P, const Work& w, F take) {
  const Tensor& t = w.tensor;
  const u32 whole = full_tiles(t.rank) * 16, all = rank_fragments(w), units = P.outputs[w.slice] / 64;
  Reader reader;
  for (u32 i = 0; i < all;) {
    // A run ends with its kind of tiles or with its page.
    if (i == 0 || i == whole) reader.enter(P.pool, t.b / P.pool.page_fragments, t.page_b, 0);
    const u32 fragment = i < whole ? t.b + w.unit * (whole / 4) + i : t.b + units * (whole / 4) + w.unit * 2 + i - whole;
    const char* from = reader.at(P.pool, t.pages, fragment, 0);
    const u32 run = min((i < whole ? whole : all) - i, reader.end - fragment);
    take(i, from, run);
    i += run;
  }
}
DEVICE void bring_ranks(const Gemm& P, const Work& w, Barrier& full, u32 to) {
  if (w.tiles == 0) {
    full.arrive();
    return;
  }
  full.expect(rank_fragments(w) * 512);
  runs_of_ranks(P, w, [&](u32 i, const char* from, u32 run) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to + i * 512), "l"(from), "r"(run * 512),
                 "r"(full.at())
                 : "memory");
  });
}
// ---- the delta, and sums on their way out

DEVICE uint4 load_shared(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}

// v B of a warp's 16 rows by 256 outputs.
template <class T> DEVICE void add_delta(float (&sums)[32][4], const uint4 (&kept)[RANK_TILES], const Work& w, u32 b) {
  const u32 full = full_tiles(w.tensor.rank), at = b + (threadIdx.x & 31) * 16;
#pragma unroll
  for (int k = 0; k < RANK_TILES; k++) {
    const uint4& a = kept[k];
    if (k < full) {
#pragma unroll
      for (int unit = 0; unit < 4; unit++) {
        uint4 v[4];
#pragma unroll
        for (int m = 0; m < 4; m++) v[m] = load_shared(at + ((unit * full + k) * 4 + m) * 512);
#pragma unroll
        for (int m = 0; m < 4; m++) {
          T::product(sums[unit * 8 + 2 * m], a.x, a.y, a.z, a.w, v[m].x, v[m].z);
          T::product(sums[unit * 8 + 2 * m + 1], a.x, a.y, a.z, a.w, v[m].y, v[m].w);
        }
      }
    } else if (k < w.tiles) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const uint4 v = load_shared(at + (full * 16 + i) * 512);
        T::product8(sums[4 * i], a.x, a.y, v.x);
        T::product8(sums[4 * i + 1], a.x, a.y, v.y);
        T::product8(sums[4 * i + 2], a.x, a.y, v.z);
        T::product8(sums[4 * i + 3], a.x, a.y, v.w);
      }
    }
  }
}

// A warp's 16 rows by 256 outputs, of which `rows` are there. A lane has eight outputs side by side.
template <class T> DEVICE void leave(const Gemm& P, const float (&sums)[32][4], u32 staging, u32 row, int rows, u32 output) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  auto piece = [&](int unit, int e) {
    const float (*s)[4] = sums + unit * 8;
    return make_uint4(T::pack(s[0][e], s[1][e]), T::pack(s[2][e], s[3][e]), T::pack(s[4][e], s[5][e]), T::pack(s[6][e], s[7][e]));
  };
  if (P.columns > 2 || rows < 16) {      // A's ring has taken the staging's place, or the rows behind are another tile's
    u16* y = P.y + (u64)(row + g) * P.stride_y + output + q * 8;
#pragma unroll
    for (int unit = 0; unit < 4; unit++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        if ((int)(g + e / 2 * 8) < rows) *(uint4*)(y + (u64)(e / 2 * 8) * P.stride_y + unit * 64 + e % 2 * 32) = piece(unit, e);
    return;
  }
#pragma unroll
  for (int unit = 0; unit < 4; unit++) {
    if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; r++) {
      // Lanes of odd rows store their halves the other way round, so that no bank is asked for twice.
      const uint4 low = piece(unit, 2 * r), high = piece(unit, 2 * r + 1);
      const bool odd = g & 1;
      const u32 at = staging + (g + 8 * r) * 128;
      const uint4 first = odd ? high : low, second = odd ? low : high;
      asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at + ((q + (odd ? 4 : 0)) ^ g) * 16), "r"(first.x), "r"(first.y), "r"(first.z), "r"(first.w) : "memory");
      asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at + ((q + (odd ? 0 : 4)) ^ g) * 16), "r"(second.x), "r"(second.y), "r"(second.z), "r"(second.w) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane == 0)
      asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1,%2}], [%3];\ncp.async.bulk.commit_group;" ::"l"(&P.out),
                   "r"(output + unit * 64), "r"(row), "r"(staging)
                   : "memory");
  }
}

// ---- the kernel

template <class T> DEVICE void gemm_lora(const Gemm& P) {
  extern __shared__ char raw[];
  __shared__ Barrier full[STAGES], empty[STAGES], low_full[LOW_STAGES], low_empty[LOW_STAGES];
  __shared__ __align__(16) Infos infos;
  const u32 ring = (shared_address(raw) + 1023) & ~1023u, low_ring = ring + STAGES * STAGE_BYTES, staging = low_ring + LOW_STAGES * 2 * LOW_TILE;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      full[s].init(1);
      empty[s].init(16);      // eight warps of both CTAs
    }
    for (int s = 0; s < LOW_STAGES; s++) {
      low_full[s].init(1);
      low_empty[s].init(8);
    }
    barriers_ready();
  }
  cluster_meet();
  let_next_start();
  const u32 group = threadIdx.x >> 7, steps = P.inputs / 64;
  Work w;
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
    const u32 warp = threadIdx.x / 32 - 9;      // of those that fill A's ring
    Walk walk(P);
    if (threadIdx.x == 256) {
      u32 number = 0, turn = 0;
      bool more = walk.next(P, w);
      if (more) {
        infos.ask_tile(P, w, turn);
        infos.ask_tensor(P, w, turn);
        asm volatile("cp.async.wait_all;" ::: "memory");
      }
      wait_for_previous();
      while (more) {
        Work after = {};
        const u32 next = (turn + 1) % INFOS;
        bool then = false;
        infos.take(w, turn);
        const u32 row = w.tile.row0, output = w.block * (TILE_OUTPUTS / 64) + walk.rank * 2;
        u32 input = (w.from + steps - w.lead) % steps * 64;
        for (u32 step = 0; step < steps; step++, number++) {
          const u32 stage = number % STAGES, at = ring + stage * STAGE_BYTES;
          empty[stage].wait((number / STAGES & 1) ^ 1);
          full[stage].expect(STAGE_BYTES);
          asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4}], [%2];" ::"r"(at), "l"(&P.x),
                       "r"(full[stage].at()), "r"(input), "r"(row)
                       : "memory");
          asm volatile(
              "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3,%6,%6,%6,%4}], [%2], %5;" ::"r"(
                  at + X_BYTES + walk.rank * 16384),
              "l"(&P.w), "r"(full[stage].at()), "r"(input), "r"(output), "h"((u16)3), "r"(0)
              : "memory");
          input += 64;
          if (input == P.inputs) input = 0;
          if (step == steps / 4) {
            runs_of_ranks(P, w, [](u32, const char* from, u32 run) { announce(from, run * 512); });
            then = walk.next(P, after);
            if (then) infos.ask_tile(P, after, next);
          }
          if (step == steps / 2 && then) infos.ask_tensor(P, after, next);
        }
        if (P.columns) {
          const u32 stage = number % STAGES;
          empty[stage].wait((number / STAGES & 1) ^ 1);
          bring_ranks(P, w, full[stage], ring + stage * STAGE_BYTES);
          number++;
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        w = after;
        more = then;
        turn = next;
      }
    } else if (warp < LOW_STAGES && P.columns == 1) {
      fill_low<T, 1, 3>(P, walk, w, warp, low_ring, low_full[warp], low_empty[warp]);
    } else if (warp < LOW_STAGES && P.columns) {
      fill_low<T, RANK_TILES, 1>(P, walk, w, warp, low_ring, low_full[warp], low_empty[warp]);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
    const u32 lane = threadIdx.x & 31, row16 = threadIdx.x / 32;
    Walk walk(P);
    float sums[32][4];
    u32 number = 0, lows = 0;      // stages so far, of both rings
    auto release = [&](u32 stage) {      // to both CTAs
      if (lane < 2) {
        u32 there;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(empty[stage].at()), "r"(lane));
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
      }
    };
    auto x_of = [&](u32 stage) { return ring + stage * STAGE_BYTES + group * 8192; };
    auto w_of = [&](u32 stage) { return ring + stage * STAGE_BYTES + X_BYTES; };
    auto multiply = [&](u32 stage, bool add) {
      full[stage].wait(number / STAGES & 1);
      products_begin();
#pragma unroll
      for (int k = 0; k < 4; k++) T::base(sums, descriptor(x_of(stage) + k * 32), descriptor(w_of(stage) + k * 32), add || k > 0);
    };
    // The steps whose part of x A is made here; nothing is in flight before and behind.
    auto shrink = [&](auto& low) {
#pragma unroll 1
      for (u32 step = 0; step < w.shrinks; step++, number++, lows++) {
        const u32 stage = number % STAGES, a = low_ring + lows % LOW_STAGES * P.columns * LOW_TILE;
        low_full[lows % LOW_STAGES].wait(lows / LOW_STAGES & 1);
        multiply(stage, w.lead + step > 0);
#pragma unroll
        for (int k = 0; k < 4; k++) T::shrink(low, descriptor(x_of(stage) + k * 32), descriptor(a + k * 32), step > 0 || k > 0);
        products_commit();
        products_wait<1>();
        if (step > 0) {
          release((number - 1) % STAGES);
          if (lane == 0) low_empty[(lows - 1) % LOW_STAGES].arrive();
        }
      }
      products_wait<0>();
      pin(low);
      release((number - 1) % STAGES);
      if (lane == 0) low_empty[(lows - 1) % LOW_STAGES].arrive();
      if (w.tiles) Exchange(P, w, row16, lane).give(low, w);
    };
#pragma unroll
    for (int i = 0; i < 128; i++) sums[i / 4][i % 4] = 0.f;
    wait_for_previous();
    for (u32 turn = 0; walk.next(P, w); turn = (turn + 1) % INFOS) {
      full[number % STAGES].wait(number / STAGES & 1);
      infos.take(w, turn);
      const Exchange exchange(P, w, row16, lane);
      uint4 kept[RANK_TILES] = {};
      bool flying = false, taken = w.tiles == 0;      // whether a step's products are; whether x A is here
      auto plain = [&](u32& step, u32 stop) {
#pragma unroll 1
        for (; step < stop; step++, number++) {
          multiply(number % STAGES, step > 0);
          products_commit();
          products_wait<1>();
          if (flying) release((number - 1) % STAGES);
          flying = true;
        }
      };
      auto land = [&]() {
        products_wait<0>();
        pin(sums);
        if (flying) release((number - 1) % STAGES);
        flying = false;
      };
      u32 step = 0;
      if (w.shrinks) {
        plain(step, w.lead);
        land();
        if (P.columns == 1) {
          float low[2][4] = {};
          shrink(low);
        } else {
          float low[RANK_TILES * 2][4] = {};
          shrink(low);
        }
        step += w.shrinks;
        plain(step, min(step + 2, steps));      // while they are written
        if (w.tiles) exchange.given(lane);
      }
      // x A is whole by now, mostly, and comes while the last steps are multiplied.
      u32 seen = 0, before = 0;
      const u32 late = max(steps - min(steps, 4u), step), early = max(late - min(late, 4u), step);
#pragma unroll 1
      while (step < steps) {
        if (step == early && !taken) seen = load_relaxed(exchange.counter);
        if (step == late && !taken && exchange.ready(w, seen)) {
          before = exchange.take(kept, w, lane);
          taken = true;
        }
        plain(step, step < early ? early : step < late ? late : steps);
      }
      if (!taken) {
        while (!exchange.ready(w, load_acquire(exchange.counter))) {
        }
        before = exchange.take(kept, w, lane);
      }
      land();
      if (P.columns) {
        const u32 stage = number % STAGES;
        full[stage].wait(number / STAGES & 1);
        if (w.tiles) add_delta<T>(sums, kept, w, ring + stage * STAGE_BYTES);
        __syncwarp();
        release(stage);
        number++;
      }
      leave<T>(P, sums, staging + row16 * 2048, w.tile.row0 + row16 * 16, (int)w.tile.rows - (int)row16 * 16, w.block * TILE_OUTPUTS);
      exchange.done(P, w, before);
    }
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  __syncwarp();
  cluster_meet();
}

#define KERNEL(T, name) \
  extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) gemm_lora_##name(const __grid_constant__ Gemm P) { gemm_lora<T>(P); }
KERNEL(WideBf16, bf16)
KERNEL(WideF16, f16)
