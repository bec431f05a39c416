// The producers: one thread copies blocks of keys, another one parts of queries.
#pragma once

#include "shape.cuh"

namespace shadowkv {

template <class Shape>
__device__ __forceinline__ void fetch_keys(const ScoreCall& call, const ScoreMemory<Shape>& memory) {
  Place<Shape::kStages> keys;
  for (int number = blockIdx.x; number < call.works(); number += gridDim.x) {
    const Span span(call, number);
    for (int i = 0; i < span.count; ++i) {
      wait_phase(memory.keys_empty(keys.slot), keys.parity ^ 1);
      arrive_expecting(memory.keys_full(keys.slot), kBoxBytes);
      copy_box(
          call.k, memory.keys(keys.slot), memory.keys_full(keys.slot), 0, span.head, (span.first + i) * kBlock);
      keys.advance();
    }
  }
}

// Of an odd number of parts the last pair has what follows the last one, which nobody stores.
template <class Shape>
__device__ __forceinline__ void fetch_queries(const ScoreCall& call, const ScoreMemory<Shape>& memory) {
  Place<Shape::kQueryStages> queries;
  for (int number = blockIdx.x; number < call.works(); number += gridDim.x) {
    const Span span(call, number);
    if (span.count <= 0) continue;
    wait_phase(memory.queries_empty(queries.slot), queries.parity ^ 1);
    const uint32_t full = memory.queries_full(queries.slot);
    arrive_expecting(full, Shape::kQueryBytes);
    for (int half = 0; half < 2; ++half)
      copy_box(
          call.q, memory.queries(queries.slot) + half * kBoxBytes, full, 0, 0,
          (span.head * call.parts + 2 * span.pair + half) * kRows);
    queries.advance();
  }
}

} // namespace shadowkv
