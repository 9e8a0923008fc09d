// One token of each row's logits, by what the row asks for; or a row's best tokens and their log-probabilities.
//
//   edit      a token that was seen: v > 0 ? v / repetition : v * repetition; one of the output: v - (presence + frequency n);
//             v + bias; a token whose mask bit is 0 is out, and so is what is not a number
//             or 3.4e38 and more below the best.
//   order     by logit, the lower id first where logits are equal. "First" below is by this order.
//   top-k     the first k. 0: all.
//   top-p     of what is left the fewest first tokens whose weights reach p of the sum of all; at least one.
//             weight = round(2^31 e^-depth), depth = (best - v) / temperature: whole numbers, so that a sum has no order.
//   min-p     of what is left those with e^-depth >= min_p.
//   draw      of what is left the greatest noise - depth, noise = -ln(-ln u), u of 32 bits: half (token & 7) of the 128 bits of
//             Philox(counter {draw, token / 8, 0}, key seed) above that of counter {draw, token / 8, 1}. So a token is drawn
//             with probability weight / sum (Gumbel's trick).
//             A row's noise is of its seed, draw and token alone, so that its token does not depend on the batch.
//   greedy    (inverse_temperature 0) the first of the order.
//   log-probability   v - ln sum e^v over the logits as they came, before any edit.
//
// `sample_scan`: a CTA takes a slice of 8,192 tokens of a row into shared memory. That is the one pass over the logits. CTAs of a
// row tell each other their best through `parts`, then draw (where nothing is cut off), or hand on candidates: all tokens of the bins below a
// floor that lets no more through than the finish can hold. Tickets give CTAs their work in the order in which they start, so that
// those of a row that wait for each other are all running, or next to run.
// `sample_finish`: a CTA to a row; cuts candidates by radix selection over {logit, id}, and draws. Where the candidates do
// not hold all that the cut keeps (a flat distribution), it goes over the row again: slower, with the same result.
// Limits: vocabulary at most 262,144; stride * element a multiple of 16 bytes; 32 leaders. Bound: bytes of the logits, once.
#include "sample.cuh"

constexpr u32 FINISH = 512, DIGITS = 1024, LEADERS = 32;

struct ScanShared {
  float logits[SLICE];
  u32 bins[BINS];
  u64 scratch[THREADS / 32];
  float sums[THREADS / 32];
  u32 ticket, floor, count;
};

// Eight words of 16 bytes to a thread of f32, four of 16 bits: all loads are in flight before the first is used.
template <class L> DEVICE void load_slice(const Sample& P, ScanShared& S, u32 row, u32 from, u32 tokens);
template <> DEVICE void load_slice<F32>(const Sample& P, ScanShared& S, u32 row, u32 from, u32 tokens) {
  const float* in = (const float*)P.logits + (u64)row * P.stride + from;
  uint4 v[8];
#pragma unroll
  for (int u = 0; u < 8; u++) {
    const u32 at = (u * THREADS + threadIdx.x) * 4;
    if (at < tokens) v[u] = load_once(in + at);
  }
#pragma unroll
  for (int u = 0; u < 8; u++) {
    const u32 at = (u * THREADS + threadIdx.x) * 4;
    const float* in = (const float*)&v[u];
    float out[4];
#pragma unroll
    for (int k = 0; k < 4; k++) out[k] = at + k < tokens ? finite(in[k]) : OUT;
    *(float4*)&S.logits[at] = *(const float4*)out;
  }
}
template <class T> DEVICE void load_halves(const Sample& P, ScanShared& S, u32 row, u32 from, u32 tokens) {
  const u16* in = (const u16*)P.logits + (u64)row * P.stride + from;
  uint4 v[4];
#pragma unroll
  for (int u = 0; u < 4; u++) {
    const u32 at = (u * THREADS + threadIdx.x) * 8;
    if (at < tokens) v[u] = load_once(in + at);
  }
#pragma unroll
  for (int u = 0; u < 4; u++) {
    const u32 at = (u * THREADS + threadIdx.x) * 8;
    const u32* words = (const u32*)&v[u];
    float out[8];
#pragma unroll
    for (int k = 0; k < 8; k++) out[k] = at + k < tokens ? finite(k & 1 ? T::high(words[k / 2]) : T::low(words[k / 2])) : OUT;
    *(float4*)&S.logits[at] = *(const float4*)out;
    *(float4*)&S.logits[at + 4] = *(const float4*)(out + 4);
  }
}
template <> DEVICE void load_slice<Half<Bf16>>(const Sample& P, ScanShared& S, u32 row, u32 from, u32 tokens) { load_halves<Bf16>(P, S, row, from, tokens); }
template <> DEVICE void load_slice<Half<F16>>(const Sample& P, ScanShared& S, u32 row, u32 from, u32 tokens) { load_halves<F16>(P, S, row, from, tokens); }

