// The consumers: warpgroups that attend, each to its own tiles.
#pragma once

#include "constants.h"
#include "fill.cuh"
#include "kernels/common/early_launch.cuh"
#include "kernels/common/half_keys.cuh"
#include "kernels/common/wgmma.cuh"
#include "values.cuh"

namespace shadowkv {

// A warp's 16 rows of latents as the products' first factors: codes in the mantissas of 1024, the strong ones last.
template <class Shape>
__device__ __forceinline__ void load_latents(uint32_t (&a)[Shape::kSteps][4], uint32_t rows) {
  constexpr int kWeak = (Shape::kRank - kStrong) / 16; // steps of the product
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t row = rows + (half * 8 + g) * Shape::kLatentRow;
#pragma unroll
    for (int step = 0; step < kWeak; step += 2) {
      const uint32_t x = load_shared4(row + kStrong + step * 8 + t * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) // latents i and i + 4 of the lane's eight
        a[step + i / 2][half + i % 2 * 2] = mask_and_set<0x000f000fu, 0x64006400u>(x >> 4 * i);
    }
#pragma unroll
    for (int step = 0; step < kStrong / 16; ++step) {
      const uint32_t x = load_shared4(row + step * 16 + t * 4);
      a[kWeak + step][half] = __byte_perm(x, 0x64646464u, 0x4140);
      a[kWeak + step][half + 2] = __byte_perm(x, 0x64646464u, 0x4342);
    }
  }
}

// Begins the product of a warpgroup's latents and half h of the basis:
// k is (tokens g, g + 8; dimensions 32 h + 8 i + 2t, + 1, from i = 4 on those RoPE pairs them with).
template <class Shape>
__device__ __forceinline__ void begin_keys(
    float (&k)[32], const uint32_t (&a)[Shape::kSteps][4], const char* basis, int h) {
  const uint32_t ones = threadIdx.x % 4 == 0 ? 0x54005400u : 0; // 64 twice
  const uint32_t mean_factor[4] = {ones, ones, 0, 0};
  // Tells the compiler that this is uniform across a warp, so that it need not be in vector registers.
  const uint32_t b = __shfl_sync(~0u, swizzled_rows(shared_address(basis)), 0) + h * Shape::kRows * 8;
  begin_products();
  first_product(k, mean_factor, b + Shape::kSteps * 128);
#pragma unroll
  for (int step = 0; step < Shape::kSteps; ++step) add_product(k, a[step], b + step * 128);
  close_products();
}

// Logarithms of the weights of tokens `token` and `token` + 8 of a unit; zeros if there are none.
__device__ __forceinline__ void
load_log_weights(float (&log_weight)[2], const LatentInputs& in, int unit_of_all, int token) {
  log_weight[0] = log_weight[1] = 0;
  if (in.log_weight == nullptr) return;
  const float* const of_unit = in.log_weight + unit_of_all * in.chunks;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    log_weight[half] = __ldg(of_unit + min(token + half * 8 >> in.log_chunk, in.chunks - 1));
}

// The products of a warp's keys, rebuilt from its latents in a stage, with each set of a unit's queries: (tokens g,
// g + 8; queries 2t, 2t + 1). `places`: of token g in the ring. One half of the dimensions after the other: angles made
// while the product is under way, or this tile's values while the next one's is, took longer (87 and 90 against 82 us
// at 63 rows of 960 tokens on an H200).
template <class Shape>
__device__ __forceinline__ void score_tokens(
    float (&s)[Shape::kSets][4], const LatentMemory<Shape>& memory, int unit, uint32_t latents, uint32_t queries,
    uint32_t places) {
  uint32_t a[Shape::kSteps][4];
  load_latents<Shape>(a, latents);
#pragma unroll
  for (int h = 0; h < Shape::kHalves; ++h) {
    float k[32];
    Angles angles;
    HalfKeys keys;
    begin_keys<Shape>(k, a, memory.basis(unit), h);
    wait_products(k);
    keys.take(k);
    angles.make(memory.frequencies(), places, h);
    keys.apply_rope(angles);
#pragma unroll
    for (int set = 0; set < Shape::kSets; ++set) keys.score(s[set], queries + set * Shape::kSetBytes + h * 1024);
  }
}

