// Products of attention over blocks: weighted sums of values (wgmma.cuh describes the layout of factors).
#pragma once

#include "kernels/common/block_products.cuh"
#include "shape.cuh"

namespace shadowkv {

// Issues sums += p v, in a separate group.
template <class Shape>
__device__ __forceinline__ void begin_sums(float (&sums)[Shape::kDim / 2], const uint32_t (&p)[32], uint32_t values) {
  const uint32_t b = swizzled_rows(values) | kBoxBytes / 16 << 16;
  begin_products();
#pragma unroll
  for (int step = 0; step < kBlock / 16; ++step)
    value_product<typename Shape::Element>(sums, p + step * 4, b + step * 128);
  close_products();
}

} // namespace shadowkv