// The best key of the slice, and the best logit of the thread's own 32 tokens. They ascend, so that an equal one never replaces.
DEVICE u64 slice_best(ScanShared& S, u32 from, float& best) {
  best = OUT;
  u32 token = 0;
#pragma unroll 4
  for (u32 i = threadIdx.x; i < SLICE; i += THREADS)
    if (S.logits[i] > best) {
      best = S.logits[i];
      token = from + i;
    }
  return block_max(best > OUT ? key_of(best, token) : 0, S.scratch);
}

// Penalties, biases and the mask, in shared memory.
DEVICE void change_slice(const Sample& P, ScanShared& S, const Ask& ask, u32 from, u32 tokens) {
  for (u32 i = threadIdx.x; i < ask.edits; i += THREADS) {
    const Edit e = P.edits[ask.edit + i];
    if (e.token >= from && e.token < from + tokens) S.logits[e.token - from] = edited(ask, e, S.logits[e.token - from]);
  }
  __syncthreads();
  if (ask.mask != NONE) {
    const u32* words = P.masks + (u64)ask.mask * P.mask_words + from / 32;
    for (u32 i = threadIdx.x; i < tokens; i += THREADS)
      if (!(words[i / 32] >> (i & 31) & 1)) S.logits[i] = OUT;
  }
  __syncthreads();
}

// Waits until all CTAs of the row have left their best in `parts`, and gives the best of them.
DEVICE u64 row_best(const Sample& P, ScanShared& S, u32 row) {
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(P.state + 1 + row, 1);
    while (*(volatile u32*)(P.state + 1 + row) < P.slices) {}
    __threadfence();
  }
  __syncthreads();
  const u32 lane = threadIdx.x & 31;
  return warp_max(lane < P.slices ? *(volatile u64*)&P.parts[row * PARTS + lane].best : 0);
}

DEVICE u64 draw_slice(ScanShared& S, const Ask& ask, u64 best, u32 from) {
  const float top = logit_of(best);
  const u32 first = token_of(best);
  u64 drawn = 0;
  // The best token's own noise is what another has to reach.
  float reach = -3.40282347e38f;
  try_token(ask, 0.f, first, half_of(noise_of(ask, first, 0), first), reach, drawn);
  drawn = 0;
#pragma unroll 1
  for (u32 i = threadIdx.x * 8; i < SLICE; i += THREADS * 8) {
    const float4 a = *(const float4*)&S.logits[i], b = *(const float4*)&S.logits[i + 4];
    const float logits[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    const float most = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
    if (!(gumbel_bound(0) - depth(top, most, ask.inverse_temperature) >= reach)) continue;
    const Philox noise = noise_of(ask, from + i, 0);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const u32 high = k & 1 ? noise.v[k / 2] >> 16 : noise.v[k / 2] & 0xffff;
      try_token(ask, depth(top, logits[k], ask.inverse_temperature), from + i + k, high, reach, drawn);
    }
  }
  return block_max(drawn, S.scratch);
}

