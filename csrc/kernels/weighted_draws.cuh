// Systematic draws by weight by a thread block, after the largest values were selected: of the others each has a chance
// proportional to an exponential of its value. Chances are whole numbers, so that sums over threads are exact and what
// is drawn has places without gaps.
#pragma once

#include "kernels/radix_select.cuh"

namespace shadowkv {

constexpr int kMostChanceBits = 20;

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

// Calls use(place, number, log2 of 1 / its chance) for at most `wanted` (1 or more) of 8 `groups` values, where `taken`
// has a zero bit and the value is not -inf; places are theirs in ascending order. Weights are 2^(factor (value - edge)),
// of values up to `edge`. Returns how many there are. For all threads of the block, with barriers before and after.
template <typename Use>
__device__ __forceinline__ uint32_t draw_by_weight(
    RadixShared& shared, const uint4* values, int groups, const uint32_t* taken, float factor, float edge,
    uint32_t wanted, uint32_t uniform, Use use) {
  const int words = (groups + 3) / 4, own = (words + blockDim.x - 1) / blockDim.x;
  const int begin = min(int(threadIdx.x) * own, words), end = min(begin + own, words);
  const auto for_weights = [&](auto&& add) { // in the numbers' order
#pragma unroll 1
    for (int group = 4 * begin; group < min(4 * end, groups); ++group) {
      const uint4 x = values[group];
      const uint32_t bits = taken[group / 4] >> 8 * (group % 4);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t pair = i < 2 ? x.x : i < 4 ? x.y : i < 6 ? x.z : x.w, half = i % 2 ? pair >> 16 : pair & 0xffff;
        if (bits >> i & 1 || half == kNever) continue;
        add(8 * group + i, exp2_of(factor * (__half2float(__ushort_as_half(uint16_t(half))) - edge)));
      }
    }
  };
  float sum = 0;
  for_weights([&](int, float weight) { sum += weight; });
  sum = sum_block(shared, sum);
  if (!(sum > 0)) return 0;

  const int bits = min(kMostChanceBits, __clz(wanted) - 1);
  const uint32_t one = 1u << bits;
  const float scale = float(uint64_t(wanted) << bits) / sum;
  const auto chance_of = [&](float weight) { return min(uint32_t(fminf(weight * scale, 0x1p30f)), one); };
  uint32_t before[1] = {}, total[1];
  for_weights([&](int, float weight) { before[0] += chance_of(weight); });
  scan_block(shared, before, total);
  const uint32_t start = uniform >> (32 - bits);
  uint32_t reached = before[0] + start;
  for_weights([&](int number, float weight) {
    const uint32_t chance = chance_of(weight), place = reached >> bits;
    reached += chance;
    if (reached >> bits != place && place < wanted) use(place, number, bits - __log2f(float(chance)));
  });
  __syncthreads();
  return min(total[0] + start >> bits, wanted);
}

} // namespace shadowkv
