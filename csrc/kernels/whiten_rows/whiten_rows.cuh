// Rows times the inverse of a Cholesky factor: L^-1 x, where L L^T are the products of rows, scaled to a diagonal of 1,
// with a shift added to the diagonal.
//
// A thread block has 32 columns of one matrix of rows, and factors all of the products by itself: that takes less time
// than a second launch would, and needs only block-level barriers. Everything is in tiles of 32 x 32 in shared memory:
// the lower triangle of the products, which becomes that of L. Division by diagonal tiles uses substitution, as
// products with the inverses of near singular tiles would lose too much of float32's precision.
#pragma once

#include <cuda_runtime.h>

namespace shadowkv {

constexpr int kWhitenTile = 32, kWhitenWarps = 8;
constexpr int kWhitenPitch = 36; // floats from row to row: for 16-byte accesses, eight rows are in different banks
constexpr int kWhitenMostRows = 256; // what fits in shared memory
constexpr int kWhitenTileFloats = kWhitenTile * kWhitenPitch;

struct WhitenRows {
  const float* rows;     // [matrices, rank, n]
  const float* products; // [matrices, rank, rank]
  float* out;            // as rows
  int matrices, rank, n;
  float shift;

  __host__ __device__ int tiles() const { return (rank + kWhitenTile - 1) / kWhitenTile; }
  // The lower triangle, the columns, the factors of rows, and one over the diagonal of L.
  __host__ int shared_bytes() const {
    const int floats = (tiles() * (tiles() + 1) / 2 + tiles()) * kWhitenTileFloats + 2 * tiles() * kWhitenTile;
    return floats * int(sizeof(float));
  }
};

// A row of a tile, in registers.
__device__ __forceinline__ void load_row(float (&x)[kWhitenTile], const float* row) {
#pragma unroll
  for (int i = 0; i < kWhitenTile; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(row + i);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
}

__device__ __forceinline__ void store_row(float* row, const float (&x)[kWhitenTile]) {
#pragma unroll
  for (int i = 0; i < kWhitenTile; i += 4)
    *reinterpret_cast<float4*>(row + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
}

// x . row
__device__ __forceinline__ float dot_row(const float (&x)[kWhitenTile], const float* row) {
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < kWhitenTile; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(row + i);
    sums[0] = fmaf(x[i], four.x, sums[0]), sums[1] = fmaf(x[i + 1], four.y, sums[1]);
    sums[2] = fmaf(x[i + 2], four.z, sums[2]), sums[3] = fmaf(x[i + 3], four.w, sums[3]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

struct WhitenMemory {
  float* triangle;
  float* columns;
  float* scales;
  float* inverses;

  __device__ WhitenMemory(float* shared, int tiles)
      : triangle(shared), columns(shared + tiles * (tiles + 1) / 2 * kWhitenTileFloats),
        scales(columns + tiles * kWhitenTileFloats), inverses(scales + tiles * kWhitenTile) {}

  __device__ float* tile(int i, int j) const { return triangle + (i * (i + 1) / 2 + j) * kWhitenTileFloats; }
  __device__ float* column_tile(int i) const { return columns + i * kWhitenTileFloats; }
};

// Loads scaled products and columns into tiles, with an identity and zeros past the last row. All loads of a few rows
// are in flight together.
__device__ __forceinline__ void load_tiles(const WhitenRows& call, const WhitenMemory& memory, int matrix, int first) {
  constexpr int kAtOnce = 2, kMostTiles = kWhitenMostRows / kWhitenTile;
  const float* products = call.products + int64_t(matrix) * call.rank * call.rank;
  const float* rows = call.rows + int64_t(matrix) * call.rank * call.n;
  const int lane = threadIdx.x % kWhitenTile, warp = threadIdx.x / kWhitenTile, tiles = call.tiles();
  for (int row = threadIdx.x; row < call.rank; row += blockDim.x)
    memory.scales[row] = 1 / fmaxf(sqrtf(products[int64_t(row) * call.rank + row]), 1e-12f); // finite for zeros
  __syncthreads();
  for (int start = warp; start < tiles * kWhitenTile; start += kAtOnce * kWhitenWarps) {
    float entries[kAtOnce][kMostTiles + 1];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int row = start + k * kWhitenWarps;
#pragma unroll
      for (int j = 0; j < kMostTiles; ++j) {
        const int column = j * kWhitenTile + lane;
        const bool inside = row < call.rank && column < call.rank && j <= row / kWhitenTile;
        entries[k][j] = inside ? __ldg(products + int64_t(row) * call.rank + column) : 0;
      }
      const bool inside = row < call.rank && first + lane < call.n;
      entries[k][kMostTiles] = inside ? __ldg(rows + int64_t(row) * call.n + first + lane) : 0;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int row = start + k * kWhitenWarps, i = row / kWhitenTile, within = row % kWhitenTile * kWhitenPitch + lane;
      if (row >= tiles * kWhitenTile) break;
      const float scale = row < call.rank ? memory.scales[row] : 0;
#pragma unroll
      for (int j = 0; j < kMostTiles; ++j) {
        const int column = j * kWhitenTile + lane;
        if (j > i) break;
        float x = entries[k][j] * scale * (column < call.rank ? memory.scales[column] : 0);
        if (row == column) x = row < call.rank ? x + call.shift : 1;
        memory.tile(i, j)[within] = x;
      }
      memory.column_tile(i)[within] = entries[k][kMostTiles] * scale;
    }
  }
}

// 1 / sqrt(x) to about the last bit, and 0 if so little is left of a square of 1 that it may be rounding: later rows
// then keep their component in that direction, instead of getting multiples of noise.
__device__ __forceinline__ float inverse_root(float x) {
  if (!(x > 2e-6f)) return 0;
  const float guess = rsqrtf(x);
  return guess * fmaf(-0.5f * x * guess, guess, 1.5f);
}

// The Cholesky factor of a tile in its lower triangle, and one over its diagonal, by one warp with one row per lane.
__device__ __forceinline__ void factor_tile(float* tile, float* inverses) {
  const int lane = threadIdx.x % kWhitenTile;
  float x[kWhitenTile];
  load_row(x, tile + lane * kWhitenPitch);
#pragma unroll
  for (int c = 0; c < kWhitenTile; ++c) {
    const float inverse = inverse_root(__shfl_sync(~0u, x[c], c));
    if (lane == c) inverses[c] = inverse;
    x[c] *= inverse;
#pragma unroll
    for (int j = c + 1; j < kWhitenTile; ++j) x[j] = fmaf(-x[c], __shfl_sync(~0u, x[c], j), x[j]);
  }
  store_row(tile + lane * kWhitenPitch, x);
}

// x <- L^-1 x, for a diagonal tile's L. Entries whose inverse is 0 become 0, or with kKeeps are not scaled.
template <bool kKeeps>
__device__ __forceinline__ void substitute(float (&x)[kWhitenTile], const float* l, const float* inverses) {
#pragma unroll
  for (int c = 0; c < kWhitenTile; ++c) {
    float sums[4] = {};
#pragma unroll
    for (int t = 0; t < c; t += 4) {
      const float4 four = *reinterpret_cast<const float4*>(l + c * kWhitenPitch + t);
      sums[0] = fmaf(x[t], four.x, sums[0]);
      if (t + 1 < c) sums[1] = fmaf(x[t + 1], four.y, sums[1]);
      if (t + 2 < c) sums[2] = fmaf(x[t + 2], four.z, sums[2]);
      if (t + 3 < c) sums[3] = fmaf(x[t + 3], four.w, sums[3]);
    }
    const float inverse = inverses[c];
    x[c] = (x[c] - ((sums[0] + sums[1]) + (sums[2] + sums[3]))) * (kKeeps && inverse == 0 ? 1 : inverse);
  }
}

// A tile below the diagonal: A <- A (L^-1)^T, one row per lane.
__device__ __forceinline__ void divide_tile(float* tile, const float* l, const float* inverses) {
  float* row = tile + threadIdx.x % kWhitenTile * kWhitenPitch;
  float x[kWhitenTile];
  load_row(x, row);
  substitute<false>(x, l, inverses);
  store_row(row, x);
}

// A tile of the columns: B <- L^-1 B, one column per lane.
__device__ __forceinline__ void divide_columns(float* tile, const float* l, const float* inverses) {
  float x[kWhitenTile];
#pragma unroll
  for (int i = 0; i < kWhitenTile; ++i) x[i] = tile[i * kWhitenPitch + threadIdx.x % kWhitenTile];
  substitute<true>(x, l, inverses);
#pragma unroll
  for (int i = 0; i < kWhitenTile; ++i) tile[i * kWhitenPitch + threadIdx.x % kWhitenTile] = x[i];
}

// A <- A - L M^T
__device__ __forceinline__ void update_tile(float* tile, const float* l, const float* m) {
  float* row = tile + threadIdx.x % kWhitenTile * kWhitenPitch;
  float x[kWhitenTile], out[kWhitenTile];
  load_row(x, l + threadIdx.x % kWhitenTile * kWhitenPitch);
  load_row(out, row);
#pragma unroll
  for (int c = 0; c < kWhitenTile; ++c) out[c] -= dot_row(x, m + c * kWhitenPitch);
  store_row(row, out);
}

// One warp continues with the next diagonal tile while the others update the rest.
__device__ __forceinline__ void factor_tiles(const WhitenMemory& memory, int tiles) {
  const int warp = threadIdx.x / kWhitenTile;
  if (warp == 0) factor_tile(memory.tile(0, 0), memory.inverses);
  __syncthreads();
  for (int k = 0; k + 1 < tiles; ++k) {
    for (int i = k + 1 + warp; i < tiles; i += kWhitenWarps)
      divide_tile(memory.tile(i, k), memory.tile(k, k), memory.inverses + k * kWhitenTile);
    __syncthreads();
    if (warp == 0) {
      update_tile(memory.tile(k + 1, k + 1), memory.tile(k + 1, k), memory.tile(k + 1, k));
      __syncwarp();
      factor_tile(memory.tile(k + 1, k + 1), memory.inverses + (k + 1) * kWhitenTile);
    } else {
      int number = 0;
      for (int i = k + 2; i < tiles; ++i)
        for (int j = k + 1; j <= i; ++j, ++number)
          if (number % (kWhitenWarps - 1) == warp - 1)
            update_tile(memory.tile(i, j), memory.tile(i, k), memory.tile(j, k));
    }
    __syncthreads();
  }
}

// Neighbouring columns of the product of a tile and a tile of columns, for the lane's row.
template <int kColumns>
__device__ __forceinline__ void multiply_columns(
    float (&out)[kColumns], const float* tile, const float* columns, int first) {
  float x[kWhitenTile];
  load_row(x, tile + threadIdx.x % kWhitenTile * kWhitenPitch);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) out[c] = 0;
#pragma unroll
  for (int t = 0; t < kWhitenTile; ++t)
#pragma unroll
    for (int c = 0; c < kColumns; c += 4) {
      const float4 four = *reinterpret_cast<const float4*>(columns + t * kWhitenPitch + first + c);
      out[c] = fmaf(x[t], four.x, out[c]), out[c + 1] = fmaf(x[t], four.y, out[c + 1]);
      out[c + 2] = fmaf(x[t], four.z, out[c + 2]), out[c + 3] = fmaf(x[t], four.w, out[c + 3]);
    }
}

// Columns <- L^-1 columns, one tile of rows after the other.
__device__ __forceinline__ void solve_columns(const WhitenMemory& memory, int tiles) {
  constexpr int kOfUnit = 8, kUnits = kWhitenTile / kOfUnit;
  const int warp = threadIdx.x / kWhitenTile, row = threadIdx.x % kWhitenTile * kWhitenPitch;
  for (int k = 0; k < tiles; ++k) {
    if (warp == 0) divide_columns(memory.column_tile(k), memory.tile(k, k), memory.inverses + k * kWhitenTile);
    __syncthreads();
    for (int unit = warp; unit < (tiles - k - 1) * kUnits; unit += kWhitenWarps) {
      const int i = k + 1 + unit / kUnits, first = unit % kUnits * kOfUnit;
      float part[kOfUnit];
      multiply_columns<kOfUnit>(part, memory.tile(i, k), memory.column_tile(k), first);
#pragma unroll
      for (int c = 0; c < kOfUnit; ++c) memory.column_tile(i)[row + first + c] -= part[c];
    }
    __syncthreads();
  }
}

__global__ __launch_bounds__(kWhitenWarps* kWhitenTile, 1) void whiten_rows_kernel(WhitenRows call) {
  extern __shared__ __align__(16) float whiten_shared[];
  const WhitenMemory memory(whiten_shared, call.tiles());
  const int first = blockIdx.x * kWhitenTile, lane = threadIdx.x % kWhitenTile, warp = threadIdx.x / kWhitenTile;
  load_tiles(call, memory, blockIdx.y, first);
  __syncthreads();
  factor_tiles(memory, call.tiles());
  solve_columns(memory, call.tiles());
  float* out = call.out + int64_t(blockIdx.y) * call.rank * call.n;
  if (first + lane < call.n)
    for (int row = warp; row < call.rank; row += kWhitenWarps)
      out[int64_t(row) * call.n + first + lane] =
          memory.column_tile(row / kWhitenTile)[row % kWhitenTile * kWhitenPitch + lane];
}

} // namespace shadowkv
