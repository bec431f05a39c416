// Computes outputs from the sums of warps, and of blocks if several share a sequence and kv head.
#pragma once

#include "constants.h"
#include "values.cuh"

namespace shadowkv {

// Writes attention outputs from y [8][row] float in shared memory (rows from `group` on are zero), multiplied by the
// codec's transposed rotation where there is one. Products split both factors in two bf16: errors stay near float32's.
template <int kDim, bool kRotate>
__device__ __forceinline__ void write_outputs(
    const float* y, int row, const float* __restrict__ rotation, __nv_bfloat16* out, int group) {
  if constexpr (!kRotate) {
    for (int i = threadIdx.x; i < group * kDim / 2; i += blockDim.x) {
      const float* x = y + i / (kDim / 2) * row + i % (kDim / 2) * 2;
      reinterpret_cast<uint32_t*>(out)[i] = pack_bf16(x[0], x[1]);
    }
  } else {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const auto halves = [](float2 x, uint32_t& high, uint32_t& low) {
      high = pack_bf16(x.x, x.y);
      low = pack_bf16(x.x - __uint_as_float(high << 16), x.y - __uint_as_float(high & 0xffff0000u));
    };
    for (int tile = threadIdx.x / 32; tile < kDim / 16; tile += kAttendWarps) {
      float c[4] = {};
#pragma unroll 4
      for (int step = 0; step < kDim / 16; ++step) {
        uint32_t high[4], low[4], b_high[2], b_low[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* x = rotation + (16 * tile + g + 8 * (i % 2)) * kDim + 16 * step + 8 * (i / 2) + 2 * t;
          halves(__ldg(reinterpret_cast<const float2*>(x)), high[i], low[i]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
          halves(*reinterpret_cast<const float2*>(y + g * row + 16 * step + 8 * i + 2 * t), b_high[i], b_low[i]);
        mma_bf16(c, low, b_high);
        mma_bf16(c, high, b_low);
        mma_bf16(c, high, b_high);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (2 * t + i % 2 < group) out[(2 * t + i % 2) * kDim + 16 * tile + g + 8 * (i / 2)] = __float2bfloat16(c[i]);
    }
  }
}

// Merges the four warps' results. Values are in units of value_scale.
template <class Shape>
__device__ __forceinline__ void join_warps(
    const AttendInputs& in, const AttendOutputs& to, AttendSums<Shape>& sums, float value_scale, char* shared) {
  constexpr int kDim = Shape::kDim;
  const int head = blockIdx.y, batch = blockIdx.z;
  const BlockQueries block(in);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sums.sum[i] = rows_sum(sums.sum[i]);
#pragma unroll
    for (int c = 0; c < Shape::kScales; ++c) sums.coded[c][i] = rows_sum(sums.coded[c][i]);
  }
  wait_copy_groups<0>();
  __syncthreads();
  float* const merged = reinterpret_cast<float*>(shared);
  float* const parts = merged + kAttendQueries * Shape::kMergeRow;
  float2* const states = reinterpret_cast<float2*>(parts + kAttendWarps * kAttendQueries * Shape::kMergeRow);
  constexpr int kStep = Shape::kFp8Values ? 2 : 1, kBetween = Shape::kFp8Values ? 1 : 8; // of dimensions
  float* const mine = parts + warp * kAttendQueries * Shape::kMergeRow + 2 * t * Shape::kMergeRow + kStep * g;
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      mine[j % 2 * Shape::kMergeRow + 16 * i + j / 2 * kBetween] = WarpValues<Shape>::finish(sums, i, j) * value_scale;
  }
  if (g < 2)
    states[warp * kAttendQueries + 2 * t + g] =
        g == 0 ? make_float2(sums.top[0], sums.sum[0]) : make_float2(sums.top[1], sums.sum[1]);
  __syncthreads();
  const bool only_split = in.splits == 1;
  const int64_t unit = int64_t(batch) * in.heads + head, first = unit * in.group + block.first;
  for (int i = threadIdx.x; i < kAttendQueries * (kDim / 4); i += kAttendWarps * 32) {
    const int query = i / (kDim / 4), at = i % (kDim / 4) * 4;
    float2 state[kAttendWarps];
    float highest = -INFINITY, total = 0;
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) {
      state[w] = states[w * kAttendQueries + query];
      highest = fmaxf(highest, state[w].x);
    }
    float x[4] = {};
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) {
      const float share = highest > -INFINITY ? exp2_fast(state[w].x - highest) : 0.f;
      const float4 part =
          *reinterpret_cast<const float4*>(parts + (w * kAttendQueries + query) * Shape::kMergeRow + at);
      total += state[w].y * share;
      x[0] += part.x * share, x[1] += part.y * share, x[2] += part.z * share, x[3] += part.w * share;
    }
    if (only_split) {
      const float scale = query < block.count && total > 0 ? 1 / total : 0.f;
      *reinterpret_cast<float4*>(merged + query * Shape::kMergeRow + at) =
          make_float4(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale);
      if (at == 0 && query < block.count) to.lse[first + query] = (highest + log2f(total)) * kLn2;
    } else if (query < block.count) {
      float* partial =
          to.partial + ((unit * in.splits + block.split) * in.group + block.first + query) * (kDim + 4);
      *reinterpret_cast<float4*>(partial + at) = make_float4(x[0], x[1], x[2], x[3]);
      if (at == 0) *reinterpret_cast<float2*>(partial + kDim) = make_float2(highest, total);
    }
  }
  if (!only_split) return;
  __syncthreads();
  write_outputs<kDim, Shape::kRotated>(merged, Shape::kMergeRow, in.rotation, to.out + first * kDim, block.count);
}

// Merges the splits of one sequence and kv head, for up to eight of its queries.
template <int kDim, bool kRotate>
__global__ __launch_bounds__(kAttendWarps * 32) void merge_selected_kernel(
    const AttendOutputs to, const float* rotation, int group, int splits) {
  __shared__ float y[kAttendQueries][kDim + 4];
  const int64_t unit = blockIdx.x;
  const int before = blockIdx.y * kAttendQueries, count = min(group - before, kAttendQueries);
  for (int i = threadIdx.x; i < kAttendQueries * kDim; i += kAttendWarps * 32) {
    const int query = i / kDim, at = i % kDim;
    y[query][at] = 0;
    if (query >= count) continue;
    const float* partial = to.partial + (unit * splits * group + before + query) * (kDim + 4);
    const int64_t next = group * (kDim + 4);
    float highest = -INFINITY, total = 0, x = 0;
    for (int split = 0; split < splits; ++split) highest = fmaxf(highest, partial[split * next + kDim]);
    if (highest > -INFINITY) {
      for (int split = 0; split < splits; ++split) {
        const float share = exp2_fast(partial[split * next + kDim] - highest);
        total += partial[split * next + kDim + 1] * share;
        x += partial[split * next + at] * share;
      }
      y[query][at] = x / total;
    }
    if (at == 0) to.lse[unit * group + before + query] = (highest + log2f(total)) * kLn2;
  }
  __syncthreads();
  write_outputs<kDim, kRotate>(
      &y[0][0], kDim + 4, rotation, to.out + (unit * group + before) * kDim, count);
}

} // namespace shadowkv
