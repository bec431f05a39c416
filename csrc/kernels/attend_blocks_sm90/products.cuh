// Products of attention over blocks: scores, and weighed sums of values (wgmma.cuh says how factors lie).
#pragma once

#include "../wgmma.cuh"
#include "shape.cuh"

namespace shadowkv {

// Begins s = q k^T of 64 queries and a block of keys, in a group of its own.
template <class Shape>
__device__ __forceinline__ void begin_scores(float (&s)[64], uint32_t queries, uint32_t keys) {
  using Element = typename Shape::Element;
  const uint32_t a = swizzled_rows(queries), b = swizzled_rows(keys);
  begin_products();
  score_product<Element, false>(s, a, b);
#pragma unroll
  for (int step = 1; step < Shape::kDim / 16; ++step) {
    const int at = step / 4 * (kBoxBytes / 16) + step % 4 * 2;
    score_product<Element, true>(s, a + at, b + at);
  }
  close_products();
}

// Begins sums += p v, in a group of its own.
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
