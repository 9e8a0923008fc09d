// One token of each row's logits, by what the row asks for; or a row's best tokens and their log-probabilities.
//
//   soft cap  v = cap tanh(v / cap), of the whole call, before all else.
//   edit      a token that was seen: v > 0 ? v / repetition : v * repetition; one of the output: v - (presence + frequency n);
//             v + bias; a token whose mask bit is 0 is out, and so is what is not a number
//             or 3.4e38 and more below the best.
//   order     by logit, the lower id first where logits are equal. "First" below is by this order.
//   top-k     the first k. 0: all.
//   top-p     of what is left the fewest first tokens whose weights reach p of the sum of all; at least one.
//             weight = 2^31 e^-depth rounded down (`exact_weight`), depth = (best - v) / temperature: whole numbers, so that a sum has no
//             order. Where top-k leaves all, each 8,192 tokens are summed with depth from the best of them, and the sum is scaled by that
//             one's weight.
//   min-p     of what is left those with e^-depth >= min_p.
//   draw      where nothing is cut off: 8,192 tokens by the scaled sums of their weights, then one of them by its own; two numbers of 64
//             bits, Philox(counter {draw, 0, 2}, key seed). Else of what is left the greatest noise - depth, noise = -ln(-ln u), u of 32
//             bits: half (token & 7) of the 128 bits of Philox(counter {draw, token / 8, 0}, key seed) above that of counter {draw,
//             token / 8, 1} (Gumbel's trick). Either way with probability weight / sum.
//             What is random is of a row's seed and draw alone, so that its token does not depend on the batch.
//   greedy    (inverse_temperature 0) the first of the order.
//   log-probability   v - ln sum e^v over the logits as they came (capped), before any edit.
//
// `sample_scan` (sample_scan.cuh): a CTA takes a slice of 8,192 tokens of a row into shared memory. That is the one pass over the
// logits. It sums weights where they are asked for, and where there is a cut hands on its best tokens as candidates.
// `sample_finish`: a CTA to a row; a draw from one slice, or a cut through the candidates (sample_cut.cuh) and a draw from what is
// left. Where the candidates do not hold all that the cut keeps (a flat distribution), it goes over the row again: slower, with the
// same result.
// Limits: vocabulary at most 262,144; stride * element a multiple of 16 bytes; 32 leaders. Bound: bytes of the logits, once.
#include "sample_cut.cuh"
#include "sample_scan.cuh"

// The candidates that are better than all that slices have left, into shared memory; how many those are.
DEVICE u32 hold_candidates(const Sample& P, FinishShared& S, u32 row) {
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u64 left = warp_max(lane < P.slices ? S.parts[lane].left : 0);
  if (threadIdx.x == 0) {
    S.count = 0;
    S.left = left;
  }
  __syncthreads();
#pragma unroll 1
  for (u32 s = warp; s < P.slices; s += FINISH / 32) {
    const Candidate* in = P.candidates + ((u64)row * PARTS + s) * LIST;
    const u32 count = S.parts[s].count;
#pragma unroll 1
    for (u32 base = lane; base < (count + 31 & ~31u); base += 256) {
      Candidate c[8];
#pragma unroll
      for (int u = 0; u < 8; u++) c[u] = base + u * 32 < count ? in[base + u * 32] : Candidate{OUT, 0};
#pragma unroll
      for (int u = 0; u < 8; u++)
        if (c[u].logit > OUT && key_of(c[u].logit, c[u].token) > left) S.held[atomicAdd(&S.count, 1)] = c[u];
    }
  }
  __syncthreads();
  const u32 count = S.count;
  __syncthreads();
  return count;
}

