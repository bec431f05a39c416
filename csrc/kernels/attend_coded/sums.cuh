// What a lane sums over pages, and weights in fixed point. A lane has a page's scores and weights of query t and the
// eight tokens of g.
#pragma once

#include "codes.cuh"

namespace shadowkv {

// Over the lanes with the same t.
__device__ __forceinline__ float max_over_rows(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = max_or_nan(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

__device__ __forceinline__ float sum_over_rows(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ void eight_floats(const __half* from, float (&y)[8]) {
  const uint4 x = *reinterpret_cast<const uint4*>(from);
  const uint32_t pair[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = __half22float2(half2_of(pair[i]));
    y[2 * i] = two.x, y[2 * i + 1] = two.y;
  }
}

__device__ __forceinline__ void eight_floats(const float* from, float (&y)[8]) {
  const float4 x = reinterpret_cast<const float4*>(from)[0], z = reinterpret_cast<const float4*>(from)[1];
  y[0] = x.x, y[1] = x.y, y[2] = x.z, y[3] = x.w, y[4] = z.x, y[5] = z.y, y[6] = z.z, y[7] = z.w;
}

// Which of a page's tokens are attended to, for lane g's places 2 g + 16 i, + 1.
struct CodedSpan {
  uint32_t start, span;
  __device__ __forceinline__ bool has(int i) const { return start + (i / 2 * 16 + i % 2) < span; }
};

// Eight weights as integers up to 65535, the last bits of floats from 2^23 on: a factor scales the largest weight to
// 65535.
struct CodedIntegers {
  uint32_t whole[8];

  __device__ __forceinline__ CodedIntegers(const float (&x)[8], float inverse) {
#pragma unroll
    for (int i = 0; i < 8; ++i) whole[i] = __float_as_uint(fmaf(x[i], inverse, 8388608.0f));
  }

  static __device__ __forceinline__ float inverse_of(float largest) {
    return largest > 1e-30f ? __fdividef(65535.0f, largest) : 0.0f;
  }

  __device__ __forceinline__ uint32_t sum() const {
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) all += whole[i] - __float_as_uint(8388608.0f);
    return all;
  }

  // Upper bytes and lower bytes.
  __device__ __forceinline__ void bytes(uint2& upper, uint2& lower) const {
    uint32_t pair[4]; // lower bytes, then upper bytes, of two tokens
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = permute(whole[2 * i], whole[2 * i + 1], 0x5140);
    upper = {permute(pair[0], pair[1], 0x7632), permute(pair[2], pair[3], 0x7632)};
    lower = {permute(pair[0], pair[1], 0x5410), permute(pair[2], pair[3], 0x5410)};
  }
};

// A warp's weights of a page: bytes of query g / 2 in row g, the upper ones in even rows.
struct alignas(16) CodedWeights {
  uint8_t row[8][kPage + 16];

  // Stores a lane's weights where lane t reads those of g = t and g = t + 4.
  __device__ __forceinline__ void write(const CodedIntegers& weights, int g, int t) {
    uint2 upper, lower;
    weights.bytes(upper, lower);
    *reinterpret_cast<uint2*>(&row[2 * t][g % 4 * 16 + g / 4 * 8]) = upper;
    *reinterpret_cast<uint2*>(&row[2 * t + 1][g % 4 * 16 + g / 4 * 8]) = lower;
  }

  __device__ __forceinline__ uint4 read(int g, int t) const {
    return *reinterpret_cast<const uint4*>(&row[g][16 * t]);
  }
};

// A lane's results for query t so far.
struct CodedSums {
  float peak = -INFINITY, sum = 0.0f, ones = 0.0f; // sums over the lane's own tokens
  float acc[4][4] = {};                            // quads of lane g x places in them

  // Updates the peak with a page's scores, and returns the factor by which sums so far shrink.
  __device__ __forceinline__ float raise_peak(float top) {
    // Every page has a token, so the new peak is finite, or NaN, which must propagate.
    const float new_peak = max_or_nan(peak, max_over_rows(top)), fade = exp2_fast(peak - new_peak);
    peak = new_peak;
    return fade;
  }

  // Turns a page's scores x into weights, and rescales the sums so far.
  __device__ __forceinline__ void weigh(float (&x)[8], float fade) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = exp2_fast(x[i] - peak), total += x[i];
    sum = sum * fade + total;
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) acc[n][r] *= fade;
  }
};

// Adds the integer products of a page's bytes and weights to c, which whole_sum splits. `decode` produces quads of
// tokens 2 i and 2 i + 1, and `weight` the bytes of the weights of tokens 4 i to 4 i + 3 for dimensions at place r.
template <bool kSigned, class Decode, class Weight>
__device__ __forceinline__ void add_products(const Decode& decode, const Weight& weight, int32_t (&c)[2][4][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t quad[2][4];
    decode(i, quad);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      // The byte of a token at place r, that of the dimensions that are r-th in their quads; zeros elsewhere.
      const uint32_t place = 0xfu << 4 * r, first = i % 2 * 2;
      const uint32_t b[2] = {
          permute(weight(i / 2, r), 0, (0x4444 & ~place) | first << 4 * r),
          permute(weight(i / 2, r), 0, (0x4444 & ~place) | (first + 1) << 4 * r)};
      if constexpr (kSigned) {
        mma_s8u8(c[0][r], {quad[0][0], quad[0][1], quad[1][0], quad[1][1]}, b);
        mma_s8u8(c[1][r], {quad[0][2], quad[0][3], quad[1][2], quad[1][3]}, b);
      } else {
        mma_u8u8(c[0][r], {quad[0][0], quad[0][1], quad[1][0], quad[1][1]}, b);
        mma_u8u8(c[1][r], {quad[0][2], quad[0][3], quad[1][2], quad[1][3]}, b);
      }
    }
  }
}

// The sum of quad n at place r.
__device__ __forceinline__ int32_t whole_sum(const int32_t (&c)[2][4][4], int n, int r) {
  return 256 * c[n / 2][r][n % 2 * 2] + c[n / 2][r][n % 2 * 2 + 1];
}

} // namespace shadowkv
