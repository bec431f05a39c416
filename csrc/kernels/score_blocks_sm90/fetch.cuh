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

// Eight rows of a pair of parts: the sampled queries of one query head of one tile, or padding.
struct Sample {
  int query_head, tile;
  bool exists;

  __device__ Sample(const ScoreCall& call, const Span& span, int number) {
    constexpr int kOfPart = kRows / kSampled;
    const int within = number % kOfPart;
    query_head = span.head * call.group + within % call.group;
    tile = (2 * span.pair + number / kOfPart) * call.together + within / call.group;
    exists = within < call.together * call.group && tile < call.tiles;
  }
};

// Padding rows become zeros. A lane looks up a token of one of four samples, so that the warp waits for few loads.
// Units of 16 bytes are laid out as by copies of boxes, swizzled by their rows.
template <class Shape>
__device__ __forceinline__ void copy_queries(const ScoreCall& call, uint32_t queries, const Span& span, int warp) {
  using Element = typename Shape::Element;
  constexpr int kUnits = Shape::kDim / 8, kOfBox = kBoxDims / 8; // of a row, and of a box's row
  constexpr int kOfPart = kRows / kSampled;
  const int lane = threadIdx.x % 32, unit = lane % kUnits;
  for (int first = 4 * warp; first < 2 * kOfPart; first += Shape::kQueryThreads / 8) {
    const Sample looked_up(call, span, first + lane / kSampled);
    const int place = (looked_up.query_head * call.tiles + looked_up.tile) * kSampled + lane % kSampled;
    const int found = looked_up.exists ? __ldg(call.sampled + place) : 0;
    for (int i = 0; i < 4; ++i) {
      const Sample sample(call, span, first + i);
      const Element* const from = static_cast<const Element*>(call.q) + sample.query_head * call.q_head + unit * 8;
      const uint32_t to = queries + (first + i) / kOfPart * Shape::kKeyBytes + unit / kOfBox * kBoxBytes +
                          (first + i) % kOfPart * kSampled * 128;
#pragma unroll
      for (int step = 0; step < kSampled; step += 32 / kUnits) {
        const int row = step + lane / kUnits, token = __shfl_sync(~0u, found, i * kSampled + row);
        copy16_async(to + row * 128 + (unit % kOfBox ^ row) * 16, from + token * call.q_token, sample.exists);
      }
    }
  }
}

template <class Shape>
__device__ __forceinline__ void fetch_queries(const ScoreCall& call, const ScoreMemory<Shape>& memory, int warp) {
  Place<Shape::kQueryStages> queries;
  for (int number = blockIdx.x; number < call.works(); number += gridDim.x) {
    const Span span(call, number);
    if (span.count <= 0) continue;
    wait_phase(memory.queries_empty(queries.slot), queries.parity ^ 1);
    copy_queries<Shape>(call, memory.queries(queries.slot), span, warp);
    close_copy_group();
    wait_copy_groups<0>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // products read them through the async proxy
    arrive(memory.queries_full(queries.slot));
    queries.advance();
  }
}

} // namespace shadowkv
