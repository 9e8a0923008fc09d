// Four lanes turn four pieces of four words, so that each stores sixteen bytes side by side.
#pragma once
#include "common.cuh"

// Lane q of four gets piece q of each of the four: pieces[i] of lane k becomes part k of lane i.
DEVICE uint4 turn(const u32 (&pieces)[4]) {
  const int q = threadIdx.x & 3;
  const bool high = q & 2, odd = q & 1;
  const u32 x0 = high ? pieces[2] : pieces[0], x1 = high ? pieces[3] : pieces[1];
  const u32 y0 = __shfl_xor_sync(0xffffffffu, high ? pieces[0] : pieces[2], 2);
  const u32 y1 = __shfl_xor_sync(0xffffffffu, high ? pieces[1] : pieces[3], 2);
  const u32 x = odd ? x1 : x0, y = odd ? y1 : y0;
  const u32 u = __shfl_xor_sync(0xffffffffu, odd ? x0 : x1, 1), v = __shfl_xor_sync(0xffffffffu, odd ? y0 : y1, 1);
  const u32 mine[2] = {odd ? u : x, odd ? x : u}, other[2] = {odd ? v : y, odd ? y : v};
  return high ? make_uint4(other[0], other[1], mine[0], mine[1]) : make_uint4(mine[0], mine[1], other[0], other[1]);
}
