// Keys of a consumer's tile: from latents to scores.
#pragma once

#include "kernels/common/mma.cuh"
#include "kernels/common/wgmma.cuh"
#include "shape.cuh"

namespace shadowkv {

// A warp's 16 rows of latents as the products' first factors: codes in the mantissas of 1024, the strong ones last.
template <class Shape>
__device__ __forceinline__ void load_latents(uint32_t (&a)[Shape::kSteps][4], uint32_t rows) {
  constexpr int kWeak = (Shape::kRank - kStrong) / 16; // steps of the product
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t row = rows + (half * 8 + g) * Shape::kLatentRow;
#pragma unroll
    for (int step = 0; step < kWeak; step += 2) {
      const uint32_t x = load_shared4(row + kStrong + step * 8 + t * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) // latents i and i + 4 of the lane's eight
        a[step + i / 2][half + i % 2 * 2] = mask_and_set<0x000f000fu, 0x64006400u>(x >> 4 * i);
    }
#pragma unroll
    for (int step = 0; step < kStrong / 16; ++step) {
      const uint32_t x = load_shared4(row + step * 16 + t * 4);
      a[kWeak + step][half] = __byte_perm(x, 0x64646464u, 0x4140);
      a[kWeak + step][half + 2] = __byte_perm(x, 0x64646464u, 0x4342);
    }
  }
}

// Begins the product of a warpgroup's latents and half h of the basis:
// k is (tokens g, g + 8; dimensions 32 h + 8 i + 2t, + 1, from i = 4 on those RoPE pairs them with).
template <class Shape>
__device__ __forceinline__ void begin_keys(
    float (&k)[32], const uint32_t (&a)[Shape::kSteps][4], const char* basis, int h) {
  const uint32_t ones = threadIdx.x % 4 == 0 ? 0x54005400u : 0; // 64 twice
  const uint32_t mean_factor[4] = {ones, ones, 0, 0};
  // Tells the compiler that this is uniform across a warp, so that it need not be in vector registers.
  const uint32_t b = __shfl_sync(~0u, swizzled_rows(shared_address(basis)), 0) + h * Shape::kRows * 8;
  begin_products();
  first_product(k, mean_factor, b + Shape::kSteps * 128);
#pragma unroll
  for (int step = 0; step < Shape::kSteps; ++step) add_product(k, a[step], b + step * 128);
  close_products();
}

} // namespace shadowkv
