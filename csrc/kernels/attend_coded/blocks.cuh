// Pages of tq3_0 (shadowkv/baselines/tq3_0.py): rows of four blocks of 32 dimensions in 14 bytes, which are the
// lower two bits of all codes (8 bytes), the upper bits (4) and a scale in half. Blocks start at any even byte, and a
// product takes one block at a time, with some codes from each lane: so a warp reorders a page in place before it is
// decoded, into rows of lloyd-3bit.
#pragma once

#include "codes.cuh"

namespace shadowkv {

// Scales of a token's four blocks, in half.
struct alignas(8) BlockScales {
  uint32_t pair[2];
};

struct Tq3 : Lloyd3 {
  static constexpr int64_t kId = codec::kTq3;
  using Scale = BlockScales;
};

// Word m of the result has byte m of all four words.
__device__ __forceinline__ void transpose_bytes(uint32_t (&x)[4]) {
  const uint32_t a = permute(x[0], x[1], 0x5140), b = permute(x[0], x[1], 0x7362);
  const uint32_t c = permute(x[2], x[3], 0x5140), d = permute(x[2], x[3], 0x7362);
  x[0] = permute(a, c, 0x5410), x[1] = permute(a, c, 0x7632);
  x[2] = permute(b, d, 0x5410), x[3] = permute(b, d, 0x7632);
}

// From every two groups of kWidth bits: the lower groups of x in the lower positions and those of y in the upper ones;
// and likewise the upper groups.
template <int kWidth>
__device__ __forceinline__ void interleave(uint32_t x, uint32_t y, uint32_t& lower, uint32_t& upper) {
  constexpr uint32_t kMask = kWidth == 4 ? 0x0f0f0f0f : 0x33333333;
  lower = (x & kMask) | (y << kWidth & ~kMask);
  upper = (x >> kWidth & kMask) | (y & ~kMask);
}

// A lane's two rows in their stored form, from which they are reordered.
struct BlockRows {
  static constexpr int kBytes = 56, kWords = kBytes / 4;
  uint32_t word[2][kWords];

  // Word `i` of the lower bits of block `b`, and its upper bits.
  __device__ __forceinline__ uint32_t lower(int row, int b, int i) const {
    const uint32_t* const at = word[row] + b / 2 * 7 + i;
    return b % 2 == 0 ? at[0] : permute(at[3], at[4], 0x5432);
  }
  __device__ __forceinline__ uint32_t upper(int row, int b) const { return lower(row, b, 2); }

  __device__ __forceinline__ BlockScales scales(int row) const {
    const uint32_t(&x)[kWords] = word[row];
    return {{permute(x[3], x[6], 0x7610), permute(x[10], x[13], 0x7610)}};
  }
};

struct BlockPage : CodedPage<Tq3> {
  static constexpr int kScales = 0; // stored outside the rows
  static constexpr int kStoredRow = BlockRows::kBytes;

  // Starts a warp's copy of the rows in their stored form.
  __device__ __forceinline__ void copy(const uint8_t* rows, const Scale*, int lane) {
    static_assert(sizeof(codes) + sizeof(scales) == kPage * kStoredRow && kPage * kStoredRow % 512 == 0);
    const uint32_t to = shared_address(this) + 16 * lane;
    const auto copy_all = [&]<int... kSteps>(std::integer_sequence<int, kSteps...>) {
      (copy16_async_at<512 * kSteps>(to, rows + 16 * lane), ...);
    };
    copy_all(std::make_integer_sequence<int, kPage * kStoredRow / 512>());
  }

  // Rows `lane` and `lane` + 32; all lanes have read theirs before any is written back.
  __device__ __forceinline__ void take(int lane, BlockRows& rows) const {
#pragma unroll
    for (int row = 0; row < 2; ++row)
#pragma unroll
      for (int i = 0; i < BlockRows::kWords / 2; ++i) {
        const uint8_t* const at = reinterpret_cast<const uint8_t*>(this) + (lane + 32 * row) * kStoredRow + 8 * i;
        const uint2 x = *reinterpret_cast<const uint2*>(at);
        rows.word[row][2 * i] = x.x, rows.word[row][2 * i + 1] = x.y;
      }
  }

