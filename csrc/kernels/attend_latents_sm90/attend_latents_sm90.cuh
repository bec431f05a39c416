// Attention of one query per sequence over selected tokens, from latents of 8 and 4 bits and coded values, for Hopper:
// keys are rebuilt by warpgroup products (wgmma), whose second factor, the basis, is read from shared memory without
// passing through registers. Each warp then applies RoPE, scores and weighs its own 16 of 64 tokens, in the fragments
// that the product left, and adds their values to its own sums (attend_selected/value_codecs.cuh has the arithmetic).
//
// One block per multiprocessor. One warp finds tokens, one copies tiles of them, two prepare the basis of the next
// unit; the other warpgroups are consumers, each with its own tiles. The tiles of all units (sequence and kv head) form
// one line that is split into equal runs, one per block: no second wave, and a long sequence among short ones has as
// many blocks as it has work. Each consumer leaves one partial result per unit that it processes.
//
// Between finder and copier is a ring of token places, some tiles ahead of the copies: a chunk's number, its pages and
// its rows are three consecutive memory latencies, which no other warp has to wait for.
//
// A code becomes half by placing it in the mantissa of 1024, without a subtraction: the excess of a latent, 1152 for a
// byte and 1032 for four bits, times the basis' column sums is subtracted together with the mean, in a separate 16-rank
// product.
#pragma once

#include "consume.cuh"
#include "copy.cuh"
#include "find.cuh"
#include "kernels/common/early_launch.cuh"
#include "merge.cuh"

namespace shadowkv {

template <class Shape>
__global__ __launch_bounds__(Shape::kThreads, 1) void attend_latents_kernel(const LatentCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const LatentInputs& in = call.in;
  extern __shared__ __align__(1024) char latents_shared[];
  const LatentMemory<Shape> memory = {latents_shared};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kRing; ++i) {
      init_barrier(memory.stage_full(i), 32 + 1); // copies of the copier's lanes, and the copier
      init_barrier(memory.ring_full(i), 1);
      init_barrier(memory.ring_empty(i), 1);
    }
    for (int i = 0; i < Shape::kStages; ++i) init_barrier(memory.stage_empty(i), 4); // each warp of a consumer
    for (int i = 0; i < 2; ++i) {
      init_barrier(memory.unit_full(i), 1);
      init_barrier(memory.unit_empty(i), 4 * Shape::kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  } else if (threadIdx.x / 32 == 1) { // what is read here was written before the launch that selects
    const Run own = find_run(in, call.blocks, blockIdx.x);
    if (threadIdx.x == 32) memory.run() = own;
  }
  __syncthreads();
  const Run& run = memory.run(); // kept in shared memory, as registers are scarce
  // Tells the compiler that this is uniform across a warp, so that what follows from it need not be in vector
  // registers.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  if (warpgroup == Shape::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kProducerRegisters));
    wait_for_launch_before();
    let_next_launch_begin(); // the merge, on multiprocessors whose blocks have ended
    if (warp == 0)
      find_tokens<Shape>(in, run, memory);
    else if (warp == 1)
      copy_tiles<Shape>(in, memory);
    else {
      RunUnit unit(run);
      for (int number = 1; unit.advance(in); ++number)
        fill_unit<Shape, 64>(in, unit, memory, number, this_thread() % 64, 1, memory.sums());
    }
  } else if (run.length > 0) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kConsumerRegisters));
    consume_latents<Shape>(in, call.to, memory, warpgroup);
  }
#endif // other compilation passes have no wgmma, and no callers
}

} // namespace shadowkv
