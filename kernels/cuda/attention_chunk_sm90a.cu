// o = softmax(scale q K^T) V over a sequence's pages, causal, for chunks of a prompt, on Hopper's warpgroup products.
//
// A tile is up to 128 lines: the query heads of one KV head for tokens that stand side by side. CTAs stay, and take one tile and KV
// head after the other. The third warpgroup copies q and blocks of 128 keys and of 128 values, 16 bytes to a lane and page by page;
// the other two take 64 lines each: S = q K^T of the next block runs beside P V of the block before, also where the next block is
// the next tile's, and one warpgroup's softmax beside the other's products. Blocks go from the newest to the oldest.
//
// Shared memory, all in the 128-byte swizzle (16-byte piece c of row r lies at c ^ (r & 7)): q as 128 lines of two tiles, K and V as
// 128 tokens in two stages each, in parts of 64 dimensions. K is the product's second operand as it lies; V is the one that is read along its columns.
// Limits: head_dim 64 or 128; page_tokens a multiple of 16; at most 16 query heads to a KV head; scale above 0; no parts of a
// sequence. Scores, sums and outputs in f32; probabilities are rounded to the element type. Tokens behind the last are zeros here.
// Bound: 4 head_dim operations for each line and token that it sees.
#include "async.cuh"
#include "attention.cuh"
#include "turn.cuh"

constexpr int BLOCK = 128, STAGES = 2, CONSUMERS = 256, PART = 128 * 128;      // PART: bytes of 64 dimensions

// ---- copies, and products of a warpgroup

// Sixteen bytes, or zeros.
DEVICE void copy_or_zero(u32 shared, const void* global, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(there ? 16 : 0) : "memory");
}

