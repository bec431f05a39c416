// The producers: one thread copies blocks of keys, three warps gather queries.
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
      copy_rows<Shape::kDim>(
          call.k, memory.keys(keys.slot), memory.keys_full(keys.slot), span.head, (span.first + i) * kBlock);
      keys.advance();
    }
  }
}

// Both parts' rows, kSampled at a time: those of one query head of one tile. Rows that are nobody's become zeros.
template <class Shape>
__device__ __forceinline__ void copy_queries(
    const ScoreCall& call, const ScoreMemory<Shape>& memory, const Span& span, int warp) {
  using Element = typename Shape::Element;
  constexpr int kUnits = Shape::kDim / 8; // of 16 bytes, of a row
  const int lane = threadIdx.x % 32, unit = lane % kUnits;
  for (int i = warp; i < 2 * kRows / kSampled; i += Shape::kQueryThreads / 32) {
    const int within = i % (kRows / kSampled), part = 2 * span.pair + i / (kRows / kSampled);
    const int tile = part * call.together + within / call.group;
    const bool wanted = within < call.together * call.group && tile < call.tiles;
    const Element* const head = static_cast<const Element*>(call.q) +
                                (span.head * call.group + within % call.group) * call.q_head + unit * 8;
    const uint32_t to = memory.queries() + i * kSampled * Shape::kQueryPitch + unit * 16;
    for (int row = lane / kUnits; row < kSampled; row += 32 / kUnits) {
      const int token = min(tile * kBlock + (row + 1) * (kBlock / kSampled) - 1, call.n - 1);
      copy16_async(to + row * Shape::kQueryPitch, head + token * call.q_token, wanted);
    }
  }
}

template <class Shape>
__device__ __forceinline__ void fetch_queries(const ScoreCall& call, const ScoreMemory<Shape>& memory, int warp) {
  int parity = 1; // of the phase before, in which queries are gone: those of a new barrier are
  for (int number = blockIdx.x; number < call.works(); number += gridDim.x) {
    const Span span(call, number);
    if (span.count <= 0) continue;
    wait_phase(memory.queries_empty(), parity);
    parity ^= 1;
    copy_queries<Shape>(call, memory, span, warp);
    arrive_with_copies(memory.queries_full());
  }
}

} // namespace shadowkv
