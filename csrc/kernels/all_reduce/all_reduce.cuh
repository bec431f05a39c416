// The sum of every rank's tensor, over memory that all GPUs of a host can address (NVLink or PCIe peers).
//
// Every rank has a buffer: flags, then two regions of data. A call writes what the others need into a region, tells
// them by a flag per thread block, and reads theirs once their flags are there. Calls alternate between the regions:
// a rank that has raised its flags of call k + 1 has finished reading in call k, so call k + 2 may write there again,
// and no call has to wait at its end.
//
// Small tensors: every rank reads all of the others' (one shot, one wait). Large ones: every rank adds up one share and
// writes it to the others (two shots, two waits), so that each number crosses a link twice, however many ranks there
// are. Both add in the order of ranks, in float32: the bits are the same on every rank.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace shadowkv {

constexpr int kReduceBlocks = 64, kReduceThreads = 512; // the same in every call: flags are counted
constexpr int kMostRanks = 8;
constexpr int kFlagBytes = kReduceBlocks * kMostRanks * int(sizeof(uint32_t));
constexpr int kPollsBetweenLooks = 1024; // at the host's memory, which takes a microsecond

struct AllReduce {
  uint4* x;                 // this rank's, replaced by the sum
  char* buffers[kMostRanks]; // of every rank, as this one addresses them
  uint32_t* calls;          // [kReduceBlocks] how many this rank has made
  const uint32_t* aborted;  // in the host's memory: not 0 once waiting is in vain
  int64_t region;           // bytes
  int64_t vectors;          // of 16 bytes, of x
  int rank, ranks;

  __device__ uint32_t* flag(int of, int from) const {
    return reinterpret_cast<uint32_t*>(buffers[of]) + blockIdx.x * kMostRanks + from;
  }
  __device__ uint4* data(int of, uint32_t call) const {
    return reinterpret_cast<uint4*>(buffers[of] + kFlagBytes + (call & 1) * region);
  }
};

// Past L1, which does not see what other GPUs write.
__device__ __forceinline__ uint4 load_shared_memory(const uint4* from) {
  uint4 x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

// What this block has written so far is there for the same block of every rank, and the other way round.
__device__ __forceinline__ void meet(const AllReduce& call, uint32_t number) {
  __syncthreads();
  const int other = threadIdx.x;
  if (other < call.ranks && other != call.rank) {
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(call.flag(other, call.rank)), "r"(number) : "memory");
    uint32_t seen = number - 1;
    for (int polls = 1; int32_t(seen - number) < 0; ++polls) {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(call.flag(call.rank, other)) : "memory");
      if (polls % kPollsBetweenLooks == 0 && *static_cast<const volatile uint32_t*>(call.aborted)) break;
    }
  }
  __syncthreads();
}

template <typename T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  static __device__ float2 unpack(uint32_t x) { return __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(x)); }
  static __device__ uint32_t pack(float2 x) {
    const __nv_bfloat162 pair = __float22bfloat162_rn(x);
    return reinterpret_cast<const uint32_t&>(pair);
  }
};
template <>
struct Pair<__half> {
  static __device__ float2 unpack(uint32_t x) { return __half22float2(reinterpret_cast<__half2&>(x)); }
  static __device__ uint32_t pack(float2 x) {
    const __half2 pair = __float22half2_rn(x);
    return reinterpret_cast<const uint32_t&>(pair);
  }
};

template <typename T>
struct Sum {
  float2 numbers[4] = {};

  __device__ void add(uint4 x) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Pair<T>::unpack(words[i]);
      numbers[i].x += pair.x, numbers[i].y += pair.y;
    }
  }
  __device__ uint4 rounded() const {
    return {Pair<T>::pack(numbers[0]), Pair<T>::pack(numbers[1]), Pair<T>::pack(numbers[2]), Pair<T>::pack(numbers[3])};
  }
};
template <>
struct Sum<float> {
  float numbers[4] = {};

  __device__ void add(uint4 x) {
    numbers[0] += __uint_as_float(x.x), numbers[1] += __uint_as_float(x.y);
    numbers[2] += __uint_as_float(x.z), numbers[3] += __uint_as_float(x.w);
  }
  __device__ uint4 rounded() const {
    return {__float_as_uint(numbers[0]), __float_as_uint(numbers[1]), __float_as_uint(numbers[2]),
            __float_as_uint(numbers[3])};
  }
};

