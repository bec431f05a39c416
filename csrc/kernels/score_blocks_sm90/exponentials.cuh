// Sums of exponentials of scores, in the fragments that products leave: a thread has two rows, g and g + 8 of its
// warp's 16, and two neighbouring columns from each of 16 groups of eight, in s[4 i + 2 r + e].
#pragma once

#include "kernels/common/mma.cuh"

namespace shadowkv {

// 2^x on the multiply-add units, for x from -kReach to kReach, with a relative error below 1e-4; beyond, the value at
// the nearest end. x is 2 kReach y - kReach, y from 0 to 1: so a saturating multiplication does the clamping.
struct Powers {
  static constexpr float kReach = 120;

  __device__ static __forceinline__ float of(float y) {
    constexpr float kShift = 12582912 - kReach; // at which floats are integers: x, rounded, is in the lowest bits
    const float shifted = fmaf(y, 2 * kReach, kShift), whole = shifted - kShift;
    const float left = fmaf(y, 2 * kReach, -whole); // from -1/2 to 1/2, where the cubic is the best fit to 2^x
    const float cubic = fmaf(fmaf(fmaf(0.05517167f, left, 0.24261112f), left, 0.69326099f), left, 0.99992807f);
    return __uint_as_float(__float_as_uint(cubic) + (__float_as_uint(shifted) << 23));
  }
};

// Exponents are relative to a base per row, a whole number; sums from 2^-60 to 2^100 have lost nothing significant to
// the ends of the range of floats, or of Powers, whatever the base. So a base is kept until a sum leaves that range.
// A multiprocessor computes 16 exponentials per clock, as many as its products of 128 dimensions produce scores: of
// every eight, some are computed by Powers.
template <int kByPowers>
__device__ __forceinline__ void sum_exponentials(
    float (&sum)[2], const float (&s)[64], const float (&base)[2], float scale) {
  constexpr float kRange = 2 * Powers::kReach;
  const float narrow = scale * (1 / kRange);
  float part[2][2] = {}, middle[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) middle[r] = fmaf(base[r], -1 / kRange, 0.5f);
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int r = i / 2 % 2;
    float& to = part[r][i % 2];
    if (i * 3 % 8 < kByPowers) // the same for both rows
      to += Powers::of(__saturatef(fmaf(s[i], narrow, middle[r])));
    else
      to += exp2_fast(fmaf(s[i], scale, -base[r]));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] = part[r][0] + part[r][1];
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
  }
}

// Bases close to the rows' largest scores.
__device__ __forceinline__ void find_bases(float (&base)[2], const float (&s)[64], float scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < 32; ++i) most = fmaxf(most, s[i / 2 * 4 + 2 * r + i % 2]);
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    base[r] = rintf(most * scale);
  }
}

// log2 of the row sum that this thread is to store: of its first row in the quad's first thread, of its second row
// in the next thread. All threads of a warp take the same branch.
template <int kByPowers>
__device__ __forceinline__ float log_sum(const float (&s)[64], float (&base)[2], float scale) {
  float sum[2];
  for (bool again = false;; again = true) {
    sum_exponentials<kByPowers>(sum, s, base, scale);
    const bool fit = fminf(sum[0], sum[1]) > 0x1p-60f && fmaxf(sum[0], sum[1]) < 0x1p100f;
    if (again || __all_sync(~0u, fit)) break;
    find_bases(base, s, scale);
  }
  const bool second = threadIdx.x & 1;
  float log;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log) : "f"(second ? sum[1] : sum[0]));
  return log + (second ? base[1] : base[0]);
}

} // namespace shadowkv
