// y = x, up to two arrays of each: what a kernel between two others costs at least that reads and writes so many bytes. Only
// benchmarks launch it, beside the small ops.
//
// A thread takes sixteen bytes of each array. Limits: arrays lie one behind the other; at most two. Bound: their bytes.
#include "common.cuh"

struct Floor {
  const uint4* x;
  uint4* y;
  u32 pieces;            // of sixteen bytes, in one array; 0: nothing is done
  u32 reads, writes;     // arrays: 1 or 2
  u32 unused;
};

extern "C" __global__ void __launch_bounds__(256) floor_copy(const __grid_constant__ Floor P) {
  let_next_start();
  wait_for_previous();
  const u32 at = blockIdx.x * 256 + threadIdx.x;
  if (at >= P.pieces) return;
  uint4 v = P.x[at];
  if (P.reads > 1) {
    const uint4 w = P.x[P.pieces + at];
    v = make_uint4(v.x ^ w.x, v.y ^ w.y, v.z ^ w.z, v.w ^ w.w);
  }
  P.y[at] = v;
  if (P.writes > 1) P.y[P.pieces + at] = v;
}
