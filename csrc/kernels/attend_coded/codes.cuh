// Codes of 4, 3 and 2 bits as bytes b, each of which stands for 2 b + 1 steps (shadowkv/kvcache/codecs/lloyd.py), and
// pages of them in shared memory.
//
// A unit is the 16 codes whose bits are adjacent in a row (a lane in the lloyd formats), units 0 to 7. Units are
// decoded two at a time, each into four registers of four bytes, called quads. The codes of a quad are chosen for the
// least cost: products may take dimensions in any order.
//
// Each codec is a struct:
//   kId     its number
//   kBits   of a code
//   Scale   how a token's scale is stored
//   kWords  words that two units are decoded from
//   decode  quads of two units
//   dim     dimension of a byte of a unit's quads
#pragma once

#include <type_traits>
#include <utility>

#include "codecs.h"
#include "constants.h"
#include "kernels/common/memory.cuh"
#include "kernels/common/mma.cuh"

namespace shadowkv {

constexpr int kCodedDim = 128;

// Levels as bytes, for codes 0 to 7; 4-bit codes derive the others from them.
struct LevelBytes {
  uint32_t low, high;
};

// A sign bit above the number of a magnitude. The negative of a level is its complement, and the sign of each code is
// that of a byte, either of the word or of the word shifted up by one code.
struct SignedNibbles {
  static constexpr int kBits = 4, kWords = 4; // two per unit
  using Scale = __half;

  static __device__ __forceinline__ uint32_t magnitudes(uint32_t word) { return word & 0x77777777; }

  template <class Codec>
  static __device__ __forceinline__ void decode_as(
      const uint32_t (&word)[kWords], const LevelBytes& levels, uint32_t (&quad)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t magnitude = Codec::magnitudes(word[i]), moved = word[i] << 4;
      quad[i / 2][i % 2 * 2] = permute(levels.low, levels.high, magnitude) ^ permute(word[i], moved, 0x9d8c);
      quad[i / 2][i % 2 * 2 + 1] =
          permute(levels.low, levels.high, magnitude >> 16) ^ permute(word[i], moved, 0xbfae);
    }
  }
};

struct Lloyd4 : SignedNibbles {
  static constexpr int64_t kId = codec::kLloyd4;

  static __device__ __forceinline__ void decode(
      const uint32_t (&word)[kWords], const LevelBytes& levels, uint32_t (&quad)[2][4]) {
    decode_as<Lloyd4>(word, levels, quad);
  }

  static __device__ __forceinline__ constexpr int dim(int unit, int quad, int byte) {
    return 8 * (4 * quad + byte) + unit;
  }
};

// Levels in ascending order: those of c and 15 - c are opposite, so codes from 8 on are counted down from 15. A byte
// has one dimension of the first half and one of the second (Halves in shadowkv/baselines/polarquant.py).
struct PolarInt4 : SignedNibbles {
  static constexpr int64_t kId = codec::kPolarInt4;
  using Scale = float;

  static __device__ __forceinline__ uint32_t magnitudes(uint32_t word) {
    // 7/8 of a set top bit gives the three other bits. A multiplication avoids the busier integer pipe.
    return (word ^ __umulhi(word & 0x88888888, 0xe0000000)) & 0x77777777;
  }

  static __device__ __forceinline__ void decode(
      const uint32_t (&word)[kWords], const LevelBytes& levels, uint32_t (&quad)[2][4]) {
    decode_as<PolarInt4>(word, levels, quad);
  }

  static __device__ __forceinline__ constexpr int dim(int unit, int quad, int byte) {
    return byte % 2 * (kCodedDim / 2) + 8 * unit + (4 * quad + byte) / 2;
  }
};

// Selectors of all eight levels: for both units a nibble for every other code, with the upper bits where they are
// needed (SelectorLanes in shadowkv/kvcache/codecs/packing.py).
struct Lloyd3 {
  static constexpr int64_t kId = codec::kLloyd3;
  static constexpr int kBits = 3, kWords = 3; // lower bits of each unit, upper bits of both
  using Scale = __half;

  static __device__ __forceinline__ void decode(
      const uint32_t (&word)[kWords], const LevelBytes& levels, uint32_t (&quad)[2][4]) {
    const uint32_t first = permute(word[0], word[1], 0x5410), last = permute(word[0], word[1], 0x7632);
    const uint32_t lower[4] = {first, first >> 2, last, last >> 2};
    const uint32_t upper[4] = {word[2] << 2, word[2] << 1, word[2], word[2] >> 1};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t selectors = (lower[i] & 0x33333333) | (upper[i] & 0x44444444);
      quad[0][i] = permute(levels.low, levels.high, selectors);
      quad[1][i] = permute(levels.low, levels.high, selectors >> 16);
    }
  }

  static __device__ __forceinline__ constexpr int dim(int unit, int quad, int byte) {
    return 8 * (quad / 2 * 8 + quad % 2 + 2 * byte) + unit;
  }
};

struct Lloyd2 {
  static constexpr int64_t kId = codec::kLloyd2;
  static constexpr int kBits = 2, kWords = 2; // one per unit
  using Scale = __half;

