// The second launch: scores the tokens of the kept runs by all bits, which are distributed over warps in slices.
#pragma once

#include "kernels/common/early_launch.cuh"
#include "queries.cuh"
#include "radix_select.cuh"
#include "shape.cuh"
#include "stages.cuh"

namespace shadowkv {

// A slice of the kept runs of a row, from a lane's view.
struct Slice {
  uint2 named; // the page id and run of the lane's run
  float slope, more; // linear map from its tokens' scores to exponents
  unsigned row, head, first;
  int left; // runs from the first on, at most those of a slice; 0 or less if there is no such slice
};

// Stores in `before` how many slices of a head there are before each sequence, and in total. For one warp.
__device__ __forceinline__ void count_slices(const SelectBySketch& p, unsigned sequences, uint32_t* before) {
  const int lane = threadIdx.x % 32;
  uint32_t sum = 0;
  for (unsigned first = 0; first < sequences; first += 32) {
    const unsigned sequence = first + lane;
    const uint32_t slices = sequence < sequences ? (p.kept_of(sequence) + p.slice - 1) / p.slice : 0;
    const uint32_t inclusive = scan_warp(slices);
    if (sequence < sequences) before[sequence] = sum + inclusive - slices;
    sum += __shfl_sync(~0u, inclusive, 31);
  }
  if (lane == 0) before[sequences] = sum;
}

// The slices of all rows in order, with those of all heads at one place adjacent.
struct SliceLine {
  const uint32_t* before; // as count_slices leaves it
  unsigned sequences, all;

  __device__ __forceinline__ Slice find(const SelectBySketch& p, unsigned number) const {
    const int lane = threadIdx.x % 32;
    Slice x{};
    if (number >= all) return x;
    const unsigned place = number / p.heads;
    int sequence = -1; // the last that begins at or before it
    for (unsigned first = 0; first < sequences; first += 32)
      sequence += __popc(__ballot_sync(~0u, first + lane < sequences && before[first + lane] <= place));
    x.head = number % p.heads, x.row = sequence * p.heads + x.head, x.first = (place - before[sequence]) * p.slice;
    const unsigned at = min(x.first + lane, unsigned(p.region.keep - 1));
    const RowState state = p.state(x.row);
    x.named = p.kept(x.row)[at];
    x.slope = state.slope, x.more = fmaf(-state.slope, state.edge, p.weights(x.row)[at]);
    x.left = min(state.count - int(x.first), p.slice);
    return x;
  }
};

// kBytes: per token in a plane, 8, 16, 32 or 64. kQueries: most query heads of a kv head, 4, 8 or 16. kSingle: chunks of
// one token.
template <int kBytes, int kQueries, bool kSingle>
__global__ void __launch_bounds__(32 * kScoreWarps<kBytes>, kScoreBlocks<kBytes, kQueries>)
    score_runs_kernel(const SelectBySketch p) {
  constexpr int kWarps = kScoreWarps<kBytes>;
  __shared__ __align__(128) uint8_t memory[kWarps * kStages * Stage<kBytes>::kSize];
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
  unsigned number = blockIdx.x * kWarps + warp;
  Slice own = line.find(p, number);
  const RunStages<kBytes> stages(memory);
#pragma unroll
  for (int slot = 0; slot < kStages; ++slot) stages.copy(p, own.named, own.head, own.left, slot * kBatch, slot);
#pragma unroll 1
  for (; number < line.all; number += kWarps * gridDim.x) {
    const Slice next = line.find(p, number + kWarps * gridDim.x);
    const QueryFragments<kBytes, kQueries> queries(p, own.row);
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
