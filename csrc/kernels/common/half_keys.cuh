// Keys of a warp's tokens as half, in the fragments that products of latents and a basis leave: RoPE, and scores.
#pragma once

#include "memory.cuh"
#include "mma.cuh"

namespace shadowkv {

// cos and sin of tokens g and g + 8: of 32 dimensions, eight after eight, and of two of them each token's.
struct Angles {
  __half2 cosine[8], sine[8];

  // Half h of the dimensions. An angle is a product of integers, of which whole revolutions overflow: exact to 2^-33
  // of one a position. (Tables in shared memory take three rows a token: that was a third of all that was read there.)
  __device__ __forceinline__ void make(uint32_t frequencies, uint32_t places, int h) {
    const uint32_t from = frequencies + threadIdx.x % 4 * 16;
    const int position[2] = {int(load_shared4(places + 12)), int(load_shared4(places + 128 + 12))};
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint4 all = load_shared16(from + (2 * h + pair) * 64);
      const uint32_t frequency[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) { // two groups of eight, two tokens
        float angle[2];
#pragma unroll
        for (int e = 0; e < 2; ++e)
          angle[e] = float(int(position[i % 2] * frequency[i / 2 * 2 + e])) * 0x1.921fb6p-30f; // 2 pi / 2^32
        cosine[4 * pair + i] = __floats2half2_rn(__cosf(angle[0]), __cosf(angle[1]));
        sine[4 * pair + i] = __floats2half2_rn(__sinf(angle[0]), __sinf(angle[1]));
      }
    }
  }
};

// Keys as half: its 11 bits lose less in RoPE than rounding them to bf16 does. Axes as those of Angles.
struct HalfKeys {
  __half2 x[8], y[8]; // dimensions that RoPE pairs

  __device__ __forceinline__ void take(const float (&k)[32]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* const from = k + 4 * (i / 2) + 2 * (i % 2);
      x[i] = __floats2half2_rn(from[0], from[1]), y[i] = __floats2half2_rn(from[16], from[17]);
    }
  }

  __device__ __forceinline__ void apply_rope(const Angles& by) {
#pragma unroll
    for (int i = 0; i < 8; ++i) rotate_by_angle(x[i], y[i], by.cosine[i], by.sine[i]);
  }

  // Adds the keys' products with the queries: (tokens g, g + 8; queries 2t, 2t + 1).
  __device__ __forceinline__ void score(float (&s)[4], uint32_t queries) const {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint4 q = load_shared16(queries + pair * 512);
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        const int i = 4 * pair + 2 * eight;
        mma_f16(s, {bits(x[i]), bits(x[i + 1]), bits(y[i]), bits(y[i + 1])}, {eight ? q.z : q.x, eight ? q.w : q.y});
      }
    }
  }
};

} // namespace shadowkv
