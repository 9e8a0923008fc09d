// Where keys and values lie in a page: for each layer first all keys, then all values; for each head the page's tokens, one
// row of head_dim elements after the other. src/kv.rs says the same in Rust.
#pragma once
#include "common.cuh"

struct Kv {
  char* base;            // of the pool
  const u32* pages;      // page lists of all sequences
  u64 page_bytes;
  u32 page_tokens, heads, head_dim, layer;
};

// Row of `token` (of the page), which: 0 key, 1 value.
DEVICE u16* kv_row(const Kv& kv, u32 page, u32 which, u32 head, u32 token) {
  const u64 row = ((u64)(kv.layer * 2 + which) * kv.heads + head) * kv.page_tokens + token;
  return (u16*)(kv.base + (u64)page * kv.page_bytes) + row * kv.head_dim;
}
