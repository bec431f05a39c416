// Fills a unit: the basis, the mean and the queries of a sequence and kv head, in the layout of the consumers'
// products.
#pragma once

#include "kernels/common/mma.cuh"
#include "shape.cuh"

namespace shadowkv {

// The first of eight dimensions: those of a unit of 16 bytes in a row of a half of the basis, which has 32 dimensions
// and the 32 that RoPE pairs them with.
template <class Shape>
__device__ __forceinline__ int dim_of(const LatentInputs& in, int half, int unit) {
  return in.rope.dim_of<Shape::kDim>(half * 4 + unit % 4, unit / 4);
}

// How kThreads threads share the rows of a half of the basis. A thread has the same eight dimensions in all rows that
// it moves, and the rank of a row is the sum of a term for the thread and a term for the pass.
template <class Shape, int kThreads>
struct BasisPasses {
  static constexpr int kRows = kThreads / 8, kPasses = Shape::kRank / kRows; // rows: per pass
  static constexpr int kWeak = Shape::kRank - kStrong;
  static constexpr int kBytes = kRows * 128, kHalfBytes = Shape::kRows * 128; // in shared memory

  // Whether a pass has rank dimensions in 8 bits: they come first in memory and last in the product.
  static __device__ __forceinline__ bool is_strong(int pass) { return pass * kRows >= kWeak; }
};

// Prefetches a unit's basis and queries into the L2 cache, while the unit before the last is in use.
template <class Shape, int kThreads>
__device__ __forceinline__ void
prefetch_unit(const LatentInputs& in, int64_t state, int unit_of_all, int head, int thread) {
  constexpr int kDim = Shape::kDim, kLines = kDim / 64;
#pragma unroll 1
  for (int i = thread; i < Shape::kRank * kLines; i += kThreads)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(
        in.basis + state * in.basis_state + int64_t(i / kLines) * in.heads * kDim + head * kDim + i % kLines * 64));
  if (thread < in.group * kLines)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(in.q + int64_t(unit_of_all) * in.group * kDim + thread * 64));
}

// Starts copies of the basis without conversion: `from` a sequence and head the thread's dimensions `into` its place.
template <class Shape, int kThreads>
__device__ __forceinline__ void
copy_basis(const LatentInputs& in, const __nv_bfloat16* from, uint32_t into, int my_row, int my_unit) {
  using Passes = BasisPasses<Shape, kThreads>;
  int dim[Shape::kHalves];
#pragma unroll
  for (int half = 0; half < Shape::kHalves; ++half) dim[half] = dim_of<Shape>(in, half, my_unit);
#pragma unroll(Passes::kPasses % 5 == 0 ? 10 : 8) // not all of 16 or 20 passes: registers are scarce
  for (int pass = 0; pass < Passes::kPasses; ++pass) {
    const bool strong = Passes::is_strong(pass);
    const int rank =
        rank_of(pass * Passes::kRows, strong) + rank_of(my_row, strong) + (strong ? -Passes::kWeak : kStrong);
#pragma unroll
    for (int half = 0; half < Shape::kHalves; ++half)
      copy16_async(
          into + half * Passes::kHalfBytes + pass * Passes::kBytes,
          from + int64_t(rank) * (in.heads * Shape::kDim) + dim[half]);
  }
  close_copy_group();
}

// Stores a unit's queries as half where products read them; zeros for queries past the group.
template <class Shape, int kThreads>
__device__ __forceinline__ void fill_queries(const LatentInputs& in, uint2* queries, int unit_of_all, int thread) {
  constexpr int kDim = Shape::kDim;
#pragma unroll kDim / 64
  for (int i = thread; i < Shape::kSets * kDim * 2; i += kThreads) {
    const int set = i / (kDim * 2), j = i / 32 % (kDim / 16), query = 8 * set + i % 32 / 4 % Shape::kColumns;
    const __nv_bfloat16* const q = in.q + (int64_t(unit_of_all) * in.group + query) * kDim + i % 4 * 2;
    const float factor = in.rope.factor(j);
    uint32_t x[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      x[half] = query < in.group ? __ldg(reinterpret_cast<const uint32_t*>(q + in.rope.dim_of<kDim>(j, half))) : 0;
      const float2 both = unpack_bf16(x[half]);
      x[half] = bits(__floats2half2_rn(both.x * factor, both.y * factor));
    }
    queries[set * kDim * 2 + j / 2 * 64 + i % 32 * 2 + j % 2] = make_uint2(x[0], x[1]);
  }
}

// Counts the run's tiles of a unit that have tokens: -1s come last. For one warp.
__device__ __forceinline__ int count_tiles(const LatentInputs& in, const RunUnit& unit, int lane) {
  const int64_t* const selected = in.selected + int64_t(unit.number(in)) * in.chunks;
  int count = 0;
  for (int tile = unit.begin + lane; tile - lane < unit.end; tile += 32)
    count += __popc(__ballot_sync(
        ~0u, tile < unit.end && __ldg(selected + (tile * kLatentTile >> in.log_chunk)) >= 0));
  return count;
}

