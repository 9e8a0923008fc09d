// What both kernels of sampling know: what a row asks for, what a slice hands on, reading and changing logits.
#pragma once
#include "exact.cuh"

constexpr u32 THREADS = 256;
constexpr u32 SLICE = THREADS * 32;      // tokens that a CTA of the scan takes
constexpr u32 PARTS = 32;                // CTAs to a row, at most
constexpr u32 HELD = 4096;               // candidates that the finish holds
constexpr u32 LIST = 512;                // of them from one CTA, at most
constexpr u32 BINS = 256;                // of a slice, by how far a logit is below its best
constexpr u32 ID_BITS = 18;
constexpr u32 NONE = 0xffffffffu, ALL = 0xffffffffu;
constexpr float OUT = -__builtin_huge_valf();   // the logit of a token that is out
constexpr float WEIGHT_ONE = 2147483648.f;      // the weight of the best token
constexpr float DEPTH_MAX = 3.4e38f;            // a token at or below it is out

struct Ask {
  u64 seed, draw;
  float inverse_temperature;     // 0: greedy
  float top_p, min_p;            // 1 and 0: off
  float repetition, presence, frequency;
  u32 top_k;                     // 0: off
  u32 edit, edits;               // first of the row's edits, and how many
  u32 mask;                      // row of the masks, or NONE
  u32 leaders;                   // above 0: no draw, but so many best tokens
  u32 logprob;                   // 1: the log-probability is asked for

  DEVICE bool cuts() const { return leaders || top_k || top_p < 1.f || min_p > 0.f; }
  DEVICE bool cuts_count(u32 vocabulary) const { return top_k > 0 && top_k < vocabulary; }
  // Whether the weight of all tokens is asked for: by a draw from all, or by top-p of all.
  DEVICE bool weighs(u32 vocabulary) const { return !leaders && (!cuts() || (!cuts_count(vocabulary) && top_p < 1.f)); }
};

// What is to be done to one token's logit. The tokens of a row's edits differ.
struct Edit {
  u32 token, outputs;            // how often the token is in the output
  float bias;                    // minus infinity bans it
  u32 seen;                      // 1: it is in the prompt or the output
};

// What the scan of a slice leaves.
struct alignas(16) Part {
  u64 best;                      // key of the best token after changes; 0: all are out
  u64 weight;                    // of all its tokens, counted from the slice's best
  u64 left;                      // key of the best token that is not among the candidates; 0: all are
  float raw_best, raw_sum;       // before changes: the best logit, and the sum of e^(logit - it)
  u32 count;                     // of candidates
  u32 unused[3];
};

struct Candidate {
  float logit;
  u32 token;
};

struct Leader {
  u32 token;
  float logprob;
};

struct Sample {
  const void* logits;            // rows of `stride` elements
  const Ask* asks;
  const Edit* edits;
  const u32* masks;              // rows of mask_words; bit t of word w allows token 32 w + t
  u32* tokens;                   // NONE where nothing is allowed
  float* logprobs;
  Leader* leaders;               // leaders_stride to a row
  Part* parts;                   // PARTS to a row
  Candidate* candidates;         // PARTS * LIST to a row
  u32 rows, vocabulary, stride, slices, mask_words, leaders_stride;
  float soft_cap;                // above 0: logits are first made soft_cap * tanh(logit / soft_cap)
  u32 unused;
};

// Tokens by logit, the lower id first where logits are equal: the greater key is the better token.
DEVICE u64 key_of(float logit, u32 token) { return (u64)ordered(logit) << ID_BITS | (((1u << ID_BITS) - 1) - token); }
DEVICE u32 token_of(u64 key) { return ((1u << ID_BITS) - 1) - (u32)(key & ((1u << ID_BITS) - 1)); }
DEVICE float logit_of(u64 key) { return of_ordered((u32)(key >> ID_BITS)); }

// What is no number can never be drawn; what is infinite counts as the greatest number.
DEVICE float finite(float v) { return v != v ? OUT : fminf(v, 3.40282347e38f); }
// What is out stays out.
DEVICE float capped(float v, float cap) { return cap > 0.f && v > OUT ? __fmul_rn(exact_tanh(__fdiv_rn(v, cap)), cap) : v; }