// The slice's weight where top-p wants it, and its candidates. `own`: the best logit of the thread's tokens.
DEVICE void collect_slice(const Sample& P, ScanShared& S, const Ask& ask, u64 best, float own, Part& part, Candidate* out, u32 from) {
  const float top = logit_of(best), inverse = ask.leaders ? 1.f : ask.inverse_temperature;
  // The least of the threads' own: at least THREADS tokens are not below it, and candidates need not be either.
  const float least = of_ordered(~(u32)block_max(~ordered(own), S.scratch));
  const bool weighs = !ask.leaders && (ask.top_k == 0 || ask.top_k >= P.vocabulary) && ask.top_p < 1.f;
  for (u32 i = threadIdx.x; i < BINS; i += THREADS) S.bins[i] = 0;
  __syncthreads();
  u64 weight = 0;
  u32 last = 0;
#pragma unroll 4
  for (u32 i = threadIdx.x; i < SLICE; i += THREADS) {
    const float v = S.logits[i], d = depth(top, v, inverse);
    if (weighs) weight += weight_of(d);
    const bool counts = v >= least && d < DEPTH_MAX;
    if (!__any_sync(ALL, counts)) continue;
    const u32 bin = counts ? bin_of(top, v) : BINS, same = same_bin(bin);
    last += bin == BINS - 1;
    if (bin < BINS - 1) {
      if (!(same >> (threadIdx.x & 31) & 1)) atomicAdd(&S.bins[bin], 1);
      else if ((threadIdx.x & 31) == 0) atomicAdd(&S.bins[bin], __popc(same));
    }
  }
  if (last) atomicAdd(&S.bins[BINS - 1], last);
  weight = block_sum(weight, S.scratch);
  if (threadIdx.x < 32) {
    // The finish can hold what all slices together hand on; twice what is asked for is nearly always enough.
    const u32 wanted = ask.leaders ? ask.leaders : ask.top_k, room = min(LIST, HELD / P.slices), most = wanted ? min(2 * min(wanted, LIST) + 32, room) : room;
    u32 floor = 0, before = 0;
    for (u32 base = 0; base < BINS; base += 32) {
      u32 sum = S.bins[base + threadIdx.x];
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const u32 other = __shfl_up_sync(ALL, sum, d);
        if (threadIdx.x >= d) sum += other;
      }
      floor += __popc(__ballot_sync(ALL, before + sum <= most));
      before += __shfl_sync(ALL, sum, 31);
    }
    if (threadIdx.x == 0) {
      // Nothing was counted below the least.
      S.floor = part.floor = least > OUT ? min(floor, bin_of(top, least)) : floor;
      S.count = 0;
    }
  }
  __syncthreads();
#pragma unroll 4
  for (u32 i = threadIdx.x; i < SLICE; i += THREADS) {
    const float d = depth(top, S.logits[i], inverse);
    if (!(d < DEPTH_MAX) || bin_of(top, S.logits[i]) >= S.floor) continue;
    out[atomicAdd(&S.count, 1)] = Candidate{S.logits[i], from + i};
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    part.weight = weight;
    part.count = S.count;
  }
}

template <class L> DEVICE void scan(const Sample& P) {
  __shared__ __align__(16) ScanShared S;
  wait_for_previous();
  if (threadIdx.x == 0) S.ticket = atomicAdd(P.state, 1);
  __syncthreads();
  let_next_start();
  const u32 row = S.ticket / P.slices, slice = S.ticket % P.slices, from = slice * SLICE, tokens = min(P.vocabulary - from, SLICE);
  const Ask ask = P.asks[row];
  Part& part = P.parts[row * PARTS + slice];
  load_slice<L>(P, S, row, from, tokens);
  __syncthreads();
  float own;
  u64 best = slice_best(S, from, own);
  if (ask.logprob || ask.leaders) {
    const float top = logit_of(best);
    float sum = 0.f;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < SLICE; i += THREADS) sum += best ? __expf(S.logits[i] - top) : 0.f;
    sum = block_reduce(sum, S.sums, 0.f, [](float v) { return warp_sum(v); });
    if (threadIdx.x == 0) {
      part.raw_best = best ? top : OUT;
      part.raw_sum = sum;
    }
  }
  if ((ask.edits || ask.mask != NONE) && !ask.leaders) {
    change_slice(P, S, ask, from, tokens);
    best = slice_best(S, from, own);
  }
  if (threadIdx.x == 0) part.best = best;
  if (ask.inverse_temperature == 0.f && !ask.leaders) return;
  best = row_best(P, S, row);
  if (best == 0) return;
  if (!ask.leaders && ask.top_k == 0 && ask.top_p >= 1.f && ask.min_p <= 0.f) {
    const u64 drawn = draw_slice(S, ask, best, from);
    if (threadIdx.x == 0) part.drawn = drawn;
  } else {
    collect_slice(P, S, ask, best, own, part, P.candidates + ((u64)row * PARTS + slice) * LIST, from);
  }
}

