// Selection by a thread block of values by chance: the largest for sure, each other in proportion to an exponential of
// its value. Values that share a bin of the first digit are all sure or none is, so that the bins' counts are all that is
// needed to begin with. Chances are whole numbers, sums of them are exact. The one sum of floats that they come of is a
// fixed tree over bins: blocks of 8 and of 16 warps, of which batches of many rows take the smaller, add it up alike.
#pragma once

#include "kernels/mma.cuh"
#include "kernels/radix_select.cuh"
#include "sketch_rules.h"

namespace shadowkv {

constexpr int kSearches = 4;   // places that a thread looks for at once
constexpr int kBinsAtOnce = 4; // that are added up one after the other: a thread's share in a block of 16 warps

// Chris Wellons' lowbias32.
__device__ __forceinline__ uint32_t mix_bits(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352d;
  x = (x ^ x >> 15) * 0x846ca68b;
  return x ^ x >> 16;
}

// The sum of x over the block's threads, for all of them: pairs of neighbours, then pairs of those. Barriers as
// scan_block has them.
__device__ __forceinline__ float sum_block(RadixShared& shared, float x) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) x += __shfl_xor_sync(~0u, x, mask);
  if (threadIdx.x % 32 == 0) shared.scratch[threadIdx.x / 32] = __float_as_uint(x);
  __syncthreads();
  float sum = threadIdx.x % 32 < blockDim.x / 32 ? __uint_as_float(shared.scratch[threadIdx.x % 32]) : 0.f;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  __syncthreads();
  return sum;
}

// What was selected: how many values, and one that none of those that were not sure is above; -inf where all were.
struct Chosen {
  uint32_t count;
  float edge;
};

// Selects at most `wanted` of 8 `groups` values, -inf never: at most `certain` (fewer than `wanted`) of the largest for
// sure, the others by weights 2^(factor value). Calls use(place, number, log2 of 1 / its chance), places being theirs in
// ascending order. shared.first has counted the values; `sums` has room for `groups` numbers. For all threads of a block
// of 8 or 16 warps, which select the same, with barriers before and after, of which the last leaves what `use` wrote to
// be read.
template <typename Use>
__device__ __forceinline__ Chosen select_by_chance(
    RadixShared& shared, const uint4* values, uint32_t groups, uint32_t certain, uint32_t wanted, float factor,
    uint32_t uniform, uint32_t* sums, Use use) {
  __syncthreads();
  // The first bin, from the top, that does not fit: what is above is sure.
  const int own_bins = kFirstBins / blockDim.x, first_bin = kFirstBins - own_bins * (threadIdx.x + 1);
  uint32_t above[1] = {}, total[1];
  for (int i = 0; i < own_bins; ++i) above[0] += first_bin + i < kFirstFinite ? 0 : shared.first[first_bin + i];
  const uint32_t here = above[0];
  if (threadIdx.x == 0) shared.bin = 0;
  scan_block(shared, above, total);
  if (above[0] <= certain && certain < above[0] + here) {
    uint32_t higher = above[0];
    int bin = first_bin + own_bins - 1;
    while (higher + shared.first[bin] <= certain) higher += shared.first[bin--];
    shared.bin = bin, shared.above = higher;
  }
  __syncthreads();
  const int bin = shared.bin; // 0 where all fit
  const uint32_t sure = bin ? shared.above : total[0];
  const float edge = bin ? __low2float(half_of_order(bin << 5 | 31)) : -INFINITY, less = bin ? -factor * edge : 0.f;
  const auto weight_of = [&](float value) { return exp2_fast(fmaf(factor, value, less)); };
  float sum = 0;
  for (int from = 0; from < own_bins; from += kBinsAtOnce) { // twice in a block of 8 warps: neighbours of one of 16
    float of_bins = 0;
    for (int i = from; i < from + kBinsAtOnce; ++i) {
      const int own = first_bin + i;
      const uint32_t count = own > bin || own < kFirstFinite ? 0 : shared.first[own];
      if (count) of_bins = fmaf(float(count), weight_of(__low2float(half_of_order(own << 5 | 16))), of_bins);
    }
    sum += of_bins;
  }
  sum = sum_block(shared, sum);
  // Bins of the largest numbers are so wide that weights of their middles are nothing: then they all count as their edge.
  if (sum == 0) sum = float(shared.first[bin]);

  const int bits = min(kMostChanceBits, __clz(wanted) - 1);
  const float one = float(1u << bits), scale = sum > 0 ? kCaution * (wanted - sure) * one / sum : 0.f;
  // The nearest whole number is in the last bits of a sum with 2^23: conversions are slow.
  constexpr uint32_t kZero = 0x4b000000;
  const auto chance_of = [&](float value) {
    const float chance = value > edge ? one : fminf(weight_of(value) * scale, one);
    return __float_as_uint(chance + 0x1p23f) - kZero;
  };
  const auto for_chances = [&](uint32_t group, auto&& see) {
    const uint4 x = values[group];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 both = __half22float2(half2_of(i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w));
      see(2 * i, chance_of(both.x)), see(2 * i + 1, chance_of(both.y));
    }
  };
#pragma unroll 1
  for (uint32_t group = threadIdx.x; group < groups; group += blockDim.x) {
    uint32_t of_group = 0;
    for_chances(group, [&](int, uint32_t chance) { of_group += chance; });
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
    sums[group] = before[0], before[0] += of_group; // of all groups before
  }
  __syncthreads();

  // One is selected wherever chances, added up from the first value on, pass a whole number.
  const uint32_t start = uniform >> (32 - bits), count = min(all[0] + start >> bits, wanted);
  const uint32_t top_step = 1u << 31 - __clz(groups);
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < count; first += kSearches * blockDim.x) {
    uint32_t group[kSearches] = {}; // the last that begins below; all are looked for at once
    const auto pass = [&](int i) { return (first + i * blockDim.x + 1 << bits) - start; };
#pragma unroll 1
    for (uint32_t step = top_step; step; step /= 2)
#pragma unroll
      for (int i = 0; i < kSearches; ++i)
        if (group[i] + step < groups && sums[group[i] + step] < pass(i)) group[i] += step;
#pragma unroll
    for (int i = 0; i < kSearches; ++i) {
      uint32_t reached = sums[group[i]], number = 0, chance = 1;
      for_chances(group[i], [&](int at, uint32_t own_chance) {
        if (reached < pass(i)) number = at, chance = own_chance;
        reached += own_chance;
      });
      const uint32_t place = first + i * blockDim.x;
      if (place < count) use(place, 8 * group[i] + number, bits - __log2f(float(chance)));
    }
  }
  __syncthreads();
  return {count, edge};
}

} // namespace shadowkv
