// Queries for the kernels that search a key sketch: mapped, divided by their original length, as 8-bit whole numbers in
// bytes, and as 4-bit numbers in bit planes. A block computes up to eight queries of one row and kv head, which share a
// map; the map's bytes, 32 KiB at head dim 128, are in flight while the previous launch is still running. More than eight
// are halves, of two blocks: the second takes the map from the L2 cache. With more than 256 dimensions a block has four
// queries.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/common/early_launch.cuh"
#include "sketch_rules.h"

namespace shadowkv {

struct SketchQueries {
  const void* q;             // [rows, heads, group, d]
  const __nv_bfloat16* maps; // [states, heads, d, d], whole states apart
  int64_t maps_stride;       // from one state to the next, in elements
  const int64_t* states;      // [rows]
  uint32_t* whole;           // [queries, 8, W]: byte b of row j, signed, is dimension j d/8 + b; bytes from d/8 on are 0
  float* unit;               // [queries], the unit of the whole numbers
  int* sum;                  // [queries], of the whole numbers
  uint32_t* planes;          // [queries, 4, W]: bit j of byte b of row p is bit p of byte b of row j, in sixteenths
  int* plane_sum;            // [queries], of those
  float* length;             // [queries], of the queries, times dim^-1/2
  int rows, heads, group, dim;
  int share; // queries of a block, of the group's
};

__device__ __forceinline__ void add_product(float4& sum, uint2 x, float y) {
  const float2 low = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x.x));
  const float2 high = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x.y));
  sum = {fmaf(low.x, y, sum.x), fmaf(low.y, y, sum.y), fmaf(high.x, y, sum.z), fmaf(high.y, y, sum.w)};
}

// Four entries from `at` on, zeros from `end` on; aligned to 8 bytes where `end` is a multiple of 4.
__device__ __forceinline__ uint2 load_four(const __nv_bfloat16* p, int at, int end) {
  if (end % 4 == 0) return at < end ? __ldg(reinterpret_cast<const uint2*>(p + at)) : uint2{};
  const auto load = [&](int i) {
    return i < end ? uint32_t(__ldg(reinterpret_cast<const unsigned short*>(p + i))) : 0u;
  };
  return {load(at) | load(at + 1) << 16, load(at + 2) | load(at + 3) << 16};
}

// Floats of a block's shared memory: queries by dimension, so that a lane reads all of them at once, and sums.
template <int kWords, int kQueries>
struct QueryMemory {
  static constexpr int kParts = kWords > 4 ? kWords / 4 : 1;
  static int bytes(int dim) { return 4 * (dim * kQueries + kQueries * kQueries * kParts * 32 * 4); }
};

// Four dimensions of a query in whole numbers, a byte each, and in sixteenths of these; sums up both.
struct RoundedFour {
  uint32_t whole = 0, sixteenths = 0;

  __device__ __forceinline__ RoundedFour(const float4& x, float inverse, int& sum, int& sum_of_sixteenths) {
    const float of_four[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int number = __float2int_rn(of_four[i] * inverse), rounder = min((number + 8) >> 4, 7);
      sum += number, sum_of_sixteenths += rounder;
      whole |= uint32_t(number & 255) << 8 * i, sixteenths |= uint32_t(rounder & 255) << 8 * i;
    }
  }

  // The four dimensions of all 8 rows as a word of a bit plane: of 8 lanes with one row each, lane j ends up with the
  // word of plane j, lanes beyond the planes with 0.
  __device__ __forceinline__ uint32_t plane_word(int lane) const {
    uint32_t bits = 0;
#pragma unroll
    for (int plane = 0; plane < kQueryPlanes; ++plane) {
      uint32_t word = (sixteenths >> plane & 0x01010101u) << lane % 8;
#pragma unroll
      for (int mask = 1; mask < 8; mask *= 2) word |= __shfl_xor_sync(~0u, word, mask);
      if (lane % 8 == plane) bits = word;
    }
    return bits;
  }
};

// Sums up a query's results from the warps' shares of the map; returns the largest number of a lane's dimensions.
template <int kQueries, int kParts>
__device__ __forceinline__ float join_shares(float4 (&own)[kParts], const float4* sums, int query, int lane) {
  float top = 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    float4& v = own[part];
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      const float4 y = sums[((i * kQueries + query) * kParts + part) * 32 + lane];
      v.x += y.x, v.y += y.y, v.z += y.z, v.w += y.w;
    }
    top = fmaxf(fmaxf(fmaxf(top, fabsf(v.x)), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
  }
  return top;
}

// Rounds and writes a query, by a warp. own: a lane's mapped dimensions; top: the largest of all dimensions; square:
// the squared original length.
template <int kWords, int kParts>
__device__ __forceinline__ void
write_query(const SketchQueries& p, int query, const float4 (&own)[kParts], float top, float square, int lane) {
  const float unit = fmaxf(top * (1.f / 127.f), 1e-30f), inverse = __frcp_rn(unit);
  int sum = 0, plane_sum = 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const RoundedFour four(own[part], inverse, sum, plane_sum);
    const uint32_t bits = four.plane_word(lane);
    if (lane / 8 < kWords) {
      const int word = lane / 8 + 4 * part;
      p.whole[(int64_t(query) * 8 + lane % 8) * kWords + word] = four.whole;
      if (lane % 8 < kQueryPlanes) p.planes[(int64_t(query) * kQueryPlanes + lane % 8) * kWords + word] = bits;
    }
  }
  sum = __reduce_add_sync(~0u, sum), plane_sum = __reduce_add_sync(~0u, plane_sum);
  if (lane == 0) {
    p.sum[query] = sum, p.plane_sum[query] = plane_sum;
    p.unit[query] = square > 0 ? unit / sqrtf(square) : 0.f;
    p.length[query] = sqrtf(square / p.dim);
  }
}

