// The largest of 16-bit floats by a thread block of 8, 16 or 32 warps. Two digits of 11 and 5 bits of integers that are
// ordered like the floats: the first digit is counted where the values are computed, and only values that share the
// threshold's first digit are examined again. Bit sets make the result ascending.
#pragma once

#include "kernels/common/scan_warp.cuh"

#include <cuda_fp16.h>

#include <cstdint>

namespace shadowkv {

constexpr int kFirstBins = 2048;    // of the first digit
constexpr int kFirstFinite = 32;    // the first bin that may be selected: those below hold -inf
constexpr uint32_t kNever = 0xfc00; // -inf

struct RadixShared {
  uint32_t first[kFirstBins]; // how many values have each first digit; all 0 after a selection
  uint32_t second[32];
  uint32_t scratch[64];
  uint32_t bin, above;
};

// Two halves as integers in the same order; -0 as 0.
__device__ __forceinline__ uint32_t ordered2(uint32_t x) {
  const __half2 positive = __hadd2(*reinterpret_cast<const __half2*>(&x), __half2{});
  const uint32_t y = *reinterpret_cast<const uint32_t*>(&positive);
  return y ^ ((y >> 15 & 0x00010001) * 0x7fff | 0x80008000);
}

__device__ __forceinline__ __half2 half_of_order(uint32_t key) {
  const uint32_t x = key & 0x8000 ? key ^ 0x8000 : key ^ 0xffff;
  return __half2half2(__ushort_as_half(uint16_t(x == 0x8000 ? 0x8001 : x))); // the largest below 0, not -0
}

__device__ __forceinline__ void count_first(RadixShared& shared, const uint4& x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t keys = ordered2(i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w);
    atomicAdd(&shared.first[keys >> 21], 1);
    atomicAdd(&shared.first[keys >> 5 & 0x7ff], 1);
  }
}

// x[n] becomes the sum over the threads before this one, total[n] the sum over all.
template <int kCount>
__device__ __forceinline__ void scan_block(RadixShared& shared, uint32_t (&x)[kCount], uint32_t (&total)[kCount]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const uint32_t inclusive = scan_warp(x[n]);
    if (lane == 31) shared.scratch[32 * n + warp] = inclusive;
    x[n] = inclusive - x[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const uint32_t sum = lane < warps ? shared.scratch[32 * n + lane] : 0;
    total[n] = __reduce_add_sync(~0u, sum);
    x[n] += __reduce_add_sync(~0u, lane < warp ? sum : 0);
  }
  __syncthreads();
}

// Finds the bin of the `to_select`-th largest value, and clears the counts. False if there are not that many values.
__device__ __forceinline__ bool find_bin(RadixShared& shared, uint32_t to_select) {
  const int own = kFirstBins / blockDim.x;
  uint32_t* bins = shared.first + kFirstBins - own * (threadIdx.x + 1); // a thread's, the first thread's on top
  uint32_t sum = 0, above[1], total[1];
#pragma unroll 1
  for (int i = 0; i < own; i += 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(bins + i);
    sum += x.x + x.y;
  }
  above[0] = bins - shared.first >= kFirstFinite ? sum : 0;
  sum = above[0];
  scan_block(shared, above, total);
  if (above[0] < to_select && to_select <= above[0] + sum) {
    uint32_t higher = above[0];
    int bin = own;
    do shared.above = higher, higher += bins[--bin];
    while (higher < to_select);
    shared.bin = bins + bin - shared.first;
  }
#pragma unroll 1
  for (int i = 0; i < own; i += 2) *reinterpret_cast<uint2*>(bins + i) = {};
  __syncthreads();
  return total[0] > to_select;
}

// Bits of 8 masks of 16 bits.
__device__ __forceinline__ uint8_t bits_of(const uint32_t (&masks)[4]) {
  const uint32_t low = __byte_perm(masks[0], masks[1], 0x6420) & 0x08040201;
  const uint32_t high = __byte_perm(masks[2], masks[3], 0x6420) & 0x80402010;
  return uint8_t((low | high) * 0x01010101 >> 24);
}

// Bit sets of 8 `groups` values, in whole words: values above a range, and values in it.
struct Candidates {
  uint32_t *above, *alike;
  int words;

  // Stores in the sets which values are above the halves `highest`, and which of the others are not below `lowest`.
  __device__ __forceinline__ void compare(const uint4* values, int groups, __half2 lowest, __half2 highest) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < 4 * words; i += blockDim.x) {
      uint32_t larger[4] = {}, inside[4] = {};
      if (i < groups) {
        const uint4 x = values[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t pair = j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
          larger[j] = __hgt2_mask(*reinterpret_cast<const __half2*>(&pair), highest);
          inside[j] = __hge2_mask(*reinterpret_cast<const __half2*>(&pair), lowest) & ~larger[j];
        }
      }
      reinterpret_cast<uint8_t*>(above)[i] = bits_of(larger);
      reinterpret_cast<uint8_t*>(alike)[i] = bits_of(inside);
    }
  }
};

