// What both launches that select by a histogram have in common: their shared memory, and the counting of values.
#pragma once

#include "radix_select.cuh"
#include "shape.cuh"

namespace shadowkv {

// Bytes of shared memory, at most `most`, to select from 8 `groups` values: two bit sets or sums of groups and, if
// there is room, the values, to read them again.
struct LargestMemory {
  int bits, values;
  LargestMemory(int64_t groups, bool sampled, int64_t most)
      : bits(int(((groups + 3) / 4 * (sampled ? 16 : 8) + 15) / 16 * 16)),
        values(bits + 16 * groups <= most ? int(16 * groups) : 0) {}
  int bytes() const { return bits + values; }
};

constexpr int kFewBlocks = 3, kManyBlocks = 5; // that a multiprocessor holds, with 512 or 256 threads

struct SelectPhase {
  SelectBySketch of;
  LargestMemory memory;
};

// Counts 8 `groups` values and copies them to shared memory after the bit sets, if there is room; returns where they
// can be read again.
__device__ __forceinline__ const uint4*
count_values(RadixShared& shared, const LargestMemory& memory, uint4* room, const uint4* values, int groups) {
  for (int i = threadIdx.x; i < kFirstBins; i += blockDim.x) shared.first[i] = 0;
  if (threadIdx.x < 32) shared.second[threadIdx.x] = 0;
  __syncthreads();
  uint4* copies = room + memory.bits / 16;
#pragma unroll 1
  for (int i = threadIdx.x; i < groups; i += 4 * blockDim.x) {
    uint4 x[4]; // all in flight at once
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (i + j * int(blockDim.x) < groups) x[j] = values[i + j * blockDim.x];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j * int(blockDim.x) >= groups) break;
      if (memory.values) copies[i + j * blockDim.x] = x[j];
      count_first(shared, x[j]);
    }
  }
  return memory.values ? copies : values;
}

} // namespace shadowkv
