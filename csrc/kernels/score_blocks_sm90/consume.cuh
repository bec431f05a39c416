// The consumers: two warpgroups, each with 64 rows of either part of a pair.
#pragma once

#include "../wgmma.cuh"
#include "exponentials.cuh"
#include "shape.cuh"

namespace shadowkv {

// A warpgroup's rows of one part. Queries stay in registers, whence products take them, for a span.
template <class Shape>
struct ScoredRows {
  // Of eight exponentials. With fewer dimensions products take less time than exponentials do.
  static constexpr int kByPowers = Shape::kDim == 128 ? 2 : 3;

  float s[64] = {};
  uint32_t q[Shape::kDim / 4] = {};
  float base[2] = {};
  float* to = nullptr;
  bool stored = false; // whether this thread has a row to store

  // After the products that read the queries before.
  __device__ __forceinline__ void load(
      const ScoreCall& call, const ScoreMemory<Shape>& memory, const Span& span, int half, int consumer) {
    const int lane = threadIdx.x % 32, first = consumer * 64 + threadIdx.x / 32 % 4 * 16; // the warp's row
    keep(q, call.scale < 0, memory.first); // which it never is
    const uint32_t at =
        memory.queries() + (half * kRows + first + lane % 16) * Shape::kQueryPitch + lane / 16 * 16;
#pragma unroll
    for (int step = 0; step < Shape::kDim / 16; ++step) {
      uint32_t x[4];
      load_matrices(x, at + step * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) q[step * 4 + i] = x[i];
    }
    settle(q);
    const int part = 2 * span.pair + half, row = first + lane / 4 + lane % 2 * 8, of_tile = kSampled * call.group;
    stored = lane % 4 < 2 && row < call.together * of_tile && part * call.together + row / of_tile < call.tiles;
    to = call.scores + ((int64_t(span.first) * call.heads + span.head) * call.parts + part) * kRows + row;
  }

  // Products of a block, in a group of their own.
  __device__ __forceinline__ void begin(uint32_t keys) {
    using Element = typename Shape::Element;
    const uint32_t b = swizzled_rows(keys);
    begin_products();
    score_product<Element, false>(s, q, b);
#pragma unroll
    for (int step = 1; step < Shape::kDim / 16; ++step)
      score_product<Element, true>(s, q + step * 4, b + step / 4 * (kBoxBytes / 16) + step % 4 * 2);
    close_products();
  }

  __device__ __forceinline__ void settle_products() {
    wait_product_groups<0>();
    settle(s);
  }

  __device__ __forceinline__ void finish(float scale, int64_t step) {
    const float log = log_sum<kByPowers>(s, base, scale);
    if (stored) *to = log;
    to += step;
  }
};

// Warpgroups take turns at beginning products, so that one's exponentials are computed during the other's products.
struct Turns {
  int consumer;

  __device__ void start() const {
    if (consumer == 1) arrive_threads(1, 256); // the first turn is the first one's
  }
  __device__ void wait() const { sync_threads(1 + consumer, 256); }
  __device__ void pass() const { arrive_threads(2 - consumer, 256); }
};

// One part's products go on while the other's exponentials are computed, from one block to the next and from one span
// to the next.
template <class Shape>
__device__ __forceinline__ void score_spans(const ScoreCall& call, const ScoreMemory<Shape>& memory, int consumer) {
  const int64_t step = int64_t(call.heads) * call.parts * kRows;
  const bool speaks = threadIdx.x % 32 == 0; // for its warp
  const Turns turns = {consumer};
  ScoredRows<Shape> a, b;
  Place<Shape::kStages> keys;
  int parity = 0;
  turns.start();
  for (int number = blockIdx.x; number < call.works(); number += gridDim.x) {
    const Span span(call, number);
    if (span.count <= 0) continue;
    wait_phase(memory.queries_full(), parity);
    parity ^= 1;
    a.load(call, memory, span, 0, consumer);
    for (int i = 0; i < span.count; ++i) {
      wait_phase(memory.keys_full(keys.slot), keys.parity);
      b.settle_products(); // once more: the assembler does not see that it did before, and would wait for those of a
      turns.wait();
      a.begin(memory.keys(keys.slot));
      turns.pass();
      b.finish(call.scale, step); // the block before; at first, nothing
      if (i == 0) b.load(call, memory, span, 1, consumer);
      a.settle_products();
      turns.wait();
      b.begin(memory.keys(keys.slot));
      turns.pass();
      arrive_if(speaks && i == 0, memory.queries_empty());
      a.finish(call.scale, step);
      b.settle_products();
      arrive_if(speaks, memory.keys_empty(keys.slot));
      keys.advance();
    }
  }
  b.finish(call.scale, step);
}

} // namespace shadowkv
