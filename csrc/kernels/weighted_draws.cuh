// Systematic draws by weight by a thread block, after the largest values were selected: of the others each has a chance
// proportional to an exponential of its value. Chances are whole numbers, so that sums over threads are exact and what
// is drawn has places without gaps.
#pragma once

#include "kernels/mma.cuh"
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
  const int begin = min(int(threadIdx.x) * own * 4, groups), end = min(begin + own * 4, groups);
  const float less = -factor * edge;
  const auto weight_of = [&](float value) { return exp2_of(fmaf(factor, value, less)); };
  const auto for_weights = [&](auto&& add) { // in the numbers' order
#pragma unroll 1
    for (int group = begin; group < end; ++group) {
      const uint4 x = values[group];
      const uint32_t bits = taken[group / 4] >> 8 * (group % 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 both = __half22float2(half2_of(i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w));
        add(8 * group + 2 * i, bits >> 2 * i & 1 ? 0.f : weight_of(both.x));
        add(8 * group + 2 * i + 1, bits >> 2 * i & 2 ? 0.f : weight_of(both.y));
      }
    }
  };
  float sum = 0;
  for_weights([&](int, float weight) { sum += weight; });
  sum = sum_block(shared, sum);
  if (!(sum > 0)) return 0;

  const int bits = min(kMostChanceBits, __clz(wanted) - 1);
  const uint32_t one = 1u << bits;
  const float scale = float(uint64_t(wanted) << bits) / sum, most = float(one);
  // The nearest whole number, from the bits of a sum with 2^23: conversions are slow.
  const auto chance_of = [&](float weight) {
    return __float_as_uint(fminf(weight * scale, most) + 0x1p23f) - __float_as_uint(0x1p23f);
  };
  uint32_t before[1] = {}, total[1];
  for_weights([&](int, float weight) { before[0] += chance_of(weight); });
  scan_block(shared, before, total);
  const uint32_t start = uniform >> (32 - bits), count = min(total[0] + start >> bits, wanted);
  const auto use_number = [&](uint32_t place, uint32_t number) {
    const __half value = __ushort_as_half(reinterpret_cast<const uint16_t*>(values)[number]);
    use(place, number, bits - __log2f(float(chance_of(weight_of(__half2float(value))))));
  };
  uint32_t reached = before[0] + start;
  for_weights([&](int number, float weight) {
    const uint32_t place = reached >> bits;
    reached += chance_of(weight);
    if (reached >> bits != place && place < wanted) put_down(shared, place, number, use_number);
  });
  use_put_down(shared, count, use_number);
  return count;
}

} // namespace shadowkv
