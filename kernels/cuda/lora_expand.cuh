// The expand of a decode launch. A run's steps are laid out in shared memory first, by all threads at once; then each warp goes
// through its own, while the next ones arrive in its ring.
#pragma once
#include "lora_decode.cuh"

// What an expand run has in each slice, as items: a unit, or two where all that a slice has of ranks is a half tile.
struct Items {
  u32 first[SLICES + 1];       // items before each slice, and all
  u32 from[SLICES];            // first unit in the slice
  u32 tiles[SLICES], most;     // steps of an item, and the most of any
  u32 paired;                  // bits: slices whose items are pairs
  bool one;                    // all of one full tile

  DEVICE void count(const Decode& P, const Run& run, const Slice* t) {
    u32 before = 0;
    first[0] = paired = 0;
    most = 1;
    one = true;
#pragma unroll
    for (int s = 0; s < SLICES; s++) {
      const u32 to = min(run.from + run.count, P.unit_end[s]), begin = max(run.from, before);
      const u32 units = to > begin && t[s].rank ? to - begin : 0, pairs = full_tiles(t[s].rank) == 0;
      from[s] = begin - before;
      tiles[s] = ::tiles(t[s].rank);
      if (units) most = max(most, tiles[s]);
      one &= !units || (t[s].rank > 8 && t[s].rank <= 16);
      paired |= pairs << s;
      first[s + 1] = first[s] + (pairs && units ? (from[s] + units + 1) / 2 - from[s] / 2 : units);
      before = P.unit_end[s];
    }
  }
  // Items that are laid out at one time.
  DEVICE u32 some() const { return WARPS * (WARP_STEPS / most); }
};

// The place of a fragment, less the lane's part.
DEVICE const char* place_of(const Pool& pool, const Start& at, u32 fragment) {
  const u32 index = fragment / pool.page_fragments;
  const u32 page = index == at.index ? at.page : __ldg(pool.pages + at.list + index);
  return pool.base + page * pool.page_bytes + (u64)(fragment - index * pool.page_fragments) * 512;
}

// Lays out the steps of the items from `begin` on, every eighth for the same warp. Returns how many the calling warp has.
DEVICE u32 lay_steps(const Decode& P, Shared& S, const Run& run, const Slice* t, const Items& items, u32 begin) {
  const u32 end = min(items.first[SLICES], begin + items.some());
  u32 mine = 0;
#pragma unroll
  for (int s = 0; s < SLICES; s++) {
    // Of the first n items of this layout, those of warp w.
    auto of = [](u32 w, u32 n) { return (n + WARPS - 1 - w) / WARPS; };
    auto inside = [&](int s) { return min(max(items.first[s], begin), end) - begin; };
    const u32 from = inside(s), to = inside(s + 1), w = (from + threadIdx.x) % WARPS;
    const u32 full = full_tiles(t[s].rank), outputs = P.outputs[s], units = P.unit_end[s] - (s ? P.unit_end[s - 1] : 0);
    mine += items.tiles[s] * (of(threadIdx.x >> 5, to) - of(threadIdx.x >> 5, from));
    u32 before = 0;      // steps of warp w for the slices before
#pragma unroll
    for (int k = 0; k < s; k++) before += items.tiles[k] * (of(w, inside(k + 1)) - of(w, inside(k)));
#pragma unroll 1
    for (u32 i = from + threadIdx.x; i < to; i += WARPS * 32) {
      const u32 item = i + begin - items.first[s];
      Step* step = S.steps + (before + items.tiles[s] * (i / WARPS - of(w, from))) * WARPS + w;
      if (items.paired >> s & 1) {
        const u32 last_unit = run.from + run.count - (s ? P.unit_end[s - 1] : 0);      // behind the run
        const u32 unit = max((items.from[s] / 2 + item) * 2, items.from[s]), both = unit % 2 == 0 && unit + 1 < min(units, last_unit);
        const u32 left = min(outputs - (unit + both) * 64, 64u) / 8;
        *step = Step{place_of(P.pool, t[s].b, t[s].b.fragment + unit * 2), P.column[s] + unit * 64, (both ? PAIR : HALF) | LAST | left << EIGHTHS | t[s].column << TILE};
      } else {
        const u32 unit = items.from[s] + item, left = min(outputs - unit * 64, 64u) / 8;
#pragma unroll 1
        for (u32 k = 0; k < items.tiles[s]; k++) {
          const u32 fragment = k < full ? (unit * full + k) * 4 : units * full * 4 + unit * 2;
          const u32 what = (k < full ? FULL : HALF) | (k + 1 == items.tiles[s] ? LAST : 0) | left << EIGHTHS | (t[s].column + k) << TILE;
          step[k * WARPS] = Step{place_of(P.pool, t[s].b, t[s].b.fragment + fragment), P.column[s] + unit * 64, what};
        }
      }
    }
  }
  return mine;
}