// Sixteen bytes of logits.
struct F32 {
  static constexpr int WIDE = 4;
  static DEVICE float one(const void* p, u64 at) { return ((const float*)p)[at]; }
  static DEVICE float part(const uint4& v, int k) { return __uint_as_float(k < 2 ? (k ? v.y : v.x) : k == 2 ? v.z : v.w); }
};
template <class T> struct Half {
  static constexpr int WIDE = 8;
  static DEVICE float one(const void* p, u64 at) { return T::one(((const u16*)p)[at]); }
  static DEVICE float part(const uint4& v, int k) {
    const u32 pair = k < 4 ? (k < 2 ? v.x : v.y) : k < 6 ? v.z : v.w;
    return k & 1 ? T::high(pair) : T::low(pair);
  }
};
template <class L> DEVICE float raw_logit(const Sample& P, u32 row, u32 token) {
  return capped(finite(L::one(P.logits, (u64)row * P.stride + token)), P.soft_cap);
}

DEVICE bool allowed(const Sample& P, const Ask& ask, u32 token) {
  return ask.mask == NONE || P.masks[(u64)ask.mask * P.mask_words + token / 32] >> (token & 31) & 1;
}

DEVICE float edited(const Ask& ask, const Edit& e, float v) {
  if (e.seen && ask.repetition != 1.f) v = v > 0.f ? __fdiv_rn(v, ask.repetition) : __fmul_rn(v, ask.repetition);
  if (e.outputs) v = __fadd_rn(v, -__fadd_rn(ask.presence, __fmul_rn(ask.frequency, (float)e.outputs)));
  return finite(__fadd_rn(v, e.bias));
}

// How far below the best, in units of the temperature; never negative.
DEVICE float depth(float best, float logit, float inverse_temperature) { return __fmul_rn(__fadd_rn(best, -logit), inverse_temperature); }
DEVICE u32 weight_of(float depth) { return exact_weight(__fmul_rn(depth, 1.44269504f)); }

DEVICE u64 warp_max(u64 v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) {
    const u64 other = __shfl_xor_sync(ALL, v, d);
    v = other > v ? other : v;
  }
  return v;
}

DEVICE u64 warp_sum(u64 v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(ALL, v, d);
  return v;
}

// Over all threads, in one order; `scratch` has a place for each warp.
template <class T, class F> DEVICE T block_reduce(T v, T* scratch, T zero, F reduce) {
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  v = reduce(v);
  __syncthreads();
  if (lane == 0) scratch[warp] = v;
  __syncthreads();
  return reduce(lane < blockDim.x >> 5 ? scratch[lane] : zero);
}
DEVICE u64 block_max(u64 v, u64* scratch) {
  return block_reduce(v, scratch, (u64)0, [](u64 w) { return warp_max(w); });
}
DEVICE u64 block_sum(u64 v, u64* scratch) {
  return block_reduce(v, scratch, (u64)0, [](u64 w) { return warp_sum(w); });
}

// Random bits of a row's draw: which 0 and 1: the high and the low halves of eight tokens' noise; 2: of a draw from all.
DEVICE Philox random_of(const Ask& ask, u32 token, u32 which) {
  return Philox((u32)ask.draw, (u32)(ask.draw >> 32), token / 8, which, (u32)ask.seed, (u32)(ask.seed >> 32));
}
DEVICE u32 half_of(const Philox& noise, u32 token) {
  const u32 word = token & 4 ? (token & 2 ? noise.v[3] : noise.v[2]) : token & 2 ? noise.v[1] : noise.v[0];
  return token & 1 ? word >> 16 : word & 0xffff;
}

// Of threads' shares, in their order: what is before the calling thread's. `scratch` has a place for each warp.
DEVICE u64 block_before(u64 v, u64* scratch) {
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u64 upto = v;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const u64 other = __shfl_up_sync(ALL, upto, d);
    if (lane >= d) upto += other;
  }
  __syncthreads();
  if (lane == 31) scratch[warp] = upto;
  __syncthreads();
  return warp_sum(lane < warp ? scratch[lane] : 0) + upto - v;
}

// Tries the token against the best so far: z = noise - depth. Nothing is computed that cannot win: high halves alone say
// of nearly all tokens that they do not.
DEVICE void try_token(const Ask& ask, float depth, u32 token, u32 high, float& reach, u64& drawn) {
  if (!(gumbel_bound(high << 16) - depth >= reach)) return;
  const float z = __fadd_rn(gumbel(high << 16 | half_of(random_of(ask, token, 1), token)), -depth);
  const u64 key = key_of(z, token);
  if (key > drawn) drawn = key;
  reach = fmaxf(reach, z);
}
