// Prefill attention for Hopper, after FlashAttention-3 (arXiv:2407.08608): over listed blocks of 128 keys, over all
// keys of packed sequences or of one sequence, and without a mask.
//
// One thread block per multiprocessor takes one tile of 128 queries of a head after another. One warp copies queries,
// keys and values (fetch.cuh) into rings of stages; two warpgroups attend with 64 queries each (consume.cuh). Each
// issues the products of the next block's scores and of this block's values together, and computes the next block's
// softmax (softmax.cuh) during the latter and during the other warpgroup's products.
#pragma once

#include "consume.cuh"
#include "fetch.cuh"
#include "kernels/common/memory.cuh"

namespace shadowkv {

template <class Shape, Over kOver>
__global__ __launch_bounds__(Shape::kThreads, 1) void attend_blocks_kernel(const __grid_constant__ BlocksCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char blocks_shared[];
  const BlocksMemory<Shape> memory = {shared_address(blocks_shared)};
  if (threadIdx.x == 0) {
    memory.init();
    prefetch_map(call.q);
    prefetch_map(call.k);
    prefetch_map(call.v);
  }
  __syncthreads();
  // Tells the compiler that this is uniform across a warp.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  if (warpgroup == Shape::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kProducerRegisters));
    if (warp == 0) fetch_tiles<Shape, kOver>(call, memory);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kConsumerRegisters));
    attend_tiles<Shape, kOver>(call, memory, warpgroup);
  }
#endif // other compilation passes have no wgmma, and no callers
}

} // namespace shadowkv
