// Ragged top-k of softmax shares, one block per row: scores become integers in the same order in shared memory while
// their histogram is counted; the digits of the k-th largest follow from it, and only the few chunks that share its
// first digit are examined again. Bit sets make the result ascending and deterministic. Prefetching logits into the L2
// cache made it slower.
#pragma once

#include <cfloat>

#include "kernels/common/memory.cuh"

namespace shadowkv {

constexpr int kSelectGroup = 32;  // most query heads of a kv head
constexpr int kDigitBits = 11;    // keys of 32 bits are digits of 11, 11 and 10 bits
constexpr int kBins = 1 << kDigitBits;
constexpr int kListed = 1024;     // chunks that can be ranked without another pass over all chunks

struct SelectTopChunks {
  const float* logits;   // [rows, G, n]
  const float* lse;      // [rows, G, T]
  const int64_t* budget; // [B]
  uint32_t* workspace;   // [rows, keys and bit sets] if they do not fit in shared memory, otherwise null
  int64_t* selected;     // [rows, k]
  int heads, group, chunks, parts, k;
};

__host__ __device__ constexpr int64_t select_words(int64_t chunks) { return (chunks + 31) / 32 * 34; }

// An integer that grows with the score; 0 only for what may not be selected. Scores are logarithms of shares, most of
// them between -20 and -5: as float bits, nearly all would begin with the same few digits, and atomics on one bin are
// serialised. Down to -128, a key is a fixed-point number instead, exact to 2**-24; scores below that, whose softmax is
// 0 in float32, keep their order as floats.
__device__ __forceinline__ uint32_t rank_key(float score) {
  if (!(fabsf(score) <= FLT_MAX)) return 0;
  const float depth = fmaxf(-score, 0.f);
  if (depth < 128.f) return 0xffffffffu - uint32_t(depth * 0x1p24f);
  return 0x7fffffffu - (__float_as_uint(depth) - __float_as_uint(128.f));
}

// Sum of x over the threads before this one; `total` is the sum over all. The scratch is free for reuse at the end.
template <int kWarps>
__device__ __forceinline__ uint32_t scan_block(uint32_t x, uint32_t* scratch, uint32_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t inclusive = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t below = __shfl_up_sync(~0u, inclusive, step);
    if (lane >= step) inclusive += below;
  }
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  uint32_t before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += scratch[w];
    total += scratch[w];
  }
  __syncthreads();
  return before + inclusive - x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}

struct SelectShared {
  uint32_t histogram[kBins];
  uint2 listed[kListed]; // key, chunk
  uint32_t scratch[32];
  float norm[kSelectGroup];
  uint32_t num_listed, bin, above, inside;
};

// Finds the bin of the `need`-th largest key in the histogram, clears the histogram and returns how many keys it
// counted. Stores in shared memory the bin and how many keys are above and in it, unless there are fewer than `need`.
template <int kThreads>
__device__ __noinline__ uint32_t find_bin(SelectShared& shared, uint32_t need) {
  constexpr int kOwn = kBins / kThreads;
  const int top = kBins - kOwn * (threadIdx.x + 1); // a thread's bins, the first thread's on top
  uint32_t own[kOwn], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    sum += own[i] = shared.histogram[top + i];
    shared.histogram[top + i] = 0;
  }
  uint32_t above = scan_block<kThreads / 32>(sum, shared.scratch, total);
  if (above < need && need <= above + sum) {
#pragma unroll
    for (int i = kOwn - 1; i >= 0; --i) {
      if (above < need && need <= above + own[i]) shared.bin = top + i, shared.above = above, shared.inside = own[i];
      above += own[i];
    }
  }
  __syncthreads();
  return total;
}

