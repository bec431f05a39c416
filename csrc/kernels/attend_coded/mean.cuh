// What mean keys add to the scores of keys that are stored without them: queries x RoPE(mean), by the angle addition
// theorem. With P the position of a page's first token, the token at offset o has
//   sum over frequencies f of A_f cos(o f) + B_f sin(o f), A_f = along_f cos(P f) + across_f sin(P f) and
//   B_f = across_f cos(P f) - along_f sin(P f),
// a product of a matrix that is the same for all pages, in half in shared memory, and of one that is made of a page's
// own row of the tables. Along and across are what rope_products in shadowkv/ops/attend_coded/reference.py says.
#pragma once

#include "constants.h"
#include "queries.cuh"

namespace shadowkv {

constexpr int kFrequencies = kCodedDim / 2;

struct MeanInputs {
  const float* q;        // [batch, heads * group, 128], dense; after RoPE
  const float* mean;     // states of [heads, 128]
  const int64_t* states; // [batch]
  const int64_t* first;  // [batch]
  const float* cos;      // [positions, half]
  const float* sin;
  int64_t mean_state; // elements between consecutive means
  float magnitude;    // of cos and sin
  int half;           // frequencies, a multiple of 4
  int positions;
  bool interleaved;
};

// Lane t has frequencies 16 t to 16 t + 15. At step s of 8, which takes two of them, A and B of each are neighbours.
struct MeanShared {
  static constexpr int kColumns = 2 * kFrequencies + 8; // eight rows lie in all banks
  __half near[kPage][kColumns];                         // token 16 i + 2 g + b at row 16 i + 8 b + g
  float4 products[kCodedQueries][4][9];                 // along, across of two frequencies, by query, t and step
  float rest[kCodedQueries];                            // of dimensions that RoPE leaves

  __device__ __forceinline__ void fill(
      const MeanInputs& in, int64_t sequence, int head, int64_t first_row, int queries) {
    const float inverse = 1.0f / in.magnitude;
    for (int i = threadIdx.x; i < kPage * kFrequencies; i += blockDim.x) {
      const int row = i / kFrequencies, frequency = i % kFrequencies, token = row / 16 * 16 + row % 8 * 2 + row / 8 % 2;
      const int t = frequency / 16, step = frequency % 16 / 2, place = frequency % 2;
      float cos = 0.0f, sin = 0.0f;
      if (frequency < in.half) {
        const int at = min(token, in.positions - 1) * in.half + frequency;
        cos = in.cos[at] * inverse, sin = in.sin[at] * inverse;
      }
      *reinterpret_cast<__half2*>(&near[row][16 * step + 8 * place + 2 * t]) = __floats2half2_rn(cos, sin);
    }
    const float scale = kLog2E * rsqrtf(float(kCodedDim));
    const float* mean = in.mean + in.states[sequence] * in.mean_state + head * kCodedDim;
    for (int i = threadIdx.x; i < kCodedQueries * kFrequencies; i += blockDim.x) {
      const int query = i / kFrequencies, frequency = i % kFrequencies;
      float along = 0.0f, across = 0.0f;
      if (query < queries && frequency < in.half) {
        const float* q = in.q + (first_row + query) * kCodedDim;
        const int x = in.interleaved ? 2 * frequency : frequency, y = in.interleaved ? x + 1 : x + in.half;
        along = (q[x] * mean[x] + q[y] * mean[y]) * scale, across = (q[y] * mean[x] - q[x] * mean[y]) * scale;
      }
      float4& to = products[query][frequency / 16][frequency % 16 / 2];
      if (frequency % 2 == 0) to.x = along, to.y = across;
      else to.z = along, to.w = across;
    }
    if (threadIdx.x < kCodedQueries) {
      float sum = 0.0f;
      if (threadIdx.x < queries)
        for (int i = 2 * in.half; i < kCodedDim; ++i)
          sum += in.q[(first_row + threadIdx.x) * kCodedDim + i] * mean[i];
      rest[threadIdx.x] = sum * scale;
    }
  }

  // Terms of query t and the eight tokens of g of two pages: even columns are those of the one that is wanted now, odd
  // ones those of the next. This lane rotates query g / 2 (RoPE) to `position`, that of the first token of page g % 2.
  __device__ __forceinline__ void terms(
      const MeanInputs& in, int64_t position, int g, int t, float (&now)[8], float (&later)[8]) const {
    // Past a row's end there may be no more positions.
    const int64_t at = min(position, int64_t(in.positions - 1)) * in.half + 16 * t;
    const uint32_t row = shared_address(&near[threadIdx.x % 16][threadIdx.x % 32 / 16 * 8]);
    float c[4][4] = {};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      float4 cos = {}, sin = {};
      if (16 * t + 4 * pair < in.half) {
        cos = __ldg(reinterpret_cast<const float4*>(in.cos + at) + pair);
        sin = __ldg(reinterpret_cast<const float4*>(in.sin + at) + pair);
      }
#pragma unroll
      for (int one = 0; one < 2; ++one) {
        const int step = 2 * pair + one;
        const float4 x = products[g / 2][t][step];
        const float cos0 = one == 0 ? cos.x : cos.z, cos1 = one == 0 ? cos.y : cos.w;
        const float sin0 = one == 0 ? sin.x : sin.z, sin1 = one == 0 ? sin.y : sin.w;
        const uint32_t b[2] = {
            pack_half(x.x * cos0 + x.y * sin0, x.y * cos0 - x.x * sin0),
            pack_half(x.z * cos1 + x.w * sin1, x.w * cos1 - x.z * sin1)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t a[4];
          load_matrices(a, row + (16 * i * kColumns + 16 * step) * sizeof(__half));
          mma_f16(c[i], a, b);
        }
      }
    }
    const float constant = rest[t];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      now[i] = c[i / 2][i % 2 * 2] + constant;
      later[i] = c[i / 2][i % 2 * 2 + 1] + constant;
    }
  }

  static __device__ __forceinline__ uint32_t pack_half(float low, float high) {
    const __half2 x = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&x);
  }
};

struct NoMeanShared {};

// Terms of a warp's pages, one after another.
struct TermsInTurn {
  float later[8]; // the next page's terms, if known
  bool known = false;

  // x of the page in turn. This lane rotates to `page`: that one where g is even, the next where it is odd.
  __device__ __forceinline__ void take(
      const MeanShared& mean, const MeanInputs& in, int64_t sequence, int page, int g, int t, float (&x)[8]) {
    if (known) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = later[i];
    } else {
      mean.terms(in, in.first[sequence] + int64_t(page) * kPage, g, t, x, later);
    }
    known = !known;
  }
};

} // namespace shadowkv
