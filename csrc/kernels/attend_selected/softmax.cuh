// Weights of a warp's tokens, and its sums so far.
#pragma once

#include "constants.h"
#include "shape.cuh"

namespace shadowkv {

template <class Shape>
struct AttendSums {
  static constexpr int kTiles = Shape::kTiles, kScales = Shape::kScales;
  // Weighted values: (dimensions 16 i + g, + 8; queries 2t, 2t + 1), of fp8 (dimensions 16 i + 2g, + 1; ...).
  float o[Shape::kDim / 16][4] = {};
  // For queries 2t, 2t + 1: largest score, sum of weights, sums of weights x scale.
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, coded[kScales][2] = {};

  // Turns scores s (tokens g, g + 8; queries 2t, 2t + 1) into weights: p, times each of the scales, as the second
  // factor of a product (tokens 2t, 2t + 1; query g).
  __device__ __forceinline__ void weigh(
      uint32_t (&p)[kScales][kTiles][2], float (&s)[kTiles][4], uint32_t valid, float score_scale,
      const float (&log_weight)[kTiles][2], const float (&scale)[kScales][kTiles][2]) {
    const int g = threadIdx.x % 32 / 4;
    float next_top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[m][i] = valid >> (16 * m + i / 2 * 8 + g) & 1
            ? fmaf(s[m][i], score_scale, log_weight[m][i / 2] * kLog2E)
            : -INFINITY;
        next_top[i % 2] = fmaxf(next_top[i % 2], s[m][i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) next_top[i] = fmaxf(top[i], rows_max(next_top[i]));
    if (__any_sync(~0u, next_top[0] > top[0] || next_top[1] > top[1])) {
      float shrink[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        shrink[i] = exp2_fast(top[i] - next_top[i]);
        sum[i] *= shrink[i], top[i] = next_top[i];
#pragma unroll
        for (int c = 0; c < kScales; ++c) coded[c][i] *= shrink[i];
      }
#pragma unroll
      for (int i = 0; i < Shape::kDim / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o[i][j] *= shrink[j % 2];
      }
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = exp2_fast(s[m][2 * half] - top[0]);
        const float y = exp2_fast(s[m][2 * half + 1] - top[1]);
        sum[0] += x, sum[1] += y;
#pragma unroll
        for (int c = 0; c < kScales; ++c) {
          const float factor = Shape::kCodes ? scale[c][m][half] : 1.f;
          const uint32_t both = Shape::kFp8Values ? pack_f16(x, y) : pack_bf16(x * factor, y * factor);
          if constexpr (Shape::kCodes) coded[c][0] += unpack_bf16(both).x, coded[c][1] += unpack_bf16(both).y;
          p[c][m][half] = transpose_matrix(both);
        }
      }
    }
  }
};

} // namespace shadowkv
