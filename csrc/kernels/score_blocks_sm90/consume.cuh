// The consumers: four warpgroups, each with 64 rows of a pair of parts. While one's products run, the others compute
// exponentials, which take less time than the products of three.
#pragma once

#include "kernels/common/block_products.cuh"
#include "exponentials.cuh"
#include "shape.cuh"

namespace shadowkv {

template <class Shape>
__device__ __forceinline__ void score_spans(const ScoreCall& call, const ScoreMemory<Shape>& memory, int consumer) {
  // How many of eight exponentials. With fewer dimensions, products take less time than exponentials.
  constexpr int kByPowers = Shape::kDim == 128 ? 1 : 3;
  const int half = consumer / 2, first = consumer % 2 * 64, lane = threadIdx.x % 32; // the part, and rows of it
  const int row = first + threadIdx.x / 32 % 4 * 16 + lane / 4 + lane % 2 * 8;      // which this thread may store
  const int of_tile = kSampled * call.group;
  const int step = call.heads * call.parts * kRows;
  const bool speaks = lane == 0; // for its warp
  float s[64], base[2] = {};
  Place<Shape::kStages> keys;
  Place<Shape::kQueryStages> queries;
  for (int number = blockIdx.x; number < call.works(); number += gridDim.x) {
    const Span span(call, number);
    if (span.count <= 0) continue;
    const int part = 2 * span.pair + half;
    const int tile = part * call.together + row / of_tile;
    const bool stored = lane % 4 < 2 && row < call.together * of_tile && tile < call.tiles;
    float* to = call.scores + ((int64_t(span.first) * call.heads + span.head) * call.parts + part) * kRows + row;
    wait_phase(memory.queries_full(queries.slot), queries.parity);
    const uint32_t own = memory.queries(queries.slot) + half * Shape::kKeyBytes + first * 128;
    for (int i = 0; i < span.count; ++i) {
      wait_phase(memory.keys_full(keys.slot), keys.parity);
      begin_scores<typename Shape::Element, Shape::kDim>(s, own, memory.keys(keys.slot));
      wait_product_groups<0>();
      settle(s);
      arrive_if(speaks, memory.keys_empty(keys.slot));
      arrive_if(speaks && i + 1 == span.count, memory.queries_empty(queries.slot));
      keys.advance();
      const float log = log_sum<kByPowers>(s, base, call.scale);
      if (stored) *to = log;
      to += step;
    }
    queries.advance();
  }
}

} // namespace shadowkv
