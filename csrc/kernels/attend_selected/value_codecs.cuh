// Formats of values, each a class that kernels are made with:
//   kId        its number
//   kCoded     whether rows are codes in units of steps of each token, or floats: bf16, or e4m3 if its id is kFp8
//   kRotated   whether rows were multiplied by the codec's rotation before they were coded
//   takes      whether rows of so many dimensions can be coded
//   row_bytes  of a token. Codes have besides
//   scales     steps of a token, each half, of so many equal blocks of its dimensions
//   Codes      of one token, what a lane owns: of dimensions 16 i + g and 16 i + 8 + g. load(row, g) takes it from
//              where row.read<n>(to, at) reads n = 16, 8, 4, 2 or 1 bytes
//   Pair       two consecutive tokens: decode(i, low, high) turns their codes i into a piece of the first factor of a
//              bf16 product, low for dimension g, high for g + 8. The product's sum over tokens becomes a sum of
//              values in steps by factor(i) and, times the sum of weights, offset(i)
#pragma once

#include "codecs.h"
#include "kernels/common/memory.cuh"
#include "kernels/common/mma.cuh"

namespace shadowkv {

struct DenseValues {
  static constexpr int64_t kId = codec::kDense;
  static constexpr bool kCoded = false, kRotated = false;
  __host__ __device__ static constexpr bool takes(int dim) { return dim % 16 == 0; }
  __host__ __device__ static constexpr int row_bytes(int dim) { return dim * 2; }
  __host__ __device__ static constexpr int scales(int dim) { return 1; }
};

// In units of a scale per kv head and state.
struct Fp8Values {
  static constexpr int64_t kId = codec::kFp8;
  static constexpr bool kCoded = false, kRotated = false;
  __host__ __device__ static constexpr bool takes(int dim) { return dim % 32 == 0; }
  __host__ __device__ static constexpr int row_bytes(int dim) { return dim; }
  __host__ __device__ static constexpr int scales(int dim) { return 1; }
};

// A row in global memory, which is read once.
struct StreamedRow {
  const char* p;

  template <int kBytes>
  __device__ __forceinline__ void read(uint32_t* to, int at) const {
    if constexpr (kBytes == 16) {
      const uint4 x = load_streamed16(p + at);
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else if constexpr (kBytes == 8) {
      const uint2 x = load_streamed8(p + at);
      to[0] = x.x, to[1] = x.y;
    } else if constexpr (kBytes == 4) {
      to[0] = __ldg(reinterpret_cast<const uint32_t*>(p + at));
    } else if constexpr (kBytes == 2) {
      to[0] = __ldg(reinterpret_cast<const uint16_t*>(p + at));
    } else {
      to[0] = __ldg(reinterpret_cast<const uint8_t*>(p + at));
    }
  }
};

// Codes of rotated values, in 4, 3 or 2 bits, in the layout of shadowkv/kvcache/codecs/packing.py: from the low bits up
// all 4 bits, or the lower 2; with 3 bits, the upper bits are the second plane.
template <int kDim, int kBits>
struct LaneCodes {
  static constexpr int kFirstBytes = kDim / 8 * (kBits == 4 ? 4 : 2) / 8;      // of a lane in the first plane
  static constexpr int kSecondBytes = kBits == 3 ? kDim / 64 : 0, kSecondAt = kDim / 4; // and where the second begins
  uint32_t first[(kFirstBytes + 3) / 4];
  uint32_t second[kBits == 3 ? (kSecondBytes + 3) / 4 : 1];

  template <class Row>
  __device__ __forceinline__ void load(const Row& row, int g) {
    read<kFirstBytes>(row, first, g * kFirstBytes);
    if constexpr (kBits == 3) read<kSecondBytes>(row, second, kSecondAt + g * kSecondBytes);
  }

