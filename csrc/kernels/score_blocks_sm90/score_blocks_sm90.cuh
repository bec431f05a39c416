// Scores of blocks of 128 keys for Hopper: log2 of the sums of exponentials of sampled queries.
//
// One thread block per multiprocessor takes one span of blocks after another, each for two parts of 128 queries: keys
// are read from the L2 cache once for both. Three warps gather queries and one copies keys into rings of stages; four
// warpgroups multiply and sum.
#pragma once

#include "kernels/common/memory.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/row_blocks.cuh"

namespace shadowkv {

// Inputs and outputs, how blocks are split into spans, and the shared memory.

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

// The producers: one thread copies blocks of keys, three warps gather queries.

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
    const int sampled_token = looked_up.exists ? __ldg(call.sampled + place) : 0;
    for (int i = 0; i < 4; ++i) {
      const Sample sample(call, span, first + i);
      const Element* const from = static_cast<const Element*>(call.q) + sample.query_head * call.q_head + unit * 8;
      const uint32_t to = queries + (first + i) / kOfPart * Shape::kKeyBytes + unit / kOfBox * kBoxBytes +
                          (first + i) % kOfPart * kSampled * 128;
#pragma unroll
      for (int step = 0; step < kSampled; step += 32 / kUnits) {
        const int row = step + lane / kUnits, token = __shfl_sync(~0u, sampled_token, i * kSampled + row);
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

// Sums of exponentials of scores, in the fragments that products leave: a thread has two rows, g and g + 8 of its
// warp's 16, and two neighbouring columns from each of 16 groups of eight, in s[4 i + 2 r + e].

// 2^x on the multiply-add units, for x from -kReach to kReach, with a relative error below 1e-4; beyond, the value at
// the nearest end. x is 2 kReach y - kReach, y from 0 to 1: so a saturating multiplication does the clamping.
struct Powers {
  static constexpr float kReach = 120;

  __device__ static __forceinline__ float of(float y) {
    constexpr float kShift = 12582912 - kReach; // at which floats are integers: x, rounded, is in the lowest bits
    const float shifted = fmaf(y, 2 * kReach, kShift), whole = shifted - kShift;
    const float left = fmaf(y, 2 * kReach, -whole); // from -1/2 to 1/2, where the cubic is the best fit to 2^x
    const float cubic = fmaf(fmaf(fmaf(0.05517167f, left, 0.24261112f), left, 0.69326099f), left, 0.99992807f);
    return __uint_as_float(__float_as_uint(cubic) + (__float_as_uint(shifted) << 23));
  }
};

// Exponents are relative to a base per row, a whole number; sums from 2^-60 to 2^100 have lost nothing significant to
// the ends of the range of floats, or of Powers, whatever the base. So a base is kept until a sum leaves that range.
// A multiprocessor computes 16 exponentials per clock, as many as its products of 128 dimensions produce scores: of
// every eight, some are computed by Powers.
template <int kByPowers>
__device__ __forceinline__ void sum_exponentials(
    float (&sum)[2], const float (&s)[64], const float (&base)[2], float scale) {
  constexpr float kRange = 2 * Powers::kReach;
  const float narrow = scale * (1 / kRange);
  float part[2][2] = {}, middle[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) middle[r] = fmaf(base[r], -1 / kRange, 0.5f);
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int r = i / 2 % 2;
    float& to = part[r][i % 2];
    if (i * 3 % 8 < kByPowers) // the same for both rows
      to += Powers::of(__saturatef(fmaf(s[i], narrow, middle[r])));
    else
      to += exp2_fast(fmaf(s[i], scale, -base[r]));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] = part[r][0] + part[r][1];
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
  }
}

// Bases close to the rows' largest scores.
__device__ __forceinline__ void find_bases(float (&base)[2], const float (&s)[64], float scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float highest = -INFINITY;
#pragma unroll
    for (int i = 0; i < 32; ++i) highest = fmaxf(highest, s[i / 2 * 4 + 2 * r + i % 2]);
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
    base[r] = rintf(highest * scale);
  }
}

