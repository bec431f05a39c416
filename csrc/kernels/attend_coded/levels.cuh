// Attention over pages of levels with one scale per token: integer products with keys times the tokens' scales, and
// weights times the scales of values.
#pragma once

#include "queries.cuh"
#include "sums.cuh"

namespace shadowkv {

template <class Codec>
struct LevelKeys : CodedPage<Codec> {
  using Asked = CodedQueriesShared;

  // For a block, which waits at the end.
  template <int kWarps>
  static __device__ __forceinline__ void ask(const float* q, int queries, float scale, Asked& asked) {
    ask_by_bytes<kWarps>(q, queries, scale, LevelKeys::key_dim, asked);
  }

  struct Products {
    float product[8], scale[8];
    __device__ __forceinline__ float score(const Asked& asked, int t, int i) const {
      return product[i] * (asked.unit[t] * scale[i]);
    }
  };

  // Products 2 (256 upper + lower) + sum are exact. Row g of tile i is token 2 i, row g + 8 the next one.
  __device__ __forceinline__ void multiply(
      const LevelBytes& levels, const Asked& asked, int lane, Products& products) const {
    const int g = lane / 4, t = lane % 4, sum = asked.sum[t];
    uint32_t q[4][2];
    asked.read(g, t, q);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t word[Codec::kWords], even[2][4], odd[2][4];
      this->load_key(i, 0, g, t, word);
      Codec::decode(word, levels, even);
      this->load_key(i, 1, g, t, word);
      Codec::decode(word, levels, odd);
      int32_t c[4] = {};
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const int unit = s / 2, quad = s % 2 * 2;
        mma_s8s8(c, {even[unit][quad], odd[unit][quad], even[unit][quad + 1], odd[unit][quad + 1]}, q[s]);
      }
      products.product[2 * i] = float(512 * c[0] + (2 * c[1] + sum));
      products.product[2 * i + 1] = float(512 * c[2] + (2 * c[3] + sum));
    }
    eight_floats(this->scales_of(g), products.scale);
  }
};

template <class Codec>
struct LevelValues : CodedPage<Codec> {
  using Weights = CodedWeights;

  // Weights a page by its scores x: acc += unit * bytes x integer weights, for query t and the dimensions of
  // lane g's values.
  __device__ __forceinline__ void add(
      const LevelBytes& levels, float (&x)[8], const CodedSpan& span, float fade, int lane, Weights& weights,
      CodedSums& sums) const {
    const int g = lane / 4, t = lane % 4;
    float scale[8], largest = 0.0f;
    eight_floats(this->scales_of(g), scale);
    sums.weigh(x, fade), sums.ones *= fade;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = span.has(i) ? x[i] * scale[i] : 0.0f;
      largest = max_or_nan(largest, x[i]);
    }
    largest = max_over_rows(largest);
    const float unit = largest * (1.0f / 65535.0f);
    const CodedIntegers whole(x, CodedIntegers::inverse_of(largest));
    sums.ones += float(whole.sum()) * unit;
    weights.write(whole, g, t);
    __syncwarp();
    const uint4 mine = weights.read(g, t);
    const uint32_t weight[4] = {mine.x, mine.y, mine.z, mine.w}; // of four tokens each
    int32_t c[2][4][4] = {};
    const auto decode = [&](int i, uint32_t (&quad)[2][4]) { this->decode_values(i, g, t, levels, quad); };
    add_products<true>(decode, [&](int i, int) { return weight[i]; }, c);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) sums.acc[n][r] += float(whole_sum(c, n, r)) * unit;
  }

  static __device__ __forceinline__ float result(float acc, float ones, float step) {
    return (2.0f * acc + ones) * step;
  }
};

} // namespace shadowkv