// Vectors [first, last) of this block's thread, a few at a time: `load` them all, then `store` them all, so that loads
// are in flight together.
template <int kAtOnce, typename Load, typename Store>
__device__ __forceinline__ void move_vectors(int64_t first, int64_t last, Load load, Store store) {
  constexpr int64_t kStep = kReduceBlocks * kReduceThreads;
  first += int64_t(blockIdx.x) * kReduceThreads + threadIdx.x;
  for (int64_t start = first; start < last; start += kAtOnce * kStep) {
    decltype(load(start)) loaded[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (start + k * kStep < last) loaded[k] = load(start + k * kStep);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (start + k * kStep < last) store(start + k * kStep, loaded[k]);
  }
}

template <int kRanks>
struct Parts {
  uint4 of[kRanks];
};

// Every rank's vector `i`: the others' from their regions, this rank's from x.
template <int kRanks>
__device__ __forceinline__ Parts<kRanks> load_parts(const AllReduce& call, uint32_t number, int64_t i) {
  Parts<kRanks> parts;
#pragma unroll
  for (int rank = 0; rank < kRanks; ++rank)
    if (rank < call.ranks)
      parts.of[rank] = rank == call.rank ? call.x[i] : load_shared_memory(call.data(rank, number) + i);
  return parts;
}

template <typename T, int kRanks>
__device__ __forceinline__ uint4 add_parts(const AllReduce& call, const Parts<kRanks>& parts) {
  Sum<T> sum;
#pragma unroll
  for (int rank = 0; rank < kRanks; ++rank)
    if (rank < call.ranks) sum.add(parts.of[rank]);
  return sum.rounded();
}

template <typename T, int kRanks>
__device__ __forceinline__ void one_shot(const AllReduce& call, uint32_t number) {
  uint4* const own = call.data(call.rank, number);
  move_vectors<4>(
      0, call.vectors, [&](int64_t i) { return call.x[i]; }, [&](int64_t i, uint4 x) { own[i] = x; });
  meet(call, 2 * number);
  move_vectors<kMostRanks / kRanks>(
      0, call.vectors, [&](int64_t i) { return load_parts<kRanks>(call, number, i); },
      [&](int64_t i, const Parts<kRanks>& parts) { call.x[i] = add_parts<T, kRanks>(call, parts); });
}

// Rank r adds up vectors [r * share, r * share + share). Which thread has which of them is the same on every rank, so
// that the flags of a block are about what that block reads.
template <typename T, int kRanks>
__device__ __forceinline__ void two_shot(const AllReduce& call, uint32_t number) {
  const int64_t share = (call.vectors + call.ranks - 1) / call.ranks;
  const auto last = [&](int rank) { return min((rank + 1) * share, call.vectors); };
  uint4* const own = call.data(call.rank, number);
  for (int rank = 0; rank < call.ranks; ++rank)
    if (rank != call.rank)
      move_vectors<4>(
          rank * share, last(rank), [&](int64_t i) { return call.x[i]; }, [&](int64_t i, uint4 x) { own[i] = x; });
  meet(call, 2 * number);
  move_vectors<kMostRanks / kRanks>(
      call.rank * share, last(call.rank), [&](int64_t i) { return load_parts<kRanks>(call, number, i); },
      [&](int64_t i, const Parts<kRanks>& parts) {
        const uint4 sum = call.x[i] = add_parts<T, kRanks>(call, parts);
#pragma unroll
        for (int rank = 0; rank < kRanks; ++rank) // over what it has just read there
          if (rank < call.ranks && rank != call.rank) call.data(rank, number)[i] = sum;
      });
  meet(call, 2 * number + 1);
  for (int rank = 0; rank < call.ranks; ++rank)
    if (rank != call.rank)
      move_vectors<4>(
          rank * share, last(rank), [&](int64_t i) { return load_shared_memory(own + i); },
          [&](int64_t i, uint4 x) { call.x[i] = x; });
}

template <typename T, int kRanks, bool kTwoShots>
__global__ void __launch_bounds__(kReduceThreads, 1) all_reduce_kernel(const __grid_constant__ AllReduce call) {
  const uint32_t number = call.calls[blockIdx.x] + 1;
  if constexpr (kTwoShots)
    two_shot<T, kRanks>(call, number);
  else
    one_shot<T, kRanks>(call, number);
  if (threadIdx.x == 0) call.calls[blockIdx.x] = number; // after a barrier: all have read it
}

} // namespace shadowkv
