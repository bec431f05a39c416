// Products of a warpgroup (wgmma): the first factor in registers, the second in shared memory.
#pragma once

#include "kernels/common/hopper.cuh"

namespace shadowkv {

// Waits for all products; c may only be read afterwards.
__device__ __forceinline__ void wait_products(float (&c)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (float& x : c) asm volatile("" : "+f"(x)::"memory");
}

#define SHADOWKV_C4(f, c, i) f(c[i]), f(c[i + 1]), f(c[i + 2]), f(c[i + 3])
#define SHADOWKV_C32(f, c)                                                                                     \
  SHADOWKV_C4(f, c, 0), SHADOWKV_C4(f, c, 4), SHADOWKV_C4(f, c, 8), SHADOWKV_C4(f, c, 12), SHADOWKV_C4(f, c, 16), \
      SHADOWKV_C4(f, c, 20), SHADOWKV_C4(f, c, 24), SHADOWKV_C4(f, c, 28)
#define SHADOWKV_PRODUCT                                                                                 \
  "mov.b64 b, {%36, 0x40000040};\n"                                                                      \
  "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"   \
  "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, b, p, 1, 1, 1;"

// c[64 x 64] = a[64 x 16] b[16 x 64], of half, and c += a b. Each warp has 16 rows, in the fragments of mma_f16;
// c[4 i ..] are columns 8 i to 8 i + 7. b is described by swizzled_rows.
__device__ __forceinline__ void first_product(float (&c)[32], const uint32_t (&a)[4], uint32_t b) {
#define SHADOWKV_OUT(x) "=f"(x)
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, 0, 0;\n" SHADOWKV_PRODUCT "\n}"
               : SHADOWKV_C32(SHADOWKV_OUT, c)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
#undef SHADOWKV_OUT
}

__device__ __forceinline__ void add_product(float (&c)[32], const uint32_t (&a)[4], uint32_t b) {
#define SHADOWKV_INOUT(x) "+f"(x)
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, 1, 0;\n" SHADOWKV_PRODUCT "\n}"
               : SHADOWKV_C32(SHADOWKV_INOUT, c)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
#undef SHADOWKV_INOUT
}
#undef SHADOWKV_PRODUCT
#undef SHADOWKV_C32
#undef SHADOWKV_C4

} // namespace shadowkv
