// What attention over pages is asked: tiles of rows of one sequence, and where everything lies. `attention.cu` and
// `attention_chunk_sm90a.cu` read the same; src/decoder/attention.rs has it in Rust.
#pragma once
#include "kv.cuh"

struct Tile {
  u32 row;       // of the batch: the first token's
  u32 tokens;    // tokens * heads per KV head is at most a tile's lines: 16, and 128 in a chunk
  int position;  // of the first token
  u32 list;      // where the sequence's page list starts
};

struct Attention {
  const u16* q;          // rows of stride_q
  u16* y;                // rows of query_heads * head_dim
  const Tile* tiles;
  float* parts;          // [tile][KV head][split][line][head_dim], then maximum and sum of every line; chunks have none
  Kv kv;
  u32 query_heads, stride_q;
  u32 splits, window;    // window: how many tokens back a token sees, itself included; 0: all
  float scale, soft_cap; // soft_cap: 0 for none
  u32 tile_count, unused;
};
