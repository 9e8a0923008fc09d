// o = softmax(scale q K^T) V over a sequence's pages, causal, for chunks of a prompt, on Hopper's warpgroup products.
//
// A tile is up to 128 lines: the query heads of one KV head for tokens that stand side by side. A CTA takes one tile and one KV
// head. Its third warpgroup copies blocks of 128 keys and of 128 values, 16 bytes to a lane and page by page, into two stages of
// shared memory each; the other two take 64 lines each: S = q K^T of the next block runs beside P V of the block before, and one
// warpgroup's softmax beside the other's products. Blocks go from the newest to the oldest.
//
// Shared memory, all in the 128-byte swizzle (16-byte piece c of row r lies at c ^ (r & 7)): q as 128 lines, K and V as 128 tokens,
// each in parts of 64 dimensions. K is the product's second operand as it lies; V is the one that is read along its columns.
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
};

template <class T, int D> DEVICE void attention_chunk(const Attention& P) {
  constexpr u32 BLOCK_BYTES = D / 64 * PART;
  extern __shared__ char raw[];
  const u32 base = (shared_address(raw) + 1023) & ~1023u, queries = base, keys = base + BLOCK_BYTES, values = keys + STAGES * BLOCK_BYTES;
  __shared__ Barrier key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES];
  const u32 head = blockIdx.x, per = P.query_heads / P.kv.heads, group = threadIdx.x >> 7;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < STAGES; s++) {
      key_full[s].init(128);
      value_full[s].init(128);
      key_empty[s].init(CONSUMERS / 32);
      value_empty[s].init(CONSUMERS / 32);
    }
    barriers_ready();
  }
  const Tile tile = P.tiles[blockIdx.y];
  const int last = tile.position + (int)tile.tokens - 1, newest = last / BLOCK;
  const int oldest = P.window ? max(tile.position + 1 - (int)P.window, 0) / BLOCK : 0, blocks = newest - oldest + 1;
  __syncthreads();
  let_next_start();
  wait_for_previous();
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const char* row0 = P.kv.base + ((u64)(P.kv.layer * 2) * P.kv.heads + head) * P.kv.page_tokens * (D * 2);
    const u64 to_values = (u64)P.kv.heads * P.kv.page_tokens * (D * 2);
    for (int i = 0; i < blocks; i++) {
      const u32 stage = i % STAGES, phase = (i / STAGES & 1) ^ 1;
      const int first = (newest - i) * BLOCK;
      key_empty[stage].wait(phase);
      copy_block<D>(P.kv, row0, tile.list, first, last + 1, keys + stage * BLOCK_BYTES);
      key_full[stage].arrive_behind_copies();
      value_empty[stage].wait(phase);
      copy_block<D>(P.kv, row0 + to_values, tile.list, first, last + 1, values + stage * BLOCK_BYTES);
      value_full[stage].arrive_behind_copies();
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31, g = lane >> 2, q = lane & 3;
  const u32 live = tile.tokens * per;
  // Its 64 lines of q: eight 16-byte pieces to a row and part.
  for (int i = thread; i < 64 * D / 8; i += 128) {
    const u32 line = group * 64 + i / (D / 8), piece = i % (D / 8), token = line / per;
    const u16* from = P.q + (u64)(tile.row + token) * P.stride_q + (head * per + line % per) * D + piece * 8;
    const uint4 v = line < live ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
    const u32 to = queries + piece / 8 * PART + line * 128 + ((piece & 7) ^ (line & 7)) * 16;
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
  const u32 my_queries = queries + group * 64 * 128;
  Lines<T, D> mine;
#pragma unroll
  for (int i = 0; i < D / 2; i++) mine.o[i] = 0.f;
#pragma unroll
  for (int i = 0; i < 64; i++) mine.s[i] = 0.f;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const u32 line = group * 64 + warp * 16 + g + 8 * r;
    mine.limit[r] = line < live ? tile.position + (int)(line / per) : -1;
    mine.top[r] = -INFINITY;
    mine.sum[r] = 0.f;
  }
  auto partly = [&](int first) { return first + BLOCK - 1 > tile.position || (P.window && first + (int)P.window <= last); };
  // What copies brought is visible to products only behind this fence.
  auto wait_for = [&](Barrier& b, u32 phase) {
    b.wait(phase);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  };
  auto release = [&](Barrier& b) {
    if (lane == 0) b.arrive();
  };
  // The warpgroups take turns at issuing products, so that one's softmax runs beside the other's: barrier 4 + group.
  auto take_turn = [&]() { asm volatile("bar.sync %0, 256;" ::"r"(group + 4) : "memory"); };
  auto give_turn = [&]() { asm volatile("bar.arrive %0, 256;" ::"r"((group ^ 1) + 4) : "memory"); };
  if (group == 1) give_turn();
  wait_for(key_full[0], 0);
  take_turn();
  products_begin();
  mine.scores(my_queries, keys);
  products_commit();
  give_turn();
  products_wait<0>();
  pin(mine.s);
  release(key_empty[0]);
  mine.softmax(P, newest * BLOCK, partly(newest * BLOCK));
  mine.pack();
#pragma unroll 1
  for (int i = 1; i < blocks; i++) {
    const u32 stage = i % STAGES, phase = i / STAGES & 1, before = (i - 1) % STAGES, before_phase = (i - 1) / STAGES & 1;
    const int first = (newest - i) * BLOCK;
    wait_for(key_full[stage], phase);
    take_turn();
    products_begin();
    mine.scores(my_queries, keys + stage * BLOCK_BYTES);
    products_commit();
    wait_for(value_full[before], before_phase);
    products_begin();
    mine.values(values + before * BLOCK_BYTES);
    products_commit();
    give_turn();
    products_wait<1>();
    pin(mine.s);
    release(key_empty[stage]);
    mine.softmax(P, first, partly(first));
    products_wait<0>();
    pin(mine.o);
    release(value_empty[before]);
    mine.rescale();
    mine.pack();
  }
  if (group == 0) take_turn();      // the turn that the other gave last
  const u32 stage = (blocks - 1) % STAGES, phase = (blocks - 1) / STAGES & 1;
  wait_for(value_full[stage], phase);
  products_begin();
  mine.values(values + stage * BLOCK_BYTES);
  products_commit();
  products_wait<0>();
  pin(mine.o);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float all = mine.sum[r];
    all += __shfl_xor_sync(0xffffffffu, all, 1);
    all += __shfl_xor_sync(0xffffffffu, all, 2);
    const float share = 1.f / all;
    const u32 line = group * 64 + warp * 16 + g + 8 * r;
    u16* y = P.y + ((u64)(tile.row + line / per) * P.query_heads + head * per + line % per) * D;
#pragma unroll
    for (int b = 0; b < D / 32; b++) {
      u32 pieces[4];
#pragma unroll
      for (int k = 0; k < 4; k++) pieces[k] = T::pack(mine.o[(b * 4 + k) * 4 + 2 * r] * share, mine.o[(b * 4 + k) * 4 + 2 * r + 1] * share);
      const uint4 piece = turn(pieces);
      if (line < live) *(uint4*)(y + (b * 4 + q) * 8) = piece;
    }
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