// A tile in the 128-byte swizzle; eight rows are 1,024 bytes, and 64 further columns start PART behind.
DEVICE u64 descriptor(u32 at) { return (u64)(at >> 4 & 0x3fff) | (u64)(PART >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62; }

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Keeps the compiler from reading sums before a wait, or moving them while a product runs.
template <int N> DEVICE void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define SUMS8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS32(d, i) SUMS8(d, i), SUMS8(d, i + 8), SUMS8(d, i + 16), SUMS8(d, i + 24)
#define NAMES32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES64 NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// The instructions, for one element type: 64 lines by 128 tokens; 64 lines by 64 or 128 dimensions.
#define PRODUCTS(NAME)                                                                                                              \
  static DEVICE void scores(float(&d)[64], u64 a, u64 b, int add) {                                                                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {" NAMES64 \
                 "}, %64, %65, p, 1, 1, 0, 0;\n}"                                                                                   \
                 : SUMS32(d, 0), SUMS32(d, 32)                                                                                      \
                 : "l"(a), "l"(b), "r"(add));                                                                                       \
  }                                                                                                                                 \
  static DEVICE void values(float(&d)[64], const u32* a, u64 b) {                                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {" NAMES64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;" \
                 : SUMS32(d, 0), SUMS32(d, 32)                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                             \
  }                                                                                                                                 \
  static DEVICE void values(float(&d)[32], const u32* a, u64 b) {                                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" NAMES32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"  \
                 : SUMS32(d, 0)                                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                             \
  }

struct WideBf16 : Bf16 {
  PRODUCTS("bf16")
};
struct WideF16 : F16 {
  PRODUCTS("f16")
};

// ---- which work is whose

// One tile of one KV head.
struct Work {
  Tile tile;
  u32 head;
  int last, newest, blocks;      // the last token; the block that it is in; blocks from there on back

  // Every second round of the CTAs goes backwards: where the longest tiles come first, all get about as many blocks.
  DEVICE bool take(const Attention& P, u32 round) {
    const u32 item = round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (item >= P.tile_count * P.kv.heads) return false;
    const uint4 v = __ldg((const uint4*)P.tiles + item / P.kv.heads);
    tile = Tile{v.x, v.y, (int)v.z, v.w};
    head = item % P.kv.heads;
    last = tile.position + (int)tile.tokens - 1;
    newest = last / BLOCK;
    blocks = newest - (P.window ? max(tile.position + 1 - (int)P.window, 0) / BLOCK : 0) + 1;
    return true;
  }
};

// ---- the copying warpgroup

// One side (0 keys, 1 values) of the 128 tokens from `first` on.
template <int D> DEVICE void copy_block(const Kv& kv, const char* row0, u32 list, int first, int length, u32 to) {
  constexpr int PIECES = D / 8, ROWS = 128 / PIECES;      // rows that the warpgroup brings at a time
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31, piece = thread % PIECES, row = thread / PIECES;
  // Lane i looks up where the sixteen tokens from first + 16 i on lie.
  u64 place = 0;
  if (lane < BLOCK / 16 && first + lane * 16 < length) {
    const u32 token = first + lane * 16, page = __ldg(kv.pages + list + token / kv.page_tokens);
    place = page * kv.page_bytes + (u64)(token % kv.page_tokens) * (D * 2);
  }
  const u32 target = to + piece / 8 * PART + row * 128 + ((piece & 7) ^ (row & 7)) * 16;
#pragma unroll
  for (int i = 0; i < BLOCK / ROWS; i++) {
    const int token = i * ROWS + row;
    const u64 base = __shfl_sync(0xffffffffu, place, i * ROWS / 16);
    copy_or_zero(target + i * ROWS * 128, row0 + base + (token & 15) * (D * 2) + piece * 16, first + token < length);
  }
}

// A tile's lines of q.
template <int D> DEVICE void copy_queries(const Attention& P, const Work& w, u32 to) {
  constexpr u32 PIECES = D / 8, ROWS = 128 / PIECES;      // rows that the warpgroup brings at a time
  const u32 thread = threadIdx.x & 127, piece = thread % PIECES, row = thread / PIECES, per = P.query_heads / P.kv.heads;
#pragma unroll 4
  for (u32 i = 0; i < 128 / ROWS; i++) {
    const u32 line = i * ROWS + row, token = line / per;
    const bool there = token < w.tile.tokens;
    const u16* from = P.q + (u64)(w.tile.row + (there ? token : 0)) * P.stride_q + (w.head * per + line % per) * D + piece * 8;
    copy_or_zero(to + piece / 8 * PART + line * 128 + ((piece & 7) ^ (line & 7)) * 16, from, there);
  }
}

template <int D> struct Shared {
  static constexpr u32 BLOCK_BYTES = D / 64 * PART;
  u32 queries, keys, values;
  DEVICE explicit Shared(const char* raw) {
    queries = (shared_address(raw) + 1023) & ~1023u;
    keys = queries + 2 * BLOCK_BYTES;
    values = keys + STAGES * BLOCK_BYTES;
  }
};

// What the warpgroups tell each other: a stage is there, or free again.
struct Barriers {
  Barrier query_full[2], query_empty[2], key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES];
  DEVICE void init() {
    static_assert(STAGES == 2, "q has as many");
    for (u32 s = 0; s < STAGES; s++) {
      query_full[s].init(128);
      key_full[s].init(128);
      value_full[s].init(128);
      query_empty[s].init(CONSUMERS / 32);
      key_empty[s].init(CONSUMERS / 32);
      value_empty[s].init(CONSUMERS / 32);
    }
    barriers_ready();
  }
};

template <int D> DEVICE void copy_all(const Attention& P, Barriers& b, const Shared<D>& to) {
  const u64 to_values = (u64)P.kv.heads * P.kv.page_tokens * (D * 2);
  Work w;
  for (u32 round = 0, number = 0; w.take(P, round); round++) {
    const u32 buffer = round & 1;
    b.query_empty[buffer].wait((round >> 1 & 1) ^ 1);
    copy_queries<D>(P, w, to.queries + buffer * to.BLOCK_BYTES);
    b.query_full[buffer].arrive_behind_copies();
    const char* row0 = P.kv.base + ((u64)(P.kv.layer * 2) * P.kv.heads + w.head) * P.kv.page_tokens * (D * 2);
    for (int i = 0; i < w.blocks; i++, number++) {
      const u32 stage = number % STAGES, phase = (number / STAGES & 1) ^ 1;
      const int first = (w.newest - i) * BLOCK;
      b.key_empty[stage].wait(phase);
      copy_block<D>(P.kv, row0, w.tile.list, first, w.last + 1, to.keys + stage * to.BLOCK_BYTES);
      b.key_full[stage].arrive_behind_copies();
      b.value_empty[stage].wait(phase);
      copy_block<D>(P.kv, row0 + to_values, w.tile.list, first, w.last + 1, to.values + stage * to.BLOCK_BYTES);
      b.value_full[stage].arrive_behind_copies();
    }
  }
}

