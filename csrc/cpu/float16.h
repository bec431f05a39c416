// The 16 bits of a float16, and their conversion to and from float.

#pragma once

#include <cstdint>
#include <cstring>

namespace shadowkv {

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

}  // namespace shadowkv
