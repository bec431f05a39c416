// The first launch: finds the runs with the best sign scores, one row and kv head per block.
#pragma once

#include "constants.h"
#include "kernels/common/early_launch.cuh"
#include "weighted_sampling.cuh"
#include "count.cuh"

namespace shadowkv {

template <int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == 512 ? kFewBlocks : kManyBlocks)
    find_runs_kernel(const SelectPhase phase) {
  const SelectBySketch& p = phase.of;
  extern __shared__ uint4 room[];
  __shared__ RadixShared shared;
  wait_for_launch_before();
  let_next_launch_begin();
  const unsigned row = blockIdx.x, sequence = row / p.heads;
  const int pages = p.pages_of(sequence), wanted = p.kept_of(sequence), sampled = p.sampled_runs_of(sequence);
  RowState state = {0, 1, 0, 0}; // scores as they are
  if (wanted > 0) {
    const uint4* values =
        count_values(shared, phase.memory, room, p.coarse + int64_t(row) * p.num_pages_most, pages);
    const int64_t* names = p.pages + sequence * p.pages_stride;
    uint2* kept = p.kept(row);
    float* weights = p.weights(row);
    uint32_t* bits = reinterpret_cast<uint32_t*>(room);
    const auto keep = [&](uint32_t place, uint32_t run, float weight) {
      kept[place] = {uint32_t(names[run / kPageRuns]), run}, weights[place] = weight;
    };
    float length = 0; // average over the queries
    if (p.sampled) {
      for (int i = 0; i < p.group; ++i) length += p.length[row * p.group + i];
      length /= p.group, state.slope = p.chunk_sharpness * length;
    }
    if (sampled) {
      const Chosen chosen = systematic_sample(
          shared, values, pages, wanted - sampled, wanted, p.run_sharpness * length, mix_bits(p.state_of(row)), bits,
          keep);
      state.count = chosen.count, state.edge = fmaxf(chosen.edge, -kLargestHalf);
    } else {
      state.count = select_largest(shared, values, pages, wanted, bits, [&](uint32_t place, uint32_t run) {
        keep(place, run, 0);
      });
    }
  }
  if (threadIdx.x == 0) p.state(row) = state;
}

} // namespace shadowkv
