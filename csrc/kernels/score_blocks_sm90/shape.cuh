// Inputs and outputs of scores of blocks on Hopper, how blocks are split into spans, and the shared memory.
#pragma once

#include "kernels/common/block_copies.cuh"

namespace shadowkv {

constexpr int kSampled = 8; // queries of a tile
constexpr int kRows = 128;  // of a part: sampled queries of one kv head's query heads, of a few tiles

struct ScoreCall {
  CUtensorMap k; // of [m, heads, dim], in boxes of 128 x 1 x 64
  const void* q; // [n, heads group, dim]
  int64_t q_token, q_head;
  const int* sampled; // [heads group, tiles, kSampled]: rows of q
  float* scores; // [blocks, heads, parts, kRows]
  float scale;   // turns q k into a base-2 exponent
  int n, m, heads, group, tiles, together, parts; // together: tiles in a part
  int sink, local;                                // first blocks, and blocks before a tile's own, that have no scores
  int span, spans;                                // blocks of a span, and spans of a part

  // The end of the blocks for which a part has scores.
  __host__ __device__ int end(int part) const {
    const int tile = ((part + 1) * together < tiles ? (part + 1) * together : tiles) - 1;
    return (m - n + tile * kBlock) / kBlock - local + 1;
  }
  __host__ __device__ int pairs() const { return (parts + 1) / 2; }
  __device__ int works() const { return heads * spans * pairs(); }
};

// A span of blocks of one kv head, for two parts of queries. All parts go through a span at the same time, on different
// multiprocessors, so that keys are read from memory once.
struct Span {
  int head, pair, first, count; // count: 0 or less for parts that end before

  __device__ Span(const ScoreCall& call, int number) {
    const int left = number / call.pairs();
    pair = number % call.pairs();
    head = left / call.spans;
    first = call.sink + left % call.spans * call.span;
    count = min(first + call.span, call.end(min(2 * pair + 1, call.parts - 1))) - first;
  }
};

template <class Element_, int kDim_>
struct ScoreShape {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kStages = 3, kQueryStages = 2;
  static constexpr int kKeyBytes = kDim / kBoxDims * kBoxBytes; // of 128 rows of keys, or of queries of one part
  static constexpr int kQueryBytes = 2 * kKeyBytes;

  // Registers: the compiler gives 96 to each thread, and what producers release is enough for these.
  static constexpr int kConsumers = 4; // warpgroups, each with half of a part
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = 32, kConsumerRegisters = 112;
  static constexpr int kQueryThreads = 96; // that copy queries: three warps of the producers'

  static constexpr int kBarriers = 2 * (kStages + kQueryStages);
  static constexpr int kSharedBytes = kStages * kKeyBytes + kQueryStages * kQueryBytes + kBarriers * 8;
  static_assert(kSharedBytes <= 227 * 1024);
};

// The parts of a block's shared memory. Consumers wait for `full` barriers, producers for `empty` ones, at which each
// of the consumers' warps arrives.
template <class Shape>
struct ScoreMemory {
  uint32_t first; // a multiple of 1024

  __device__ uint32_t keys(int slot) const { return first + slot * Shape::kKeyBytes; }
  __device__ uint32_t queries(int slot) const { return keys(Shape::kStages) + slot * Shape::kQueryBytes; }
  __device__ uint32_t barrier(int number) const { return queries(Shape::kQueryStages) + number * 8; }
  __device__ uint32_t queries_full(int slot) const { return barrier(slot); }
  __device__ uint32_t queries_empty(int slot) const { return barrier(Shape::kQueryStages + slot); }
  __device__ uint32_t keys_full(int slot) const { return barrier(2 * Shape::kQueryStages + slot); }
  __device__ uint32_t keys_empty(int slot) const { return barrier(2 * Shape::kQueryStages + Shape::kStages + slot); }

  __device__ void init() const {
    for (int slot = 0; slot < Shape::kQueryStages; ++slot) {
      init_barrier(queries_full(slot), Shape::kQueryThreads);
      init_barrier(queries_empty(slot), 4 * Shape::kConsumers);
    }
    for (int slot = 0; slot < Shape::kStages; ++slot) {
      init_barrier(keys_full(slot), 1);
      init_barrier(keys_empty(slot), 4 * Shape::kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

} // namespace shadowkv
