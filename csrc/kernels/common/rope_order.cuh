// The order that kernels which rebuild keys have a head's dimensions in: every dimension of the first half is half a
// head before the one that RoPE rotates it with, also where RoPE rotates only the head's first dimensions, in halves of
// those. The others follow as if they were rotated, by no angle.
#pragma once

#include <cstdint>

namespace shadowkv {

struct RopeOrder {
  int rotating; // of the kDim / 16 eights of dimensions in a half, the first ones
  float still;  // factor of the other dimensions of a query: scores are multiplied by the magnitude of the rotation

  // The first of the eight dimensions that are the n-th eight of the first half, or of the second.
  template <int kDim>
  __host__ __device__ int dim_of(int eight, int half) const {
    const int pairs = 8 * rotating;
    return 8 * eight + (eight < rotating ? half * pairs : half ? kDim / 2 : pairs);
  }
  __host__ __device__ float factor(int eight) const { return eight < rotating ? 1.f : still; }
};

} // namespace shadowkv
