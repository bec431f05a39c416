// Sums of exponentials of scores, in the fragments that products leave: a thread has two rows, g and g + 8 of its
// warp's 16, and of each of 16 groups of eight columns two neighbours, in s[4 i + 2 r + e].
#pragma once

#include "../mma.cuh"

namespace shadowkv {

// Sums of products of bytes, which begin at the bits of a float at which floats are integers: as floats they are that
// number and the sum. Sums of 128 products are less than its lowest bits hold.
struct Sums {
  static constexpr uint32_t kZero = 0x4b400000;
  static constexpr float kFloat = 12582912;
};

// 2^x on the units that multiply and add, for x from -kReach to kReach, off by 3 % at the most: between whole numbers it
// is a line. Beyond, that of the nearest end. x is 2 kReach y - kReach, y from 0 to 1: so a multiplication that saturates
// does the clamping.
struct Powers {
  static constexpr float kReach = 120;

  __device__ static __forceinline__ float of(float y) {
    // At 1536 floats are multiples of 2^-13: x and the exponent's bias stand in the lower bits, 10 below where a float
    // has them. The line through 2^x at whole numbers is above it by up to 0.086 in log2: half of that is taken off.
    constexpr float kShift = 1536 + 127 - kReach - 0.043f;
    return __uint_as_float(__float_as_uint(fmaf(y, 2 * kReach, kShift)) << 10);
  }
};

// Exponents are relative to a base of each row, a whole number; sums from 2^-60 to 2^100 have lost nothing of weight
// to the ends of floats, or of Powers, whatever the base. So a base stays where it is until a sum leaves that range.
// A multiprocessor computes 16 exponentials a clock, half as many as its products of 128 dimensions make scores: of
// every eight, some come from Powers. A score is a sum times its row's scale.

// What is added to a sum as a float, times its scale, so that a score less its base is left.
__device__ __forceinline__ float offset_of(float base, float scale) { return fmaf(-Sums::kFloat, scale, -base); }

template <int kByPowers>
__device__ __forceinline__ void sum_exponentials(
    float (&sum)[2], const uint32_t (&s)[64], const float (&base)[2], const float (&scale)[2]) {
  constexpr float kRange = 2 * Powers::kReach;
  float part[2][2] = {}, behind[2], narrow[2], middle[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    behind[r] = offset_of(base[r], scale[r]);
    narrow[r] = scale[r] * (1 / kRange), middle[r] = fmaf(behind[r], 1 / kRange, 0.5f);
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int r = i / 2 % 2;
    const float x = __uint_as_float(s[i]);
    float& to = part[r][i % 2];
    if (i * 3 % 8 < kByPowers) // of both rows alike
      to += Powers::of(__saturatef(fmaf(x, narrow[r], middle[r])));
    else
      to += exp2_fast(fmaf(x, scale[r], behind[r]));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] = part[r][0] + part[r][1];
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
  }
}

// Bases next to the rows' largest scores.
__device__ __forceinline__ void find_bases(float (&base)[2], const uint32_t (&s)[64], const float (&scale)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < 32; ++i) most = fmaxf(most, __uint_as_float(s[i / 2 * 4 + 2 * r + i % 2]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    base[r] = rintf((most - Sums::kFloat) * scale[r]);
  }
}

// log2 of the row's sum that this thread is to store: of its first row in the quad's first thread, of its second one
// in the next. All of a warp go the same way.
template <int kByPowers>
__device__ __forceinline__ float log_sum(const uint32_t (&s)[64], float (&base)[2], const float (&scale)[2]) {
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
  const float own = second ? base[1] : base[0], own_scale = second ? scale[1] : scale[0];
  const float rounded = fmaf(-Sums::kFloat, own_scale, -offset_of(own, own_scale)) - own; // away in the offset
  return log + rounded + own;
}

} // namespace shadowkv
