#include <cuda_runtime.h>

#include "kernels/select_by_sketch/weighted_sampling.cuh"

namespace shadowkv {

// What a kernel does before and with a sample, for 8 `groups` halves.
static void sample(
    const uint4* values, uint32_t groups, uint32_t top_k, uint32_t to_select, float factor, uint32_t uniform,
    uint32_t* sums, int* numbers, float* log_weights, uint32_t* count) {
  __shared__ RadixShared shared;
  for (int i = threadIdx.x; i < kFirstBins; i += blockDim.x) shared.first[i] = 0;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < groups; i += blockDim.x) count_first(shared, values[i]);
  const Chosen chosen = systematic_sample(
      shared, values, groups, top_k, to_select, factor, uniform, sums,
      [&](uint32_t place, uint32_t number, float log_weight) {
        numbers[place] = int(number), log_weights[place] = log_weight;
      });
  if (threadIdx.x == 0) *count = chosen.count;
}

} // namespace shadowkv

// False where threads wait for others that have ended.
extern "C" bool weighted_sampling(
    const void* values, uint32_t groups, uint32_t top_k, uint32_t to_select, float factor, uint32_t uniform,
    uint32_t* sums, int* numbers, float* log_weights, uint32_t* count, int threads) {
  return on_cpu::run({1}, threads, [] {}, [&] {
    shadowkv::sample(
        static_cast<const uint4*>(values), groups, top_k, to_select, factor, uniform, sums, numbers, log_weights,
        count);
  });
}
