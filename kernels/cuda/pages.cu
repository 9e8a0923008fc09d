// Copies pieces of memory: an adapter's or a sequence's bytes from where they were staged to its pages, pages to others, pages
// to and from mapped host memory.
//
// One row of the grid to a piece, its CTAs share the bytes; four 16-byte loads of a thread are in flight. Pieces must not overlap.
// Limits: addresses and lengths multiples of 16. Bound: twice the bytes, or the bus.
#include "common.cuh"

struct Piece {
  const uint4* from;
  uint4* to;
  u64 bytes;
};

struct Pages {
  const Piece* pieces;
  u32 count, unused;
};

extern "C" __global__ void __launch_bounds__(256) pages_copy(const __grid_constant__ Pages P) {
  let_next_start();
  wait_for_previous();
  const Piece piece = P.pieces[blockIdx.y];
  const u64 words = piece.bytes / 16, step = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int u = 0; u < 4; u++)
      if (i + u * step < words) v[u] = load_once(piece.from + i + u * step);
#pragma unroll
    for (int u = 0; u < 4; u++)
      if (i + u * step < words) store_streaming(piece.to + i + u * step, v[u]);
  }
}
