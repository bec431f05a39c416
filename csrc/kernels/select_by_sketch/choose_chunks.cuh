// The third launch: chooses the best chunks of a row and kv head, and samples others.
#pragma once

#include "constants.h"
#include "kernels/common/early_launch.cuh"
#include "weighted_sampling.cuh"
#include "count.cuh"

namespace shadowkv {

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
    const int wanted = p.budget_of(sequence);
    if (sampled)
      count = systematic_sample(
          shared, values, groups, wanted, wanted + sampled, 1, mix_bits(random + 0x85ebca77u), bits, use).count;
    else
      count = select_largest(shared, values, groups, wanted, bits, [&](uint32_t place, uint32_t i) {
        use(place, i, 0);
      });
  }
  for (int i = count + int(threadIdx.x); i < p.k; i += blockDim.x) selected[i] = -1;
}

} // namespace shadowkv
