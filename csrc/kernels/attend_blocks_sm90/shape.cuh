// What attention over blocks on Hopper reads and writes, its order of tiles, and its shared memory.
#pragma once

#include "kernels/common/row_blocks.cuh"

namespace shadowkv {

// What a query attends to: the blocks of its tile's list or all blocks of its sequence, in both cases up to its own
// position; or everything.
enum class Over { kListed, kSequence, kEverything };

struct BlocksCall {
  CUtensorMap q, k, v; // of [tokens, heads, dim], in boxes of 128 x 1 x 64, so that rows past the last one are zeros
  const int *indices, *counts; // lists [query heads, tiles, blocks] and how many are valid [query heads, tiles], or null
  const float* weights; // [query heads, tiles, blocks]: as how many blocks each one counts, or null
  const int* starts; // where packed sequences' queries begin and the last one's end, or null for one sequence
  const int* key_starts; // the same of their keys
  int* taken;        // number of tiles that blocks have taken after their first ones, initially zero
  void* out;         // [n, query heads, dim]
  float* lse;        // natural logarithms of softmax sums, [n, query heads], or null
  int64_t out_token, out_head;
  float scale; // turns q k into a base-2 exponent
  int n, m, query_heads, group, tiles, blocks, sequences;

  __device__ int works() const { return query_heads * tiles; }
};

// A tile of up to 128 queries of one query head. Tiles of one kv head are consecutive, so that its keys and values stay
// in the L2 cache; among these, later tiles come first, as they have the longer lists.
struct Tile {
  int query_head, head;
  int row, end; // its first query, and the end of its sequence's queries: a surplus tile has none
  int position; // of the first query, among its sequence's keys
  int keys;     // where those keys begin
  int count;    // blocks
  const int* list; // of blocks; null for the first blocks
  const float* weights;

  template <Over kOver>
  __device__ static Tile at(const BlocksCall& call, int number) {
    const int of_head = call.tiles * call.group, left = number % of_head, tile = call.tiles - 1 - left / call.group;
    Tile found = {number / of_head * call.group + left % call.group, number / of_head};
    if (kOver == Over::kSequence && call.starts)
      found.find_packed(call, tile);
    else
      found.find_alone<kOver>(call, tile);
    return found;
  }

private:
  template <Over kOver>
  __device__ void find_alone(const BlocksCall& call, int tile) {
    const int place = query_head * call.tiles + tile;
    row = tile * kBlock, end = call.n, position = call.m - call.n + row, keys = 0;
    list = kOver == Over::kListed ? call.indices + int64_t(place) * call.blocks : nullptr;
    weights = kOver == Over::kListed ? call.weights + int64_t(place) * call.blocks : nullptr;
    if constexpr (kOver == Over::kListed)
      count = __ldg(call.counts + place);
    else
      count = ((kOver == Over::kEverything ? call.m : position + min(kBlock, end - row)) - 1) / kBlock + 1;
  }

  // Sequence i has the tiles from starts[i] / 128 + i on: as many as it needs, or one more.
  __device__ void find_packed(const BlocksCall& call, int tile) {
    int sequence = 0;
    for (int last = call.sequences - 1; sequence < last;) {
      const int middle = (sequence + last + 1) / 2;
      if (__ldg(call.starts + middle) / kBlock + middle <= tile)
        sequence = middle;
      else
        last = middle - 1;
    }
    const int first = __ldg(call.starts + sequence);
    keys = __ldg(call.key_starts + sequence), end = __ldg(call.starts + sequence + 1);
    const int before = __ldg(call.key_starts + sequence + 1) - keys - (end - first); // keys that precede its queries
    row = first + (tile - first / kBlock - sequence) * kBlock;
    position = before + row - first;
    count = row < end ? (position + min(kBlock, end - row) - 1) / kBlock + 1 : 0;
    list = nullptr, weights = nullptr;
  }
};

template <class Element_, int kDim_>
struct BlocksShape {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kBoxes = kDim / kBoxDims;
  static constexpr int kTileBytes = kBoxes * kBoxBytes; // of queries, keys or values
  static constexpr int kStages = kDim == 128 ? 3 : 4;   // of keys, and of values

  // Registers: a multiprocessor has 504 for three warpgroups.
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  static constexpr int kBarriers = 2 + 4 * kStages;
  static constexpr int kTold = 48; // bytes of what consumers are told: about the tile, and a number for each stage
  static_assert(32 + 4 * kStages <= kTold);
  static constexpr int kSharedBytes = (1 + 2 * kStages) * kTileBytes + kTold + kBarriers * 8;
  static_assert(kSharedBytes <= 227 * 1024);
};

// The parts of a block's shared memory. Queries and their tile arrive together. Consumers wait for `full`
// barriers, the producer for `empty` ones, at which each of the consumers' eight warps arrives.
template <class Shape>
struct BlocksMemory {
  uint32_t first; // a multiple of 1024

  __device__ uint32_t queries() const { return first; }
  __device__ uint32_t keys(int slot) const { return first + (1 + slot) * Shape::kTileBytes; }
  __device__ uint32_t values(int slot) const { return keys(Shape::kStages + slot); }
  __device__ uint32_t tile() const { return keys(2 * Shape::kStages); } // what consumers need to know about the tile
  __device__ uint32_t raise(int slot) const { return tile() + 32 + slot * 4; } // of the scores of a stage's keys
  __device__ uint32_t barriers() const { return tile() + Shape::kTold; }
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
      init_barrier(keys_full(slot), 1); // keys, then values
      init_barrier(keys_empty(slot), 4 * Shape::kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

} // namespace shadowkv
