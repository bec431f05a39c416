// The 16 bits of a bfloat16, and their conversion to and from float.

#pragma once

#include <cstdint>
#include <cstring>

namespace shadowkv {

struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void from_float(float x, float& result) { result = x; }

// Rounds to nearest, ties to even. NaN stays NaN: rounding could carry its mantissa away.
inline void from_float(float x, BFloat16& result) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  result.bits = static_cast<uint16_t>(x != x ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace shadowkv
