// Includes the file SHADOWKV_KERNEL once per instruction set, each time in a separate namespace, with SHADOWKV_LANES
// set to the number of floats in a vector register: one build serves every machine. SHADOWKV_BEST(function) is the one
// to run. To be included in namespace shadowkv. No include guard; kernels must not include standard headers, which
// would be compiled for that instruction set.

#define SHADOWKV_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define SHADOWKV_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHADOWKV_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#endif
namespace avx512 {
#define SHADOWKV_LANES 16
#include SHADOWKV_KERNEL
#undef SHADOWKV_LANES
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {
#define SHADOWKV_LANES 8
#include SHADOWKV_KERNEL
#undef SHADOWKV_LANES
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#define SHADOWKV_BEST(function)                                       \
  (instruction_set() == InstructionSet::avx512     ? avx512::function \
       : instruction_set() == InstructionSet::avx2 ? avx2::function   \
                                                   : baseline::function)
#else
#define SHADOWKV_BEST(function) (baseline::function)
#endif

namespace baseline {  // SSE2, NEON
#define SHADOWKV_LANES 4
#include SHADOWKV_KERNEL
#undef SHADOWKV_LANES
}  // namespace baseline
