// Products of a warpgroup (wgmma) of keys with eight queries.
#pragma once

#include "kernels/common/wgmma.cuh"

namespace shadowkv {

// c[64 x 8] = or += a[64 x 16] b[8 x 16]^T, in half, a in registers, in the fragments of mma_f16. In b, eight
// dimensions of each of eight queries are 16 contiguous bytes; the other eight dimensions begin kNext bytes further on.
#define SHADOWKV_QUERY_PRODUCT(ADD, BIND)                                                                \
  asm volatile(                                                                                           \
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, " ADD ", 0;\nmov.b64 b, {%8, 0x00000008};\n"      \
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, b, p, 1, 1, 0;\n}" \
      : BIND(c[0]), BIND(c[1]), BIND(c[2]), BIND(c[3])                                                    \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b))

template <bool kAdd, int kNext>
__device__ __forceinline__ void query_product(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t address) {
  const uint32_t b = (address & 0x3ffff) >> 4 | kNext / 16 << 16;
  if constexpr (kAdd)
    SHADOWKV_QUERY_PRODUCT("1", "+f");
  else
    SHADOWKV_QUERY_PRODUCT("0", "=f");
}
#undef SHADOWKV_QUERY_PRODUCT

} // namespace shadowkv
