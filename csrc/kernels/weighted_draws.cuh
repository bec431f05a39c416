// Selection by a thread block of the largest values and, of the others, of some by chance, each in proportion to an
// exponential of its value. Values that share a bin of the first digit are taken together or left to chance, so that
// their counts are all that is needed to begin with. Chances are whole numbers: sums over threads are exact, and what is
// drawn has places without gaps.
#pragma once

#include "kernels/mma.cuh"
#include "kernels/radix_select.cuh"

namespace shadowkv {

constexpr int kMostChanceBits = 20;
constexpr float kCaution = 0.97f; // of the chances that weights of bins allow: what they come to is known later

// Chris Wellons' lowbias32.
__device__ __forceinline__ uint32_t mix_bits(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352d;
  x = (x ^ x >> 15) * 0x846ca68b;
  return x ^ x >> 16;
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The sum of x over the block's threads, for all of them. Barriers as scan_block has them.
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

// What was selected: how many values, and one that none of the others is above.
struct Largest {
  uint32_t count;
  float edge;
};

// Selects at most `certain` of the largest of 8 `groups` values, and others by chance, at most `wanted` (more than
// `certain`) in all. Weights are 2^(factor value) times what makes them at most 1. Calls use(place, number, log2 of 1 /
// its chance), places being first those of the largest and then those drawn, ascending in each; -inf never. shared.first
// has counted the values. For all threads of the block, with barriers before and after, of which the last leaves what
// `use` wrote to be read.
template <typename Use>
__device__ __forceinline__ Largest select_by_weight(
    RadixShared& shared, const uint4* values, int groups, uint32_t certain, uint32_t wanted, float factor,
    uint32_t uniform, Use use) {
  __syncthreads();
  // The first bin, from the top, that does not fit: all that are above are taken.
  const int own_bins = kFirstBins / blockDim.x, first_bin = kFirstBins - own_bins * (threadIdx.x + 1);
  uint32_t above[1] = {}, total[1];
  for (int i = 0; i < own_bins; ++i) above[0] += first_bin + i < kFirstFinite ? 0 : shared.first[first_bin + i];
  const uint32_t here = above[0];
  if (threadIdx.x == 0) shared.bin = kFirstFinite - 1;
  scan_block(shared, above, total);
  if (above[0] <= certain && certain < above[0] + here) {
    uint32_t higher = above[0];
    int bin = first_bin + own_bins - 1;
    while (higher + shared.first[bin] <= certain) higher += shared.first[bin--];
    shared.bin = bin, shared.above = higher;
  }
  __syncthreads();
  const int bin = shared.bin;
  const bool some = bin >= kFirstFinite; // are left to chance
  const uint32_t taken = some ? shared.above : total[0], draws = wanted - taken;
  const float edge = some ? __low2float(half_of_order(bin << 5 | 31)) : -INFINITY, less = some ? -factor * edge : 0.f;
  const auto weight_of = [&](float value) { return exp2_of(fmaf(factor, value, less)); };
  float sum = 0;
  for (int i = 0; i < own_bins; ++i) {
    const int own = first_bin + i;
    const uint32_t count = own > bin || own < kFirstFinite ? 0 : shared.first[own];
    if (count) sum = fmaf(float(count), weight_of(__low2float(half_of_order(own << 5 | 16))), sum);
  }
  sum = sum_block(shared, sum);

  const int bits = min(kMostChanceBits, __clz(draws | 1) - 1);
  const float most = float(1u << bits), scale = some && sum > 0 ? kCaution * draws * most / sum : 0.f;
  // The nearest whole number, from the bits of a sum with 2^23: conversions are slow.
  const auto chance_of = [&](float value) {
    return __float_as_uint(fminf(weight_of(value) * scale, most) + 0x1p23f) - __float_as_uint(0x1p23f);
  };
  const int own = (groups + blockDim.x - 1) / blockDim.x;
  const int begin = min(int(threadIdx.x) * own, groups), end = min(begin + own, groups);
  const auto for_values = [&](auto&& see) { // in the numbers' order
#pragma unroll 1
    for (int group = begin; group < end; ++group) {
      const uint4 x = values[group];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 both = __half22float2(half2_of(i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w));
        see(8 * group + 2 * i, both.x), see(8 * group + 2 * i + 1, both.y);
      }
    }
  };
  uint32_t before[2] = {}, all[2];
  for_values([&](int, float value) {
    before[0] += value > edge;
    before[1] += value > edge ? 0 : chance_of(value);
  });
  scan_block(shared, before, all);
  const uint32_t start = uniform >> (32 - bits), count = taken + min(all[1] + start >> bits, draws);
  const auto use_number = [&](uint32_t place, uint32_t number) {
    const float value = __half2float(__ushort_as_half(reinterpret_cast<const uint16_t*>(values)[number]));
    use(place, number, place < taken ? 0.f : bits - __log2f(float(chance_of(value))));
  };
  uint32_t reached = before[1] + start;
  for_values([&](int number, float value) {
    uint32_t place = ~0u;
    if (value > edge) {
      place = before[0]++;
    } else {
      const uint32_t at = reached >> bits;
      reached += chance_of(value);
      if (reached >> bits != at && at < draws) place = taken + at;
    }
    if (place != ~0u) put_down(shared, place, number, use_number);
  });
  use_put_down(shared, count, use_number);
  return {count, edge};
}

} // namespace shadowkv
