// y[row, :] += scale * (x[row, :] A) B for segments of 1..8 rows, each with its own adapter and rank.
//
// One launch serves the projections that share x (q,k,v; gate,up). A CTA takes runs from its block of the plan: first
// shrink runs (a segment's K range), then expand runs (a segment's range of 64-output units). Weights stream into
// a ring of each warp (`lora_decode_*`), or into registers (`lora_decode_registers_*`, which needs no dynamic shared memory), and are the
// 16-row operand of the product; rows are its 8 columns.
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
#include "lora_exchange.cuh"
#include "lora_registers.cuh"

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

template <class T, bool REGISTERS, int N, int H>
DEVICE void shrink_some(const Decode& P, Shared& S, const Bundle& b, bool& waited) {
  if (REGISTERS) shrink_in_registers<T, N, H>(P, S, S.runs[b.run], S.slices[b.run], S.rows[b.run], b.first, waited);
  else shrink<T, N, H>(P, S, S.runs[b.run], S.slices[b.run], S.rows[b.run], b.first, waited);
}
template <class T, bool REGISTERS> DEVICE void shrink_bundle(const Decode& P, Shared& S, const Bundle& b, bool& waited) {
  if (b.half) {
    if (b.count == 1) shrink_some<T, REGISTERS, 1, 1>(P, S, b, waited);
    else if (b.count == 2) shrink_some<T, REGISTERS, 2, 1>(P, S, b, waited);
    else if (BUNDLE > 2) shrink_some<T, REGISTERS, 3, 1>(P, S, b, waited);
  } else {
    if (b.count == 1) shrink_some<T, REGISTERS, 1, 2>(P, S, b, waited);
    else if (b.count == 2) shrink_some<T, REGISTERS, 2, 2>(P, S, b, waited);
    else if (BUNDLE > 2) shrink_some<T, REGISTERS, 3, 2>(P, S, b, waited);
  }
}

// Whether the launch that had this part of the exchange before is complete, so that nobody reads it any more.
DEVICE bool part_is_free(const Decode& P, u32 tag) { return (int)(tag - *(volatile u32*)(P.step + 1)) < PARTS; }

template <class T, bool REGISTERS> DEVICE void decode(const Decode& P) {
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
      shrink_bundle<T, REGISTERS>(P, S, pending, waited);
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
  Coming coming;
#pragma unroll 1
  for (u32 r = shrinks, item = 0; r < runs;) {
    const Run& run = S.runs[r];
    const Slice* t = S.slices[r];
    Items items;
    items.count(P, run, t);
    const u32 steps = lay_steps(P, S, run, t, items, item), all = items.first[SLICES], next = item + items.some();
    __syncthreads();
    if (REGISTERS) coming.begin(S, steps);
    else begin_ring(S, steps);
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
    if (REGISTERS && items.one) expand_in_registers<T, true>(P, S, target, steps, coming);
    else if (REGISTERS) expand_in_registers<T, false>(P, S, target, steps, coming);
    else if (items.one) expand<T, true>(P, S, target, steps);
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

#define DECODE(NAME, T, REGISTERS) \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS_PER_SM) NAME(const __grid_constant__ Decode P) { decode<T, REGISTERS>(P); }
DECODE(lora_decode_bf16, Bf16, false)
DECODE(lora_decode_f16, F16, false)
DECODE(lora_decode_registers_bf16, Bf16, true)
DECODE(lora_decode_registers_f16, F16, true)
