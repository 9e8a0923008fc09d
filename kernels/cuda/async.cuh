// Barriers in shared memory, and copies that arrive at them. On sm_80 a lane copies for itself and waits.
#pragma once
#include "common.cuh"

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

struct Barrier {
  u64 word;

  DEVICE u32 at() const { return shared_address(&word); }
  DEVICE void init(u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at()), "r"(count) : "memory"); }
  DEVICE void arrive() { asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(at()) : "memory"); }
  // Arrives when the 16-byte copies that this thread has issued are there.
  DEVICE void arrive_behind_copies() { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at()) : "memory"); }
  DEVICE void wait(u32 phase) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(at()), "r"(phase) : "memory");
#else
    asm volatile("{\n.reg .pred p;\nAGAIN: mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(at()), "r"(phase) : "memory");
#endif
  }

  // One thread's share of a phase: it says how many bytes it brings, brings them, and is done.
  DEVICE void expect(u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at()), "r"(bytes) : "memory");
#endif
  }
  // Addresses and length are multiples of 16.
  DEVICE void bring(void* shared, const void* global, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(at())
                 : "memory");
#else
    for (u32 i = 0; i < bytes; i += 16) copy_async((char*)shared + i, (const char*)global + i);
#endif
  }
  DEVICE void brought() {
#if __CUDA_ARCH__ < 900
    asm volatile("cp.async.wait_all;" ::: "memory");
    arrive();
#endif
  }
};

// By whoever initialised barriers, before others meet at __syncthreads.
DEVICE void barriers_ready() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