struct FinishShared {
  union {
    Candidate held[HELD];              // the candidates, where they fit and hold all that the cut keeps
    u32 changed[(1 << ID_BITS) / 32];  // else the tokens that have an edit
  };
  u32 counts[DIGITS], low[DIGITS], high[DIGITS];      // of a digit: tokens, and their weight in two words
  u64 scratch[FINISH / 32], above[FINISH / 32];
  u32 count, digit, alone, floor;
  u64 before, leaders[LEADERS];
};

// A row's tokens, from the list or from the logits again.
template <class L> struct Tokens {
  const Sample& P;
  FinishShared& S;
  const Ask& ask;
  u32 row, count;
  bool listed;

  // f(live, logit, token) by all threads together; not live: nothing.
  template <class F> DEVICE void each(F f) const {
    if (listed) {
#pragma unroll 1
      for (u32 i = threadIdx.x; i < (count + FINISH - 1) / FINISH * FINISH; i += FINISH) {
        const Candidate c = i < count ? S.held[i] : Candidate{OUT, 0};
        f(i < count, c.logit, c.token);
      }
      return;
    }
#pragma unroll 1
    for (u32 base = 0; base < P.vocabulary; base += FINISH * 8) {
      float v[8];
#pragma unroll
      for (int u = 0; u < 8; u++) {
        const u32 token = base + u * FINISH + threadIdx.x;
        v[u] = token < P.vocabulary && !(S.changed[token / 32] >> (token & 31) & 1) && (ask.leaders || allowed(P, ask, token)) ? raw_logit<L>(P, row, token) : OUT;
      }
#pragma unroll
      for (int u = 0; u < 8; u++) f(v[u] > OUT, v[u], base + u * FINISH + threadIdx.x);
    }
    const u32 edits = ask.leaders ? 0 : ask.edits;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < (edits + FINISH - 1) / FINISH * FINISH; i += FINISH) {
      const Edit e = i < edits ? P.edits[ask.edit + i] : Edit{NONE, 0, 0.f, 0};
      const bool live = e.token < P.vocabulary && allowed(P, ask, e.token);
      const float v = live ? edited(ask, e, raw_logit<L>(P, row, e.token)) : OUT;
      f(v > OUT, v, e.token);
    }
  }
};

// The key of the last token, in order, that is wanted: the first `target` tokens, or the fewest first ones whose weights reach it.
// Digit by digit from the top: how much is above, and in which digit the target is reached.
template <class L> DEVICE u64 select(FinishShared& S, const Tokens<L>& tokens, float top, float inverse, u64 target, bool by_weight) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u64 prefix = 0, before = 0;
#pragma unroll 1
  for (int shift = 40; shift >= 0; shift -= 10) {
    for (u32 i = threadIdx.x; i < DIGITS; i += FINISH) S.counts[i] = S.low[i] = S.high[i] = 0;
    __syncthreads();
    tokens.each([&](bool live, float logit, u32 token) {
      const u64 key = key_of(logit, token);
      const float d = depth(top, logit, inverse);
      live = live && d < DEPTH_MAX && key >> shift >> 10 == prefix;
      if (!__any_sync(ALL, live)) return;
      const u32 digit = live ? key >> shift & (DIGITS - 1) : DIGITS, same = same_bin(digit);
      const u32 weight = live && by_weight ? weight_of(d) : 0;
      const bool crowd = __popc(same) > 4, together = crowd && (same >> lane & 1);
      u64 sum = weight;
      if (by_weight && crowd) {
        const u32 shared = together ? weight : 0;
        const u64 all = (u64)__reduce_add_sync(ALL, shared >> 16) * 65536 + __reduce_add_sync(ALL, shared & 0xffff);
        if (lane == 0) sum = all;
      }
      if (!live || (together && lane != 0)) return;
      atomicAdd(&S.counts[digit], together ? __popc(same) : 1);
      if (sum == 0) return;
      // Sixty-four bits as two words: who makes the low one wrap carries.
      const u32 old = atomicAdd(&S.low[digit], (u32)sum), carry = old + (u32)sum < old;
      if ((u32)(sum >> 32) + carry) atomicAdd(&S.high[digit], (u32)(sum >> 32) + carry);
    });
    __syncthreads();
    // Thread t has the digits 1023 - 2t and 1022 - 2t: what is above them is with the threads before.
    const u32 first = DIGITS - 1 - 2 * threadIdx.x;
    u64 own[2], sum = 0;
#pragma unroll
    for (int k = 0; k < 2; k++) {
      own[k] = by_weight ? (u64)S.high[first - k] << 32 | S.low[first - k] : S.counts[first - k];
      sum += own[k];
    }
    u64 upto = sum;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const u64 other = __shfl_up_sync(ALL, upto, d);
      if (lane >= d) upto += other;
    }
    if (lane == 31) S.above[warp] = upto;
    if (threadIdx.x == 0) S.digit = NONE;
    __syncthreads();
    u64 above = before + upto - sum;
    for (u32 w = 0; w < warp; w++) above += S.above[w];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      if (above < target && target <= above + own[k]) {
        S.digit = first - k;
        S.alone = S.counts[first - k] == 1;
        S.before = above;
      }
      above += own[k];
    }
    __syncthreads();
    if (S.digit == NONE) return 0;      // there is less than the target: all
    prefix = prefix << 10 | S.digit;
    before = S.before;
    if (S.alone) return prefix << shift;
  }
  return prefix;
}