 private:
  template <int kBytes, class Row>
  __device__ static __forceinline__ void read(const Row& row, uint32_t* to, int at) {
    if constexpr ((kBytes & kBytes - 1) == 0) {
      row.template read<kBytes>(to, at);
    } else { // 96 dimensions: words whose bytes may start anywhere
      constexpr int kUnit = kBytes % 2 ? 1 : 2;
#pragma unroll
      for (int i = 0; i < kBytes / kUnit; ++i) {
        uint32_t x;
        row.template read<kUnit>(&x, at + i * kUnit);
        uint32_t& word = to[i * kUnit / 4];
        word = i * kUnit % 4 ? word | x << i * kUnit % 4 * 8 : x;
      }
    }
  }
};

// Codes become 128 + code, or 128 + 16 code where they would have to be shifted: 0x4300 | x is 128 + x.
template <int kDim, int kBits>
struct CodePair {
  using Codes = LaneCodes<kDim, kBits>;
  static constexpr int kEights = (kDim + 63) / 64; // of a token's dimensions in a lane, two words each
  // 4 bits: the first token's eight codes, then the other token's. Otherwise the even codes, then the odd codes, with
  // four bits for each token, the first token's in the lower half.
  uint32_t word[2 * kEights];

  CodePair() = default;
  __device__ __forceinline__ CodePair(const Codes& one, const Codes& other) {
    if constexpr (kBits == 4) {
#pragma unroll
      for (int i = 0; i < kEights; ++i) word[2 * i] = one.first[i], word[2 * i + 1] = other.first[i];
    } else {
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        const uint32_t low = __byte_perm(one.first[i / 2], other.first[i / 2], i % 2 ? 0x7632 : 0x5410);
        uint32_t even = low, odd = low >> 2;
        if constexpr (kBits == 3) {
          // Upper bits move in pairs to the two lowest of every four: their byte twice, then the second copy four
          // lower, then the part of each byte that is still a pair too low.
          const uint32_t twice =
              __byte_perm(one.second[i / 4], other.second[i / 4], i % 4 * 0x11 | (4 + i % 4) * 0x1100);
          const uint32_t halves = select_bits<0x00ff00ffu>(twice, twice >> 4);
          const uint32_t high = select_bits<0x03030303u>(halves, halves << 2);
          even = select_bits<0x33333333u>(even, high << 2), odd = select_bits<0x33333333u>(odd, high << 1);
        }
        word[2 * i] = even, word[2 * i + 1] = odd;
      }
    }
  }

  __device__ __forceinline__ void decode(int i, uint32_t& low, uint32_t& high) const {
    if constexpr (kBits == 4) {
      const uint32_t both = __byte_perm(word[i / 4 * 2], word[i / 4 * 2 + 1], i % 4 | (4 + i % 4) << 8);
      low = mask_and_set<0x000f000fu, 0x43004300u>(both);
      high = mask_and_set<0x000f000fu, 0x43004300u>(both >> 4);
    } else {
      constexpr uint32_t kMask = ((1 << kBits) - 1) * 0x00010001u;
      const uint32_t even = word[i / 4 * 2] >> i % 4 / 2 * 8, odd = word[i / 4 * 2 + 1] >> i % 4 / 2 * 8;
      if (i % 2) {
        low = mask_and_set<kMask << 4, 0x43004300u>(even), high = mask_and_set<kMask << 4, 0x43004300u>(odd);
      } else {
        low = mask_and_set<kMask, 0x43004300u>(even), high = mask_and_set<kMask, 0x43004300u>(odd);
      }
    }
  }

  __device__ static constexpr float factor(int i) { return kBits < 4 && i % 2 ? 1 / 16.f : 1.f; }
  __device__ static constexpr float offset(int i) { return -128 * factor(i) - ((1 << kBits) - 1) / 2.f; }
};

template <int64_t kId_, int kBits>
struct RotatedCodes {
  static constexpr int64_t kId = kId_;
  static constexpr bool kCoded = true, kRotated = true;
  __host__ __device__ static constexpr bool takes(int dim) { return dim % (kBits == 3 ? 64 : 64 / kBits) == 0; }
  __host__ __device__ static constexpr int row_bytes(int dim) { return dim * kBits / 8; }
  __host__ __device__ static constexpr int scales(int dim) { return 1; }
  template <int kDim>
  using Codes = LaneCodes<kDim, kBits>;
  template <int kDim>
  using Pair = CodePair<kDim, kBits>;
};

using Rotated4 = RotatedCodes<codec::kRotated4, 4>;
using Rotated3 = RotatedCodes<codec::kRotated3, 3>;
using Rotated2 = RotatedCodes<codec::kRotated2, 2>;

} // namespace shadowkv