template <class Shape>
__device__ __forceinline__ void consume_latents(
    const LatentInputs& in, const LatentOutputs& to, const LatentMemory<Shape>& memory, int consumer) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, g = lane / 4;

  // Helps to fill the first unit, for which the filling warps are too few.
  if (thread < Shape::kDim / 8 && consumer == Shape::kConsumers - 1)
    copy16_async(memory.frequencies() + thread * 16, in.frequencies + thread * 4);
  wait_for_launch_before();
  if (consumer < 2) fill_unit<Shape, 256>(in, RunUnit(memory.run()), memory, 0, threadIdx.x, 6, memory.merge(0));
  close_copy_group();
  wait_copy_groups<0>();
  asm volatile("bar.sync 7, %0;" ::"n"(Shape::kConsumers * 128) : "memory");

  int next = consumer;  // tile of the run
  int stage = consumer; // of it
  int passed = 0;       // tiles of previous units
  bool more = true;
  for (int unit = 0; more; ++unit) {
    wait_phase(memory.unit_full(unit), unit / 2 % 2);
    const FilledUnit& filled = memory.filled(unit);
    const int number = __shfl_sync(~0u, filled.number, 0);
    const int offset = __shfl_sync(~0u, filled.begin, 0) - passed; // of a tile in the unit: those without tokens are last
    const int until = passed + __shfl_sync(~0u, filled.count, 0);
    more = __shfl_sync(~0u, filled.more, 0);
    passed = until;
    const bool any = next < until;
    Attended<Shape> attended(shared_address(memory.merge(consumer)));

    for (; next < until; next += Shape::kConsumers) {
      const uint32_t queries = shared_address(memory.queries(unit)) + lane * 16;
      const uint32_t places = memory.places(next % Shape::kRing) + (warp * 16 + g) * 16;
      float log_weight[2]; // of tokens g, g + 8; in flight while the keys are computed
      load_log_weights(log_weight, in, number, (next + offset) * kLatentTile + warp * 16 + g);
      wait_phase(memory.stage_full(next % Shape::kRing), next / Shape::kRing % 2);
      float s[Shape::kSets][4] = {};
      score_tokens<Shape>(s, memory, unit, memory.stage(stage) + warp * 16 * Shape::kLatentRow, queries, places);
      TileValues<Shape> values;
      values.load(memory.stage(stage) + kLatentTile * Shape::kLatentRow + warp * 16 * Shape::kCodeRow, places);
      __syncwarp();
      if (lane == 0) arrive(memory.stage_empty(stage));
      stage += Shape::kConsumers;
      if (stage >= Shape::kStages) stage -= Shape::kStages;
      if (!__any_sync(~0u, values.scale[0] >= 0)) continue;
#pragma unroll
      for (int set = 0; set < Shape::kSets; ++set) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          s[set][j] = values.scale[j / 2] < 0
              ? -INFINITY
              : fmaf(s[set][j], in.score_scale, log_weight[j / 2] * kLog2E);
      }
      attended.add(s, values);
    }
    __syncwarp();
    if (lane == 0) arrive(memory.unit_empty(unit));
    const int part = (number + int(blockIdx.x)) * Shape::kConsumers + consumer;
    float* const partial = to.partial + int64_t(part) * in.group * Shape::kMergeRow;
    if (any)
      attended.write(partial, in.group, memory.merge(consumer), 2 + consumer);
    else if (thread < in.group)
      *reinterpret_cast<float2*>(partial + thread * Shape::kMergeRow + Shape::kDim) = make_float2(-INFINITY, 0);
  }
}

} // namespace shadowkv
