// Numbers as they are stored, and their conversion to and from float: 16-bit floats, and numbers in memory whose dtype
// is known at run time.

#pragma once

#include <cstdint>
#include <cstring>

namespace shadowkv {

// The 16 bits of a bfloat16.
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

// The 16 bits of a float16.
struct Float16 {
  uint16_t bits;
};

inline float to_float(Float16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  result *= 0x1p112f;  // a float's exponent has 112 more
  if (!(x.bits & 0x7c00)) result = static_cast<float>(x.bits & 0x3ff) * 0x1p-24f;  // a subnormal float may be flushed
  if ((x.bits & 0x7c00) == 0x7c00) result = (x.bits & 0x3ff) ? __builtin_nanf("") : __builtin_inff();
  return x.bits & 0x8000 ? -result : result;
}

// Rounds to nearest, ties to even.
inline Float16 to_float16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  uint32_t result;
  if (bits >= 0x47800000) {  // 65536 and above
    result = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
  } else if (bits < 0x38800000) {  // below 2^-14: after adding 0.5, a unit in the last place is that of float16
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 0.5f;
    std::memcpy(&result, &magnitude, sizeof result);
    result -= 0x3f000000;
  } else {
    result = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | result)};
}

inline float to_float(int8_t x) { return x; }

// Numbers in memory.
enum class Dtype { float32, bfloat16, int8, uint8 };

struct Numbers {
  const void* data = nullptr;
  Dtype dtype = Dtype::float32;
};

}  // namespace shadowkv