// Logarithms of each head's softmax sum, from those of its parts.
template <int kThreads>
__device__ __forceinline__ void find_norms(const SelectTopChunks& p, SelectShared& shared, int64_t row, int group) {
  const int lane = threadIdx.x % 32;
  for (int head = threadIdx.x / 32; head < group; head += kThreads / 32) {
    const float* parts = p.lse + (row * group + head) * p.parts;
    float top = -FLT_MAX, sum = 0;
#pragma unroll 4
    for (int i = lane; i < p.parts; i += 32) {
      const float part = parts[i], next = fmaxf(top, part);
      sum = sum * __expf(top - next) + __expf(part - next);
      top = next;
    }
    const float highest = warp_max(top);
    sum *= __expf(top - highest);
#pragma unroll
    for (int mask = 16; mask; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (lane == 0) shared.norm[head] = highest + logf(sum);
  }
}

// Keys of a row's scores, padded with zeros to a multiple of 32, and counts of their first digits.
template <int kVector, int kThreads>
__device__ __forceinline__ void make_keys(
    const SelectTopChunks& p, SelectShared& shared, uint32_t* keys, int64_t row, int group, int words) {
  constexpr int kShift = 32 - kDigitBits;
  const int thread = threadIdx.x;
  const float* logits = p.logits + row * group * p.chunks;
#pragma unroll 2 // with the loads of both in flight
  for (int i = thread * kVector; i < p.chunks; i += kThreads * kVector) {
    float best[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) best[e] = -INFINITY;
#pragma unroll 4
    for (int head = 0; head < group; ++head) {
      const float* from = logits + int64_t(head) * p.chunks + i;
      const float norm = shared.norm[head];
      if constexpr (kVector == 4) {
        const uint4 x = load_streamed16(from);
        best[0] = fmaxf(best[0], __uint_as_float(x.x) - norm); // of NaN and a number, fmaxf takes the number
        best[1] = fmaxf(best[1], __uint_as_float(x.y) - norm);
        best[2] = fmaxf(best[2], __uint_as_float(x.z) - norm);
        best[3] = fmaxf(best[3], __uint_as_float(x.w) - norm);
      } else {
        best[0] = fmaxf(best[0], *from - norm);
      }
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const uint32_t key = rank_key(best[e]);
      keys[i + e] = key;
      if (key) atomicAdd(&shared.histogram[key >> kShift], 1);
    }
  }
  for (int i = p.chunks + thread; i < 32 * words; i += kThreads) keys[i] = 0;
}

// The k-th largest key, as far as it is known: its first digits, those from bit `shift` on. Of the keys that begin with
// these digits, `need` are selected, and all larger keys.
template <int kThreads>
struct Threshold {
  SelectShared& shared;
  int shift = 32 - kDigitBits;
  uint32_t prefix = 0, need = 0;

  // Refines it by one digit, over keys [count] given by `key_of`.
  template <class KeyOf>
  __device__ __forceinline__ void narrow(int count, KeyOf key_of) {
    const int next = max(0, shift - kDigitBits);
    const uint32_t mask = (1u << (shift - next)) - 1;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const uint32_t key = key_of(i);
      if (key >> shift == prefix) atomicAdd(&shared.histogram[key >> next & mask], 1);
    }
    __syncthreads();
    find_bin<kThreads>(shared, need);
    prefix = prefix << (shift - next) | shared.bin;
    shift = next;
    need -= shared.above;
  }

  // The digits for which all keys are needed.
  __device__ __forceinline__ void find(const uint32_t* keys, int chunks, uint32_t budget) {
    if (find_bin<kThreads>(shared, budget) <= budget) {
      shift = 0; // select every key above 0
      return;
    }
    prefix = shared.bin, need = budget - shared.above;
    while (shift > 0 && shared.inside > kListed) narrow(chunks, [&](int i) { return keys[i]; });
  }

  // Bit sets of keys larger than it and keys equal to it.
  __device__ __forceinline__ void mark(const uint32_t* keys, uint32_t* above, uint32_t* equal, int words) {
    const int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int word = threadIdx.x / 32; word < words; word += kThreads / 32) {
      const uint32_t key = keys[32 * word + lane], start = key >> shift;
      const bool same = need > 0 && start == prefix;
      const uint32_t larger = __ballot_sync(~0u, start > prefix), alike = __ballot_sync(~0u, same);
      if (lane == 0) above[word] = larger, equal[word] = shift ? 0 : alike;
      if (shift && same) shared.listed[atomicAdd(&shared.num_listed, 1)] = {key, uint32_t(32 * word + lane)};
    }
    __syncthreads();
    if (shift == 0) return;
    while (shift > 0) narrow(shared.num_listed, [&](int i) { return shared.listed[i].x; });
    for (int i = threadIdx.x; i < shared.num_listed; i += kThreads) {
      const uint2 x = shared.listed[i];
      if (x.x >= prefix) atomicOr((x.x > prefix ? above : equal) + x.y / 32, 1u << x.y % 32);
    }
    __syncthreads();
  }
};