// The last key that top-k and top-p keep. `weight`: of all tokens. `enough` becomes false where the list does not hold them all.
template <class L> DEVICE u64 cut_row(const Sample& P, FinishShared& S, Tokens<L>& tokens, float top, u64 weight, bool& enough) {
  const Ask& ask = tokens.ask;
  const u32 k = ask.leaders ? ask.leaders : ask.top_k;
  const float inverse = ask.leaders ? 1.f : ask.inverse_temperature;
  const bool complete = !tokens.listed || S.left == 0;
  u64 cut = 0;
  if (k > 0 && k < P.vocabulary) {
    narrow(S, tokens, top, inverse, k, false);
    cut = select(S, tokens, top, inverse, k, false);
    if (cut == 0 && !complete) enough = false;
    if (!enough) return 0;
    if (!ask.leaders && ask.top_p < 1.f) weight = weight_above(S, tokens, top, inverse, cut);
  } else if (ask.top_p >= 1.f) {
    // Only min-p cuts: what is left has to be below it.
    enough = complete || exact_exp(-depth(top, logit_of(S.left), inverse)) < 0.999f * ask.min_p;
    return 0;
  }
  if (ask.leaders || ask.top_p >= 1.f) return cut;
  const u64 target = max((u64)ceil((double)ask.top_p * (double)weight), (u64)1);
  narrow(S, tokens, top, inverse, target, true);
  const u64 second = select(S, tokens, top, inverse, target, true);
  if (second == 0 && !complete) enough = false;
  return second > cut ? second : cut;
}

// The best tokens in order: each of the kept counts how many are better.
template <class L> DEVICE void write_leaders(const Sample& P, FinishShared& S, const Tokens<L>& tokens, float top, u64 cut, float total) {
  if (threadIdx.x == 0) S.count = 0;
  __syncthreads();
  tokens.each([&](bool live, float logit, u32 token) {
    if (!live || !(depth(top, logit, 1.f) < DEPTH_MAX) || key_of(logit, token) < cut) return;
    const u32 at = atomicAdd(&S.count, 1);
    if (at < LEADERS) S.leaders[at] = key_of(logit, token);
  });
  __syncthreads();
  const u32 count = min(S.count, tokens.ask.leaders);
  Leader* out = P.leaders + (u64)tokens.row * P.leaders_stride;
  if (threadIdx.x < tokens.ask.leaders && threadIdx.x >= count) out[threadIdx.x] = Leader{NONE, OUT};
  if (threadIdx.x >= count) return;
  const u64 own = S.leaders[threadIdx.x];
  u32 better = 0;
  for (u32 i = 0; i < count; i++) better += S.leaders[i] > own;
  out[better] = Leader{token_of(own), logit_of(own) - total};
}

template <class L> DEVICE u64 draw_kept(FinishShared& S, const Tokens<L>& tokens, float top, u64 cut) {
  const Ask& ask = tokens.ask;
  u64 drawn = 0;
  float reach = -3.40282347e38f;
  tokens.each([&](bool live, float logit, u32 token) {
    const float d = depth(top, logit, ask.inverse_temperature);
    if (!live || !(d < DEPTH_MAX) || key_of(logit, token) < cut || !(exact_exp(-d) >= ask.min_p)) return;
    try_token(ask, d, token, half_of(random_of(ask, token, 0), token), reach, drawn);
  });
  return block_max(drawn, S.scratch);
}

// What all slices know together; every warp works it out for itself, a lane to a slice.
struct Whole {
  u64 best, weight;
  u64 share;            // of the lane's slice in the weight
  float log_total;      // ln sum e^v over the row as it came

  DEVICE Whole(const Sample& P, const FinishShared& S, const Ask& ask) {
    const u32 lane = threadIdx.x & 31;
    const Part part = lane < P.slices ? S.parts[lane] : Part{0, 0, 0, OUT, 0.f, 0, {}};
    best = warp_max(part.best);
    // Less than 2^44 times at most 2^31.
    const u64 scale = part.best ? weight_of(depth(logit_of(best), logit_of(part.best), ask.inverse_temperature)) : 0;
    share = __umul64hi(part.weight, scale) << 33 | part.weight * scale >> 31;
    weight = warp_sum(share);
    const float most = warp_max(part.raw_best), sum = part.raw_best > OUT ? part.raw_sum * expf(part.raw_best - most) : 0.f;
    log_total = most + logf(warp_sum(sum));
  }
};