// ---- the multiplying warpgroups

DEVICE float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <class T, int D> struct Lines {
  float o[D / 2], s[64];
  u32 p[32];
  int limit[2];          // the last token that a line sees; below zero: no line
  float top[2], sum[2], keep[2];

  static DEVICE u32 line_of(int r) { return (threadIdx.x >> 7) * 64 + (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7) + 8 * r; }
  DEVICE void begin(const Attention& P, const Work& w) {
    const u32 per = P.query_heads / P.kv.heads;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 token = line_of(r) / per;
      limit[r] = token < w.tile.tokens ? w.tile.position + (int)token : -1;
      top[r] = -INFINITY;
      sum[r] = 0.f;
    }
  }
  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] = 0.f;
  }

  DEVICE void scores(u32 q, u32 keys) {
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      const u32 at = k / 4 * PART + k % 4 * 32;
      T::scores(s, descriptor(q + at), descriptor(keys + at), k > 0);
    }
  }
  DEVICE void values(u32 values) {
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++) T::values(o, p + k * 4, descriptor(values + k * 2048));
  }

  // Scores of the block from `first` on become probabilities, short of the sum. `partly`: not every line sees all of it.
  DEVICE void softmax(const Attention& P, int first, bool partly) {
    const int q = threadIdx.x & 3;
    const float log2e = 1.44269504f, c = P.soft_cap != 0.f ? log2e : P.scale * log2e;
    if (P.soft_cap != 0.f) {
      // cap tanh(x / cap), by way of e^(2 x / cap).
      const float up = 2.f * log2e * P.scale / P.soft_cap;
#pragma unroll
      for (int i = 0; i < 64; i++) s[i] = P.soft_cap - 2.f * P.soft_cap * __fdividef(1.f, power_of_2(fminf(s[i] * up, 126.f)) + 1.f);
    }
    if (partly) {
#pragma unroll
      for (int i = 0; i < 64; i++) {
        const int token = first + i / 4 * 8 + 2 * q + (i & 1), most = limit[i >> 1 & 1];
        if (token > most || (P.window && token + (int)P.window <= most)) s[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float most = top[r];
#pragma unroll
      for (int i = 0; i < 64; i += 4) most = fmaxf(most, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      // A line that has seen nothing yet has nothing to rescale.
      const float shift = most == -INFINITY ? 0.f : most * c;
      keep[r] = power_of_2(top[r] * c - shift);
      top[r] = most;
      float all = 0.f;
#pragma unroll
      for (int i = 0; i < 64; i += 4)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; e++) {
          s[i + e] = power_of_2(s[i + e] * c - shift);
          all += s[i + e];
        }
      sum[r] = sum[r] * keep[r] + all;
    }
  }
  DEVICE void pack() {
#pragma unroll
    for (int i = 0; i < 32; i++) p[i] = T::pack(s[2 * i], s[2 * i + 1]);
  }
  DEVICE void rescale() {
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] *= keep[i >> 1 & 1];
  }
  // o over `sums` goes to y.
  DEVICE void leave(const Attention& P, const Work& w, const float (&sums)[2]) {
    const u32 per = P.query_heads / P.kv.heads, q = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float all = sums[r];
      all += __shfl_xor_sync(0xffffffffu, all, 1);
      all += __shfl_xor_sync(0xffffffffu, all, 2);
      const float share = 1.f / all;
      const u32 line = line_of(r), token = line / per;
      u16* y = P.y + ((u64)(w.tile.row + token) * P.query_heads + w.head * per + line % per) * D;
#pragma unroll
      for (int b = 0; b < D / 32; b++) {
        u32 pieces[4];
#pragma unroll
        for (int k = 0; k < 4; k++) pieces[k] = T::pack(o[(b * 4 + k) * 4 + 2 * r] * share, o[(b * 4 + k) * 4 + 2 * r + 1] * share);
        const uint4 piece = turn(pieces);
        if (token < w.tile.tokens) *(uint4*)(y + (b * 4 + q) * 8) = piece;
      }
    }
  }
};

