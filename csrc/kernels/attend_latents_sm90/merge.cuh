// Computes outputs from the consumers' partial results.
#pragma once

#include "constants.h"
#include "kernels/common/early_launch.cuh"
#include "shape.cuh"

namespace shadowkv {

// c[16 x 8] += a[16 x 8] b[8 x 8]. a0: (g, t) a1: (g + 8, t) a2: (g, t + 4) a3: (g + 8, t + 4); b0: (t, g)
// b1: (t + 4, g); c as in mma_bf16. Floats, rounded to 11 bits here.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
  const auto round = [](float x) {
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
  };
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(round(a[0])), "r"(round(a[1])), "r"(round(a[2])), "r"(round(a[3])), "r"(round(b[0])), "r"(round(b[1])));
}

// The sum or the maximum over the kLanes lanes of a query.
template <int kLanes, class T, class Join>
__device__ __forceinline__ T reduce_query(T x, Join join) {
  const uint32_t lanes = kLanes == 32 ? ~0u : 0xffffu << (threadIdx.x & 16);
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) x = join(x, __shfl_xor_sync(lanes, x, i));
  return x;
}

// The partial results of a unit: how many, and the first of them in `partial`; found by kLanes lanes.
template <int kLanes, int kConsumers>
__device__ __forceinline__ int2 parts_of(const LatentCall& call, int unit) {
  const LatentInputs& in = call.in;
  const int sequence = unit / in.heads, tiles = in.tiles_of(sequence);
  int before = 0, all = 0; // tiles of one head of the sequences before, and of all
  for (int i = threadIdx.x % kLanes; i < in.batch; i += kLanes) {
    const int own = in.tiles_of(i);
    all += own;
    if (i < sequence) before += own;
  }
  const auto sum = [](int a, int b) { return a + b; };
  before = reduce_query<kLanes>(before, sum), all = reduce_query<kLanes>(all, sum);
  if (tiles == 0) return {0, 0};
  const TileLine line = {uint32_t(all) * in.heads, uint32_t(call.blocks)};
  const int first = before * in.heads + unit % in.heads * tiles;
  const int block = line.block_of(first), blocks = line.block_of(first + tiles - 1) - block + 1;
  return {blocks * kConsumers, (unit + block) * kConsumers};
}

// Merges a query's parts, as parts_of found them, by kLanes lanes, each with four dimensions; returns those, and writes
// the query's lse.
template <int kDim, int kConsumers>
__device__ __forceinline__ float4 join_parts(const LatentCall& call, int query, int2 parts_from) {
  constexpr int kLanes = kDim / 4;
  const int group = call.in.group, lane = threadIdx.x % kLanes, at = lane * 4;
  const int parts = parts_from.x, next = group * (kDim + 4);
  const float* const partial = call.to.partial + (int64_t(parts_from.y) * group + query % group) * (kDim + 4);
  float highest = -INFINITY, total = 0;
  for (int i = lane; i < parts; i += kLanes) highest = fmaxf(highest, __ldcg(partial + i * next + kDim));
  highest = reduce_query<kLanes>(highest, [](float a, float b) { return fmaxf(a, b); });
  const auto share_of = [&](float top) { return top > -INFINITY ? exp2_fast(top - highest) : 0.f; };
  for (int i = lane; i < parts; i += kLanes) {
    const float2 state = __ldcg(reinterpret_cast<const float2*>(partial + i * next + kDim));
    total += state.y * share_of(state.x);
  }
  total = reduce_query<kLanes>(total, [](float a, float b) { return a + b; });
  float4 x = make_float4(0, 0, 0, 0);
#pragma unroll 8
  for (int i = 0; i < parts; ++i) {
    const float4 part = __ldcg(reinterpret_cast<const float4*>(partial + i * next + at));
    const float share = share_of(__ldcg(partial + i * next + kDim));
    if (share == 0) continue; // a sum may not have been written
    x.x += part.x * share, x.y += part.y * share, x.z += part.z * share, x.w += part.w * share;
  }
  const float scale = total > 0 ? 1 / total : 0.f;
  x.x *= scale, x.y *= scale, x.z *= scale, x.w *= scale;
  if (at == 0) call.to.lse[query] = (highest + log2f(total)) * kLn2;
  return x;
}

// Joins the parts of eight queries, of one unit or of several, and rotates the values back by their codec's rotation; a
// warp makes 16 dimensions. It may start before the parts are there: the rotation is read meanwhile.
template <int kDim, int kConsumers>
__global__ __launch_bounds__(kDim * 2) void merge_latents_kernel(const LatentCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const LatentInputs& in = call.in;
  __shared__ __align__(16) float y[8][kDim + 4];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float4 rotation[kDim / 16][2]; // of dimensions 16 warp + g, + 8; four of each 16
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      rotation[i][half] =
          __ldg(reinterpret_cast<const float4*>(in.rotation + (16 * warp + 8 * half + g) * kDim + 16 * i + 4 * t));
  }
  const int first_query = int(blockIdx.x) * 8, queries = min(8, in.batch * in.heads * in.group - first_query);
  const int query = threadIdx.x / (kDim / 4), at = threadIdx.x % (kDim / 4) * 4; // at: the thread's four dimensions
  int2 parts{};
  if (query < queries) parts = parts_of<kDim / 4, kConsumers>(call, (first_query + query) / in.group);
  wait_for_launch_before();
  let_next_launch_begin();

  *reinterpret_cast<float4*>(&y[query][at]) =
      query < queries ? join_parts<kDim, kConsumers>(call, first_query + query, parts) : make_float4(0, 0, 0, 0);
  __syncthreads();
  float c[4] = {}; // (dimensions 16 warp + g, + 8; queries 2t, 2t + 1)
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    const float4 b = *reinterpret_cast<const float4*>(&y[g][16 * i + 4 * t]);
    const float4 a = rotation[i][0], a8 = rotation[i][1];
    mma_tf32(c, {a.x, a8.x, a.y, a8.y}, {b.x, b.y});
    mma_tf32(c, {a.z, a8.z, a.w, a8.w}, {b.z, b.w});
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (2 * t + i % 2 < queries)
      call.to.out[int64_t(first_query + 2 * t + i % 2) * kDim + 16 * warp + 8 * (i / 2) + g] = __float2bfloat16(c[i]);
#endif
}

} // namespace shadowkv