// A token of all: a slice by its share of the weight, then one of its tokens by its own.
template <class L> DEVICE u32 draw_from_all(const Sample& P, FinishShared& S, const Ask& ask, u32 row, const Whole& whole) {
  const Philox random = random_of(ask, 0, 2);
  const u64 place = __umul64hi((u64)random.v[1] << 32 | random.v[0], whole.weight);
  u64 upto = whole.share;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const u64 other = __shfl_up_sync(ALL, upto, d);
    if ((threadIdx.x & 31) >= d) upto += other;
  }
  const u32 slice = __ffs(__ballot_sync(ALL, upto > place)) - 1, from = slice * SLICE, tokens = min(P.vocabulary - from, SLICE);
  load_slice<L, FINISH>(P, S.slice, row, from, tokens);
  if (P.soft_cap > 0.f) cap_slice<FINISH>(P, S.slice, from);
  if (ask.edits || ask.mask != NONE) change_slice<FINISH>(P, S.slice, ask, from, tokens);
  constexpr u32 EACH = SLICE / FINISH;
  const float top = logit_of(S.parts[slice].best);
  auto weight = [&](u32 k) { return weight_of(depth(top, S.slice[threadIdx.x * EACH + k], ask.inverse_temperature)); };
  u64 own = 0;
#pragma unroll 4
  for (u32 k = 0; k < EACH; k++) own += weight(k);
  const u64 in_slice = __umul64hi((u64)random.v[3] << 32 | random.v[2], S.parts[slice].weight);
  u64 before = block_before(own, S.scratch);
  if (before <= in_slice && in_slice < before + own)
    for (u32 k = 0; k < EACH; k++) {
      before += weight(k);
      if (in_slice >= before) continue;
      S.token = from + threadIdx.x * EACH + k;
      break;
    }
  __syncthreads();
  return S.token;
}

template <class L> DEVICE void finish(const Sample& P) {
  __shared__ __align__(16) FinishShared S;
  let_next_start();
  wait_for_previous();
  const u32 row = blockIdx.x;
  const Ask ask = P.asks[row];
  constexpr u32 WORDS = sizeof(Part) / 16;
  if (threadIdx.x < P.slices * WORDS) ((uint4*)S.parts)[threadIdx.x] = __ldcg((const uint4*)(P.parts + row * PARTS) + threadIdx.x);
  __syncthreads();
  const Whole whole(P, S, ask);
  u32 chosen = token_of(whole.best);
  if (whole.best && ask.cuts() && (ask.leaders || ask.inverse_temperature != 0.f)) {
    const float top = logit_of(whole.best);
    Tokens<L> tokens{P, S, ask, row, hold_candidates(P, S, row), true};
    u64 cut = 0;
#pragma unroll 1
    for (bool enough = false; !enough;) {
      enough = true;
      cut = cut_row(P, S, tokens, top, whole.weight, enough);
      if (!enough) tokens.take_row();
    }
    if (ask.leaders) write_leaders(P, S, tokens, top, cut, whole.log_total);
    else chosen = token_of(draw_kept(S, tokens, top, cut));
  } else if (whole.best && ask.inverse_temperature != 0.f) {
    chosen = draw_from_all<L>(P, S, ask, row, whole);
  }
  if (ask.leaders || threadIdx.x) return;
  P.tokens[row] = whole.best ? chosen : NONE;
  if (ask.logprob) P.logprobs[row] = whole.best ? raw_logit<L>(P, row, chosen) - whole.log_total : OUT;
}

#define SAMPLE(NAME, L)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(THREADS, 4) sample_scan_##NAME(const __grid_constant__ Sample P) { scan<L>(P); } \
  extern "C" __global__ void __launch_bounds__(FINISH, 1) sample_finish_##NAME(const __grid_constant__ Sample P) { finish<L>(P); }
SAMPLE(f32, F32)
SAMPLE(bf16, Half<Bf16>)
SAMPLE(f16, Half<F16>)
