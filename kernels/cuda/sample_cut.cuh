// The finish's cut through a row, by its list of candidates or by the whole row. A list is first narrowed by bins of logits. Among few tokens
// each then counts what is better; among many the cut is found by radix selection over {logit, id}.
#pragma once
#include "sample_slice.cuh"

constexpr u32 FINISH = 512, DIGITS = 1024, FEW = 128, LEADERS = 32;

struct FinishShared {
  Part parts[PARTS];
  union {
    Candidate held[HELD];              // the candidates, where they hold all that the cut keeps
    u32 changed[(1 << ID_BITS) / 32];  // else the tokens that have an edit
    float slice[SLICE];                // or, where nothing is cut, the slice from which is drawn
  };
  union {
    struct {
      u32 counts[DIGITS], low[DIGITS], high[DIGITS];      // of a digit or bin: tokens, and their weight in two words
    };
    struct {
      u64 keys[FEW];                   // the few tokens among which the cut is
      u32 weights[FEW];
    };
  };
  u64 scratch[FINISH / 32];
  u32 count, digit, in_digit, token;
  u64 before, cut, left;
  u64 leaders[LEADERS];
};

// The lanes whose digit is the first lane's: one addition for all of them, since digits of logits are crowded.
DEVICE u32 same_digit(u32 digit) { return __ballot_sync(ALL, digit == __shfl_sync(ALL, digit, 0)); }

