// Attention over pages of steps (steps.cuh). The steps of a page's channels are factors of the queries, which are
// converted to integers again for every page; least entries of channels add one number per query and page. Steps of a
// page's tokens are factors of the weights; least entries of tokens add a number, and scales of channels multiply both.
#pragma once

#include "steps.cuh"
#include "sums.cuh"

namespace shadowkv {

struct SteppedKeys : SteppedKeyPage {
  // Codes are never negative: the rounding error of a query's integers is compensated at the codes' middle.
  static constexpr float kMiddle = 7.5f;

  // Queries of a block as lanes read them: channels c to c + 15 of query g / 2,
  // c = 32 t + 16 (g % 2).
  struct Asked {
    float4 x[4][32];
  };

  template <int kWarps>
  static __device__ __forceinline__ void ask(const float* q, int queries, float scale, Asked& asked) {
    for (int i = threadIdx.x; i < 4 * 32; i += kWarps * 32) {
      const int lane = i % 32, query = lane / 8, first = lane % 4 * 32 + lane / 4 % 2 * 16 + i / 32 * 4;
      float4 x = {};
      if (query < queries) x = *reinterpret_cast<const float4*>(q + query * kCodedDim + first);
      asked.x[i / 32][lane] = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
    }
    __syncthreads();
  }

  struct Products {
    float product[8], scale[8], unit, constant;
    __device__ __forceinline__ float score(const Asked&, int, int i) const {
      return (product[i] * unit + constant) * scale[i];
    }
  };

  // A page's queries: factors of the products of words k, and for lane t's query their unit and what least entries add.
  __device__ __forceinline__ void scale_queries(
      const Asked& asked, int lane, uint32_t (&q)[4][2], float& unit, float& constant) const {
    const int part = lane / 4 % 2; // half of 32 channels, whose other half lane + 4 or lane - 4 has
    uint32_t step[8], least[8];
    channels(lane % 4 * 2 + part, false, step), channels(lane % 4 * 2 + part, true, least);
    float y[16], largest = 0.0f, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 x = asked.x[i][lane];
      const float of[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 steps = __half22float2(half2_of(step[2 * i + j / 2]));
        const float2 leasts = __half22float2(half2_of(least[2 * i + j / 2]));
        y[4 * i + j] = of[j] * (j % 2 == 0 ? steps.x : steps.y);
        sum += of[j] * (j % 2 == 0 ? leasts.x : leasts.y) + kMiddle * y[4 * i + j];
        largest = max_or_nan(largest, fabsf(y[4 * i + j]));
      }
    }
#pragma unroll
    for (int lanes = 1; lanes <= 4; lanes *= 2) largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, lanes));
    const int whole = exchange(y, largest > 1e-30f ? __fdividef(32639.0f, largest) : 0.0f, part, q);
    largest *= 1.0f / 32639.0f, sum -= kMiddle * largest * float(whole);
#pragma unroll
    for (int lanes = 1; lanes <= 4; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    unit = __shfl_sync(~0u, largest, lane % 4 * 8), constant = __shfl_sync(~0u, sum, lane % 4 * 8);
  }

  // Integers of 16 channels as bytes: a lane with even g takes the upper bytes of all 32 channels, its neighbour the
  // lower bytes. Returns their sum.
  static __device__ __forceinline__ int exchange(
      const float (&y)[16], float inverse, int part, uint32_t (&q)[4][2]) {
    const uint32_t mine = part == 0 ? 0x7632 : 0x5410, others = mine ^ 0x2222;
    const uint32_t sign = part == 0 ? 0 : 0x80808080;
    uint32_t all = 0;
#pragma unroll
    for (int word = 0; word < 2; ++word)
#pragma unroll
      for (int quad = 0; quad < 2; ++quad) {
        // The last bits of floats of this size are integers + 128: their upper byte is rounded to nearest, and the
        // lower byte minus 128 is the remainder.
        uint32_t whole[4];
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
          whole[byte] = __float_as_uint(fmaf(y[8 * word + 2 * byte + quad], inverse, 12583040.0f));
          all += whole[byte];
        }
        const uint32_t a = permute(whole[0], whole[1], 0x5140), b = permute(whole[2], whole[3], 0x5140);
        const uint32_t kept = permute(a, b, mine) ^ sign;
        const uint32_t came = __shfl_xor_sync(~0u, permute(a, b, others), 4) ^ sign;
        q[word][quad] = part == 0 ? kept : came, q[2 + word][quad] = part == 0 ? came : kept;
      }
    return int(all - 16 * __float_as_uint(12583040.0f));
  }

  // Row g of tile i is token 2 i, row g + 8 the next one. Products of unsigned codes are exact.
  __device__ __forceinline__ void multiply(const LevelBytes&, const Asked& asked, int lane, Products& products) const {
    const int g = lane / 4, t = lane % 4;
    uint32_t q[4][2];
    scale_queries(asked, lane, q, products.unit, products.constant);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t even[4][2], odd[4][2];
      decode_key(i, 0, g, t, even), decode_key(i, 1, g, t, odd);
      int32_t c[4] = {};
#pragma unroll
      for (int k = 0; k < 4; ++k) mma_u8s8(c, {even[k][0], odd[k][0], even[k][1], odd[k][1]}, q[k]);
      products.product[2 * i] = float(256 * c[0] + c[1]), products.product[2 * i + 1] = float(256 * c[2] + c[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) products.scale[i] = __half2float(scale_of(g, i));
  }
};

struct SteppedValues : SteppedValuePage {
  using Weights = CodedWeights;
  static constexpr float kMiddle = 1.5f; // as for keys

  // Weights a page by its scores x: acc += scale of the channel * (unit * codes x integer weights + least).
  __device__ __forceinline__ void add(
      const LevelBytes&, float (&x)[8], const CodedSpan& span, float fade, int lane, Weights& weights,
      CodedSums& sums) const {
    const int g = lane / 4, t = lane % 4;
    float largest = 0.0f, least = 0.0f;
    sums.weigh(x, fade);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 steps = __half22float2(half2_of(steps_of(g, i)));
      least += span.has(i) ? x[i] * (steps.y + kMiddle * steps.x) : 0.0f;
      x[i] = span.has(i) ? x[i] * steps.x : 0.0f;
      largest = max_or_nan(largest, x[i]);
    }
    largest = max_over_rows(largest);
    const CodedIntegers whole(x, CodedIntegers::inverse_of(largest));
    weights.write(whole, g, t);
    least = sum_over_rows(least - kMiddle * (largest * (1.0f / 65535.0f)) * float(whole.sum()));
    __syncwarp();
    const uint4 mine = weights.read(g, t);
    const uint32_t weight[4] = {mine.x, mine.y, mine.z, mine.w}; // of four tokens each
    int32_t c[2][4][4] = {};
    const auto decode = [&](int i, uint32_t (&quad)[2][4]) { decode_values(i, g, t, quad); };
    add_products<false>(decode, [&](int i, int) { return weight[i]; }, c);
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const float2 scale = __half22float2(half2_of(scales_of(g, r, pair)));
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          const int n = 2 * pair + next;
          const float unit = largest * (1.0f / 65535.0f / (1 << 2 * n));
          const float sum = float(whole_sum(c, n, r)) * unit + least;
          sums.acc[n][r] += sum * (next == 0 ? scale.x : scale.y);
        }
      }
  }

  static __device__ __forceinline__ float result(float acc, float, float) { return acc; }
};

} // namespace shadowkv
