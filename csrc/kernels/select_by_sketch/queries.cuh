// Queries as fragments, and their products with the codes of runs.
#pragma once

#include "stages.cuh"

namespace shadowkv {

// Up to kQueries queries as fragments: lane 4 g + t has those of query g, and of g + 8 where there are 16. Of four it
// has those of g % 4, where the first four columns are multiplied with runs 0 and 1 and the others with runs 2 and 3.
// Missing queries are copies of the last.
template <int kBytes, int kQueries>
struct QueryFragments {
  static_assert(kQueries == 4 || kQueries == 8 || kQueries == 16);
  static constexpr bool kWide = kQueries > 4;
  static constexpr int kSets = kWide ? kQueries / 8 : 1; // of eight columns
  static constexpr int kHalves = RunCodes<kBytes>::kHalves, kPlanes = kBytes == 8 ? 4 : 8; // bits of a token in a lane
  static constexpr int kTiles = kWide ? 2 : 1;
  // Codes of weight 4 have separate sums; floats that begin with these bits are kMagic + a whole number.
  static constexpr int kMagicBits = 0x4b400000;
  static constexpr float kMagic = 12582912;
  uint32_t b[kSets][kHalves][kPlanes][kWide ? 1 : 2];
  float unit[kSets][2]; // that makes products, before a token's scale, logits
  int start[kSets][2]; // start value of 4 times the sum of codes minus their mean

  __device__ __forceinline__ QueryFragments(const SelectBySketch& p, unsigned row) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const auto query = [&](int column) { return row * p.group + min(kWide ? column : column % 4, p.group - 1); };
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      const uint8_t* whole =
          p.whole + query(8 * s + g) * 8 * kBytes + (kBytes == 8 ? (t & 2) * 2 * kBytes + t % 2 * 4 : 4 * t);
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int j = 0; j < kPlanes; ++j) {
          uint32_t(&own)[kWide ? 1 : 2] = b[s][half][j];
          const uint32_t x = *reinterpret_cast<const uint32_t*>(whole + j * kBytes + 16 * half);
          own[0] = kWide || g < 4 ? x : 0;
          if constexpr (!kWide) {
            own[1] = g < 4 ? 0 : x;
            if (kBytes == 16) keep_in_registers(own[0], own[1]);
          }
        }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * s + 2 * t + e;
        unit[s][e] = 0.25f * p.unit[query(column)] * p.length[query(column)];
        start[s][e] = kMagicBits - 6 * p.sum[query(column)];
      }
    }
  }

  // Adds the products with codes of weight 1 to `ones`, those with codes of weight 4 to `fours`.
  __device__ __forceinline__ void multiply(
      const RunCodes<kBytes>& x, int32_t (&ones)[kSets][kTiles][4], int32_t (&fours)[kSets][kTiles][4]) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      uint32_t codes[2][kBatch]; // of even bits and of odd bits
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        codes[0][r] = select_bits<0xaaaaaaaa>(x.sign[half][r] << 1, x.low[half][r]);
        codes[1][r] = select_bits<0xaaaaaaaa>(x.sign[half][r], x.low[half][r] >> 1);
      }
      const auto plane = [&](int r, int j) {
        return codes[j & 1][r] >> (j & 4) & (j & 2 ? 0x0c0c0c0cu : 0x03030303u);
      };
      if constexpr (kWide) {
#pragma unroll
        for (int j = 0; j < kPlanes / 2; ++j) {
          const int first = kPlanes == 8 ? j : 2 * j, second = kPlanes == 8 ? j + 4 : 2 * j + 1; // of one weight
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            const uint32_t a[4] = {
                plane(2 * tile, first), plane(2 * tile + 1, first), plane(2 * tile, second),
                plane(2 * tile + 1, second)};
#pragma unroll
            for (int s = 0; s < kSets; ++s)
              mma_u8s8(
                  first & 2 ? fours[s][tile] : ones[s][tile], a, {b[s][half][first][0], b[s][half][second][0]});
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < kPlanes; ++j)
          mma_u8s8(
              j & 2 ? fours[0][0] : ones[0][0], {plane(0, j), plane(1, j), plane(2, j), plane(3, j)}, b[0][half][j]);
      }
    }
  }

  // The best product of token g of run t with a query, before the token's scale.
  __device__ __forceinline__ float best_product(const RunCodes<kBytes>& codes) const {
    int32_t ones[kSets][kTiles][4] = {}, fours[kSets][kTiles][4];
#pragma unroll
    for (int s = 0; s < kSets; ++s)
#pragma unroll
      for (int e = 0; e < 4 * kTiles; ++e) fours[s][e / 4][e % 4] = start[s][e % 2];
    multiply(codes, ones, fours);
    float best[2 * kTiles]; // of tokens g of two runs, of a tile
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) {
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
        float score[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = r % 2 * 2 + e, sum = 4 * ones[s][r / 2][at] + fours[s][r / 2][at];
          score[e] = (__int_as_float(sum) - kMagic) * unit[s][e];
        }
        const float larger = fmaxf(score[0], score[1]);
        best[r] = s == 0 ? larger : fmaxf(best[r], larger);
      }
    }
    const int t = threadIdx.x % 4;
    // The maximum over a quad's lanes, for a different run in each lane.
    const auto exchange = [](bool odd, float x, float y, int mask) {
      return fmaxf(odd ? y : x, __shfl_xor_sync(~0u, odd ? x : y, mask));
    };
    const float score = exchange(t & 1, best[0], best[1], 1);
    if constexpr (kWide) return exchange(t & 2, score, exchange(t & 1, best[2], best[3], 1), 2);
    return score;
  }
};

} // namespace shadowkv
