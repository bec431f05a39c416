// Queries as the kernels that search a key sketch take them: rotated, of length 1, in whole numbers of 8 bits, once by
// bytes and once by bits. Half of the time goes to reading the rotation, 64 KiB for every block at head dim 128: a
// block makes as many queries as registers allow.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/early_launch.cuh"

namespace shadowkv {

constexpr int kQueryWarps = 8;    // each sums over an eighth of the rotation's rows, for all queries of its block
constexpr int kBlockQueries = 16; // of a block; 8 above head dim 128

struct SketchQueries {
  const void* q;         // [queries, d]
  const float* rotation; // [d, d]
  uint32_t* whole;       // [queries, 8, W]: byte b of row j, signed, is dimension j d/8 + b; bytes from d/8 on are 0
  uint32_t* planes;      // [queries, 8, W]: bit j of byte b of row p is bit p of byte b of row j of `whole`
  float* unit;           // [queries], what the whole numbers are multiples of
  int* sum;              // [queries], of the whole numbers
  int queries, dim;
};

__device__ __forceinline__ void add_product(float4& sum, const float4& x, float y) {
  sum = {fmaf(x.x, y, sum.x), fmaf(x.y, y, sum.y), fmaf(x.z, y, sum.z), fmaf(x.w, y, sum.w)};
}

// Four floats from `at` on, zeros from `end` on; aligned to 16 bytes where `end` is a multiple of 4.
__device__ __forceinline__ float4 load_floats(const float* p, int at, int end) {
  if (end % 4 == 0) return at < end ? __ldg(reinterpret_cast<const float4*>(p + at)) : float4{};
  const auto load = [&](int i) { return i < end ? __ldg(p + i) : 0.f; };
  return {load(at), load(at + 1), load(at + 2), load(at + 3)};
}

// Where things are in a block's shared memory, in floats. The queries' columns are 4 apart from each other, so that
// neighbours in a query are written to different banks.
template <int kWords, int kQueries>
struct QueryMemory {
  static constexpr int kParts = kWords == 8 ? 2 : 1, kColumn = kQueries + 4;

  static __host__ __device__ int sums(int dim) { return dim * kColumn; }
  static int bytes(int dim) { return 4 * (sums(dim) + kQueryWarps * kQueries * kParts * 32 * 4); }
};

// q R, first by an eighth of the rows of R a warp, and then a query a warp at a time. Lane 8 w + j is for word w of row
// j, four dimensions; with 8 words, for word w + 4 too.
template <typename T, int kWords, int kQueries>
__global__ void __launch_bounds__(32 * kQueryWarps, kQueries > 8 || kWords == 8 ? 1 : 2)
    sketch_queries_kernel(const SketchQueries p) {
  using Memory = QueryMemory<kWords, kQueries>;
  constexpr int kParts = Memory::kParts, kColumn = Memory::kColumn;
  constexpr int kRows = 16 / kParts; // of R, under way together
  let_next_launch_begin();
  const int lane = threadIdx.x, warp = threadIdx.y, bytes = p.dim / 8;
  const int first = blockIdx.x * kQueries;
  float4 r[kRows][kParts];
  const auto load_rows = [&](int row) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const float* from = p.rotation + (warp * bytes + row + i) * p.dim + lane % 8 * bytes;
        r[i][part] = row + i < bytes ? load_floats(from, lane / 8 * 4 + part * 16, bytes) : float4{};
      }
  };
  load_rows(0);

  extern __shared__ float4 shared[];
  float* turned = reinterpret_cast<float*>(shared); // [dims][kColumn], so that a lane reads all queries at once
  float4* sums = shared + Memory::sums(p.dim) / 4;  // [warp][query][part][lane]
  for (int i = warp; i < p.dim * kQueries / 32; i += kQueryWarps) {
    const int at = 32 * i + lane, query = at / p.dim;
    const T* q = static_cast<const T*>(p.q) + int64_t(first) * p.dim;
    turned[at % p.dim * kColumn + query] = first + query < p.queries ? float(q[at]) : 0.f;
  }
  __syncthreads();
  float4 x[kQueries][kParts] = {};
  for (int row = 0; row < bytes; row += kRows) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float y[kQueries];
      const float* column = turned + (warp * bytes + min(row + i, bytes - 1)) * kColumn;