// mean[j]: of dimension thread + j kThreads, in the order of the product.
template <class Shape, int kThreads, int kMeans>
__device__ __forceinline__ void
read_mean(float (&mean)[kMeans], const LatentInputs& in, int64_t state, int head, int thread) {
#pragma unroll
  for (int j = 0; j < kMeans; ++j) {
    const int i = thread + j * kThreads;
    if (in.mean == nullptr || i >= Shape::kDim) continue;
    const int64_t at = state * in.mean_state + head * Shape::kDim + dim_of<Shape>(in, i / 64, i / 8 % 8) + i % 8;
    mean[j] = in.mean_is_float ? static_cast<const float*>(in.mean)[at]
                               : __bfloat162float(static_cast<const __nv_bfloat16*>(in.mean)[at]);
  }
}

// Converts the basis to half where the thread has copied it, and leaves in `sums`, one row per warp, what the codes'
// offsets add to the keys. Entries under 6e-5 lose bits; for keys around one, none do.
template <class Shape, int kThreads>
__device__ __forceinline__ void round_basis(uint32_t into, float* sums, int my_unit, int thread) {
  using Passes = BasisPasses<Shape, kThreads>;
  const int lane = thread % 32;
#pragma unroll 1
  for (int half = 0; half < Shape::kHalves; ++half) {
    float sum_of[8] = {};
#pragma unroll(Passes::kPasses < 5 ? Passes::kPasses : 5)
    for (int pass = 0; pass < Passes::kPasses; ++pass) {
      const uint32_t at = into + half * Passes::kHalfBytes + pass * Passes::kBytes;
      const uint4 loaded = load_shared16(at);
      uint32_t x[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      const float too_much = Passes::is_strong(pass) ? 1024 + 128 : 1024 + 8; // offset of a code
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 both = unpack_bf16(x[j]);
        sum_of[2 * j] = fmaf(too_much, both.x, sum_of[2 * j]);
        sum_of[2 * j + 1] = fmaf(too_much, both.y, sum_of[2 * j + 1]);
        x[j] = bits(__float22half2_rn(both));
      }
      store_shared16(at, make_uint4(x[0], x[1], x[2], x[3]));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) { // over the warp's four rows
      sum_of[i] += __shfl_xor_sync(~0u, sum_of[i], 9);
      sum_of[i] += __shfl_xor_sync(~0u, sum_of[i], 18);
      if (lane < 8) sums[thread / 32 * Shape::kDim + half * 64 + my_unit * 8 + i] = sum_of[i];
    }
  }
}

// Writes after the basis the mean minus the excess of a latent times the column sums, as two halves whose first factor
// is 64. The product's other rows, here and after, are multiplied by zeros: they only need to be finite.
template <class Shape, int kThreads, int kMeans>
__device__ __forceinline__ void write_mean(char* basis, const float (&mean)[kMeans], const float* sums, int thread) {
#pragma unroll
  for (int m = 0; m < kMeans; ++m) {
    const int i = thread + m * kThreads;
    if (i >= Shape::kDim) break;
    float sum = 0;
    for (int w = 0; w < kThreads / 32; ++w) sum += sums[w * Shape::kDim + i];
    const float x = (mean[m] - sum) / 64.f;
    const __half high = __float2half(x);
    char* const row = basis + (i / 64 * Shape::kRows + Shape::kRank) * 128 + i % 8 * 2;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      *reinterpret_cast<__half*>(row + j * 128 + (i / 8 % 8 ^ j) * 16) =
          j == 0 ? high : j == 1 ? __float2half(x - __half2float(high)) : __half(0.f);
  }
}

// Prepares unit `number` of a run with kThreads threads, which have a separate barrier and room for their warps' sums.
// What does not need the basis is done while it is in flight.
template <class Shape, int kThreads>
__device__ __forceinline__ void fill_unit(
    const LatentInputs& in, const RunUnit& unit, const LatentMemory<Shape>& memory, int number, int thread,
    int barrier, float* sums) {
  constexpr int kDim = Shape::kDim;
  const int unit_of_all = unit.number(in), head = unit.head;
  const int64_t state = __ldg(in.states + unit.sequence);
  const int my_row = thread / 8, my_unit = (thread ^ my_row) % 8;
  const uint32_t into = shared_address(memory.basis(number)) + thread * 16;
  const __nv_bfloat16* const from = in.basis + state * in.basis_state + head * kDim;

  prefetch_unit<Shape, kThreads>(in, state, unit_of_all, head, thread);
  wait_phase(memory.unit_empty(number), number / 2 % 2 ^ 1);
  copy_basis<Shape, kThreads>(in, from, into, my_row, my_unit);
  fill_queries<Shape, kThreads>(in, memory.queries(number), unit_of_all, thread);
  if (thread < 32) {
    const int count = count_tiles(in, unit, thread);
    if (thread == 0) memory.filled(number) = {unit_of_all, unit.begin, count, unit.left > 0};
  }
  float mean[kDim > kThreads ? kDim / kThreads : 1] = {};
  read_mean<Shape, kThreads>(mean, in, state, head, thread);
  wait_copy_groups<0>();
  round_basis<Shape, kThreads>(into, sums, my_unit, thread);
  sync_threads(barrier, kThreads);
  write_mean<Shape, kThreads>(memory.basis(number), mean, sums, thread);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  sync_threads(barrier, kThreads);
  if (thread == 0) arrive(memory.unit_full(number));
}

} // namespace shadowkv
