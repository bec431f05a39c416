// Sums over the lanes of a warp.
#pragma once

#include <cstdint>

namespace shadowkv {

// The sum of x over the lanes up to and including this one.
__device__ __forceinline__ uint32_t scan_warp(uint32_t x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t below = __shfl_up_sync(~0u, x, step);
    if (threadIdx.x % 32 >= step) x += below;
  }
  return x;
}

} // namespace shadowkv