  static __device__ __forceinline__ void decode(
      const uint32_t (&word)[kWords], const LevelBytes& levels, uint32_t (&quad)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t even = word[i] & 0x33333333, odd = word[i] >> 2 & 0x33333333;
      quad[i][0] = permute(levels.low, levels.low, even), quad[i][1] = permute(levels.low, levels.low, odd);
      quad[i][2] = permute(levels.low, levels.low, even >> 16), quad[i][3] = permute(levels.low, levels.low, odd >> 16);
    }
  }

  static __device__ __forceinline__ constexpr int dim(int unit, int quad, int byte) {
    return Lloyd3::dim(unit, quad, byte);
  }
};

// A page of a head in shared memory. A lane has eight tokens: number 2 i is token 16 i + 2 g of the page, 2 i + 1 the
// next one. As keys they are those of its own g, as values those of g = t and g = t + 4. Reads have no bank conflicts,
// except for pairs of lanes at the upper bits of 3-bit keys: rows of 48 bytes are naturally in different banks; for the
// others, the 16-byte chunks of a 128-byte line are permuted.
template <class Codec>
struct alignas(128) CodedPage {
  using Scale = typename Codec::Scale;
  static constexpr int64_t kId = Codec::kId;
  static constexpr int kBits = Codec::kBits, kRow = kCodedDim * kBits / 8; // bytes
  static constexpr int kStoredRow = kRow;
  static constexpr int kScales = 1;                                        // of a token
  uint8_t codes[kPage * kRow];
  alignas(16) Scale scales[kPage]; // of token 16 i + 2 g + b at 8 g + 2 i + b

  static __device__ __forceinline__ int place(int byte) {
    const int line = byte / 128;
    if constexpr (kBits == 4) return byte ^ (line % 2 * 64 + line / 2 % 2 * 32);
    if constexpr (kBits == 2) return byte ^ line % 2 * 32;
    return byte;
  }

  // Starts a warp's copy, 512 bytes at a time.
  __device__ __forceinline__ void copy(const uint8_t* rows, const Scale* row_scales, int lane) {
    const uint32_t to = shared_address(codes + place(16 * lane));
    const auto copy_all = [&]<int... kSteps>(std::integer_sequence<int, kSteps...>) {
      (copy16_async_at<512 * kSteps>(to, rows + 16 * lane), ...);
    };
    copy_all(std::make_integer_sequence<int, kPage * kRow / 512>());
    const uint32_t pair = shared_address(scales + lane % 8 * 8 + lane / 8 * 2);
    if constexpr (sizeof(Scale) == 2) copy4_async(pair, row_scales + 2 * lane);
    else copy8_async(pair, row_scales + 2 * lane);
  }

  // Units 2t and 2t + 1 of token 2 i + next of lane g.
  __device__ __forceinline__ void load_key(
      int i, int next, int g, int t, uint32_t (&word)[Codec::kWords]) const {
    const int first = (2 * g + next) * kRow, row = 16 * kRow * i;
    if constexpr (kBits == 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(codes + place(first + 16 * t) + row);
      word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
    } else {
      const uint2 x = *reinterpret_cast<const uint2*>(codes + place(first + 8 * t) + row);
      word[0] = x.x, word[1] = x.y;
      if constexpr (kBits == 3) word[2] = *reinterpret_cast<const uint32_t*>(codes + first + 32 + 4 * t + row);
    }
  }

  // Bytes of unit g of tokens 2 i and 2 i + 1 of t and, from i = 4 on, of t + 4.
  __device__ __forceinline__ void decode_values(
      int i, int g, int t, const LevelBytes& levels, uint32_t (&quad)[2][4]) const {
    const int first = 2 * t * kRow, second = first + kRow, row = (i % 4 * 16 + i / 4 * 8) * kRow;
    if constexpr (kBits == 4) {
      const uint2 x = *reinterpret_cast<const uint2*>(codes + place(first + 8 * g) + row);
      const uint2 y = *reinterpret_cast<const uint2*>(codes + place(second + 8 * g) + row);
      Codec::decode({x.x, x.y, y.x, y.y}, levels, quad);
    } else {
      const uint32_t x = *reinterpret_cast<const uint32_t*>(codes + place(first + 4 * g) + row);
      const uint32_t y = *reinterpret_cast<const uint32_t*>(codes + place(second + 4 * g) + row);
      if constexpr (kBits == 3) {
        const uint32_t upper = *reinterpret_cast<const uint16_t*>(codes + first + 32 + 2 * g + row);
        const uint32_t next = *reinterpret_cast<const uint16_t*>(codes + second + 32 + 2 * g + row);
        Codec::decode({x, y, upper | next << 16}, levels, quad);
      } else {
        Codec::decode({x, y}, levels, quad);
      }
    }
  }

  // Scales of the eight tokens of g.
  __device__ __forceinline__ const Scale* scales_of(int g) const { return scales + 8 * g; }

  // Dimension of a byte of a key's quads in lane t, and of a value's in lane g.
  static __device__ __forceinline__ int key_dim(int unit, int quad, int byte, int t) {
    return Codec::dim(2 * t + unit, quad, byte);
  }
  static __device__ __forceinline__ int value_dim(int quad, int byte, int g) { return Codec::dim(g, quad, byte); }
};

} // namespace shadowkv
