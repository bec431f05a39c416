// What attention over blocks on Hopper reads and writes, how it goes through tiles, and what shared memory holds.
#pragma once

#include "../block_copies.cuh"

namespace shadowkv {

struct BlocksCall {
  CUtensorMap q, k, v; // of [tokens, heads, dim], in boxes of 128 x 1 x 64, so that rows past the last one are zeros
  const int* indices;  // [query heads, tiles, blocks]
  const int* counts;   // [query heads, tiles]
  int* taken;          // how many tiles blocks have taken besides their first ones, zero before
  void* out;           // [n, query heads, dim]
  int64_t out_token, out_head;
  float scale; // of q k in the exponent to base 2
  int n, m, query_heads, group, tiles, blocks;

  __device__ int works() const { return query_heads * tiles; }
};

// A tile of one query head. Those of one kv head come one after the other, as its keys and values then stay in the
// second-level cache; of these the later tiles come first, as theirs are the longer lists.
struct Work {
  int tile, query_head, head;

  __device__ Work(const BlocksCall& call, int number) {
    const int of_head = call.tiles * call.group, left = number % of_head;
    head = number / of_head;
    tile = call.tiles - 1 - left / call.group;
    query_head = head * call.group + left % call.group;
  }
  __device__ int row(const BlocksCall& call) const { return query_head * call.tiles + tile; } // of indices, counts
};

template <class Element_, int kDim_>
struct BlocksShape {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kBoxes = kDim / kBoxDims;
  static constexpr int kTileBytes = kBoxes * kBoxBytes; // of queries, keys or values
  static constexpr int kStages = kDim == 128 ? 3 : 4;   // of keys, and of values

  // Registers: a multiprocessor's are 504 for three warpgroups.
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  static constexpr int kBarriers = 2 + 4 * kStages;
  static constexpr int kSharedBytes = (1 + 2 * kStages) * kTileBytes + kBarriers * 8 + 8;
  static_assert(kSharedBytes <= 227 * 1024);
};

// The parts of a block's shared memory. Queries and the work that they are of come together. What is full the consumers
// wait for, what is empty the producer; each of their eight warps says so.
template <class Shape>
struct BlocksMemory {
  uint32_t first; // a multiple of 1024

  __device__ uint32_t queries() const { return first; }
  __device__ uint32_t keys(int slot) const { return first + (1 + slot) * Shape::kTileBytes; }
  __device__ uint32_t values(int slot) const { return keys(Shape::kStages + slot); }
  __device__ uint32_t work() const { return keys(2 * Shape::kStages); } // its number or -1, and its number of blocks
  __device__ uint32_t barriers() const { return work() + 8; }
  __device__ uint32_t queries_full() const { return barriers(); }
  __device__ uint32_t queries_empty() const { return barriers() + 8; }
  __device__ uint32_t keys_full(int slot) const { return barriers() + 16 + slot * 8; }
  __device__ uint32_t values_full(int slot) const { return keys_full(Shape::kStages + slot); }
  __device__ uint32_t keys_empty(int slot) const { return keys_full(2 * Shape::kStages + slot); }
  __device__ uint32_t values_empty(int slot) const { return keys_full(3 * Shape::kStages + slot); }

  __device__ void init() const {
    init_barrier(queries_full(), 1);
    init_barrier(queries_empty(), 4 * Shape::kConsumers);
    for (int slot = 0; slot < 2 * Shape::kStages; ++slot) {
      init_barrier(keys_full(slot), 1); // of keys, then of values
      init_barrier(keys_empty(slot), 4 * Shape::kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

} // namespace shadowkv
