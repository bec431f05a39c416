// Copies of blocks of rows into rings of stages, in boxes as products read them.
#pragma once

#include "hopper.cuh"

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

} // namespace shadowkv