 protected:
  __device__ __forceinline__ void put_row(
      int token, const BlockScales& scale, const uint32_t (&lower)[8], const uint32_t (&upper)[4]) {
    uint4* const to = reinterpret_cast<uint4*>(codes + token * kRow);
    to[0] = {lower[0], lower[1], lower[2], lower[3]}, to[1] = {lower[4], lower[5], lower[6], lower[7]};
    to[2] = {upper[0], upper[1], upper[2], upper[3]};
    scales[token % 16 / 2 * 8 + token / 16 * 2 + token % 2] = scale;
  }
};

// After reordering, lane t has codes 8 t to 8 t + 7 of all blocks: the lower bits of blocks 0 and 1 in one word and
// those of 2 and 3 in the next, whose quads are every other code of one block.
struct BlockKeyPage : BlockPage {
  __device__ __forceinline__ void put(int lane, const BlockRows& rows) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32_t(&x)[BlockRows::kWords] = rows.word[row];
      uint32_t lower[8], upper[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // The odd blocks' halves of words are already in place, except for one word.
        const uint32_t* const from = x + 7 * i;
        lower[i] = permute(from[0], from[3], 0x7610), lower[2 + i] = permute(from[0], from[4], 0x5432);
        lower[4 + i] = permute(from[1], from[4], 0x7610), lower[6 + i] = permute(from[1], from[5], 0x5432);
        // Upper bits in pairs, the even block's first.
        uint32_t even, odd;
        interleave<2>(rows.upper(row, 2 * i), rows.upper(row, 2 * i + 1), even, odd);
        interleave<4>(even, odd, upper[2 * i], upper[2 * i + 1]);
      }
      transpose_bytes(upper);
      put_row(lane + 32 * row, rows.scales(row), lower, upper);
    }
  }

  static __device__ __forceinline__ int key_dim(int unit, int quad, int byte, int t) {
    return 32 * (2 * unit + quad / 2) + 8 * t + quad % 2 + 2 * byte;
  }
};

// After reordering, lane g has four codes of each block, at the block's place in its quads.
struct BlockValuePage : BlockPage {
  // Which of a block's bytes of lower bits belong to lane g.
  static __device__ __forceinline__ constexpr int byte_of(int g) { return g % 4 * 2 + g / 4; }

  __device__ __forceinline__ void put(int lane, const BlockRows& rows) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t lower[8], upper[4], nibbles[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t x[4]; // the first two codes of each byte of blocks 0 and 1, of 2 and 3, then the last two codes
        interleave<4>(rows.lower(row, 0, half), rows.lower(row, 1, half), x[0], x[2]);
        interleave<4>(rows.lower(row, 2, half), rows.lower(row, 3, half), x[1], x[3]);
        transpose_bytes(x);
#pragma unroll
        for (int i = 0; i < 4; ++i) lower[i % 2 * 4 + half * 2 + i / 2] = x[i];
      }
      interleave<4>(rows.upper(row, 0), rows.upper(row, 1), nibbles[0], nibbles[2]);
      interleave<4>(rows.upper(row, 2), rows.upper(row, 3), nibbles[1], nibbles[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        upper[i] = permute(nibbles[i / 2 * 2], nibbles[i / 2 * 2 + 1], i % 2 == 0 ? 0x5140 : 0x7362);
      put_row(lane + 32 * row, rows.scales(row), lower, upper);
    }
  }

  static __device__ __forceinline__ int value_dim(int quad, int byte, int g) {
    return 32 * byte + 4 * byte_of(g) + quad;
  }
};

} // namespace shadowkv
