// How the kept runs of all rows are distributed over warps.
#pragma once

#include "radix_select.cuh"
#include "shape.cuh"

namespace shadowkv {

// A slice of the kept runs of a row, from a lane's view.
struct Slice {
  uint2 named; // the page name and run of the lane's run
  float slope, more; // linear map from its tokens' scores to exponents
  unsigned row, head, first;
  int left; // runs from the first on, at most those of a slice; 0 or less if there is no such slice
};

// Stores in `before` how many slices of a head there are before each sequence, and in total. For one warp.
__device__ __forceinline__ void count_slices(const SelectBySketch& p, unsigned sequences, uint32_t* before) {
  const int lane = threadIdx.x % 32;
  uint32_t sum = 0;
  for (unsigned first = 0; first < sequences; first += 32) {
    const unsigned sequence = first + lane;
    const uint32_t slices = sequence < sequences ? (p.kept_of(sequence) + p.slice - 1) / p.slice : 0;
    const uint32_t inclusive = scan_warp(slices);
    if (sequence < sequences) before[sequence] = sum + inclusive - slices;
    sum += __shfl_sync(~0u, inclusive, 31);
  }
  if (lane == 0) before[sequences] = sum;
}

// The slices of all rows in order, with those of all heads at one place adjacent.
struct SliceLine {
  const uint32_t* before; // as count_slices leaves it
  unsigned sequences, all;

  __device__ __forceinline__ Slice find(const SelectBySketch& p, unsigned number) const {
    const int lane = threadIdx.x % 32;
    Slice x{};
    if (number >= all) return x;
    const unsigned place = number / p.heads;
    int sequence = -1; // the last that begins at or before it
    for (unsigned first = 0; first < sequences; first += 32)
      sequence += __popc(__ballot_sync(~0u, first + lane < sequences && before[first + lane] <= place));
    x.head = number % p.heads, x.row = sequence * p.heads + x.head, x.first = (place - before[sequence]) * p.slice;
    const unsigned at = min(x.first + lane, unsigned(p.region.keep - 1));
    const RowState state = p.state(x.row);
    x.named = p.kept(x.row)[at];
    x.slope = state.slope, x.more = fmaf(-state.slope, state.edge, p.weights(x.row)[at]);
    x.left = min(state.count - int(x.first), p.slice);
    return x;
  }
};

} // namespace shadowkv
