// Queries of a thread block in 16-bit fixed point.
#pragma once

#include "codes.cuh"

namespace shadowkv {

constexpr int kCodedQueries = 4; // query heads per block

// Queries as integers 256 upper + lower in units of `unit`, their largest entry / 32639.
struct CodedQueriesShared {
  int8_t byte[2 * kCodedQueries][kCodedDim]; // upper ones in even rows
  alignas(16) uint32_t quads[2 * 32 * 4];    // row g in the order of a key's quads, by unit, lane and quad
  int sum[kCodedQueries];
  float unit[kCodedQueries];

  // Factors of the four products with a lane's quads of keys.
  __device__ __forceinline__ void read(int g, int t, uint32_t (&q)[4][2]) const {
    const uint4* at = reinterpret_cast<const uint4*>(quads) + 4 * g + t;
    const uint4 first = at[0], second = at[32];
    q[0][0] = first.x, q[0][1] = first.y, q[1][0] = first.z, q[1][1] = first.w;
    q[2][0] = second.x, q[2][1] = second.y, q[3][0] = second.z, q[3][1] = second.w;
  }
};

// In a block of at least kCodedQueries warps, the first warps take one query each; queries past the group are 0.
__device__ __forceinline__ void quantize_queries(const float* q, int queries, float scale, CodedQueriesShared& to) {
  static_assert(kCodedDim == 4 * 32);
  const int lane = threadIdx.x % 32, query = threadIdx.x / 32;
  if (query >= kCodedQueries) return;
  float4 x = {};
  if (query < queries) x = reinterpret_cast<const float4*>(q + query * kCodedDim)[lane];
  const float entries[4] = {x.x, x.y, x.z, x.w};
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = max_or_nan(largest, fabsf(entries[i]));
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, step));
  const float inverse = largest > 1e-30f ? 32639.0f / largest : 0.0f;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int whole = __float2int_rn(entries[i] * inverse), upper = (whole + 128) >> 8;
    sum += whole;
    to.byte[2 * query][4 * lane + i] = int8_t(upper);
    to.byte[2 * query + 1][4 * lane + i] = int8_t(whole - 256 * upper);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) to.sum[query] = sum, to.unit[query] = largest / 32639.0f * scale;
}

// Queries of a block in the order of the keys' dimensions, `key_dim` for a unit, quad, byte and lane t.
template <int kWarps, class KeyDim>
__device__ __forceinline__ void ask_by_bytes(
    const float* q, int queries, float scale, const KeyDim& key_dim, CodedQueriesShared& asked) {
  quantize_queries(q, queries, scale, asked);
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * 32 * 4; i += kWarps * 32) {
    const int unit = i / 128, row = i % 128 / 16, quad = i % 4;
    uint32_t x = 0;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte)
      x |= uint32_t(uint8_t(asked.byte[row][key_dim(unit, quad, byte, i / 4 % 4)])) << 8 * byte;
    asked.quads[i] = x;
  }
  __syncthreads();
}

} // namespace shadowkv