// What a row's tokens are counted and weighed for, all those of keys from `cut` up.
struct Sum {
  u64 count, weight;
};
template <class L> DEVICE Sum sum_above(FinishShared& S, const Tokens<L>& tokens, float top, float inverse, u64 cut) {
  u64 count = 0, weight = 0;
  tokens.each([&](bool live, float logit, u32 token) {
    const float d = depth(top, logit, inverse);
    if (!live || !(d < DEPTH_MAX) || key_of(logit, token) < cut) return;
    count++;
    weight += weight_of(d);
  });
  return Sum{block_sum(count, S.scratch), block_sum(weight, S.scratch)};
}

// The last key that top-k and top-p keep. `enough` becomes false where the list does not hold them all.
template <class L> DEVICE u64 cut_row(const Sample& P, FinishShared& S, const Tokens<L>& tokens, float top, u64 weight, bool& enough) {
  const Ask& ask = tokens.ask;
  const u32 k = ask.leaders ? ask.leaders : ask.top_k;
  const float inverse = ask.leaders ? 1.f : ask.inverse_temperature;
  const bool complete = !tokens.listed || S.floor == BINS;
  u64 cut = 0;
  if (k > 0 && k < P.vocabulary) {
    cut = select(S, tokens, top, inverse, k, false);
    if (cut == 0 && !complete) enough = false;
    if (!enough) return 0;
    if (!ask.leaders && ask.top_p < 1.f) weight = sum_above(S, tokens, top, inverse, cut).weight;
  } else if (ask.top_p >= 1.f) {
    // Only min-p cuts: the floor has to be below it.
    enough = complete || exact_exp(-bin_start(S.floor) * inverse) < 0.999f * ask.min_p;
    return 0;
  }
  if (ask.leaders || ask.top_p >= 1.f) return cut;
  const u64 target = max((u64)ceil((double)ask.top_p * (double)weight), (u64)1);
  const u64 second = select(S, tokens, top, inverse, target, true);
  if (second == 0 && !complete) enough = false;
  return second > cut ? second : cut;
}

// ln sum e^v over the row as it came, from the slices' shares, in their order.
DEVICE float log_total(const Sample& P, u32 row) {
  float best = OUT, sum = 0.f;
  for (u32 s = 0; s < P.slices; s++) best = fmaxf(best, P.parts[row * PARTS + s].raw_best);
  for (u32 s = 0; s < P.slices; s++) {
    const Part& part = P.parts[row * PARTS + s];
    if (part.raw_best > OUT) sum += part.raw_sum * expf(part.raw_best - best);
  }
  return best + logf(sum);
}

