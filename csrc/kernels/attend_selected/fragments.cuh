// Arithmetic on fragments of products, shared by the attention kernels.
#pragma once

#include "kernels/common/mma.cuh"

namespace shadowkv {

// Over the eight lanes with the same place in their quads, which hold the rows of a fragment.
__device__ __forceinline__ float rows_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

__device__ __forceinline__ float rows_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 4);
  x += __shfl_xor_sync(~0u, x, 8);
  return x + __shfl_xor_sync(~0u, x, 16);
}

// Two bf16 as floats.
__device__ __forceinline__ float2 unpack_bf16(uint32_t x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}

__device__ __forceinline__ uint32_t bits(__half2 x) { return *reinterpret_cast<const uint32_t*>(&x); }

// (x & mask) | set in one instruction, which the compiler does not generate by itself.
template <uint32_t kMask, uint32_t kSet>
__device__ __forceinline__ uint32_t mask_and_set(uint32_t x) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "n"(kMask), "n"(kSet));
  return y;
}

// Rotates x and y by one angle, as RoPE does: (x, y) to (x cos - y sin, y cos + x sin), of two dimensions each.
__device__ __forceinline__ void rotate_by_angle(__half2& x, __half2& y, __half2 cosine, __half2 sine) {
  const __half2 old = x;
  x = __hfma2(x, cosine, __hneg2(__hmul2(y, sine)));
  y = __hfma2(y, cosine, __hmul2(old, sine));
}

} // namespace shadowkv
