// The scan: a CTA to a slice of a row. It reads the slice once, and leaves in its `Part` what the finish makes the row's answer of.
// Everything is counted from the slice's own best token, so that no CTA waits for another.
#pragma once
#include "sample_slice.cuh"

struct ScanShared {
  float logits[SLICE];
  u32 bins[BINS];
  u64 scratch[THREADS / 32];
  float sums[THREADS / 32];
  u32 count;
};

// How many candidates a slice hands on, at most: what all slices hand on the finish can hold, and where so many tokens are asked
// for, no more than those can come from one slice.
DEVICE u32 candidates_most(const Sample& P, const Ask& ask) {
  const u32 wanted = ask.leaders ? ask.leaders : ask.top_k, room = min(LIST, HELD / P.slices);
  return wanted ? min(min(wanted, LIST) + 64, room) : room;
}

// Hands on the slice's best tokens, as many as fit, and says what is the best of those left. `own`: the best of the thread's tokens.
DEVICE void collect_slice(const Sample& P, ScanShared& S, const Ask& ask, u64 best, float own, Part& part, Candidate* out, u32 from) {
  // The least of the threads' own best: no less than one token to a thread is not below it, and no more have to be looked at.
  const float top = logit_of(best), least = of_ordered(~(u32)block_max(own > OUT ? ~ordered(own) : 0, S.scratch));
  // Bins divide what lies between, so that they are as fine as the slice is flat.
  const float scale = top > least ? (BINS - 1) / (top - least) : 0.f;
  auto bin_of = [&](float v) { return (u32)fminf((top - v) * scale, BINS - 1.f); };
  auto counts = [&](float v) { return v >= least; };
  for (u32 i = threadIdx.x; i < BINS; i += THREADS) S.bins[i] = 0;
  __syncthreads();
#pragma unroll 4
  for (u32 i = threadIdx.x; i < SLICE; i += THREADS)
    if (counts(S.logits[i])) atomicAdd(&S.bins[bin_of(S.logits[i])], 1);
  __syncthreads();
  // The bins that together are not too many: a thread to a bin.
  static_assert(BINS == THREADS, "a thread to a bin");
  const u32 here = S.bins[threadIdx.x];
  if (threadIdx.x == 0) S.count = 0;
  const u32 floor = __syncthreads_count(block_before(here, S.scratch) + here <= candidates_most(P, ask));
  Best left{OUT, 0};
#pragma unroll 4
  for (u32 i = threadIdx.x; i < SLICE; i += THREADS) {
    const float v = S.logits[i];
    if (counts(v) && bin_of(v) < floor) out[atomicAdd(&S.count, 1)] = Candidate{v, from + i};
    else left.take(v, from + i);
  }
  const u64 best_left = block_max(left.key(), S.scratch);
  if (threadIdx.x == 0) {
    part.left = best_left;
    part.count = S.count;
  }
}

template <class L> DEVICE void scan(const Sample& P) {
  __shared__ __align__(16) ScanShared S;
  let_next_start();
  wait_for_previous();
  const u32 row = blockIdx.x / P.slices, slice = blockIdx.x % P.slices, from = slice * SLICE, tokens = min(P.vocabulary - from, SLICE);
  const Ask ask = P.asks[row];
  Best own = load_slice<L, THREADS>(P, S.logits, row, from, tokens);
  if (P.soft_cap > 0.f) own = cap_slice<THREADS>(P, S.logits, from);
  Part& part = P.parts[row * PARTS + slice];
  u64 best = block_max(own.key(), S.scratch);
  const float raw_best = best ? logit_of(best) : OUT;
  float raw_sum = 0.f;
  if ((ask.logprob || ask.leaders) && best) {
#pragma unroll 4
    for (u32 i = threadIdx.x; i < SLICE; i += THREADS) raw_sum += __expf(S.logits[i] - raw_best);
    raw_sum = block_reduce(raw_sum, S.sums, 0.f, [](float v) { return warp_sum(v); });
  }
  if ((ask.edits || ask.mask != NONE) && !ask.leaders) {
    own = change_slice<THREADS>(P, S.logits, ask, from, tokens);
    best = block_max(own.key(), S.scratch);
  }
  if (threadIdx.x == 0) part = Part{best, 0, 0, raw_best, raw_sum, 0, {}};
  if (best == 0 || (ask.inverse_temperature == 0.f && !ask.leaders)) return;
  if (ask.weighs(P.vocabulary)) {
    u64 weight = 0;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < SLICE; i += THREADS) weight += weight_of(depth(logit_of(best), S.logits[i], ask.inverse_temperature));
    weight = block_sum(weight, S.scratch);
    if (threadIdx.x == 0) part.weight = weight;
  }
  if (ask.cuts()) collect_slice(P, S, ask, best, own.logit, part, P.candidates + ((u64)row * PARTS + slice) * LIST, from);
}
