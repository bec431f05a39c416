// The first and the third launch, which select by a histogram, a row and kv head in each block.
#pragma once

#include "constants.h"
#include "kernels/common/early_launch.cuh"
#include "radix_select.cuh"
#include "shape.cuh"
#include "weighted_sampling.cuh"

namespace shadowkv {

// Bytes of shared memory, at most `most`, to select from 8 `groups` values: two bit sets or sums of groups and, if
// there is room, the values, to read them again.
struct LargestMemory {
  int bits, values;
  LargestMemory(int64_t groups, bool sampled, int64_t limit)
      : bits(int(((groups + 3) / 4 * (sampled ? 16 : 8) + 15) / 16 * 16)),
        values(bits + 16 * groups <= limit ? int(16 * groups) : 0) {}
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

// The first launch: finds the runs with the best sign scores.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == 512 ? kFewBlocks : kManyBlocks)
    find_runs_kernel(const SelectPhase phase) {
  const SelectBySketch& p = phase.of;
  extern __shared__ uint4 room[];
  __shared__ RadixShared shared;
  __shared__ float mean_length; // of the queries, for thread 0: no register is left for it
  wait_for_launch_before();
  let_next_launch_begin();
  const unsigned row = blockIdx.x, sequence = row / p.heads;
  const int pages = p.pages_of(sequence), to_keep = p.kept_of(sequence), sampled = p.sampled_runs_of(sequence);
  RowState state = {0, 1, 0, 0}; // logits as they are
  if (to_keep > 0) {
    const uint4* values =
        count_values(shared, phase.memory, room, p.coarse + int64_t(row) * p.num_pages_most, pages);
    const int64_t* page_ids = p.pages + sequence * p.pages_stride;
    uint2* kept = p.kept(row);
    float* weights = p.weights(row);
    uint32_t* bits = reinterpret_cast<uint32_t*>(room);
    const auto keep = [&](uint32_t place, uint32_t run, float weight) {
      kept[place] = {uint32_t(page_ids[run / kPageRuns]), run}, weights[place] = weight;
    };
    float length = 0; // average over the queries
    if (p.sampled) {
      for (int i = 0; i < p.group; ++i) length += p.length[row * p.group + i];
      length /= p.group, state.slope = p.chunk_sharpness;
      if (threadIdx.x == 0) mean_length = length;
    }
    if (sampled) {
      const Chosen chosen = systematic_sample(
          shared, values, pages, to_keep - sampled, to_keep, p.run_sharpness * length, mix_bits(p.state_of(row)), bits,
          keep);
      state.count = chosen.count, state.edge = mean_length * fmaxf(chosen.edge, -kLargestHalf); // thread 0's
    } else {
      state.count = select_largest(shared, values, pages, to_keep, bits, [&](uint32_t place, uint32_t run) {
        keep(place, run, 0);
      });
    }
  }
  if (threadIdx.x == 0) p.state(row) = state;
}

// The third launch: chooses the best chunks, and samples others.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == 512 ? kFewBlocks : kManyBlocks)
    choose_chunks_kernel(const SelectPhase phase) {
  const SelectBySketch& p = phase.of;
  extern __shared__ uint4 room[];
  __shared__ RadixShared shared;
  wait_for_launch_before();
  let_next_launch_begin();
  const unsigned row = blockIdx.x, sequence = row / p.heads;
  const int log_run = 3 - p.log_chunk, chunks = p.state(row).count << log_run, groups = (chunks + 7) / 8;
  const int sampled = p.sampled_of(sequence);
  const uint32_t random = sampled ? p.state_of(row) : 0;
  int64_t* selected = p.selected + int64_t(row) * p.k;
  float* log_weight = p.log_weight + int64_t(row) * p.k;
  int count = 0;
  if (chunks > 0) {
    uint16_t* scores = p.values(row);
    if (chunks + int(threadIdx.x) < 8 * groups) scores[chunks + threadIdx.x] = kNever;
    const uint4* values = count_values(shared, phase.memory, room, reinterpret_cast<const uint4*>(scores), groups);
    const uint2* kept = p.kept(row);
    const float* weights = p.weights(row);
    uint32_t* bits = reinterpret_cast<uint32_t*>(room);
    const auto use = [&](uint32_t place, uint32_t i, float weight) {
      selected[place] = (int64_t(__ldg(&kept[i >> log_run].y)) << log_run) + (i & ((1 << log_run) - 1));
      if (p.sampled) log_weight[place] = (__ldg(weights + (i >> log_run)) + weight) * kLn2;
    };
    const int budget = p.budget_of(sequence);
    if (sampled)
      count = systematic_sample(
          shared, values, groups, budget, budget + sampled, 1, mix_bits(random + 0x85ebca77u), bits, use).count;
    else
      count = select_largest(shared, values, groups, budget, bits, [&](uint32_t place, uint32_t i) {
        use(place, i, 0);
      });
  }
  for (int i = count + int(threadIdx.x); i < p.k; i += blockDim.x) selected[i] = -1;
}

} // namespace shadowkv
