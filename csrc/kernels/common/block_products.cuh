// Scores of 64 queries and a block of keys, both in shared memory as copied (wgmma.cuh describes the layout).
#pragma once

#include "block_copies.cuh"
#include "wgmma.cuh"

namespace shadowkv {

// Issues s = q k^T, in a separate group.
template <class Element, int kDim>
__device__ __forceinline__ void begin_scores(float (&s)[64], uint32_t queries, uint32_t keys) {
  const uint32_t a = swizzled_rows(queries), b = swizzled_rows(keys);
  begin_products();
  score_product<Element, false>(s, a, b);
#pragma unroll
  for (int step = 1; step < kDim / 16; ++step) {
    const int at = step / 4 * (kBoxBytes / 16) + step % 4 * 2;
    score_product<Element, true>(s, a + at, b + at);
  }
  close_products();
}

} // namespace shadowkv
