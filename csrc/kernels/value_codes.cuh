// Codes of rotated values, in 4, 3 or 2 bits, on their way into the first factor of a product of bf16. Their layout is
// that of shadowkv/ops/attend_selected/packing.py.
#pragma once

#include "mma.cuh"

namespace shadowkv {

// (x & mask) | set in one instruction, which the compiler does not find by itself.
template <uint32_t kMask, uint32_t kSet>
__device__ __forceinline__ uint32_t mask_and_set(uint32_t x) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "n"(kMask), "n"(kSet));
  return y;
}

// Codes of one token that a lane owns, of dimensions 16 i + g and 16 i + 8 + g in this order from the low bits up: all
// 4 bits, or the lower 2; of 3 bits the upper ones are the second plane.
template <int kDim, int kBits>
struct LaneCodes {
  static constexpr int kFirstBytes = kDim / 8 * (kBits == 4 ? 4 : 2) / 8;      // of a lane in the first plane
  static constexpr int kSecondBytes = kBits == 3 ? kDim / 64 : 0, kSecondAt = kDim / 4; // and where the second begins
  uint32_t first[(kFirstBytes + 3) / 4];
  uint32_t second[kBits == 3 ? (kSecondBytes + 3) / 4 : 1];

  // Of the row at p in global memory, which is read once.
  __device__ __forceinline__ void load(const char* p, int g) {
    load_bytes<kFirstBytes>(first, p + g * kFirstBytes);
    if constexpr (kBits == 3) load_bytes<kSecondBytes>(second, p + kSecondAt + g * kSecondBytes);
  }

 private:
  template <int kBytes>
  __device__ static __forceinline__ void load_bytes(uint32_t* to, const char* p) {
    if constexpr (kBytes == 16) {
      const uint4 x = load_streamed16(p);
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else if constexpr (kBytes == 8) {
      const uint2 x = load_streamed8(p);
      to[0] = x.x, to[1] = x.y;
    } else if constexpr (kBytes == 4) {
      to[0] = __ldg(reinterpret_cast<const uint32_t*>(p));
    } else if constexpr (kBytes % 2 == 0) { // of 96 dimensions, or few
#pragma unroll
      for (int i = 0; i < kBytes / 2; ++i) {
        const uint32_t x = __ldg(reinterpret_cast<const uint16_t*>(p) + i);
        to[i / 2] = i % 2 ? to[i / 2] | x << 16 : x;
      }
    } else {
      to[0] = 0;
#pragma unroll
      for (int i = 0; i < kBytes; ++i) to[0] |= uint32_t(__ldg(reinterpret_cast<const uint8_t*>(p) + i)) << 8 * i;
    }
  }
};

// What a lane has of two tokens that follow each other, as pieces of first factors. Codes come out as 128 + code, or,
// where they would have to be shifted, as 128 + 16 code: 0x4300 | x is 128 + x. A product's sum over tokens becomes one
// of centred codes by `factor` and, times the sum of weights, `offset`.
template <int kDim, int kBits>
struct CodePair {
  using Codes = LaneCodes<kDim, kBits>;
  static constexpr int kEights = (kDim + 63) / 64; // of a token's dimensions in a lane, two words each
  // 4 bits: the first token's eight codes, then the other's. Else those of even number, then those of odd number, both
  // tokens' in four bits each, the first token's in the lower half.
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
          // Upper bits, two by two, come to the two lowest of every four: their byte twice, then the second time four
          // lower, then what of each byte is still a pair too low.
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

  // Codes i of 16 dimensions: low of dimension g, high of g + 8.
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

} // namespace shadowkv