// The candidates below the floor of all slices, into shared memory.
DEVICE void hold_candidates(const Sample& P, FinishShared& S, u32 row, u64 best) {
  if (threadIdx.x == 0) {
    S.count = 0;
    S.floor = BINS;
    for (u32 s = 0; s < P.slices; s++) S.floor = min(S.floor, P.parts[row * PARTS + s].floor);
  }
  __syncthreads();
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (u32 s = warp; s < P.slices; s += FINISH / 32) {
    const Candidate* in = P.candidates + ((u64)row * PARTS + s) * LIST;
    for (u32 i = lane; i < P.parts[row * PARTS + s].count; i += 32) {
      const Candidate c = in[i];
      if (bin_of(logit_of(best), c.logit) >= S.floor) continue;
      S.held[atomicAdd(&S.count, 1)] = c;
    }
  }
  __syncthreads();
}

DEVICE void mark_changed(const Sample& P, FinishShared& S, const Ask& ask) {
  __syncthreads();
  for (u32 i = threadIdx.x; i < (1 << ID_BITS) / 32; i += FINISH) S.changed[i] = 0;
  __syncthreads();
  if (!ask.leaders)
    for (u32 i = threadIdx.x; i < ask.edits; i += FINISH) {
      const u32 token = P.edits[ask.edit + i].token;
      if (token < P.vocabulary) atomicOr(&S.changed[token / 32], 1u << (token & 31));
    }
  __syncthreads();
}

// The best tokens in order: each of the kept counts how many are better.
template <class L> DEVICE void write_leaders(const Sample& P, FinishShared& S, const Tokens<L>& tokens, float top, u64 cut) {
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
  const float total = log_total(P, tokens.row);
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
    try_token(ask, d, token, half_of(noise_of(ask, token, 0), token), reach, drawn);
  });
  return block_max(drawn, S.scratch);
}

// The row's best of one kind over its slices.
DEVICE u64 best_part(const Sample& P, u32 row, bool drawn) {
  const u32 lane = threadIdx.x & 31;
  u64 key = 0;
  if (lane < P.slices) key = drawn ? P.parts[row * PARTS + lane].drawn : P.parts[row * PARTS + lane].best;
  return warp_max(key);
}

template <class L> DEVICE void finish(const Sample& P) {
  __shared__ __align__(16) FinishShared S;
  let_next_start();
  wait_for_previous();
  const u32 row = blockIdx.x;
  const Ask ask = P.asks[row];
  if (threadIdx.x == 0) {
    P.state[1 + row] = 0;
    if (row == 0) P.state[0] = 0;
  }
  const u64 best = best_part(P, row, false);
  u64 chosen = best;
  const bool cuts = ask.leaders || ask.top_k || ask.top_p < 1.f || ask.min_p > 0.f;
  if (best && !cuts && ask.inverse_temperature != 0.f) chosen = best_part(P, row, true);
  if (best && cuts && (ask.leaders || ask.inverse_temperature != 0.f)) {
    const float top = logit_of(best);
    u64 weight = 0;
    for (u32 s = 0; s < P.slices; s++) weight += P.parts[row * PARTS + s].weight;
    hold_candidates(P, S, row, best);
    Tokens<L> tokens{P, S, ask, row, S.count, true};
    bool enough = true;
    u64 cut = cut_row(P, S, tokens, top, weight, enough);
    if (!enough) {
      mark_changed(P, S, ask);
      tokens.listed = false;
      enough = true;
      cut = cut_row(P, S, tokens, top, weight, enough);
    }
    if (ask.leaders) write_leaders(P, S, tokens, top, cut);
    else chosen = draw_kept(S, tokens, top, cut);
  }
  if (ask.leaders || threadIdx.x) return;
  P.tokens[row] = best ? token_of(chosen) : NONE;
  if (ask.logprob) P.logprobs[row] = best ? raw_logit<L>(P, row, token_of(chosen)) - log_total(P, row) : OUT;
}

#define SAMPLE(NAME, L)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(THREADS, 4) sample_scan_##NAME(const __grid_constant__ Sample P) { scan<L>(P); } \
  extern "C" __global__ void __launch_bounds__(FINISH, 1) sample_finish_##NAME(const __grid_constant__ Sample P) { finish<L>(P); }
SAMPLE(f32, F32)
SAMPLE(bf16, Half<Bf16>)
SAMPLE(f16, Half<F16>)
