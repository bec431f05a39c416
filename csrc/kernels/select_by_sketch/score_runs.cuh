// The second launch: scores the tokens of the kept runs by all bits.
#pragma once

#include "kernels/common/early_launch.cuh"
#include "queries.cuh"
#include "slices.cuh"

namespace shadowkv {

// kBytes: per token in a plane, 8, 16 or 32. kWide: more than 4 query heads. kSingle: chunks of one token.
template <int kBytes, bool kWide, bool kSingle>
__global__ void __launch_bounds__(32 * kScoreWarps, kBytes == 32 ? 2 : kScoreBlocks)
    score_runs_kernel(const SelectBySketch p) {
  __shared__ __align__(128) uint8_t memory[kScoreWarps * kStages * Stage<kBytes>::kSize];
  extern __shared__ uint32_t before[]; // as count_slices leaves it
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int log_chunk = kSingle ? 0 : p.log_chunk, log_run = 3 - log_chunk; // tokens of a chunk, chunks of a run
  const unsigned sequences = p.rows / p.heads;
  // What is read here was written before the launch that finds the runs.
  if (warp == 0) count_slices(p, sequences, before);
  __syncthreads();
  const SliceLine line = {before, sequences, before[sequences] * p.heads};
  wait_for_launch_before();
  let_next_launch_begin();

  // Warps of a block begin with the same slice of several heads, which covers much the same pages.
  unsigned number = blockIdx.x * kScoreWarps + warp;
  Slice own = line.find(p, number);
  const RunStages<kBytes> stages(memory);
#pragma unroll
  for (int slot = 0; slot < kStages; ++slot) stages.copy(p, own.named, own.head, own.left, slot * kBatch, slot);
#pragma unroll 1
  for (; number < line.all; number += kScoreWarps * gridDim.x) {
    const Slice next = line.find(p, number + kScoreWarps * gridDim.x);
    const QueryFragments<kBytes, kWide> queries(p, own.row);
    uint16_t* values = p.values(own.row) + (own.first << log_run) + (t * kRun + g >> log_chunk);
    const auto score_batch = [&](int first, int slot) {
      RunCodes<kBytes> codes;
      stages.load(codes, slot);
      const int ahead = first + kStages * kBatch;
      const bool here = ahead < p.slice;
      stages.copy(
          p, {here ? own.named.x : next.named.x, here ? own.named.y : next.named.y}, here ? own.head : next.head,
          here ? own.left : next.left, here ? ahead : ahead - p.slice, slot);
      if (first >= own.left) return;

      float score = queries.best_product(codes);
      score = fmaf(score, __half2float(__ushort_as_half(uint16_t(codes.scale << kScaleShift))), 0.f); // never -0
#pragma unroll
      for (int i = 0; i < 3; ++i)
        if (i < log_chunk) score = fmaxf(score, __shfl_xor_sync(~0u, score, 4 << i));
      score = fmaf(own.slope, score, __shfl_sync(~0u, own.more, first + t));
      if (first + t < own.left && (g & ((1 << log_chunk) - 1)) == 0)
        values[first * kRun >> log_chunk] = codes.scale == kExcluded ? kNever : finite_half(score);
    };
#pragma unroll 1
    for (int first = 0; first < p.slice; first += kStages * kBatch)
#pragma unroll
      for (int slot = 0; slot < kStages; ++slot) score_batch(first + slot * kBatch, slot);
    own = next;
  }
}

} // namespace shadowkv
