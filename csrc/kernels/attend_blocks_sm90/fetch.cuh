// The producer: one warp that takes tiles and copies their queries and blocks of keys and values.
#pragma once

#include "shape.cuh"

namespace shadowkv {

// Copies issued by one thread.
template <class Shape>
struct Fetcher {
  const BlocksCall& call;
  const BlocksMemory<Shape>& memory;
  Place<Shape::kStages> keys, values;
  int parity = 1; // of the phase before, in which queries are consumed, as they are for a new barrier

  // With what is added to their scores, where that is not always zero.
  template <bool kWeighted>
  __device__ void fetch_keys(int head, int row, float raise) {
    wait_phase(memory.keys_empty(keys.slot), keys.parity ^ 1);
    if (kWeighted) asm volatile("st.shared.f32 [%0], %1;" ::"r"(memory.raise(keys.slot)), "f"(raise) : "memory");
    copy_rows<Shape::kDim>(call.k, memory.keys(keys.slot), memory.keys_full(keys.slot), head, row);
    keys.advance();
  }
  __device__ void fetch_values(int head, int row) {
    wait_phase(memory.values_empty(values.slot), values.parity ^ 1);
    copy_rows<Shape::kDim>(call.v, memory.values(values.slot), memory.values_full(values.slot), head, row);
    values.advance();
  }
  // For the consumers: the head, or -1 after the last tile, the number of blocks, and the tile's queries.
  __device__ void announce(const Tile& tile) {
    wait_phase(memory.queries_empty(), parity);
    parity ^= 1;
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\nst.shared.u32 [%0 + 16], %5;" ::"r"(memory.tile()),
                 "r"(tile.query_head), "r"(tile.count), "r"(tile.row), "r"(tile.end), "r"(tile.position)
                 : "memory");
  }
  __device__ void fetch_queries(const Tile& tile) {
    announce(tile);
    copy_rows<Shape::kDim>(call.q, memory.queries(), memory.queries_full(), tile.query_head, tile.row);
  }
};

// Values follow the next block's keys, as the consumers need them in that order. A tile's first keys come before its
// queries, which wait for the last product of the previous tile.
template <class Shape, Over kOver>
__device__ __forceinline__ void fetch_tiles(const BlocksCall& call, const BlocksMemory<Shape>& memory) {
  const int lane = threadIdx.x % 32;
  Fetcher<Shape> fetcher = {call, memory};
  int number = blockIdx.x;
  while (number < call.works()) {
    const Tile tile = Tile::at<kOver>(call, number);
    int next = 0;
    if (lane == 0) next = atomicAdd(call.taken, 1);
    int listed = 0, before = 0; // a block for each lane; the row where the last block began
    float raise = 0;            // of a lane's block
    for (int i = 0; i < tile.count; ++i) {
      if (kOver == Over::kListed && i % 32 == 0) {
        const bool exists = i + lane < tile.count;
        listed = exists ? __ldg(tile.list + i + lane) : 0;
        raise = exists ? log2f(__ldg(tile.weights + i + lane)) / call.scale : 0;
      }
      const float raised = kOver == Over::kListed ? __shfl_sync(~0u, raise, i % 32) : 0;
      const int row = tile.keys + (kOver == Over::kListed ? __shfl_sync(~0u, listed, i % 32) : i) * kBlock;
      if (lane == 0) {
        fetcher.template fetch_keys<kOver == Over::kListed>(tile.head, row, raised);
        if (i == 0)
          fetcher.fetch_queries(tile);
        else
          fetcher.fetch_values(tile.head, before);
      }
      before = row;
      __syncwarp();
    }
    if (lane == 0 && tile.count > 0) fetcher.fetch_values(tile.head, before);
    number = __shfl_sync(~0u, next, 0) + gridDim.x;
  }
  if (lane == 0) {
    fetcher.announce({-1});
    arrive(memory.queries_full());
  }
}

} // namespace shadowkv
