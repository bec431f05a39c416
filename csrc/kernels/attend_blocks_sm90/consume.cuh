// The consumers: two warpgroups, each with 64 of a tile's 128 queries.
#pragma once

#include "constants.h"
#include "kernels/common/row_blocks.cuh"
#include "shape.cuh"
#include "softmax.cuh"

namespace shadowkv {

// Issues sums += p v, the weighted sum of a block's values, in a separate group.
template <class Shape>
__device__ __forceinline__ void begin_sums(float (&sums)[Shape::kDim / 2], const uint32_t (&p)[32], uint32_t values) {
  const uint32_t b = swizzled_rows(values) | kBoxBytes / 16 << 16;
  begin_products();
#pragma unroll
  for (int step = 0; step < kBlock / 16; ++step)
    value_product<typename Shape::Element>(sums, p + step * 4, b + step * 128);
  close_products();
}

// A warpgroup's state of the current tile. Both go through the same blocks and take turns at issuing products, so that
// one's softmax is computed during the other's products.
template <class Shape, bool kWeighted>
struct Attending {
  const BlocksMemory<Shape>& memory;
  const int consumer;
  const float scale;
  Place<Shape::kStages> keys = {}, values = {};
  float s[64];                 // scores, then weights, of one block
  uint32_t packed[32];         // weights of the last block that has any
  uint32_t p[32];              // weights that are multiplied with values
  float sums[Shape::kDim / 2]; // rows and columns as in s
  RunningSoftmax softmax = {};
  float raise = 0;         // of the scores in s, before their scale
  bool shrinks = false;    // whether sums must shrink before the block whose weights are packed is added
  uint32_t multiplied = 0; // the barrier that signals that values are no longer read, if any are

  __device__ static bool speaks() { return threadIdx.x % 32 == 0; } // this thread for its warp
  __device__ uint32_t queries() const { return memory.queries() + consumer * 64 * 128; }

  __device__ __forceinline__ void start() {
    softmax = {};
    multiplied = 0;
#pragma unroll
    for (float& x : sums) x = 0;
    wait_phase(memory.keys_full(keys.slot), keys.parity);
    read_raise();
    begin_scores<typename Shape::Element, Shape::kDim>(s, queries(), memory.keys(keys.slot));
    finish_scores<0>();
  }

  // In this warpgroup's turn.
  __device__ __forceinline__ void begin_next_scores() {
    wait_phase(memory.keys_full(keys.slot), keys.parity);
    read_raise();
    sync_threads(1 + consumer, 256);
    begin_scores<typename Shape::Element, Shape::kDim>(s, queries(), memory.keys(keys.slot));
  }

  __device__ __forceinline__ void read_raise() {
    if constexpr (kWeighted) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(raise) : "r"(memory.raise(keys.slot)));
  }

  template <int kLeft>
  __device__ __forceinline__ void finish_scores() {
    wait_product_groups<kLeft>();
    settle(s);
    arrive_if(speaks(), memory.keys_empty(keys.slot));
    keys.advance();
  }

  // Turns scores into packed weights, not in p, which products are still reading.
  __device__ __forceinline__ void weigh() {
    shrinks = softmax.weigh(s, scale, raise);
    pack_weights<typename Shape::Element>(packed, s);
    settle(packed);
  }

  // Waits for the sums of previous blocks and prepares them and their weights' registers for the next block.
  __device__ __forceinline__ void finish_sums() {
    wait_product_groups<0>();
    settle(sums);
    keep(p, scale < 0, memory.first); // never true
    arrive_if(speaks() && multiplied, multiplied);
    if (shrinks) softmax.shrink(sums);
    settle(sums);
#pragma unroll
    for (int i = 0; i < 32; ++i) p[i] = packed[i];
    settle(p);
  }

