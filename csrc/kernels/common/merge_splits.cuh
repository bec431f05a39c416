// Merges partial results of attention whose tokens were split over thread blocks.
#pragma once

#include "constants.h"
#include "early_launch.cuh"
#include "mma.cuh"

namespace shadowkv {

__device__ __forceinline__ void store4(__nv_bfloat16* to, float4 x) {
  *reinterpret_cast<uint2*>(to) = {pack_bf16(x.x, x.y), pack_bf16(x.z, x.w)};
}

__device__ __forceinline__ void store4(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }

constexpr int kMergeThreads = 256;

// Partial results carry the log2-sum-exp2 of their scores; with one split they are the final ones, natural log.
template <typename Out>
struct SplitOutputs {
  Out* out;           // [rows, dim]
  float* lse;         // [rows]
  float* partial_out; // [rows, splits, dim]
  float* partial_lse; // [rows, splits]
};

// Grid: rows, batch * heads * group. Threads share the splits of a row and hold four dimensions each.
template <int kDim, typename Out>
__global__ void __launch_bounds__(kMergeThreads) merge_splits_kernel(const SplitOutputs<Out> to, int splits) {
  constexpr int kLanes = kDim / 4, kTeams = kMergeThreads / kLanes;
  wait_for_launch_before();
  const int64_t row = blockIdx.x;
  const int team = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const float* lse = to.partial_lse + row * splits;
  float top = -INFINITY, total = 0.0f;
  for (int i = threadIdx.x % 32; i < splits; i += 32) top = fmaxf(top, lse[i]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  float4 y = {};
  if (team < kTeams) {
#pragma unroll 4
    for (int i = team; i < splits; i += kTeams) {
      // A split without tokens has weight 0.
      const float weight = lse[i] == -INFINITY ? 0.0f : exp2_fast(lse[i] - top);
      const float4 x = reinterpret_cast<const float4*>(to.partial_out)[(row * splits + i) * kLanes + lane];
      total += weight;
      y.x += weight * x.x, y.y += weight * x.y, y.z += weight * x.z, y.w += weight * x.w;
    }
  }
  __shared__ float4 parts[kTeams][kLanes];
  __shared__ float totals[kTeams];
  if (team < kTeams) {
    parts[team][lane] = y;
    if (lane == 0) totals[team] = total;
  }
  __syncthreads();
  if (team > 0) return;
#pragma unroll
  for (int i = 1; i < kTeams; ++i) {
    const float4 x = parts[i][lane];
    total += totals[i];
    y.x += x.x, y.y += x.y, y.z += x.z, y.w += x.w;
  }
  const float share = total == 0.0f ? 0.0f : 1.0f / total;
  store4(to.out + (row * kLanes + lane) * 4, {y.x * share, y.y * share, y.z * share, y.w * share});
  if (lane == 0) to.lse[row] = (top + log2f(total)) * kLn2;
}

} // namespace shadowkv
