// As much of CUDA's halves as kernels need, for a CPU.
#pragma once

#include <cuda_runtime.h>

using __half = _Float16;
struct __half2 {
  __half x, y;
};
struct float2 {
  float x, y;
};

inline float2 __half22float2(__half2 x) { return {float(x.x), float(x.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float __half2float(__half x) { return x; }
inline float __low2float(__half2 x) { return x.x; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __hadd2(__half2 x, __half2 y) { return {__half(x.x + y.x), __half(x.y + y.y)}; }
inline __half __ushort_as_half(uint16_t bits) {
  __half x;
  std::memcpy(&x, &bits, 2);
  return x;
}
inline uint32_t __hgt2_mask(__half2 x, __half2 y) {
  return (x.x > y.x ? 0xffffu : 0) | (x.y > y.y ? 0xffff0000u : 0);
}
inline uint32_t __hge2_mask(__half2 x, __half2 y) {
  return (x.x >= y.x ? 0xffffu : 0) | (x.y >= y.y ? 0xffff0000u : 0);
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t pool = uint64_t(y) << 32 | x;
  uint32_t z = 0;
  for (int i = 0; i < 4; ++i) z |= uint32_t(pool >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return z;
}

// Of mma.cuh.
namespace shadowkv {

inline float exp2_fast(float x) { return exp2f(x); }
inline __half2 half2_of(uint32_t x) {
  __half2 y;
  std::memcpy(&y, &x, 4);
  return y;
}

} // namespace shadowkv