// log2 of the row sum that this thread is to store: of its first row in the quad's first thread, of its second row
// in the next thread. All threads of a warp take the same branch.
template <int kByPowers>
__device__ __forceinline__ float log_sum(const float (&s)[64], float (&base)[2], float scale) {
  float sum[2];
  for (bool again = false;; again = true) {
    sum_exponentials<kByPowers>(sum, s, base, scale);
    const bool fit = fminf(sum[0], sum[1]) > 0x1p-60f && fmaxf(sum[0], sum[1]) < 0x1p100f;
    if (again || __all_sync(~0u, fit)) break;
    find_bases(base, s, scale);
  }
  const bool second = threadIdx.x & 1;
  float log;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log) : "f"(second ? sum[1] : sum[0]));
  return log + (second ? base[1] : base[0]);
}

// The consumers: four warpgroups, each with 64 rows of a pair of parts. While one's products run, the others compute
// exponentials, which take less time than the products of three.
template <class Shape>
__device__ __forceinline__ void score_spans(const ScoreCall& call, const ScoreMemory<Shape>& memory, int consumer) {
  // How many of eight exponentials. With fewer dimensions, products take less time than exponentials.
  constexpr int kByPowers = Shape::kDim == 128 ? 1 : 3;
  const int half = consumer / 2, first = consumer % 2 * 64, lane = threadIdx.x % 32; // the part, and rows of it
  const int row = first + threadIdx.x / 32 % 4 * 16 + lane / 4 + lane % 2 * 8;      // which this thread may store
  const int of_tile = kSampled * call.group;
  const int step = call.heads * call.parts * kRows;
  const bool speaks = lane == 0; // for its warp
  float s[64], base[2] = {};
  Place<Shape::kStages> keys;
  Place<Shape::kQueryStages> queries;
  for (int number = blockIdx.x; number < call.works(); number += gridDim.x) {
    const Span span(call, number);
    if (span.count <= 0) continue;
    const int part = 2 * span.pair + half;
    const int tile = part * call.together + row / of_tile;
    const bool stored = lane % 4 < 2 && row < call.together * of_tile && tile < call.tiles;
    float* to = call.scores + ((int64_t(span.first) * call.heads + span.head) * call.parts + part) * kRows + row;
    wait_phase(memory.queries_full(queries.slot), queries.parity);
    const uint32_t own = memory.queries(queries.slot) + half * Shape::kKeyBytes + first * 128;
    for (int i = 0; i < span.count; ++i) {
      wait_phase(memory.keys_full(keys.slot), keys.parity);
      begin_scores<typename Shape::Element, Shape::kDim>(s, own, memory.keys(keys.slot));
      wait_product_groups<0>();
      settle(s);
      arrive_if(speaks, memory.keys_empty(keys.slot));
      arrive_if(speaks && i + 1 == span.count, memory.queries_empty(queries.slot));
      keys.advance();
      const float log = log_sum<kByPowers>(s, base, call.scale);
      if (stored) *to = log;
      to += step;
    }
    queries.advance();
  }
}

template <class Shape>
__global__ __launch_bounds__(Shape::kThreads, 1) void score_blocks_kernel(const __grid_constant__ ScoreCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char scores_shared[];
  const ScoreMemory<Shape> memory = {shared_address(scores_shared)};
  if (threadIdx.x == 0) {
    memory.init();
    prefetch_map(call.k);
  }
  __syncthreads();
  // Tells the compiler that this is uniform across a warp.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  if (warpgroup == Shape::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kProducerRegisters));
    if (warp > 0)
      fetch_queries<Shape>(call, memory, warp - 1);
    else if (threadIdx.x % 32 == 0)
      fetch_keys<Shape>(call, memory);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kConsumerRegisters));
    score_spans<Shape>(call, memory, warpgroup);
  }
#endif // other compilation passes have no wgmma, and no callers
}

} // namespace shadowkv
