// What the kernel of attention over coded tokens needs of mma.cuh, for threads that take turns (cuda_runtime.h beside
// this). Fragments are PTX's: lane = 4 g + t.
#pragma once

#include <cuda_fp16.h>

#include "permute.h"

inline int __float2int_rn(float x) { return int(lrintf(x)); }
inline uint32_t __umulhi(uint32_t x, uint32_t y) { return uint64_t(x) * y >> 32; }
inline float __fdividef(float x, float y) { return x / y; }

namespace shadowkv {

inline float max_or_nan(float x, float y) { return std::isnan(x) || std::isnan(y) ? NAN : std::max(x, y); }

struct Fragments {
  uint32_t a[4], b[2];
};
inline Fragments fragments[64][32]; // by warp and lane

// c[16 x 8] += a[16 x 32] b[32 x 8] of bytes of types A and B.
template <class A, class B>
void multiply_bytes(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Fragments(&all)[32] = fragments[warp];
  std::memcpy(fragments[warp][lane].a, a, sizeof(a)), std::memcpy(fragments[warp][lane].b, b, sizeof(b));
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 32; ++k) {
      const int t = k % 16 / 4, place = 8 * (k % 4);
      c[i] += A(all[4 * row + t].a[k / 16 * 2 + i / 2] >> place) * B(all[4 * column + t].b[k / 16] >> place);
    }
  }
  __syncwarp();
}

inline void mma_s8s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_bytes<int8_t, int8_t>(c, a, b);
}
inline void mma_s8u8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_bytes<int8_t, uint8_t>(c, a, b);
}
inline void mma_u8s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_bytes<uint8_t, int8_t>(c, a, b);
}
inline void mma_u8u8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_bytes<uint8_t, uint8_t>(c, a, b);
}

// Of mean keys, which no test has here.
void mma_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

} // namespace shadowkv