  // From this one on, rows of values of the block to be added next belong to another sequence: a weight of zero would
  // not remove NaN or infinity. Each warpgroup clears half of them.
  __device__ __forceinline__ void clear_values(int first) const {
    wait_phase(memory.values_full(values.slot), values.parity);
    const int thread = consumer * 128 + threadIdx.x % 128;
    for (int i = first * 8 + thread; i < kBlock * 8; i += 256)
#pragma unroll
      for (int box = 0; box < Shape::kBoxes; ++box)
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                         memory.values(values.slot) + box * kBoxBytes + i * 16), "r"(0)
                     : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // products read them through the async proxy
    sync_threads(3, 256);
  }

  // Adds the block whose weights are in p.
  __device__ __forceinline__ void begin_next_sums() {
    wait_phase(memory.values_full(values.slot), values.parity);
    begin_sums<Shape>(sums, p, memory.values(values.slot));
    multiplied = memory.values_empty(values.slot);
    values.advance();
  }

  __device__ __forceinline__ void finish_tile() {
    wait_product_groups<0>();
    settle(sums);
    settle(p);
    arrive_if(speaks(), multiplied);
  }

  // Rows are this thread's first row and the one eight further, if they exist.
  __device__ __forceinline__ void write(const BlocksCall& call, int query_head, int first, int end) const {
    using Element = typename Shape::Element;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = softmax.row_total(r), part = __fdividef(1, total);
      const int token = first + r * 8;
      Element* const to = static_cast<Element*>(call.out) + token * call.out_token + query_head * call.out_head;
      if (token >= end) continue;
      if (call.lse && threadIdx.x % 4 == 0)
        call.lse[int64_t(token) * call.query_heads + query_head] =
            (softmax.peak[r] * call.scale + log2f(total)) * kLn2;
#pragma unroll
      for (int i = 0; i < Shape::kDim / 8; ++i)
        *reinterpret_cast<uint32_t*>(to + i * 8 + threadIdx.x % 4 * 2) =
            pack<Element>(sums[4 * i + 2 * r] * part, sums[4 * i + 2 * r + 1] * part);
    }
  }
};

// Masked blocks are a tile's last ones and are consecutive. As lists ascend, the first block of any list has a key that
// every row sees, and peaks are finite from then on.
template <class Shape, Over kOver>
__device__ __forceinline__ void attend_tiles(
    const BlocksCall& call, const BlocksMemory<Shape>& memory, int consumer) {
  const int lane = threadIdx.x % 32, row = consumer * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  Attending<Shape, kOver == Over::kListed> attending = {memory, consumer, call.scale};
  if (consumer == 1) arrive_threads(1, 256); // the first turn is the first consumer's
  for (int parity = 0;; parity ^= 1) {
    wait_phase(memory.queries_full(), parity);
    int query_head, count, first, end, position;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%5];\nld.shared.u32 %4, [%5 + 16];"
                 : "=r"(query_head), "=r"(count), "=r"(first), "=r"(end), "=r"(position)
                 : "r"(memory.tile())
                 : "memory");
    if (query_head < 0) return;
    constexpr bool kCausal = kOver != Over::kEverything;
    const int seen = kCausal ? position + min(kBlock, end - first) : call.m; // keys up to what its last query sees
    // Blocks without a mask, and the last column of the first masked block that this thread's first row sees.
    const int open = kCausal ? count - ((seen - 1) / kBlock - position / kBlock + 1) : call.m / kBlock;
    const int last = (kCausal ? row + position % kBlock : call.m % kBlock - 1) - lane % 4 * 2;

    attending.start();
    if (count == 1) arrive_if(attending.speaks(), memory.queries_empty());
    if (open == 0) mask_scores<kCausal>(attending.s, last);
    attending.weigh();
    for (int i = 1; i < count; ++i) {
      attending.finish_sums();
      attending.begin_next_scores();
      attending.begin_next_sums();
      arrive_threads(2 - consumer, 256); // the other consumer's turn
      attending.template finish_scores<1>();
      if (i == count - 1) arrive_if(attending.speaks(), memory.queries_empty());
      if (i >= open) mask_scores<kCausal>(attending.s, last - (i - open) * kBlock);
      attending.weigh();
    }
    attending.finish_sums();
    if (kOver == Over::kSequence && seen % kBlock) attending.clear_values(seen % kBlock);
    attending.begin_next_sums();
    attending.finish_tile();
    attending.write(call, query_head, first + row, end);
  }
}

} // namespace shadowkv