// Brings the i-th step of the warp on its way.
DEVICE void fetch_step(const Shared& S, char* ring, u32 i, u32 count) {
  if (i < count) {
    const Step& step = S.steps[i * WARPS + (threadIdx.x >> 5)];
    const char* p = step.weights + (threadIdx.x & 31) * 16;
    char* to = ring + i % DEPTH * STEP_BYTES;
    copy_async(to, p);
    copy_async(to + 512, p + 512);
    if ((step.what & KIND) != HALF) {
      copy_async(to + 1024, p + 1024);
      copy_async(to + 1536, p + 1536);
    }
  }
  commit_copies();
}

DEVICE void begin_ring(const Shared& S, u32 count) {
#pragma unroll 1
  for (u32 i = 0; i < DEPTH; i++) fetch_step(S, own_ring(), i, count);
}

// Where a lane's outputs of two rows go: the eighth p(g) of 64.
struct Target {
  int row[2];      // below zero: none

  DEVICE void start(const int* rows) {
    const int q = threadIdx.x & 3;
    row[0] = rows[2 * q];
    row[1] = rows[2 * q + 1];
  }
  // 64 outputs from `column` on, of which the first `eighths` eighths are.
  template <class T> DEVICE void put(const Decode& P, u32 column, u32 eighths, const float (&c)[4][4]) const {
    const u32 g = (threadIdx.x & 31) >> 2, p = (g & 1) * 4 + (g >> 1);
    if (p >= eighths) return;
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (row[j] >= 0) {
        u16* y = P.y + (u64)(u32)row[j] * P.stride_y + (column + p * 8);
        const uint4 d = make_uint4(T::pack(c[0][j], c[0][2 + j]), T::pack(c[1][j], c[1][2 + j]), T::pack(c[2][j], c[2][2 + j]), T::pack(c[3][j], c[3][2 + j]));
        if (P.store) *(uint4*)y = d;
        else add_to<T>(y, d);
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

// c += a step, twin = its second half where it is a pair. ONE: every step is a full tile, and the last of its outputs.
template <class T, bool ONE> DEVICE void multiply_step(float (&c)[4][4], float (&twin)[4][4], const uint4 (&w)[4], const u32* v, u32 what) {
  if (ONE) clear(c);
  if (ONE || (what & KIND) == FULL) multiply_full<T>(c, w, v[0], v[4]);
  else multiply_half<T>(c, w[0], w[1], v[0]);
  if (!ONE && (what & KIND) == PAIR) {
    clear(twin);
    multiply_half<T>(twin, w[2], w[3], v[0]);
  }
}
// Into y what is whole.
template <class T, bool ONE> DEVICE void put_step(const Decode& P, const Target& target, float (&c)[4][4], const float (&twin)[4][4], u32 column, u32 what) {
  if (!ONE && !(what & LAST)) return;
  const u32 eighths = what >> EIGHTHS & 15;
  target.put<T>(P, column, !ONE && (what & KIND) == PAIR ? 8 : eighths, c);
  if (ONE) return;
  clear(c);
  if ((what & KIND) == PAIR) target.put<T>(P, column + 64, eighths, twin);
}

DEVICE const u32* lane_operand(const Shared& S) { return S.v + ((threadIdx.x & 31) >> 2) * 8 + (threadIdx.x & 3); }

template <class T, bool ONE> DEVICE void expand(const Decode& P, const Shared& S, const Target& target, u32 count) {
  const u32* lane_v = lane_operand(S);
  const Step* steps = S.steps + (threadIdx.x >> 5);
  char* const ring = own_ring();
  float c[4][4], twin[4][4];
  clear(c);
#pragma unroll 1
  for (u32 i = 0; i < count; i++) {
    const u32 column = steps[i * WARPS].column, what = steps[i * WARPS].what;
    wait_for_copies<DEPTH - 1>();
    const uint4* in = (const uint4*)(ring + i % DEPTH * STEP_BYTES);
    const uint4 w[4] = {in[0], in[32], in[64], in[96]};
    multiply_step<T, ONE>(c, twin, w, lane_v + (what >> TILE) * 64, what);
    // The step's place is free: what was there is in use.
    fetch_step(S, ring, i + DEPTH, count);
    put_step<T, ONE>(P, target, c, twin, column, what);
  }
}