#pragma unroll
      for (int n = 0; n < kQueries; n += 4)
        *reinterpret_cast<float4*>(y + n) = *reinterpret_cast<const float4*>(column + n);
#pragma unroll
      for (int n = 0; n < kQueries; ++n)
#pragma unroll
        for (int part = 0; part < kParts; ++part) add_product(x[n][part], r[i][part], y[n]);
    }
    if (row + kRows < bytes) load_rows(row + kRows);
  }
#pragma unroll
  for (int n = 0; n < kQueries; ++n)
#pragma unroll
    for (int part = 0; part < kParts; ++part) sums[((warp * kQueries + n) * kParts + part) * 32 + lane] = x[n][part];
  __syncthreads();

#pragma unroll
  for (int n = warp; n < kQueries; n += kQueryWarps) {
    if (first + n >= p.queries) return;
    float4 own[kParts] = {};
    float top = 0, square = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float4& v = own[part];
#pragma unroll
      for (int i = 0; i < kQueryWarps; ++i)
        add_product(v, sums[((i * kQueries + n) * kParts + part) * 32 + lane], 1.f);
      top = fmaxf(fmaxf(fmaxf(top, fabsf(v.x)), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
      square += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) {
      top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
      square += __shfl_xor_sync(~0u, square, mask);
    }
    const float unit = fmaxf(top * (1.f / 127.f), 1e-30f), inverse = __frcp_rn(unit);
    int sum = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float4& v = own[part];
      const int whole[4] = {__float2int_rn(v.x * inverse), __float2int_rn(v.y * inverse), __float2int_rn(v.z * inverse),
                            __float2int_rn(v.w * inverse)};
      sum += whole[0] + whole[1] + whole[2] + whole[3];
      const uint32_t four =
          (whole[0] & 255) | (whole[1] & 255) << 8 | (whole[2] & 255) << 16 | uint32_t(whole[3]) << 24;
      uint32_t bits = 0; // of the four dimensions in all rows: word w of plane j
#pragma unroll
      for (int plane = 0; plane < 8; ++plane) {
        uint32_t word = (four >> plane & 0x01010101u) << lane % 8;
#pragma unroll
        for (int mask = 1; mask < 8; mask *= 2) word |= __shfl_xor_sync(~0u, word, mask);
        if (lane % 8 == plane) bits = word;
      }
      if (lane / 8 < kWords) {
        const int64_t at = (int64_t(first + n) * 8 + lane % 8) * kWords + lane / 8 + 4 * part;
        p.whole[at] = four, p.planes[at] = bits;
      }
    }
    sum = __reduce_add_sync(~0u, sum);
    if (lane == 0) p.sum[first + n] = sum, p.unit[first + n] = square > 0 ? unit / sqrtf(square) : 0.f;
  }
}

template <typename T, int kWords>
cudaError_t launch_sketch_queries(const SketchQueries& p, cudaStream_t stream) {
  constexpr int kQueries = kWords == 8 ? 8 : kBlockQueries;
  const int blocks = (p.queries + kQueries - 1) / kQueries, bytes = QueryMemory<kWords, kQueries>::bytes(p.dim);
  const auto kernel = sketch_queries_kernel<T, kWords, kQueries>;
  if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
  kernel<<<blocks, dim3(32, kQueryWarps), bytes, stream>>>(p);
  return cudaGetLastError();
}

// By bytes of a row: 8, 16 or 32.
template <typename T>
cudaError_t launch_sketch_queries(const SketchQueries& p, int64_t bytes, cudaStream_t stream) {
  return bytes == 8    ? launch_sketch_queries<T, 2>(p, stream)
         : bytes == 16 ? launch_sketch_queries<T, 4>(p, stream)
                       : launch_sketch_queries<T, 8>(p, stream);
}

} // namespace shadowkv
