// Selection of values by a thread block: the largest, and a sample of the others, each in proportion to an exponential
// of its value. Either all or none of the values that share a bin of the first digit are among the largest, so that the
// bins' counts suffice to begin with. Chances are whole numbers, and their sums are exact. The sums of floats from which
// they are derived are fixed trees: blocks of 8 and of 16 warps (batches of many rows use the smaller) add in the same
// order.
#pragma once

#include "kernels/common/mma.cuh"
#include "radix_select.cuh"
#include "sketch_rules.h"

namespace shadowkv {

constexpr int kSearches = 4;   // places that a thread searches for at once
constexpr int kMostThreads = 512;
// Least weight of a bin's middle, as a share of that of the bin's edge, with which bins' counts tell the sum of weights.
constexpr float kLeastOfMiddle = 0.8f;
constexpr int kBinsAtOnce = 4; // summed one after the other: a thread's share in a block of 16 warps

// Chris Wellons' lowbias32.
__device__ __forceinline__ uint32_t mix_bits(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352d;
  x = (x ^ x >> 15) * 0x846ca68b;
  return x ^ x >> 16;
}

// Joins x of the block's threads, for all of them: pairs of neighbours, then pairs of those. Joined with `nothing`, a
// number stays what it is. Barriers as in scan_block.
template <typename Join>
__device__ __forceinline__ float join_block(RadixShared& shared, float x, float nothing, Join join) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) x = join(x, __shfl_xor_sync(~0u, x, mask));
  if (threadIdx.x % 32 == 0) shared.scratch[threadIdx.x / 32] = __float_as_uint(x);
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? __uint_as_float(shared.scratch[threadIdx.x % 32]) : nothing;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) x = join(x, __shfl_xor_sync(~0u, x, mask));
  __syncthreads();
  return x;
}

__device__ __forceinline__ float sum_block(RadixShared& shared, float x) {
  return join_block(shared, x, 0, [](float a, float b) { return a + b; });
}

// Calls see(place in the group, value) for each of a group of 8 values.
template <typename See>
__device__ __forceinline__ void for_group(uint4 x, See&& see) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 both = __half22float2(half2_of(i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w));
    see(2 * i, both.x), see(2 * i + 1, both.y);
  }
}

// What was selected: how many values, and a value that only these exceed; -inf if all were selected.
struct Chosen {
  uint32_t count;
  float edge;
};

// The bins of the first digit that a thread sums up, the first thread's on top.
struct OwnBins {
  int count, first;

  __device__ __forceinline__ OwnBins()
      : count(kFirstBins / blockDim.x), first(kFirstBins - count * (threadIdx.x + 1)) {}

  // Finds the first bin, from the top, that does not fit into `top_k` values: everything above is selected. Stores it
  // in shared.bin, 0 if all fit, and the number of values above it in shared.above; returns the total number of values.
  __device__ __forceinline__ uint32_t find_edge(RadixShared& shared, uint32_t top_k) const {
    uint32_t above[1] = {}, total[1];
    for (int i = 0; i < count; ++i) above[0] += first + i < kFirstFinite ? 0 : shared.first[first + i];
    const uint32_t here = above[0];
    if (threadIdx.x == 0) shared.bin = 0;
    scan_block(shared, above, total);
    if (above[0] <= top_k && top_k < above[0] + here) {
      uint32_t higher = above[0];
      int bin = first + count - 1;
      while (higher + shared.first[bin] <= top_k) higher += shared.first[bin--];
      shared.bin = bin, shared.above = higher;
    }
    __syncthreads();
    return total[0];
  }

  // The sum of weights of the block's values that are not above a bin, each taken as the middle of its own bin.
  template <typename Weight>
  __device__ __forceinline__ float sum_weights(RadixShared& shared, int bin, Weight weight_of) const {
    float sum = 0;
    for (int from = 0; from < count; from += kBinsAtOnce) { // twice with 8 warps: neighbours of 16
      float of_bins = 0;
      for (int i = from; i < from + kBinsAtOnce; ++i) {
        const int own = first + i;
        const uint32_t values = own > bin || own < kFirstFinite ? 0 : shared.first[own];
        if (values) of_bins = fmaf(float(values), weight_of(__low2float(half_of_order(own << 5 | 16))), of_bins);
      }
      sum += of_bins;
    }
    return sum_block(shared, sum);
  }
};

// Chances of values, in whole numbers: `certain`, which is 2^bits, for values above the edge.
struct Chances {
  float factor, less; // a value's weight is 2^(factor value + less),
  float scale;        // its chance this times that
  float edge, certain;

  __device__ __forceinline__ float weight_of(float value) const { return exp2_fast(fmaf(factor, value, less)); }
  __device__ __forceinline__ uint32_t of_value(float value) const {
    // The whole number, rounded down so that sums are not exceeded, is in the last bits of a sum with 2^23, as
    // conversions are slow.
    constexpr uint32_t kZero = 0x4b000000;
    const float chance = value > edge ? certain : fminf(fmaxf(weight_of(value) * scale, 0.f), certain); // NaN: 0
    return __float_as_uint(__fadd_rd(chance, 0x1p23f)) - kZero;
  }

