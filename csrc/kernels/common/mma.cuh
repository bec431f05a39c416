// Products of tensor cores by warps (mma), and arithmetic on their fragments. Layouts of fragments are PTX's (ISA,
// "Matrix fragments for mma"): lane = 4 g + t, with the row or column g = lane / 4 and the place within a quad
// t = lane % 4.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace shadowkv {

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ __half2 half2_of(uint32_t x) { return *reinterpret_cast<const __half2*>(&x); }

// c[16 x 8] += a[16 x 16] b[16 x 8]. a0: (g, 2t..) a1: (g + 8, 2t..) a2: (g, 2t + 8..) a3: (g + 8, 2t + 8..);
// b0: (2t.., g) b1: (2t + 8.., g); c0, c1: (g, 2t..) c2, c3: (g + 8, 2t..). Two bf16 per register, lower index first.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c[16 x 8] += a[16 x 32] b[32 x 8], a unsigned, b signed. a0: (g, 4t..) a1: (g + 8, 4t..) a2: (g, 16 + 4t..)
// a3: (g + 8, 16 + 4t..); b0: (4t.., g) b1: (16 + 4t.., g). Four bytes per register.
__device__ __forceinline__ void mma_u8s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same, a and b signed.
__device__ __forceinline__ void mma_s8s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same, a signed, b unsigned.
__device__ __forceinline__ void mma_s8u8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same, a and b unsigned.
__device__ __forceinline__ void mma_u8u8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Bytes of x (0 to 3) and y (4 to 7), chosen by the lower four nibbles of the selector. A nibble with its highest bit
// set replicates the byte's sign eight times, which __byte_perm does not support.
__device__ __forceinline__ uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t z;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(selector));
  return z;
}

// The larger one; NaN if either is NaN.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Two floats as bf16, the first in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

// The same as half.
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

// The bits of x where the mask has ones, those of y elsewhere: one instruction.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t select_bits(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(z) : "n"(kMask), "r"(x), "r"(y));
  return z;
}

// Same as mma_bf16, for half.
__device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Transposes an 8 x 8 matrix of 16-bit elements, from (g, 2t..) to (2t.., g).
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

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

// Two e4m3 numbers in the lower half of x as float16, exactly. Older GPUs, which have no instruction for it, read NaN
// as 480.
__device__ __forceinline__ uint32_t half2_of_e4m3(uint32_t x) {
  uint32_t y;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(uint16_t(x)));
#else
  // In the upper bytes of two halves, exponents are one bit too high, and their bias is smaller by 8.
  const uint32_t wide = __byte_perm(x, 0, 0x1404);
  y = select_bits<0x80008000>(wide, wide >> 1 & 0x3f803f80);
  const __half2 scaled = __hmul2(half2_of(y), __float2half2_rn(256.0f));
  y = *reinterpret_cast<const uint32_t*>(&scaled);
#endif
  return y;
}

// Rotates x and y by one angle, as RoPE does: (x, y) to (x cos - y sin, y cos + x sin), of two dimensions each.
__device__ __forceinline__ void rotate_by_angle(__half2& x, __half2& y, __half2 cosine, __half2 sine) {
  const __half2 old = x;
  x = __hfma2(x, cosine, __hneg2(__hmul2(y, sine)));
  y = __hfma2(y, cosine, __hmul2(old, sine));
}

} // namespace shadowkv
