// Pages of kvarn-4bit keys and kvarn-2bit values (shadowkv/baselines/kvarn.py): entries are
// (code x step + least) x scale. Keys have a step and a least entry per channel and a scale per token; for values it is
// the other way round. Codes count steps from 0, so unpacking them gives bytes directly.
//
// Next to a page's codes are its float16 numbers, one row per token: first the token's numbers, then a share of the
// channels' numbers. Lanes' tokens are those of codes.cuh.
#pragma once

#include "codes.cuh"

namespace shadowkv {

// A token's row: its scale and four of the channels' numbers; steps of all channels come before their least entries.
struct alignas(128) SteppedKeyPage {
  static constexpr int64_t kId = codec::kKvarn4;
  static constexpr int kStoredRow = kCodedDim / 2, kScales = 5;
  using Scale = __half;
  uint8_t codes[kPage * kStoredRow];
  alignas(16) __half numbers[kPage * kScales];

  __device__ __forceinline__ void copy(const uint8_t* rows, const __half* row_numbers, int lane) {
    const uint32_t to = shared_address(codes + CodedPage<Lloyd4>::place(16 * lane));
    const auto copy_all = [&]<int... kSteps>(std::integer_sequence<int, kSteps...>) {
      (copy16_async_at<512 * kSteps>(to, rows + 16 * lane), ...);
    };
    copy_all(std::make_integer_sequence<int, kPage * kStoredRow / 512>());
    copy16_async_at<0>(shared_address(numbers + 8 * lane), row_numbers + 8 * lane);
    if (lane < int(sizeof(numbers)) / 16 - 32)
      copy16_async_at<512>(shared_address(numbers + 8 * lane), row_numbers + 8 * lane);
  }

  // Dimensions 32 t to 32 t + 31 of token 2 i + next of g: the even ones of each word in quad 0, the odd ones in quad
  // 1.
  __device__ __forceinline__ void decode_key(int i, int next, int g, int t, uint32_t (&quad)[4][2]) const {
    const int first = (2 * g + next) * kStoredRow + 16 * t;
    const uint4 x = *reinterpret_cast<const uint4*>(codes + CodedPage<Lloyd4>::place(first) + 16 * kStoredRow * i);
    const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) quad[k][0] = word[k] & 0x0f0f0f0f, quad[k][1] = word[k] >> 4 & 0x0f0f0f0f;
  }

  // Dimension of a byte of word k's quads in lane t.
  static __device__ __forceinline__ constexpr int key_dim(int k, int quad, int byte, int t) {
    return 32 * t + 8 * k + 2 * byte + quad;
  }

  // Steps of channels 16 n to 16 n + 15 in pairs, or least entries if `behind`. All are within 20 numbers.
  __device__ __forceinline__ void channels(int n, bool behind, uint32_t (&pair)[8]) const {
    const uint2* const from = reinterpret_cast<const uint2*>(numbers) + 5 * n + (behind ? 40 : 0);
    uint32_t word[10];
#pragma unroll
    for (int i = 0; i < 5; ++i) word[2 * i] = from[i].x, word[2 * i + 1] = from[i].y;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t* const rows = word + 5 * i; // of two tokens
      pair[4 * i] = permute(rows[0], rows[1], 0x5432), pair[4 * i + 1] = permute(rows[1], rows[2], 0x5432);
      pair[4 * i + 2] = rows[3], pair[4 * i + 3] = rows[4];
    }
  }

  // The scale of token number i of g.
  __device__ __forceinline__ __half scale_of(int g, int i) const {
    return numbers[(i / 2 * 16 + 2 * g + i % 2) * kScales];
  }
};

// A token's row: its step and least entry, and two of the channels' scales.
struct alignas(128) SteppedValuePage {
  static constexpr int64_t kId = codec::kKvarn2;
  static constexpr int kStoredRow = kCodedDim / 4, kScales = 4;
  using Scale = __half;
  uint8_t codes[kPage * kStoredRow];
  alignas(16) uint32_t numbers[kPage * kScales / 2];

  // Place of chunk n of the numbers, those of tokens 2 n and 2 n + 1: chunks that lanes read at a time are n = 8 i + g
  // or 4 g + i, and are in different banks.
  static __device__ __forceinline__ int place(int n) { return n ^ n / 8; }

  __device__ __forceinline__ void copy(const uint8_t* rows, const __half* row_numbers, int lane) {
    const uint32_t to = shared_address(codes + CodedPage<Lloyd2>::place(16 * lane));
    const auto copy_all = [&]<int... kSteps>(std::integer_sequence<int, kSteps...>) {
      (copy16_async_at<512 * kSteps>(to, rows + 16 * lane), ...);
    };
    copy_all(std::make_integer_sequence<int, kPage * kStoredRow / 512>());
    copy16_async_at<0>(shared_address(numbers + 4 * place(lane)), row_numbers + 8 * lane);
  }

  // Dimensions 16 g to 16 g + 15 of tokens 2 i and 2 i + 1 of t and, from i = 4 on, of t + 4. Codes of quad n are in
  // units of 4^-n, which avoids shifts.
  __device__ __forceinline__ void decode_values(int i, int g, int t, uint32_t (&quad)[2][4]) const {
    const int first = 2 * t * kStoredRow + 4 * g, row = (i % 4 * 16 + i / 4 * 8) * kStoredRow;
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      const int at = CodedPage<Lloyd2>::place(first + next * kStoredRow) + row;
      const uint32_t word = *reinterpret_cast<const uint32_t*>(codes + at);
#pragma unroll
      for (int n = 0; n < 4; ++n) quad[next][n] = word & 0x03030303u << 2 * n;
    }
  }

  static __device__ __forceinline__ constexpr int value_dim(int quad, int byte, int g) {
    return 16 * g + 4 * byte + quad;
  }

  // Step and least entry of token number i of g.
  __device__ __forceinline__ uint32_t steps_of(int g, int i) const {
    return numbers[4 * place(i / 2 * 8 + g) + i % 2 * 2];
  }

  // Scales of the first two dimensions of a byte of lane g, or of the other two.
  __device__ __forceinline__ uint32_t scales_of(int g, int byte, int others) const {
    return numbers[4 * place(4 * g + byte) + 2 * others + 1];
  }
};

} // namespace shadowkv