// A row's tokens, from the list or from the logits again.
template <class L> struct Tokens {
  const Sample& P;
  FinishShared& S;
  const Ask& ask;
  u32 row, count;
  bool listed;

  // From here on the row's logits, since the list does not hold enough.
  DEVICE void take_row() {
    listed = false;
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

DEVICE void clear_digits(FinishShared& S) {
  for (u32 i = threadIdx.x; i < DIGITS; i += FINISH) S.counts[i] = S.low[i] = S.high[i] = 0;
  __syncthreads();
}
// Sixty-four bits as two words: who makes the low one wrap carries.
DEVICE void count_weight(FinishShared& S, u32 digit, u64 sum) {
  if (sum == 0) return;
  const u32 old = atomicAdd(&S.low[digit], (u32)sum), carry = old + (u32)sum < old;
  if ((u32)(sum >> 32) + carry) atomicAdd(&S.high[digit], (u32)(sum >> 32) + carry);
}
DEVICE u64 counted(const FinishShared& S, u32 digit, bool by_weight) { return by_weight ? (u64)S.high[digit] << 32 | S.low[digit] : S.counts[digit]; }

// Keeps of the list the bins of logits, from the best down, in which `target` tokens are, or weights that reach it.
template <class L> DEVICE void narrow(FinishShared& S, Tokens<L>& tokens, float top, float inverse, u64 target, bool by_weight) {
  if (!tokens.listed || tokens.count <= FEW || S.left == 0) return;
  const float low = logit_of(S.left), scale = top > low ? (DIGITS - 1) / (top - low) : 0.f;
  auto bin_of = [&](float v) { return (u32)fminf((top - v) * scale, DIGITS - 1.f); };
  clear_digits(S);
  tokens.each([&](bool live, float logit, u32) {
    if (!live) return;
    if (by_weight) count_weight(S, bin_of(logit), weight_of(depth(top, logit, inverse)));
    else atomicAdd(&S.counts[bin_of(logit)], 1);
  });
  if (threadIdx.x == 0) {
    S.digit = DIGITS - 1;
    S.count = 0;
  }
  __syncthreads();
  const u32 first = 2 * threadIdx.x;
  const u64 one = counted(S, first, by_weight), both = one + counted(S, first + 1, by_weight), before = block_before(both, S.scratch);
  if (before < target && target <= before + both) S.digit = target <= before + one ? first : first + 1;
  Candidate mine[HELD / FINISH];
#pragma unroll
  for (u32 u = 0; u < HELD / FINISH; u++) mine[u] = u * FINISH + threadIdx.x < tokens.count ? S.held[u * FINISH + threadIdx.x] : Candidate{OUT, 0};
  __syncthreads();
#pragma unroll
  for (u32 u = 0; u < HELD / FINISH; u++)
    if (mine[u].logit > OUT && bin_of(mine[u].logit) <= S.digit) S.held[atomicAdd(&S.count, 1)] = mine[u];
  __syncthreads();
  tokens.count = S.count;
  __syncthreads();
}

// Of at most FEW tokens, those whose keys begin with `prefix`: each adds up what is better than it. 0: there is less than the target.
template <class L> DEVICE u64 select_few(FinishShared& S, const Tokens<L>& tokens, float top, float inverse, u64 target, bool by_weight, u64 prefix, int shift, u64 before) {
  if (threadIdx.x == 0) S.count = S.cut = 0;
  __syncthreads();
  tokens.each([&](bool live, float logit, u32 token) {
    const u64 key = key_of(logit, token);
    const float d = depth(top, logit, inverse);
    if (!live || !(d < DEPTH_MAX) || key >> shift != prefix) return;
    const u32 at = atomicAdd(&S.count, 1);
    S.keys[at] = key;
    S.weights[at] = by_weight ? weight_of(d) : 1;
  });
  __syncthreads();
  if (threadIdx.x < S.count) {
    const u64 own = S.keys[threadIdx.x];
    u64 above = before;
    for (u32 i = 0; i < S.count; i++)
      if (S.keys[i] > own) above += S.weights[i];
    if (above < target && target <= above + S.weights[threadIdx.x]) S.cut = own;
  }
  __syncthreads();
  const u64 cut = S.cut;
  __syncthreads();
  return cut;
}

// The key of the last token, in order, that is wanted: the first `target` tokens, or the fewest first ones whose weights reach it.
// Digit by digit from the top: how much is above, and in which digit the target is reached. 0: there is less than the target.
template <class L> DEVICE u64 select(FinishShared& S, const Tokens<L>& tokens, float top, float inverse, u64 target, bool by_weight) {
  if (tokens.listed && tokens.count <= FEW) return select_few(S, tokens, top, inverse, target, by_weight, 0, 63, 0);
  const u32 lane = threadIdx.x & 31;
  u64 prefix = 0, before = 0;
#pragma unroll 1
  for (int shift = 40; shift >= 0; shift -= 10) {
    clear_digits(S);
    tokens.each([&](bool live, float logit, u32 token) {
      const u64 key = key_of(logit, token);
      const float d = depth(top, logit, inverse);
      live = live && d < DEPTH_MAX && key >> shift >> 10 == prefix;
      if (!__any_sync(ALL, live)) return;
      const u32 digit = live ? key >> shift & (DIGITS - 1) : DIGITS, same = same_digit(digit);
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
      count_weight(S, digit, sum);
    });
    if (threadIdx.x == 0) S.digit = NONE;
    __syncthreads();
    // Thread t has the digits 1023 - 2t and 1022 - 2t: what is above them is with the threads before.
    const u32 first = DIGITS - 1 - 2 * threadIdx.x;
    const u64 own[2] = {counted(S, first, by_weight), counted(S, first - 1, by_weight)};
    u64 above = before + block_before(own[0] + own[1], S.scratch);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      if (above < target && target <= above + own[k]) {
        S.digit = first - k;
        S.in_digit = S.counts[first - k];
        S.before = above;
      }
      above += own[k];
    }
    __syncthreads();
    if (S.digit == NONE) return 0;
    prefix = prefix << 10 | S.digit;
    before = S.before;
    if (S.in_digit <= FEW) return select_few(S, tokens, top, inverse, target, by_weight, prefix, shift, before);
  }
  return prefix;
}

// What the tokens of keys from `cut` up weigh.
template <class L> DEVICE u64 weight_above(FinishShared& S, const Tokens<L>& tokens, float top, float inverse, u64 cut) {
  u64 weight = 0;
  tokens.each([&](bool live, float logit, u32 token) {
    const float d = depth(top, logit, inverse);
    if (live && d < DEPTH_MAX && key_of(logit, token) >= cut) weight += weight_of(d);
  });
  return block_sum(weight, S.scratch);
}
