// How the rows of paged_attention.cuh are stored, and which tokens of a page are attended to.
//
// A kind of rows has the types of its elements and of eight of them as loaded by a lane, `widen`, which converts them
// to 16-bit numbers for `multiply`, and `Tokens`, a sequence's tokens: a warp's lane keeps a number for each of its
// tiles, which determines `end` and `begin`. Tables have an entry for each row of queries. Rows of one sequence have
// the same tokens, unless they have their own ends: then the first row has the fewest, and the last one all.
#pragma once

#include "constants.h"
#include "kernels/common/memory.cuh"
#include "kernels/common/mma.cuh"

namespace shadowkv {

constexpr int kPagedTile = 16; // tokens that a warp processes at a time

// Plain bfloat16, in pages that hold any number of tokens from their start on.
struct BfloatRows {
  using Element = __nv_bfloat16;
  using Unit = uint4;
  static constexpr bool kSkipping = false;      // whether tokens before the first one are skipped
  static constexpr bool kOwnValuePages = false; // whether values have a separate page table
  static constexpr bool kOwnEnds = true;        // whether rows of one sequence have their own ends
  // Blocks that a multiprocessor holds for heads of 64, 96, 128 and 256 dimensions, and whether tiles of the last are
  // loaded ahead.
  static constexpr int kBlocks[] = {5, 4, 3, 2};
  static constexpr bool kWidestAhead = false;
  // Blocks with the queries of two products that a multiprocessor holds, for heads of 64, 96 and 128 dimensions.
  static constexpr int kWideBlocks[] = {3, 2, 2};

  const int64_t* counts; // [rows, entries]
  int64_t counts_row;

  // The number kept for a tile has its count of tokens, past 16 not its own, in 7 bits, how many of its 16 the first
  // row has in 5, and its entry in the rest; it is below 0 if the tile has no token.
  struct Tokens {
    static constexpr int kNone = -1;
    const int64_t* counts;
    int64_t counts_row;
    int last_row, first_row;
    __device__ __forceinline__ int of_row(int row, int entry, int first) const {
      return int(counts[row * counts_row + entry]) - first;
    }
    __device__ __forceinline__ int tile(int entry, int first) const {
      const int end = of_row(last_row, entry, first);
      return end > 0 ? entry << 12 | min(max(of_row(first_row, entry, first), 0), kPagedTile) << 7 | end : kNone;
    }
    __device__ __forceinline__ bool any(int kept) const { return kept >= 0; }
    __device__ __forceinline__ int end(int kept) const { return kept & 127; }
    __device__ __forceinline__ int shared(int kept) const { return kept >> 7 & 31; }
    __device__ __forceinline__ int entry(int kept) const { return kept >> 12; }
    __device__ __forceinline__ int begin(int) const { return 0; }
  };
  __device__ __forceinline__ Tokens tokens(int last_row, int first_row) const {
    return {counts, counts_row, last_row, first_row};
  }
  __device__ __forceinline__ float key_scale(int64_t, int) const { return 1.0f; }
  __device__ __forceinline__ float value_scale(int64_t, int) const { return 1.0f; }

  static __device__ __forceinline__ Unit load8(const Element* p) { return load_line16(p); }
  static __device__ __forceinline__ uint4 widen(Unit x) { return x; }
  static __device__ __forceinline__ uint32_t query(uint32_t pair) { return pair; }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return pack_bf16(low, high); }
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_bf16(c, a, b);
  }
};

// Plain bfloat16, in pages that hold any number of tokens in a row from any one on.
struct WindowRows : BfloatRows {
  static constexpr bool kSkipping = true;
  static constexpr bool kOwnEnds = false;

  const int64_t* begins; // [rows, entries]
  int64_t begins_row;

  // The number kept for a tile are its end, past which tokens are not its own, and, in the upper half, its begin; 0 if
  // it has no token.
  struct Tokens {
    static constexpr int kNone = 0;
    const int64_t *begins, *counts;
    __device__ __forceinline__ int tile(int entry, int first) const {
      const int begin = max(int(begins[entry]) - first, 0), end = int(counts[entry]) - first;
      return begin < min(end, kPagedTile) ? begin << 16 | end : kNone;
    }
    __device__ __forceinline__ bool any(int kept) const { return kept > 0; }
    __device__ __forceinline__ int end(int kept) const { return kept & 0xffff; }
    __device__ __forceinline__ int begin(int kept) const { return kept >> 16; }
  };
  __device__ __forceinline__ Tokens tokens(int row, int) const {
    return {begins + row * begins_row, counts + row * counts_row};
  }
};

// 8-bit floats (e4m3), in units of a scale per kv head from a row's state; a row's tokens may start anywhere.
struct Fp8Rows {
  using Element = uint8_t;
  using Unit = uint2;
  static constexpr bool kSkipping = true;
  static constexpr bool kOwnValuePages = true;
  static constexpr bool kOwnEnds = false;
  static constexpr int kBlocks[] = {5, 5, 4, 2};
  static constexpr bool kWidestAhead = true;
  static constexpr int kWideBlocks[] = {3, 3, 2};

  const int64_t* value_pages; // [rows, entries]
  int64_t value_pages_row;
  const int64_t *from, *to;         // [rows]: tokens of a row
  const float *k_scale, *v_scale;   // [states, heads]
  const int64_t *k_state, *v_state; // [rows]
  int64_t k_scale_row, v_scale_row;

  // The number kept for a tile is its first token.
  struct Tokens {
    static constexpr int kNone = 1 << 30;
    const int64_t* value_pages;
    int from, to;
    __device__ __forceinline__ int tile(int entry, int first) const { return entry * kPage + first; }
    __device__ __forceinline__ bool any(int kept) const { return kept < to && kept + kPagedTile > from; }
    __device__ __forceinline__ int end(int kept) const { return to - kept; }
    __device__ __forceinline__ int begin(int kept) const { return from - kept; }
  };
  __device__ __forceinline__ Tokens tokens(int row, int) const {
    const int first = int(from[row]), last = int(to[row]);
    return {value_pages + row * value_pages_row, first, first < last ? last : 0};
  }
  __device__ __forceinline__ float key_scale(int row, int head) const {
    return k_scale[k_state[row] * k_scale_row + head];
  }
  __device__ __forceinline__ float value_scale(int row, int head) const {
    return v_scale[v_state[row] * v_scale_row + head];
  }

  static __device__ __forceinline__ Unit load8(const Element* p) { return load_line8(p); }
  static __device__ __forceinline__ uint4 widen(Unit x) {
    return {half2_of_e4m3(x.x), half2_of_e4m3(x.x >> 16), half2_of_e4m3(x.y), half2_of_e4m3(x.y >> 16)};
  }
  // Two bfloat16 numbers of a query as float16, exact from 6e-5 to 65504.
  static __device__ __forceinline__ uint32_t query(uint32_t pair) {
    return pack(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return pack_f16(low, high); }
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_f16(c, a, b);
  }
};

} // namespace shadowkv