  // Weighs all values that are not above the edge, and returns the sum. From then on the largest of them weighs 1. Needs
  // two passes over the values. For all threads, with barriers inside and after.
  __device__ __forceinline__ float sum_values(RadixShared& shared, const uint4* values, uint32_t groups) {
    float largest = -INFINITY;
#pragma unroll 1
    for (uint32_t group = threadIdx.x; group < groups; group += blockDim.x)
      for_group(values[group], [&](int, float value) { largest = fmaxf(largest, value > edge ? -INFINITY : value); });
    largest = join_block(shared, largest, -INFINITY, [](float a, float b) { return fmaxf(a, b); });
    less = -factor * largest;
    const uint32_t neighbours = kMostThreads / blockDim.x; // as many threads of the largest block as one has here
    float sum = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < neighbours; ++i) {
      float of_one = 0;
#pragma unroll 1
      for (uint32_t group = neighbours * threadIdx.x + i; group < groups; group += kMostThreads)
        for_group(values[group], [&](int, float value) {
          of_one += value > edge ? 0.f : fmaxf(weight_of(value), 0.f); // NaN: 0
        });
      sum += of_one;
    }
    return sum_block(shared, sum);
  }
};

// Stores in `sums` the total chances of all groups before each, and returns the total. For all threads, with barriers
// inside and after.
__device__ __forceinline__ uint32_t sum_chances(
    RadixShared& shared, const Chances& chances, const uint4* values, uint32_t groups, uint32_t* sums) {
#pragma unroll 1
  for (uint32_t group = threadIdx.x; group < groups; group += blockDim.x) {
    uint32_t of_group = 0;
    for_group(values[group], [&](int, float value) { of_group += chances.of_value(value); });
    sums[group] = of_group;
  }
  __syncthreads();
  const uint32_t own = (groups + blockDim.x - 1) / blockDim.x;
  const uint32_t begin = min(threadIdx.x * own, groups), end = min(begin + own, groups);
  uint32_t before[1] = {}, all[1];
  for (uint32_t group = begin; group < end; ++group) before[0] += sums[group];
  scan_block(shared, before, all);
  for (uint32_t group = begin; group < end; ++group) {
    const uint32_t of_group = sums[group];
    sums[group] = before[0], before[0] += of_group;
  }
  __syncthreads();
  return all[0];
}

// Calls use(place, number, log2 of 1 / its chance) for the `count` values where the running sum of chances, from
// `start` at the first value on, passes a multiple of 2^bits.
template <typename Use>
__device__ __forceinline__ void take_at_steps(
    const Chances& chances, const uint4* values, uint32_t groups, const uint32_t* sums, uint32_t start, int bits,
    uint32_t count, Use use) {
  const uint32_t top_step = 1u << 31 - __clz(groups);
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < count; first += kSearches * blockDim.x) {
    uint32_t group[kSearches] = {}; // the last that begins below; all are searched for at once
    const auto pass = [&](int i) { return (first + i * blockDim.x + 1 << bits) - start; };
#pragma unroll 1
    for (uint32_t step = top_step; step; step /= 2)
#pragma unroll
      for (int i = 0; i < kSearches; ++i)
        if (group[i] + step < groups && sums[group[i] + step] < pass(i)) group[i] += step;
#pragma unroll
    for (int i = 0; i < kSearches; ++i) {
      uint32_t reached = sums[group[i]], number = 0, chance = 1;
      for_group(values[group[i]], [&](int at, float value) {
        const uint32_t own_chance = chances.of_value(value);
        if (reached < pass(i)) number = at, chance = own_chance;
        reached += own_chance;
      });
      const uint32_t place = first + i * blockDim.x;
      if (place < count) use(place, 8 * group[i] + number, bits - __log2f(float(chance)));
    }
  }
}

// Selects at most `to_select` of 8 `groups` values, -inf never: at most `top_k` (fewer than that) of the largest, the
// others by weights 2^(factor value). Calls use(place, number, log2 of 1 / its chance); `place` is the rank in ascending
// order. shared.first has counted the values; `sums` has room for `groups` numbers. For all threads of a
// block of 8 or 16 warps, which select the same, with barriers before and after; the last makes what `use` wrote
// readable.
template <typename Use>
__device__ __forceinline__ Chosen systematic_sample(
    RadixShared& shared, const uint4* values, uint32_t groups, uint32_t top_k, uint32_t to_select, float factor,
    uint32_t uniform, uint32_t* sums, Use use) {
  __syncthreads();
  const OwnBins own_bins;
  const uint32_t total = own_bins.find_edge(shared, top_k);
  const int bin = shared.bin; // 0 if all fit
  const uint32_t num_top = bin ? shared.above : total;

  Chances chances;
  chances.factor = factor, chances.edge = bin ? __low2float(half_of_order(bin << 5 | 31)) : -INFINITY;
  chances.less = bin ? -factor * chances.edge : 0.f; // so that a value at the edge weighs 1
  const int bits = min(kMostChanceBits, __clz(to_select) - 1);
  chances.certain = float(1u << bits);

  // The sum of weights is that of bins' middles, which costs no pass over the values. Values can weigh more than the
  // middles, and the sample would have no room for the last values, the newest tokens. Then, and where bins are so wide
  // that chances could add up to 2^32, it is the sum of the values' own weights. With that one they always fit.
  uint32_t all;
  bool exact = bin && chances.weight_of(__low2float(half_of_order(bin << 5 | 16))) < kLeastOfMiddle;
#pragma unroll 1
  while (true) {
    const float sum =
        exact ? chances.sum_values(shared, values, groups)
              : own_bins.sum_weights(shared, bin, [&](float value) { return chances.weight_of(value); });
    chances.scale = sum > 0 ? kCaution * (to_select - num_top) * chances.certain / sum : 0.f;
    all = sum_chances(shared, chances, values, groups, sums);
    if (exact || all <= to_select << bits) break;
    exact = true;
  }
  const uint32_t start = uniform >> (32 - bits), count = all + start >> bits;
  take_at_steps(chances, values, groups, sums, start, bits, count, use);
  __syncthreads();
  return {count, chances.edge};
}

} // namespace shadowkv
