// Queries as the sketch kernels take them: rotated, of length 1, in 8 bits. A warp makes one query.
#pragma once

#include "kernels/mma.cuh"

namespace shadowkv {

constexpr int kQueryWarps = 8;  // queries of a block
constexpr int kMostDim = 256;
constexpr int kAhead = 16;      // rows of the rotation under way at once

struct SketchQuery {
  float unit; // what the whole numbers are multiples of
  int sum;    // of the whole numbers
};

struct SketchQueries {
  const void* q;         // [queries, d]
  const float* rotation; // [d, d]
  uint8_t* whole;        // [queries, 8, S]: dimension j d/8 + b at row j, byte b; other bytes are 0
  SketchQuery* made;     // [queries]
  int queries, dim, plane_bytes;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// kParts: columns of the rotation that a lane has, in fours.
template <typename T, int kParts>
__global__ void __launch_bounds__(32 * kQueryWarps) sketch_queries_kernel(const SketchQueries p) {
  __shared__ float queries[kQueryWarps][kMostDim];
  __shared__ __align__(4) int8_t planes[kQueryWarps][8 * kMostDim / 8];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;"); // the next kernel waits for these queries only where it needs them
#endif
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, query = blockIdx.x * kQueryWarps + warp;
  if (query >= p.queries) return;
  const T* q = static_cast<const T*>(p.q) + int64_t(query) * p.dim;
  for (int i = lane; i < p.dim; i += 32) queries[warp][i] = widen(q[i]);
  for (int i = lane; i < 2 * p.plane_bytes; i += 32) reinterpret_cast<uint32_t*>(planes[warp])[i] = 0;
  __syncwarp();

  float x[kParts][4] = {};
  const float4* rows[kParts]; // lanes past the last column take the first again: no branch between loads
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int column = 4 * (lane + 32 * part);
    rows[part] = reinterpret_cast<const float4*>(p.rotation + (column < p.dim ? column : 0));
  }
  const int step = p.dim / 4;
#pragma unroll 1
  for (int k = 0; k < p.dim; k += kAhead) {
    float4 row[kAhead][kParts];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int part = 0; part < kParts; ++part) row[i][part] = rows[part][(k + i) * step];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const float own = queries[warp][k + i];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const float4 y = row[i][part];
        x[part][0] = fmaf(own, y.x, x[part][0]), x[part][1] = fmaf(own, y.y, x[part][1]);
        x[part][2] = fmaf(own, y.z, x[part][2]), x[part][3] = fmaf(own, y.w, x[part][3]);
      }
    }
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    if (4 * (lane + 32 * part) >= p.dim) x[part][0] = x[part][1] = x[part][2] = x[part][3] = 0;
  float most = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < 4 * kParts; ++i) {
    const float y = x[i / 4][i % 4];
    most = fmaxf(most, fabsf(y)), squares += y * y;
  }
#pragma unroll
  for (int mask = 16; mask; mask /= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
    squares += __shfl_xor_sync(~0u, squares, mask);
  }
  const float unit = fmaxf(most * (1.f / 127), 1e-30f), inverse = 1 / unit;
  const int row = p.dim / 8;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 4 * kParts; ++i) {
    const int column = 4 * (lane + 32 * (i / 4)) + i % 4;
    if (column >= p.dim) continue;
    const int whole = __float2int_rn(x[i / 4][i % 4] * inverse);
    planes[warp][column / row * p.plane_bytes + column % row] = int8_t(whole);
    sum += whole;
  }
  sum = __reduce_add_sync(~0u, sum);
  __syncwarp();
  uint32_t* whole = reinterpret_cast<uint32_t*>(p.whole + int64_t(query) * 8 * p.plane_bytes);
  for (int i = lane; i < 2 * p.plane_bytes; i += 32) whole[i] = reinterpret_cast<uint32_t*>(planes[warp])[i];
  if (lane == 0) p.made[query] = {squares > 0 ? unit * rsqrtf(squares) : 0.f, sum};
}

template <typename T>
void launch_sketch_queries(const SketchQueries& p, cudaStream_t stream) {
  const auto kernel = p.dim > 128 ? sketch_queries_kernel<T, 2> : sketch_queries_kernel<T, 1>;
  kernel<<<(p.queries + kQueryWarps - 1) / kQueryWarps, 32 * kQueryWarps, 0, stream>>>(p);
}

} // namespace shadowkv