template <class T, int D> DEVICE void multiply_all(const Attention& P, Barriers& b, const Shared<D>& from) {
  constexpr u32 BLOCK_BYTES = Shared<D>::BLOCK_BYTES;
  const u32 group = threadIdx.x >> 7, lane = threadIdx.x & 31;
  // What copies brought is visible to products only behind this fence.
  auto wait_for = [&](Barrier& full, u32 phase) {
    full.wait(phase);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  };
  auto release = [&](Barrier& empty) {
    if (lane == 0) empty.arrive();
  };
  // The warpgroups take turns at issuing products, so that one's softmax runs beside the other's: barrier 4 + group.
  auto take_turn = [&]() { asm volatile("bar.sync %0, 256;" ::"r"(group + 4) : "memory"); };
  auto give_turn = [&]() { asm volatile("bar.arrive %0, 256;" ::"r"((group ^ 1) + 4) : "memory"); };
  const u32 my_queries = from.queries + group * 64 * 128;
  Work now = {}, before = {};
  Lines<T, D> mine;
  mine.clear();
#pragma unroll
  for (int i = 0; i < 64; i++) mine.s[i] = 0.f;
  auto softmax = [&](int block) {
    const int first = (now.newest - block) * BLOCK;
    mine.softmax(P, first, first + BLOCK - 1 > now.tile.position || (P.window && first + (int)P.window <= now.last));
  };
  u32 number = 0;      // blocks so far
  auto multiply_values = [&]() {
    const u32 behind = (number - 1) % STAGES;
    wait_for(b.value_full[behind], (number - 1) / STAGES & 1);
    products_begin();
    mine.values(from.values + behind * BLOCK_BYTES);
    products_commit();
  };
  auto multiply_scores = [&](u32 round) {
    wait_for(b.key_full[number % STAGES], number / STAGES & 1);
    take_turn();
    products_begin();
    mine.scores(my_queries + (round & 1) * BLOCK_BYTES, from.keys + number % STAGES * BLOCK_BYTES);
    products_commit();
  };
  // The very first block: nothing is beside it.
  now.take(P, 0);
  mine.begin(P, now);
  if (group == 1) give_turn();
  wait_for(b.query_full[0], 0);
  multiply_scores(0);
  give_turn();
  products_wait<0>();
  pin(mine.s);
  release(b.key_empty[0]);
  softmax(0);
  mine.pack();
  number = 1;
  for (u32 round = 0;;) {
#pragma unroll 1
    for (int block = 1; block < now.blocks; block++, number++) {
      multiply_scores(round);
      multiply_values();
      give_turn();
      products_wait<1>();
      pin(mine.s);
      release(b.key_empty[number % STAGES]);
      softmax(block);
      products_wait<0>();
      pin(mine.o);
      release(b.value_empty[(number - 1) % STAGES]);
      mine.rescale();
      mine.pack();
    }
    release(b.query_empty[round & 1]);
    before = now;
    if (!now.take(P, ++round)) break;
    // The first block of a tile, beside the last of the tile before.
    wait_for(b.query_full[round & 1], round >> 1 & 1);
    multiply_scores(round);
    multiply_values();
    give_turn();
    products_wait<1>();
    pin(mine.s);
    release(b.key_empty[number % STAGES]);
    const float sums[2] = {mine.sum[0], mine.sum[1]};
    mine.begin(P, now);
    softmax(0);
    products_wait<0>();
    pin(mine.o);
    release(b.value_empty[(number - 1) % STAGES]);
    mine.leave(P, before, sums);
    mine.clear();
    mine.pack();
    number++;
  }
  if (group == 0) take_turn();      // the turn that the other gave last
  multiply_values();
  products_wait<0>();
  pin(mine.o);
  mine.leave(P, before, mine.sum);
}

// ---- the kernel

template <class T, int D> DEVICE void attention_chunk(const Attention& P) {
  extern __shared__ char raw[];
  __shared__ Barriers barriers;
  const Shared<D> shared(raw);
  if (blockIdx.x >= P.tile_count * P.kv.heads) return;
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  let_next_start();
  wait_for_previous();
  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    copy_all<D>(P, barriers, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    multiply_all<T, D>(P, barriers, shared);
  }
}

#define KERNEL(T, name, D)                                                                                        \
  extern "C" __global__ void __launch_bounds__(384, 1) attention_chunk_##name##_##D(const __grid_constant__ Attention P) { \
    attention_chunk<T, D>(P);                                                                                     \
  }
KERNEL(WideBf16, bf16, 64)
KERNEL(WideBf16, bf16, 128)
KERNEL(WideF16, f16, 64)
KERNEL(WideF16, f16, 128)
