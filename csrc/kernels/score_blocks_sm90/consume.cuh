// The consumers: four warpgroups, each with 64 rows of a pair of parts. While one's products go on, the others compute
// exponentials: these take less time than the products of three.
#pragma once

#include "../wgmma.cuh"
#include "exponentials.cuh"
#include "shape.cuh"

namespace shadowkv {

// Begins s = the products' sums, as Sums has them, in a group of its own.
template <int kDim>
__device__ __forceinline__ void begin_byte_scores(uint32_t (&s)[64], uint32_t queries, uint32_t keys) {
  const uint32_t a = swizzled_rows(queries), b = swizzled_rows(keys);
#pragma unroll
  for (uint32_t& x : s) x = Sums::kZero;
  settle(s);
  begin_products();
#pragma unroll
  for (int step = 0; step < kDim / 32; ++step) byte_product(s, a + step * 2, b + step * 2);
  close_products();
}

template <class Shape>
__device__ __forceinline__ void score_spans(const ScoreCall& call, const ScoreMemory<Shape>& memory, int consumer) {
  const int half = consumer / 2, lane = threadIdx.x % 32, first = consumer % 2 * 64; // the part, and rows of it
  const int warp_row = first + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int row = warp_row + lane % 2 * 8; // which this thread may store
  const int step = call.heads * call.parts * kRows;
  const bool speaks = lane == 0; // for its warp
  uint32_t s[64];
  float base[2] = {};
  Place<Shape::kStages> keys;
  Place<Shape::kQueryStages> queries;
  for (int number = blockIdx.x; number < call.works(); number += gridDim.x) {
    const Span span(call, number);
    if (span.count <= 0) continue;
    const int part = 2 * span.pair + half;
    const int tile = part * call.together + row / call.of_tile;
    const bool stored = lane % 4 < 2 && row < call.used && tile < call.tiles;
    float* to = call.scores + ((int64_t(span.first) * call.heads + span.head) * call.parts + part) * kRows + row;
    const float* const query_steps = call.query_steps + (span.head * call.parts + part) * kRows + warp_row;
    float query_step[2]; // of this thread's two rows
#pragma unroll
    for (int r = 0; r < 2; ++r) query_step[r] = part < call.parts ? __ldg(query_steps + 8 * r) * call.scale : 0;
    const float* key_steps = call.key_steps + span.first * call.heads + span.head;
    float key_step = __ldg(key_steps);
    wait_phase(memory.queries_full(queries.slot), queries.parity);
    const uint32_t own = memory.queries(queries.slot) + half * Shape::kKeyBytes + first * 128;
    for (int i = 0; i < span.count; ++i) {
      wait_phase(memory.keys_full(keys.slot), keys.parity);
      begin_byte_scores<Shape::kDim>(s, own, memory.keys(keys.slot));
      const float scale[2] = {query_step[0] * key_step, query_step[1] * key_step};
      if (i + 1 < span.count) key_step = __ldg(key_steps += call.heads);
      wait_product_groups<0>();
      settle(s);
      arrive_if(speaks, memory.keys_empty(keys.slot));
      arrive_if(speaks && i + 1 == span.count, memory.queries_empty(queries.slot));
      keys.advance();
      const float log = log_sum<Shape::kByPowers>(s, base, scale);
      if (stored) *to = log;
      to += step;
    }
    queries.advance();
  }
}

} // namespace shadowkv
