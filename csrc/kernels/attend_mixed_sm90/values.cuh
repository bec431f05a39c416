// Values of a warp's tokens, looked up in the codebook, and their sums.
#pragma once

#include "kernels/common/mma.cuh"
#include "shape.cuh"

namespace shadowkv {

// Vector i of the four whose indices are the bytes of x, from the lane's own copy of the codebook.
__device__ __forceinline__ uint2 look_up(const char* codebook, uint32_t x, int i) {
  constexpr int kShift = 7; // an entry and its copies take 128 bytes
  static_assert(kCopies * 8 == 1 << kShift);
  const uint32_t at = i == 0 ? x << kShift : x >> (8 * i - kShift);
  return *reinterpret_cast<const uint2*>(codebook + (at & 0xff << kShift | threadIdx.x % kCopies * 8));
}

// The same vector of two tokens; both halves of a register belong to the same dimension.
struct TwoVectors {
  uint32_t dim[4];

  __device__ __forceinline__ TwoVectors(const char* codebook, const uint32_t (&x)[2], int i) {
    const uint2 first = look_up(codebook, x[0], i), second = look_up(codebook, x[1], i);
    dim[0] = __byte_perm(first.x, second.x, 0x5410), dim[1] = __byte_perm(first.x, second.x, 0x7632);
    dim[2] = __byte_perm(first.y, second.y, 0x5410), dim[3] = __byte_perm(first.y, second.y, 0x7632);
  }
};

// A warp's results for a head. Lane g has vectors 4 g to 4 g + 3 of its tokens.
template <class Shape>
struct MixedSums {
  // o[2 i + n]: (dimensions 2 n and 2 n + 1 of vector 4 g + i; queries 2t, 2t + 1); with few queries, from t = 2 on, of
  // vector 4 g + i + 2.
  float o[Shape::kSums][4] = {};
  float top[2] = {-INFINITY, -INFINITY}; // for queries 2t, 2t + 1: the score that weights are relative to
  float sum[2] = {};                     // of weights, of this lane's tokens

  // Scores s (tokens g, g + 8; queries 2t, 2t + 1), -inf for tokens that do not count; at least one token counts.
  __device__ __forceinline__ void add(const float (&s)[4], const char* codes, const char* codebook) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    raise_top(fmaxf(s[0], s[2]), fmaxf(s[1], s[3]));
    uint32_t p[2]; // weights as the second factor: (tokens 2t, 2t + 1; query g)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t both = pack_f16(exp2_fast(s[2 * half] - top[0]), exp2_fast(s[2 * half + 1] - top[1]));
      const float2 rounded = __half22float2(half2_of(both));
      sum[0] += rounded.x, sum[1] += rounded.y;
      p[half] = transpose_matrix(both);
    }
    uint32_t x[2][2]; // for tokens 2t, 2t + 1 and those 8 further on: the indices of four vectors
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i / 2][i % 2] =
          *reinterpret_cast<const uint32_t*>(codes + (i / 2 * 8 + 2 * t + i % 2) * kValueRow + 4 * g);
    if constexpr (Shape::kFew) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t b[2] = {g < 4 ? p[half] : 0, g < 4 ? 0 : p[half]};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const TwoVectors v(codebook, x[half], i), w(codebook, x[half], i + 2);
          mma_f16(o[2 * i], {v.dim[0], v.dim[1], w.dim[0], w.dim[1]}, b);
          mma_f16(o[2 * i + 1], {v.dim[2], v.dim[3], w.dim[2], w.dim[3]}, b);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const TwoVectors v(codebook, x[0], i), w(codebook, x[1], i);
        mma_f16(o[2 * i], {v.dim[0], v.dim[1], w.dim[0], w.dim[1]}, p);
        mma_f16(o[2 * i + 1], {v.dim[2], v.dim[3], w.dim[2], w.dim[3]}, p);
      }
    }
  }

  // Weights may exceed one, up to 2^8, before their reference moves, which is rare.
  __device__ __forceinline__ void raise_top(float first, float second) {
    if (!__any_sync(~0u, first > top[0] + 8 || second > top[1] + 8)) return;
    const float highest[2] = {first, second};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float next = fmaxf(top[j], rows_max(highest[j])), shrink = exp2_fast(top[j] - next);
      top[j] = next, sum[j] *= shrink;
#pragma unroll
      for (int i = 0; i < Shape::kSums; ++i) o[i][j] *= shrink, o[i][j + 2] *= shrink;
    }
  }
};

} // namespace shadowkv