// q M by kQueries warps, first with a share of the rows of M each, then with one query each. Lane 8 w + j has word w of
// row j, four dimensions; with more than 4 words, also words w + 4… Blocks are small so that all rows and heads of a large batch
// run at once.
template <typename T, int kWords, int kQueries>
__global__ void __launch_bounds__(32 * kQueries, kWords >= 8 || kQueries == 8 ? 2 : 6)
    sketch_queries_kernel(const SketchQueries p) {
  constexpr int kParts = QueryMemory<kWords, kQueries>::kParts;
  constexpr int kRows = kParts == 1 ? 16 : kParts == 2 ? 4 : 8; // of M, in flight together
  const int lane = threadIdx.x, warp = threadIdx.y, bytes = p.dim / 8, rows = p.dim / kQueries;
  const int row = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
  const int before = blockIdx.y * p.share, first = blockIdx.x * p.group + before; // queries of the group, of all
  const int own_queries = min(p.share, p.group - before);
  const __nv_bfloat16* map = p.maps + p.states[row] * p.maps_stride + int64_t(head) * p.dim * p.dim;
  uint2 m[kRows][kParts];
  const auto load_rows = [&](int from) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        m[i][part] = from + i < rows ? load_four(
                                           map + (warp * rows + from + i) * p.dim + lane % 8 * bytes,
                                           lane / 8 * 4 + part * 16, bytes)
                                     : uint2{};
  };
  load_rows(0);
  wait_for_launch_before();
  let_next_launch_begin();

  extern __shared__ float4 shared[];
  float* columns = reinterpret_cast<float*>(shared); // [dims][kQueries]
  float4* sums = shared + p.dim * kQueries / 4;      // [warp][query][part][lane]
  const T* q = static_cast<const T*>(p.q) + int64_t(first) * p.dim;
  for (int i = warp * 32 + lane; i < p.dim * kQueries; i += 32 * kQueries) {
    const int query = i / p.dim;
    columns[i % p.dim * kQueries + query] = query < own_queries ? float(q[i]) : 0.f;
  }
  __syncthreads();
  float4 x[kQueries][kParts] = {};
  for (int from = 0; from < rows; from += kRows) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float y[kQueries];
      const float* column = columns + (warp * rows + min(from + i, rows - 1)) * kQueries;
#pragma unroll
      for (int n = 0; n < kQueries; n += 4)
        *reinterpret_cast<float4*>(y + n) = *reinterpret_cast<const float4*>(column + n);
#pragma unroll
      for (int n = 0; n < kQueries; ++n)
#pragma unroll
        for (int part = 0; part < kParts; ++part) add_product(x[n][part], m[i][part], y[n]);
    }
    if (from + kRows < rows) load_rows(from + kRows);
  }
#pragma unroll
  for (int n = 0; n < kQueries; ++n)
#pragma unroll
    for (int part = 0; part < kParts; ++part) sums[((warp * kQueries + n) * kParts + part) * 32 + lane] = x[n][part];
  __syncthreads();

  if (warp >= own_queries) return;
  float4 own[kParts] = {};
  float top = join_shares<kQueries>(own, sums, warp, lane), square = 0;
  for (int i = lane; i < p.dim; i += 32)
    square = fmaf(columns[i * kQueries + warp], columns[i * kQueries + warp], square);
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
    square += __shfl_xor_sync(~0u, square, mask);
  }
  write_query<kWords>(p, first + warp, own, top, square, lane);
}

template <typename T, int kWords, int kQueries>
cudaError_t launch_sketch_queries(const SketchQueries& p, cudaStream_t stream) {
  return launch_early(
      sketch_queries_kernel<T, kWords, kQueries>, dim3(p.rows * p.heads, (p.group + p.share - 1) / p.share),
      dim3(32, kQueries), QueryMemory<kWords, kQueries>::bytes(p.dim), stream, p);
}

template <typename T, int kWords>
cudaError_t launch_sketch_queries(SketchQueries p, cudaStream_t stream) {
  // Eight queries of 512 dimensions would take 144 KiB of shared memory.
  constexpr int kMost = kWords == 16 ? 4 : 8;
  const int blocks = (p.group + kMost - 1) / kMost;
  p.share = (p.group + blocks - 1) / blocks;
  if constexpr (kMost > 4)
    if (p.share > 4) return launch_sketch_queries<T, kWords, kMost>(p, stream);
  return launch_sketch_queries<T, kWords, 4>(p, stream);
}

// By bytes of a row: 8, 16, 32 or 64.
template <typename T>
cudaError_t launch_sketch_queries(const SketchQueries& p, int64_t bytes, cudaStream_t stream) {
  if (bytes == 8) return launch_sketch_queries<T, 2>(p, stream);
  if (bytes == 16) return launch_sketch_queries<T, 4>(p, stream);
  if (bytes == 32) return launch_sketch_queries<T, 8>(p, stream);
  return launch_sketch_queries<T, 16>(p, stream);
}

} // namespace shadowkv
