// Blocks of 128 rows on Hopper: copies into rings of stages, in boxes as products read them, and the scores of a block
// of keys (wgmma.cuh describes the layout).
#pragma once

#include "wgmma.cuh"

namespace shadowkv {

constexpr int kBlock = 128;           // keys of a block, and queries of a tile
constexpr int kBoxDims = 64;          // dimensions of a box: 128 bytes of each of 128 rows, the span of a swizzle
constexpr int kBoxBytes = 128 * 128;

// Starts the copy of 128 rows of a head.
template <int kDim>
__device__ __forceinline__ void copy_rows(const CUtensorMap& map, uint32_t to, uint32_t full, int head, int row) {
  arrive_expecting(full, kDim / kBoxDims * kBoxBytes);
#pragma unroll
  for (int box = 0; box < kDim / kBoxDims; ++box)
    copy_box(map, to + box * kBoxBytes, full, box * kBoxDims, head, row);
}

// A place in a ring of stages, and the parity of its current phase.
template <int kStages>
struct Place {
  int slot = 0, parity = 0;

  __device__ void advance() {
    if (++slot == kStages) slot = 0, parity ^= 1;
  }
};

// Issues s = q k^T of 64 queries and a block of keys, in a separate group.
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
