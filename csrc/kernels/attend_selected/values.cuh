// Values of a warp's tile, in flight while its keys are computed: codes in registers, rows in shared memory.
#pragma once

#include "softmax.cuh"

namespace shadowkv {

template <class Shape, bool kCoded = Shape::kCodes>
struct WarpValues {
  static constexpr int kRow = Shape::kValueRow;

  __device__ __forceinline__ void load(const AttendInputs& in, const AttendTile<Shape>& tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i) {
      const int token = 16 * i + lane / 2;
      const char* from = tile.value_rows[token];
      const bool exists = from != nullptr; // zeros otherwise: a weight of zero does not remove NaN
      from = (exists ? from : in.values) + lane % 2 * 16;
      const uint32_t into = shared_address(tile.values + token * kRow) + lane % 2 * 16;
#pragma unroll
      for (int unit = 0; unit < Shape::Value::row_bytes(Shape::kDim) / 32; ++unit)
        copy16_async(into + unit * 32, from + unit * 32, exists);
    }
  }

  // Adds the weighted values, while one later copy group is in flight.
  __device__ __forceinline__ void add(
      AttendSums<Shape>& sums, const uint32_t (&p)[1][Shape::kTiles][2], const AttendTile<Shape>& tile) const {
    wait_copy_groups<1>();
    __syncwarp();
    if constexpr (Shape::kFp8Values) add_fp8(sums, p, tile);
    else add_bf16(sums, p, tile);
  }

  // The sum of weighted values, from the sums of products.
  __device__ static __forceinline__ float finish(const AttendSums<Shape>& sums, int i, int j) { return sums.o[i][j]; }

 private:
  __device__ static __forceinline__ void add_bf16(
      AttendSums<Shape>& sums, const uint32_t (&p)[1][Shape::kTiles][2], const AttendTile<Shape>& tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Shape::kDim / 16; ++i) {
#pragma unroll
      for (int m = 0; m < Shape::kTiles; ++m) {
        uint32_t v[4];
        load_matrices_transposed(
            v, shared_address(
                   tile.values + (16 * m + lane % 8 + lane / 16 * 8) * kRow + (2 * i + lane / 8 % 2) * 16));
        mma_bf16(sums.o[i], v, p[0][m]);
      }
    }
  }

  // A lane gets two bytes in a row where it gets one number of 16 bits: dimensions 16 i + 2g, + 1 of tokens 2t, 2t + 1
  // (v0, and v2 of i + 1) and 2t + 8, 2t + 9 (v1, v3), in the order of tokens. So o has dimension 16 i + 2g where it
  // has 16 i + g of other rows, and 16 i + 2g + 1 where it has 16 i + 8 + g.
  __device__ static __forceinline__ void add_fp8(
      AttendSums<Shape>& sums, const uint32_t (&p)[1][Shape::kTiles][2], const AttendTile<Shape>& tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Shape::kDim / 16; i += 2) {
#pragma unroll
      for (int m = 0; m < Shape::kTiles; ++m) {
        uint32_t v[4];
        load_matrices_transposed(v, shared_address(tile.values + (16 * m + lane % 16) * kRow + (i + lane / 16) * 16));
#pragma unroll
        for (uint32_t& x : v) x = __byte_perm(x, 0, 0x3120); // of the first dimension, then of the other
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint32_t early = v[2 * n], late = v[2 * n + 1];
          mma_f16(
              sums.o[i + n],
              {half2_of_e4m3(early), half2_of_e4m3(early >> 16), half2_of_e4m3(late), half2_of_e4m3(late >> 16)},
              p[0][m]);
        }
      }
    }
  }
};

template <class Shape>
struct WarpValues<Shape, true> {
  using Codes = typename Shape::Value::template Codes<Shape::kDim>;
  using Pair = typename Shape::Value::template Pair<Shape::kDim>;
  static constexpr int kTiles = Shape::kTiles;
  Codes codes[4 * kTiles];

  __device__ __forceinline__ void load(const AttendInputs&, const AttendTile<Shape>& tile) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i)
      codes[i].load(StreamedRow{tile.value_rows[16 * (i / 4) + i / 2 % 2 * 8 + 2 * t + i % 2]}, g);
  }

  __device__ __forceinline__ void add(
      AttendSums<Shape>& sums, const uint32_t (&p)[Shape::kScales][kTiles][2], const AttendTile<Shape>&) const {
    Pair pairs[2 * kTiles];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) pairs[i] = {codes[2 * i], codes[2 * i + 1]};
#pragma unroll
    for (int i = 0; i < Shape::kDim / 16; ++i) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        uint32_t v[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) pairs[2 * m + half].decode(i, v[2 * half], v[2 * half + 1]);
        mma_bf16(sums.o[i], v, p[scale_of(i)][m]);
      }
    }
  }

  __device__ static __forceinline__ float finish(const AttendSums<Shape>& sums, int i, int j) {
    return fmaf(sums.coded[scale_of(i)][j % 2], Pair::offset(i), sums.o[i][j] * Pair::factor(i));
  }

  // For dimensions 16 i to 16 i + 15.
  __device__ static constexpr int scale_of(int i) { return i * 16 * Shape::kScales / Shape::kDim; }
};

} // namespace shadowkv
