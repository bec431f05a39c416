// Warpgroup products (wgmma), 64 rows each.
//
// Factors in shared memory have the layout of copies (copy_box with the 128-byte swizzle): boxes of 128 rows of 128
// bytes, 1024 bytes per eight rows, the 16-byte unit u of row r at u ^ r % 8. A descriptor counts in units of 16 bytes:
// its address in bits 0 to 13, the leading offset in 16 to 29, the stride offset in 32 to 45, the swizzle in 62 and 63
// (1: 128 bytes), and the base offset in 49 to 51, zero as all patterns begin at multiples of 1024 bytes.
//   Queries and keys, where the product sums within rows: the stride offset is from eight rows to the next eight, 1024
//   bytes. 16 dimensions are two units, so a step adds 32 bytes to the address and four steps are a box; the swizzle
//   depends on the address bits and stays correct. The leading offset is not read: a step is within 128 bytes.
//   Values, where the product sums over rows: the stride offset is again from eight rows to the next eight, the leading
//   offset from 64 columns to the next 64, a box. A step is 16 rows, 2048 bytes.
#pragma once

#include "hopper.cuh"

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace shadowkv {

// Registers that products will read or write, or have done so: no access to them is moved across this.
template <int kCount>
__device__ __forceinline__ void settle(float (&c)[kCount]) {
#pragma unroll
  for (float& x : c) asm volatile("" : "+f"(x)::"memory");
}

template <int kCount>
__device__ __forceinline__ void settle(uint32_t (&c)[kCount]) {
#pragma unroll
  for (uint32_t& x : c) asm volatile("" : "+r"(x)::"memory");
}

// A use, visible to the assembler too, of registers that a product reads, which never stores: up to here they are not
// reused. `never` is false, but the compiler must not know that.
template <int kCount>
__device__ __forceinline__ void keep(const uint32_t (&c)[kCount], bool never, uint32_t address) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4)
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.shared.v4.u32 [%1], {%2, %3, %4, %5};\n}" ::"r"(int(never)),
        "r"(address), "r"(c[i]), "r"(c[i + 1]), "r"(c[i + 2]), "r"(c[i + 3])
        : "memory");
}

// Waits for all but that many of the most recent groups of products; what the others access is settled afterwards.
template <int kLeft>
__device__ __forceinline__ void wait_product_groups() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

#define SHADOWKV_C8(f, c, i) \
  f(c[i]), f(c[i + 1]), f(c[i + 2]), f(c[i + 3]), f(c[i + 4]), f(c[i + 5]), f(c[i + 6]), f(c[i + 7])
#define SHADOWKV_C32(f, c, i) \
  SHADOWKV_C8(f, c, i), SHADOWKV_C8(f, c, i + 8), SHADOWKV_C8(f, c, i + 16), SHADOWKV_C8(f, c, i + 24)
#define SHADOWKV_OUT(x) "=f"(x)
#define SHADOWKV_INOUT(x) "+f"(x)
#define SHADOWKV_R32 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SHADOWKV_R64 \
  SHADOWKV_R32 \
  "," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// c[64 x 128] = or += a[64 x 16] b[128 x 16]^T.
#define SHADOWKV_SCORES(TYPES, ADD, BIND)                                                                       \
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, " ADD ", 0;\n"                                \
               "mov.b64 a, {%64, 0x40000040};\nmov.b64 b, {%65, 0x40000040};\n"                                 \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPES " {" SHADOWKV_R64 "}, a, b, p, 1, 1, 0, 0;\n}" \
               : SHADOWKV_C32(BIND, c, 0), SHADOWKV_C32(BIND, c, 32)                                            \
               : "r"(a), "r"(b))

template <class Element, bool kAdd>
__device__ __forceinline__ void score_product(float (&c)[64], uint32_t a, uint32_t b) {
  constexpr bool kHalf = std::is_same_v<Element, __half>;
  if constexpr (kHalf && kAdd)
    SHADOWKV_SCORES("f16.f16", "1", SHADOWKV_INOUT);
  else if constexpr (kHalf)
    SHADOWKV_SCORES("f16.f16", "0", SHADOWKV_OUT);
  else if constexpr (kAdd)
    SHADOWKV_SCORES("bf16.bf16", "1", SHADOWKV_INOUT);
  else
    SHADOWKV_SCORES("bf16.bf16", "0", SHADOWKV_OUT);
}
#undef SHADOWKV_SCORES

// c[64 x dim] += a[64 x 16] b[16 x dim], a in registers, b's columns within its rows.
#define SHADOWKV_VALUES_128(TYPES)                                                                                  \
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, 1, 0;\nmov.b64 b, {%68, 0x40000040};\n"              \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPES " {" SHADOWKV_R64                               \
               "}, {%64,%65,%66,%67}, b, p, 1, 1, 1;\n}"                                                            \
               : SHADOWKV_C32(SHADOWKV_INOUT, c, 0), SHADOWKV_C32(SHADOWKV_INOUT, c, 32)                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))
#define SHADOWKV_VALUES_64(TYPES)                                                                                   \
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, 1, 0;\nmov.b64 b, {%36, 0x40000040};\n"              \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES " {" SHADOWKV_R32                                \
               "}, {%32,%33,%34,%35}, b, p, 1, 1, 1;\n}"                                                            \
               : SHADOWKV_C32(SHADOWKV_INOUT, c, 0)                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))

template <class Element>
__device__ __forceinline__ void value_product(float (&c)[64], const uint32_t* a, uint32_t b) {
  if constexpr (std::is_same_v<Element, __half>)
    SHADOWKV_VALUES_128("f16.f16");
  else
    SHADOWKV_VALUES_128("bf16.bf16");
}

template <class Element>
__device__ __forceinline__ void value_product(float (&c)[32], const uint32_t* a, uint32_t b) {
  if constexpr (std::is_same_v<Element, __half>)
    SHADOWKV_VALUES_64("f16.f16");
  else
    SHADOWKV_VALUES_64("bf16.bf16");
}
#undef SHADOWKV_VALUES_128
#undef SHADOWKV_VALUES_64
#undef SHADOWKV_R64
#undef SHADOWKV_R32
#undef SHADOWKV_INOUT
#undef SHADOWKV_OUT
#undef SHADOWKV_C32
#undef SHADOWKV_C8

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