// A thread's words of the bit sets. Numbers of values count all values.
struct OwnCandidates {
  const uint4* values;
  Candidates of;
  int begin, end;

  __device__ __forceinline__ OwnCandidates(const uint4* values_, const Candidates& of_) : values(values_), of(of_) {
    const int own = (of.words + blockDim.x - 1) / blockDim.x;
    begin = min(int(threadIdx.x) * own, of.words), end = min(begin + own, of.words);
  }
  __device__ __forceinline__ uint32_t second_digit(int number) const {
    return ordered2(reinterpret_cast<const uint16_t*>(values)[number]) & 31;
  }

  // Finds the second digit of the `to_select`-th largest of the block's values with the same first digit; returns how
  // many values with that digit are selected. Contains a barrier.
  __device__ __forceinline__ uint32_t find_digit(RadixShared& shared, uint32_t to_select, uint32_t& digit) const {
#pragma unroll 1
    for (int word = begin; word < end; ++word)
#pragma unroll 1
      for (uint32_t left = of.alike[word]; left; left &= left - 1)
        atomicAdd(&shared.second[second_digit(32 * word + __ffs(left) - 1)], 1);
    __syncthreads();
    to_select -= shared.above;
    const uint32_t here = shared.second[31 - threadIdx.x % 32], inclusive = scan_warp(here);
    const int first = __ffs(__ballot_sync(~0u, inclusive >= to_select)) - 1;
    digit = 31 - first;
    return to_select - __shfl_sync(~0u, inclusive - here, first);
  }

  // Changes the sets to those of values above the threshold and of values equal to it, where the threshold has this
  // second digit; counts both.
  __device__ __forceinline__ void split_at(uint32_t digit, uint32_t (&count)[2]) const {
#pragma unroll 1
    for (int word = begin; word < end; ++word) {
      uint32_t larger = of.above[word], same = 0;
#pragma unroll 1
      for (uint32_t left = of.alike[word]; left; left &= left - 1) {
        const int bit = __ffs(left) - 1;
        const uint32_t own_digit = second_digit(32 * word + bit);
        if (own_digit >= digit) (own_digit > digit ? larger : same) |= 1u << bit;
      }
      of.above[word] = larger, of.alike[word] = same;
      count[0] += __popc(larger), count[1] += __popc(same);
    }
  }

  // Calls use(place, number) for values above the threshold and the block's first `equal` values equal to it. `before`:
  // how many there are before the thread's own.
  template <typename Use>
  __device__ __forceinline__ void take(uint32_t (&before)[2], uint32_t equal, Use use) const {
#pragma unroll 1
    for (int word = begin; word < end; ++word) {
      const uint32_t larger = of.above[word], same = of.alike[word];
      uint32_t place = before[0] + min(before[1], equal), taken = same;
      if (before[1] + __popc(same) > equal) { // not all of them: the first
        taken = 0;
#pragma unroll 1
        for (uint32_t left = same, i = before[1]; i < equal; ++i, left &= left - 1) taken |= left & -left;
      }
#pragma unroll 1
      for (uint32_t left = larger | taken; left; left &= left - 1) use(place++, 32 * word + __ffs(left) - 1);
      before[0] += __popc(larger), before[1] += __popc(same);
    }
  }
};

// Calls use(place, number) for the numbers of the `to_select` (1 or more) largest of 8 `groups` values, where places
// are in ascending order of numbers; returns how many there are. Among equal values the first are taken, -inf never.
// shared.first has counted the values and shared.second is 0. `bits` has room for two sets of 8 `groups`, each in whole
// words. For all threads of the block, with barriers before and after; the last makes what `use` wrote readable.
template <typename Use>
__device__ __forceinline__ uint32_t
select_largest(RadixShared& shared, const uint4* values, int groups, uint32_t to_select, uint32_t* bits, Use use) {
  __syncthreads();
  const bool some = find_bin(shared, to_select);
  const uint32_t bin = shared.bin;
  const int words = (groups + 3) / 4;
  const Candidates candidates = {bits, bits + words, words};
  const __half2 lowest = some ? half_of_order(bin << 5) : __half2half2(__ushort_as_half(0x7c00)); // none is in the bin
  const __half2 highest = some ? half_of_order(bin << 5 | 31) : __half2half2(__ushort_as_half(kNever)); // all are above
  candidates.compare(values, groups, lowest, highest);
  __syncthreads();

  const OwnCandidates own(values, candidates);
  uint32_t digit = 0, equal = 0;
  if (some) equal = own.find_digit(shared, to_select, digit);
  uint32_t before[2] = {}, total[2]; // above the threshold, equal to it
  own.split_at(digit, before);
  scan_block(shared, before, total);
  if (threadIdx.x < 32) shared.second[threadIdx.x] = 0;
  own.take(before, equal, use);
  __syncthreads();
  return total[0] + min(total[1], equal);
}

} // namespace shadowkv
