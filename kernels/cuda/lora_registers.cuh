// The same shrink and expand with what is on its way in registers, not in a ring: less stands between a load and its product, which is
// what counts where a CTA has little. An SM holds less of it, which counts where a CTA has much.
#pragma once
#include "lora_expand.cuh"
#include "lora_shrink.cuh"

// As shrink() of lora_shrink.cuh. Registers of a bite are never moved, since a move would wait for its load: each of DEEP bites has its own
// copy of the loop's body.
template <class T, int N, int H>
DEVICE void shrink_in_registers(const Decode& P, Shared& S, const Run& run, const Slice* t, const int* rows, u32 first, bool& waited) {
  constexpr int U = 3 - H, DEEP = N == 1 ? 4 : 2;
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
  const u16* x_row = P.x + (u64)max(row, 0) * P.inputs + q * 8;
  const u32 x_end = row < 0 ? 0 : min(end, (P.inputs + 31 - q * 8) / 32);      // blocks of which this lane has inputs
  // Zeroed, or the compiler keeps what was never loaded alive through the whole kernel.
  uint4 a[DEEP][N][2] = {}, x[DEEP][U] = {};
  auto fetch = [&](uint4 (&a)[N][2], u32 block) {
    if (block >= end) return;
#pragma unroll
    for (int m = 0; m < N; m++) {
      const char* p = walk[m].at(P.pool, list, block * H, lane);
      a[m][0] = load_once(p);
      if (H == 2) a[m][1] = load_once(p + 512);
      else if (block + 1 < end) a[m][1] = load_once(walk[m].at(P.pool, list, block + 1, lane));
    }
  };
  auto fetch_x = [&](uint4 (&x)[U], u32 block) {
#pragma unroll
    for (int i = 0; i < U; i++) x[i] = block + i < x_end ? __ldcg((const uint4*)(x_row + (block + i) * 32)) : make_uint4(0, 0, 0, 0);
  };
  u32 block = run.from + warp * U;
#pragma unroll
  for (int d = 0; d < DEEP; d++) fetch(a[d], block + d * step);
  if (P.early < X_WHOLE && !waited) {
    wait_for_previous();
    waited = true;
  }
#pragma unroll
  for (int d = 0; d < DEEP; d++) fetch_x(x[d], block + d * step);
  float acc[N][4];
#pragma unroll
  for (int m = 0; m < N; m++) acc[m][0] = acc[m][1] = acc[m][2] = acc[m][3] = 0.f;
#pragma unroll 1
  while (block < end) {
#pragma unroll
    for (int d = 0; d < DEEP; d++) {
      if (block >= end) break;
#pragma unroll
      for (int m = 0; m < N; m++) multiply_bite<T, H>(acc[m], a[d][m][0], a[d][m][1], x[d][0], x[d][U - 1], block + 1 < end);
      fetch(a[d], block + DEEP * step);
      fetch_x(x[d], block + DEEP * step);
      block += step;
    }
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < N; m++) S.partial[m][warp][lane] = make_float4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
}

// Steps of an expand on their way.
struct Coming {
  static constexpr int DEEP = 3;
  uint4 w[DEEP][4];

  static DEVICE void fetch(uint4 (&w)[4], const Shared& S, u32 i, u32 count) {
    if (i >= count) return;
    const Step& step = S.steps[i * WARPS + (threadIdx.x >> 5)];
    const char* p = step.weights + (threadIdx.x & 31) * 16;
    w[0] = load_once(p);
    w[1] = load_once(p + 512);
    if ((step.what & KIND) == HALF) return;
    w[2] = load_once(p + 1024);
    w[3] = load_once(p + 1536);
  }
  DEVICE void begin(const Shared& S, u32 count) {
#pragma unroll
    for (int d = 0; d < DEEP; d++) {
#pragma unroll
      for (int m = 0; m < 4; m++) w[d][m] = make_uint4(0, 0, 0, 0);
      fetch(w[d], S, d, count);
    }
  }
};

template <class T, bool ONE> DEVICE void expand_in_registers(const Decode& P, const Shared& S, const Target& target, u32 count, Coming& coming) {
  const u32* lane_v = lane_operand(S);
  const Step* steps = S.steps + (threadIdx.x >> 5);
  float c[4][4], twin[4][4];
  clear(c);
#pragma unroll 1
  for (u32 i = 0; i < count; i += Coming::DEEP) {
#pragma unroll
    for (int d = 0; d < Coming::DEEP; d++) {
      if (i + d >= count) break;
      const u32 column = steps[(i + d) * WARPS].column, what = steps[(i + d) * WARPS].what;
      multiply_step<T, ONE>(c, twin, coming.w[d], lane_v + (what >> TILE) * 64, what);
      Coming::fetch(coming.w[d], S, i + d + Coming::DEEP, count);
      put_step<T, ONE>(P, target, c, twin, column, what);
    }
  }
}
