// Fills a unit: the basis, the mean and the queries of a sequence and kv head, as the consumers' products read them.
#pragma once

#include "../attend/fragments.cuh"
#include "shape.cuh"

namespace shadowkv {

// Whether a tile has tokens.
__device__ __forceinline__ bool tile_begins(const LatentInputs& in, const Run& run, int unit, int tile) {
  return __ldg(in.selected + int64_t(run.first_unit + unit) * in.chunks + (tile * kLatentTile >> in.log_chunk)) >= 0;
}

// Makes a unit ready: so many threads, with a barrier and room for their warps' sums of their own.
template <class Shape, int kThreads>
__device__ __forceinline__ void fill_unit(
    const LatentInputs& in, const Run& run, const LatentMemory<Shape>& memory, int unit, int thread, int barrier,
    float* sums) {
  constexpr int kDim = Shape::kDim, kRank = Shape::kRank;
  const int lane = thread % 32, batch = (run.first_unit + unit) / in.heads, head = (run.first_unit + unit) % in.heads;
  const int64_t slot = __ldg(in.slots + batch);

  // The basis as half, 32 dimensions and the 32 they rotate with in a row; first as it is. A thread has the same eight
  // dimensions of all rows that it moves, and their ranks are the sum of what the thread and the pass make of it.
  constexpr int kRowsAtOnce = kThreads / 8, kPasses = kRank / kRowsAtOnce, kWeak = kRank - kStrong;
  const int my_row = thread / 8, my_unit = (thread ^ my_row) % 8;
  const auto dim_of = [](int half, int unit) { return unit / 4 * (kDim / 2) + half * 32 + unit % 4 * 8; };
  const uint32_t into = shared_address(memory.basis(unit)) + thread * 16;
  const __nv_bfloat16* const from = in.basis + slot * in.basis_slot + head * kDim + dim_of(0, my_unit);
  // Into the second-level cache already, while the unit before the last is in use.
  constexpr int kLines = kDim / 64;
#pragma unroll 1
  for (int i = thread; i < kRank * kLines; i += kThreads)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(
        in.basis + slot * in.basis_slot + int64_t(i / kLines) * in.heads * kDim + head * kDim + i % kLines * 64));
  if (thread < in.group * kLines)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(
        in.q + int64_t(run.first_unit + unit) * in.group * kDim + thread * 64));
  wait_phase(memory.unit_empty(unit), unit / 2 % 2 ^ 1);
#pragma unroll(kPasses % 5 == 0 ? 10 : 8) // not all of 16 or 20 passes: registers are scarce
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * kRowsAtOnce;
    const bool strong = row >= kWeak; // they come first in memory and last in the product
    const int rank = rank_of(row, strong) + rank_of(my_row, strong) + (strong ? -kWeak : kStrong);
#pragma unroll
    for (int half = 0; half < Shape::kHalves; ++half)
      copy16_async(into + half * Shape::kRows * 128 + row * 128, from + int64_t(rank) * (in.heads * kDim) + half * 32);
  }
  close_copy_group();
#pragma unroll kDim / 64
  for (int i = thread; i < kDim * 2; i += kThreads) {
    const int query = i % 32 / 4 % Shape::kQueries, j = i / 32;
    const __nv_bfloat16* const q =
        in.q + (int64_t(run.first_unit + unit) * in.group + query) * kDim + j * 8 + i % 4 * 2;
    uint32_t x[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      x[half] = query < in.group ? __ldg(reinterpret_cast<const uint32_t*>(q + half * kDim / 2)) : 0;
      x[half] = bits(__float22half2_rn(unpack_bf16(x[half])));
    }
    memory.queries(unit)[j / 2 * 64 + i % 32 * 2 + j % 2] = make_uint2(x[0], x[1]);
  }
  if (thread < 32) { // tiles with tokens: -1s come last
    int count = 0;
    for (int tile = run.unit_begin(unit) + lane; tile - lane < run.unit_end(unit); tile += 32)
      count += __popc(__ballot_sync(~0u, tile < run.unit_end(unit) && tile_begins(in, run, unit, tile)));
    if (lane == 0) memory.counts()[unit % 2] = count;
  }
  constexpr int kMeans = kDim > kThreads ? kDim / kThreads : 1;
  float mean[kMeans] = {}; // of dimensions thread + j kThreads, in the order that the product has them in
#pragma unroll
  for (int j = 0; j < kMeans; ++j) {
    const int i = thread + j * kThreads;
    if (in.mean == nullptr || i >= kDim) continue;
    const int64_t at = slot * in.mean_slot + head * kDim + dim_of(i / 64, i / 8 % 8) + i % 8;
    mean[j] = in.mean_is_float ? static_cast<const float*>(in.mean)[at]
                               : __bfloat162float(static_cast<const __nv_bfloat16*>(in.mean)[at]);
  }
  wait_copy_groups<0>();
  // Entries under 6e-5 lose bits, of keys around one none.
#pragma unroll 1
  for (int half = 0; half < Shape::kHalves; ++half) {
    float sum_of[8] = {};
#pragma unroll(kPasses < 5 ? kPasses : 5)
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint32_t at = into + half * Shape::kRows * 128 + pass * kRowsAtOnce * 128;
      const uint4 loaded = load_shared16(at);
      uint32_t x[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      const float too_much = pass * kRowsAtOnce >= kWeak ? 1024 + 128 : 1024 + 8; // of a code
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 both = unpack_bf16(x[j]);
        sum_of[2 * j] = fmaf(too_much, both.x, sum_of[2 * j]);
        sum_of[2 * j + 1] = fmaf(too_much, both.y, sum_of[2 * j + 1]);
        x[j] = bits(__float22half2_rn(both));
      }
      store_shared16(at, make_uint4(x[0], x[1], x[2], x[3]));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) { // over the warp's four rows
      sum_of[i] += __shfl_xor_sync(~0u, sum_of[i], 9);
      sum_of[i] += __shfl_xor_sync(~0u, sum_of[i], 18);
      if (lane < 8) sums[thread / 32 * kDim + half * 64 + my_unit * 8 + i] = sum_of[i];
    }
  }
  sync_threads(barrier, kThreads);
#pragma unroll
  for (int m = 0; m < kMeans; ++m) {
    // What the product of the codes has too much, in two halves whose first factor is 64. The product's other rows,
    // here and behind, meet zeros: all they need is to be finite.
    const int i = thread + m * kThreads;
    if (i >= kDim) break;
    float sum = 0;
    for (int w = 0; w < kThreads / 32; ++w) sum += sums[w * kDim + i];
    const float x = (mean[m] - sum) / 64.f;
    const __half high = __float2half(x);
    char* const row = memory.basis(unit) + (i / 64 * Shape::kRows + kRank) * 128 + i % 8 * 2;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      *reinterpret_cast<__half*>(row + j * 128 + (i / 8 % 8 ^ j) * 16) =
          j == 0 ? high : j == 1 ? __float2half(x - __half2float(high)) : __half(0.f);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  sync_threads(barrier, kThreads);
  if (thread == 0) arrive(memory.unit_full(unit));
}

} // namespace shadowkv
