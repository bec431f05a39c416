// Scores to weights, in the fragments that products leave: a thread has two rows, g and g + 8 of its warp's 16, and two
// neighbouring columns, 2t and 2t + 1, from each of 16 groups of eight, in s[4 i + 2 r + e].
#pragma once

#include "kernels/common/mma.cuh"

#include <cmath>
#include <type_traits>

namespace shadowkv {

// Columns past the last one that row g sees, counted from 2t; for row g + 8 the last one is eight further, or the same.
template <bool kCausal>
__device__ __forceinline__ void mask_scores(float (&s)[64], int last) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int column = i / 4 * 8 + i % 2 - (kCausal ? i % 4 / 2 * 8 : 0);
    if (column > last) s[i] = -INFINITY;
  }
}

struct RunningSoftmax {
  // Sums are rescaled only if a score exceeds the peak by more than this many powers of two: weights stay below 2^8,
  // and most blocks do not rescale sums.
  static constexpr float kSlack = 8;

  float peak[2] = {-INFINITY, -INFINITY}; // of raised scores before their scale
  float total[2] = {};                    // of this thread's weights
  float shrunk[2];                        // factors of the sums, if they are rescaled

  // Turns scores, all raised by so much, into weights. Returns whether this warp's sums so far must be rescaled. The
  // first block must have a score above -inf for each row.
  __device__ __forceinline__ bool weigh(float (&s)[64], float scale, float raise) {
    float high[2][2] = {{s[0], s[1]}, {s[2], s[3]}};
#pragma unroll
    for (int i = 0; i < 64; ++i) high[i / 2 % 2][i % 2] = fmaxf(high[i / 2 % 2][i % 2], s[i]);
    bool rises = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float& highest = high[r][0];
      highest = fmaxf(highest, high[r][1]);
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(fmaxf(highest, __shfl_xor_sync(~0u, highest, 2)) + raise, peak[r]);
      rises |= (highest - peak[r]) * scale > kSlack;
    }
    rises = __any_sync(~0u, rises);
    if (rises) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        shrunk[r] = exp2_fast((peak[r] - high[r][0]) * scale);
        peak[r] = high[r][0];
        total[r] *= shrunk[r];
      }
    }
    const float base[2] = {(peak[0] - raise) * scale, (peak[1] - raise) * scale};
    float sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      s[i] = exp2_fast(fmaf(s[i], scale, -base[i / 2 % 2]));
      sum[i / 2 % 2][i % 2] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) total[r] += sum[r][0] + sum[r][1];
    return rises;
  }

  template <int kCount>
  __device__ __forceinline__ void shrink(float (&sums)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] *= shrunk[i / 2 % 2];
  }

  // The divisor of a row's sums.
  __device__ __forceinline__ float row_total(int r) const {
    const float half = total[r] + __shfl_xor_sync(~0u, total[r], 1);
    return half + __shfl_xor_sync(~0u, half, 2);
  }
};

// Two floats as 16 bits each, the first in the lower half.
template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Element, __half>) {
    uint32_t x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
  } else {
    return pack_bf16(low, high);
  }
}

// Weights as a product's first factor, 16 keys at a time: (g, 2t..) (g + 8, 2t..) (g, 2t + 8..) (g + 8, 2t + 8..),
// which is the layout of scores.
template <class Element>
__device__ __forceinline__ void pack_weights(uint32_t (&p)[32], const float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
}

} // namespace shadowkv
