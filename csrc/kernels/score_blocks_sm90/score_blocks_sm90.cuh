// Scores of blocks of 128 keys for Hopper: log2 of the sums of exponentials of sampled queries.
//
// One thread block per multiprocessor takes one span of blocks after another, each for two parts of 128 queries: keys
// are read from the L2 cache once for both. Three warps gather queries and one copies keys into rings of stages
// (fetch.cuh); four warpgroups multiply and sum (consume.cuh, exponentials.cuh).
#pragma once

#include "consume.cuh"
#include "fetch.cuh"

namespace shadowkv {

template <class Shape>
__global__ __launch_bounds__(Shape::kThreads, 1) void score_blocks_kernel(const __grid_constant__ ScoreCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char scores_shared[];
  const ScoreMemory<Shape> memory = {shared_address(scores_shared)};
  if (threadIdx.x == 0) {
    memory.init();
    prefetch_map(call.k);
  }
  __syncthreads();
  // Tells the compiler that this is uniform across a warp.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  if (warpgroup == Shape::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kProducerRegisters));
    if (warp > 0)
      fetch_queries<Shape>(call, memory, warp - 1);
    else if (threadIdx.x % 32 == 0)
      fetch_keys<Shape>(call, memory);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kConsumerRegisters));
    score_spans<Shape>(call, memory, warpgroup);
  }
#endif // other compilation passes have no wgmma, and no callers
}

} // namespace shadowkv
