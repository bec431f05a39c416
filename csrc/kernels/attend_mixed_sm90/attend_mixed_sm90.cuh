// Attention of one query per sequence over all compressed tokens, from latents of mixed widths and values coded by a vector
// codebook (Shard's formats), for Hopper: split over the context, in two kernels.
//
// Keys are rebuilt by products of a warpgroup (wgmma) of latents in registers with the basis in shared memory. A block
// has two kv heads of a sequence, so that latents, which are of all heads, are decoded half as often. It takes its share
// of the pages in their order: token o of a page that begins at position P has its key RoPE-rotated by o alone, with
// the same angles in all pages, and queries are rotated back by P. One warp copies pages, two rotate queries, and two
// or three warpgroups attend, a page each in turn, a warp to the same 16 tokens of 64 always.
//
// Two halves of each product of 64 x 64 x 192 take 1664 clocks of a multiprocessor's tensor cores for a page of two
// heads, and read as much shared memory as is possible in 832; everything else must fit alongside.
#pragma once

#include "consume.cuh"
#include "fill.cuh"
#include "join.cuh"
#include "kernels/common/merge_splits.cuh"
#include "produce.cuh"

namespace shadowkv {

// Grid: splits, heads / 2, batch.
template <class Shape>
__global__ __launch_bounds__(Shape::kThreads, 1) void attend_mixed_kernel(
    const MixedInputs in, const SplitOutputs<__nv_bfloat16> to) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char mixed_shared[];
  const MixedMemory<Shape> memory = {mixed_shared};
  const MixedShare share(in);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      init_barrier(memory.full(i), 1 + kQueryWarps); // the copier, who tells of bytes, and queries
      init_barrier(memory.empty(i), 4);              // each warp of its consumer
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  // Tells the compiler that this is uniform across a warp, so that what follows from it need not be in vector
  // registers.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  if (warpgroup == Shape::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kProducerRegisters));
    if (warp == 0)
      copy_pages<Shape>(in, share, memory);
    else if (warp <= kQueryWarps)
      rope_queries<Shape>(in, share, memory, threadIdx.x % 128 - 32);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kConsumerRegisters));
    fill_memory<Shape>(in, share, memory, threadIdx.x);
    MixedSums<Shape> sums[2]; // of two heads
    consume_pages<Shape>(share, memory, warpgroup, sums);
    sync_threads(1, Shape::kFillThreads); // this memory is no longer read: results replace it
#pragma unroll
    for (int head = 0; head < 2; ++head) leave_sums<Shape>(sums[head], memory.results(threadIdx.x / 32, head));
    sync_threads(1, Shape::kFillThreads);
    join_warps<Shape>(in, share, memory, to);
  }
#endif // other compilation passes have no wgmma, and no callers
}

} // namespace shadowkv
