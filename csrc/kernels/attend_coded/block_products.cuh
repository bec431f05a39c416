// Attention over pages of blocks with one scale each (blocks.cuh), where levels are whole multiples b of a step: for
// keys, the product of each block is multiplied by its scale; for values, weights are multiplied by each block's
// scales.
#pragma once

#include "blocks.cuh"
#include "queries.cuh"
#include "sums.cuh"

namespace shadowkv {

// For token number 2 i of g and the next one, by block.
__device__ __forceinline__ void two_tokens_scales(const BlockScales* of_g, int i, float (&scale)[2][4]) {
  const uint4 x = reinterpret_cast<const uint4*>(of_g)[i];
  const uint32_t pair[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 two = __half22float2(half2_of(pair[j]));
    scale[j / 2][j % 2 * 2] = two.x, scale[j / 2][j % 2 * 2 + 1] = two.y;
  }
}

// Reorders a page that has arrived, by a whole warp.
template <class Page>
__device__ __forceinline__ void put_in_order(Page& page, int lane) {
  BlockRows rows;
  page.take(lane, rows);
  __syncwarp();
  page.put(lane, rows);
  __syncwarp();
}

struct BlockKeys : BlockKeyPage {
  using Asked = CodedQueriesShared;

  template <int kWarps>
  static __device__ __forceinline__ void ask(const float* q, int queries, float scale, Asked& asked) {
    ask_by_bytes<kWarps>(q, queries, scale, key_dim, asked);
  }

  struct Products {
    float product[8];
    __device__ __forceinline__ float score(const Asked& asked, int t, int i) const {
      return product[i] * asked.unit[t];
    }
  };

  // Row g of tile i is token 2 i, row g + 8 the next one. Products of blocks, 256 upper + lower, are exact.
  __device__ __forceinline__ void multiply(
      const LevelBytes& levels, const Asked& asked, int lane, Products& products) {
    const int g = lane / 4, t = lane % 4;
    put_in_order(*this, lane);
    uint32_t q[4][2];
    asked.read(g, t, q);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t word[Tq3::kWords], even[2][4], odd[2][4];
      load_key(i, 0, g, t, word);
      Tq3::decode(word, levels, even);
      load_key(i, 1, g, t, word);
      Tq3::decode(word, levels, odd);
      float scale[2][4], sum[2] = {};
      two_tokens_scales(scales_of(g), i, scale);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int unit = b / 2, quad = b % 2 * 2;
        int32_t c[4] = {};
        mma_s8s8(c, {even[unit][quad], odd[unit][quad], even[unit][quad + 1], odd[unit][quad + 1]}, q[b]);
        sum[0] += float(256 * c[0] + c[1]) * scale[0][b], sum[1] += float(256 * c[2] + c[3]) * scale[1][b];
      }
      products.product[2 * i] = sum[0], products.product[2 * i + 1] = sum[1];
    }
  }
};

// A warp's weights of a page by block, each as in CodedWeights: words of four tokens.
struct alignas(16) BlockWeights {
  uint4 row[8][4][5]; // the fifth is padding that keeps lanes in different banks

  __device__ __forceinline__ void write(const uint2 (&upper)[4], const uint2 (&lower)[4], int g, int t) {
    uint4* const high = &row[2 * t][g % 4][g / 4 * 2];
    uint4* const low = &row[2 * t + 1][g % 4][g / 4 * 2];
    high[0] = {upper[0].x, upper[1].x, upper[2].x, upper[3].x};
    high[1] = {upper[0].y, upper[1].y, upper[2].y, upper[3].y};
    low[0] = {lower[0].x, lower[1].x, lower[2].x, lower[3].x};
    low[1] = {lower[0].y, lower[1].y, lower[2].y, lower[3].y};
  }
};

struct BlockValues : BlockValuePage {
  using Weights = BlockWeights;

  // Weights a page by its scores x: acc += unit * bytes x integer weights. The largest weight times scale is
  // taken over all blocks.
  __device__ __forceinline__ void add(
      const LevelBytes& levels, float (&x)[8], const CodedSpan& span, float fade, int lane, Weights& weights,
      CodedSums& sums) {
    const int g = lane / 4, t = lane % 4;
    put_in_order(*this, lane);
    sums.weigh(x, fade);
    float y[4][8], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float scale[2][4];
      two_tokens_scales(scales_of(g), i, scale);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int token = 2 * i + j / 4;
        y[j % 4][token] = span.has(token) ? x[token] * scale[j / 4][j % 4] : 0.0f;
        largest = max_or_nan(largest, y[j % 4][token]);
      }
    }
    largest = max_over_rows(largest);
    const float inverse = CodedIntegers::inverse_of(largest), unit = largest * (1.0f / 65535.0f);
    uint2 upper[4], lower[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) CodedIntegers(y[b], inverse).bytes(upper[b], lower[b]);
    weights.write(upper, lower, g, t);
    __syncwarp();
    int32_t c[2][4][4] = {};
    const auto decode = [&](int i, uint32_t (&quad)[2][4]) { decode_values(i, g, t, levels, quad); };
    const uint32_t* const mine = reinterpret_cast<const uint32_t*>(weights.row[g][t]);
    add_products<true>(decode, [&](int i, int b) { return mine[4 * i + b]; }, c);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) sums.acc[n][r] += float(whole_sum(c, n, r)) * unit;
  }

  static __device__ __forceinline__ float result(float acc, float, float step) { return acc * step; }
};

} // namespace shadowkv