// Bits to numbers: a thread's words, after those of the threads before it. Of `equal`, that many.
template <int kThreads>
__device__ __forceinline__ void write_selected(
    SelectShared& shared, const uint32_t* above, const uint32_t* equal, int words, uint32_t need, int64_t* selected,
    int k) {
  constexpr int kWarps = kThreads / 32;
  const int own = (words + kThreads - 1) / kThreads;
  const int begin = min(int(threadIdx.x) * own, words), end = min(begin + own, words);
  uint32_t larger = 0, alike = 0, all_larger, all_alike;
  for (int word = begin; word < end; ++word) larger += __popc(above[word]), alike += __popc(equal[word]);
  larger = scan_block<kWarps>(larger, shared.scratch, all_larger);
  alike = scan_block<kWarps>(alike, shared.scratch, all_alike);
  for (int word = begin; word < end; ++word) {
    const uint32_t certain = above[word];
    for (uint32_t left = certain | equal[word]; left; left &= left - 1) {
      const int bit = __ffs(left) - 1;
      const bool is_larger = certain >> bit & 1;
      if (is_larger || alike < need) selected[larger + min(alike, need)] = 32 * word + bit;
      is_larger ? ++larger : ++alike;
    }
  }
  for (int i = all_larger + min(all_alike, need) + threadIdx.x; i < k; i += kThreads) selected[i] = -1;
}

// kVector: chunks per load, 4 if rows allow it. kHeads: query heads per kv head, 0 if not known at compile time.
template <int kVector, int kHeads, int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) select_top_chunks_kernel(const SelectTopChunks p) {
  extern __shared__ __align__(16) uint32_t row_memory[];
  __shared__ SelectShared shared;
  const int group = kHeads ? kHeads : p.group;
  const int64_t row = blockIdx.x;
  const int words = (p.chunks + 31) / 32;
  uint32_t* keys = p.workspace ? p.workspace + row * select_words(p.chunks) : row_memory;
  uint32_t *above = keys + 32 * words, *equal = above + words; // bit sets: larger than the threshold, equal to it
  int64_t* selected = p.selected + row * p.k;
  const uint32_t budget = uint32_t(max(int64_t(0), min(p.budget[row / p.heads], int64_t(p.k))));

  for (int i = threadIdx.x; i < kBins; i += kThreads) shared.histogram[i] = 0;
  if (threadIdx.x == 0) shared.num_listed = 0;
  find_norms<kThreads>(p, shared, row, group);
  __syncthreads();
  if (budget == 0) {
    for (int i = threadIdx.x; i < p.k; i += kThreads) selected[i] = -1;
    return;
  }
  make_keys<kVector, kThreads>(p, shared, keys, row, group, words);
  __syncthreads();
  Threshold<kThreads> threshold = {shared};
  threshold.find(keys, p.chunks, budget);
  threshold.mark(keys, above, equal, words);
  write_selected<kThreads>(shared, above, equal, words, threshold.need, selected, p.k);
}

} // namespace shadowkv
