// Merges the results of a block's warps.
#pragma once

#include "constants.h"
#include "kernels/common/merge_splits.cuh"
#include "values.cuh"

namespace shadowkv {

// Stores a warp's sums of a head where all warps can read them.
template <class Shape>
__device__ __forceinline__ void leave_sums(const MixedSums<Shape>& sums, MixedResults<Shape>& results) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, query = 2 * t % Shape::kQueries;
  const float sum[2] = {rows_sum(sums.sum[0]), rows_sum(sums.sum[1])};
  if (g == 0 && 2 * t < Shape::kQueries) {
#pragma unroll
    for (int j = 0; j < 2; ++j) results.peak[query + j] = sums.top[j], results.sum[query + j] = sum[j];
  }
  const int further = 2 * t < Shape::kQueries ? 0 : 2; // vectors
#pragma unroll
  for (int i = 0; i < Shape::kSums; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      results.out[query + j % 2][(4 * g + i / 2 + further) * kVector + i % 2 * 2 + j / 2] = sums.o[i][j];
}

// Multiplies 128 numbers, one of each thread of a team of four warps, by the Hadamard matrix of rows of length 1, as
// values were before they were coded. `row` is theirs in shared memory.
__device__ __forceinline__ float multiply_by_hadamard(float y, float* row, int dim, int barrier) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_xor_sync(~0u, y, step);
    y = dim & step ? other - y : y + other;
  }
  row[dim] = y;
  sync_threads(barrier, kMixedDim);
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kMixedDim / 32; ++warp) {
    const float x = row[warp * 32 + dim % 32];
    sum += __popc(warp & dim / 32) % 2 ? -x : x;
  }
  return sum * 0.08838834764831845f; // 1 / sqrt(128)
}

// Writes the outputs, or a split's share of them.
template <class Shape>
__device__ __forceinline__ void join_warps(
    const MixedInputs& in, const MixedShare& share, const MixedMemory<Shape>& memory,
    const SplitOutputs<__nv_bfloat16>& to) {
  constexpr int kWarps = 4 * Shape::kConsumers, kAtOnce = Shape::kFillThreads / kMixedDim;
  const int dim = threadIdx.x % kMixedDim;
  const float* const largest = in.largest + in.value_states[share.sequence] * in.largest_state + dim;
  for (int i = threadIdx.x / kMixedDim; i < 2 * in.group; i += kAtOnce) {
    const int head = i / in.group, query = i % in.group;
    float top = -INFINITY, total = 0.0f, y = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = max_or_nan(top, memory.results(w, head).peak[query]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      // Without tokens a sum is 0, otherwise at least 2^-8, or NaN, which must propagate.
      const MixedResults<Shape>& of_warp = memory.results(w, head);
      const float weight = of_warp.sum[query] == 0.0f ? 0.0f : exp2_fast(of_warp.peak[query] - top);
      total += weight * of_warp.sum[query], y += weight * of_warp.out[query][dim];
    }
    y = total == 0.0f ? 0.0f : y / total * largest[(share.head + head) * kMixedDim];
    y = multiply_by_hadamard(y, memory.results(0, head).out[query], dim, 2 + threadIdx.x / kMixedDim);
    const float log_sum = top + log2f(total);
    const int64_t row = (share.sequence * in.heads + share.head + head) * in.group + query;
    const int64_t partial = row * in.splits + blockIdx.x;
    if (in.splits == 1) {
      to.out[row * kMixedDim + dim] = __float2bfloat16(y);
      if (dim == 0) to.lse[row] = log_sum * kLn2;
    } else {
      to.partial_out[partial * kMixedDim + dim] = y;
      if (dim == 0) to.partial_lse[partial] = log_sum;
    }
  }
}

} // namespace shadowkv
