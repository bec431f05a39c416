// As much of CUDA as kernels of plain C++ need, for a CPU: one thread block after the other, whose threads take turns,
// each until it waits for others. Shuffles, votes and barriers wait for all that take part.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <math.h>
#include <memory>
#include <setjmp.h>
#include <ucontext.h>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
// What is static within a function, and may be extern: there is one thread. Arrays that are extern a test defines before
// it includes the kernel.
#define __shared__ thread_local
#define __align__(bytes)

struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace on_cpu {

// All of `count` threads come here before any goes on.
struct Barrier {
  int count, here = 0, turn = 0;
};

struct Thread {
  static constexpr int kStack = 1 << 17;
  ucontext_t first; // where it begins
  jmp_buf place;     // where it waits
  std::unique_ptr<char[]> stack{new char[kStack]};
  bool begun = false, ended = false;
};

inline std::vector<Thread> threads;
inline Barrier of_block;
inline std::vector<Barrier> of_warps;
inline std::vector<uint64_t> said; // by each thread, to its warp
inline jmp_buf scheduler;
inline const std::function<void()>* kernel;
inline dim3 thread_index, block_index, block_size;

inline void start() {
  (*kernel)();
  threads[thread_index.x].ended = true;
  _longjmp(scheduler, 1);
}

// Lets a thread go on until it waits or ends. Jumps, as swapcontext asks the kernel of the system for signal masks.
__attribute__((noinline)) inline void resume(int thread) {
  thread_index = {unsigned(thread)};
  Thread& one = threads[thread];
  if (_setjmp(scheduler)) return;
  if (one.begun) _longjmp(one.place, 1);
  one.begun = true;
  setcontext(&one.first);
}

__attribute__((noinline)) inline void leave() {
  if (!_setjmp(threads[thread_index.x].place)) _longjmp(scheduler, 1);
}

inline void wait(Barrier& barrier) {
  const int turn = barrier.turn;
  if (++barrier.here == barrier.count) {
    barrier.here = 0, ++barrier.turn;
    return;
  }
  while (barrier.turn == turn) leave();
}

// Runs a kernel's body for all threads of all blocks of a grid; `before` each block. Whether all of them ended: some may
// wait for those that have ended.
inline bool run(dim3 grid, int count, const std::function<void()>& before, const std::function<void()>& body) {
  kernel = &body, block_size = {unsigned(count)};
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      block_index = {x, y};
      before();
      threads = std::vector<Thread>(count);
      of_block = {count}, of_warps.assign(count / 32, {32}), said.assign(count, 0);
      for (Thread& thread : threads) {
        getcontext(&thread.first);
        thread.first.uc_stack = {thread.stack.get(), 0, Thread::kStack};
        thread.first.uc_link = nullptr;
        makecontext(&thread.first, start, 0);
      }
      const auto progress = [] {
        int all = of_block.turn;
        for (const Barrier& one : of_warps) all += one.turn;
        for (const Thread& one : threads) all += one.ended;
        return all;
      };
      for (int left = count, last = -1; left > 0 && progress() != last;) {
        last = progress(), left = 0;
        for (int i = 0; i < count; ++i)
          if (!threads[i].ended) ++left, resume(i);
      }
      if (!std::all_of(threads.begin(), threads.end(), [](const Thread& one) { return one.ended; })) return false;
    }
  return true;
}

// Says something to this warp and does something with what its lanes say.
template <class T, class Listen>
void exchange(T x, Listen listen) {
  std::memcpy(&said[thread_index.x], &x, sizeof(T));
  Barrier& warp = of_warps[thread_index.x / 32];
  const uint64_t* const first = &said[thread_index.x / 32 * 32];
  wait(warp);
  listen(first);
  wait(warp);
}

// What a lane of this warp says.
template <class T>
T hear(T x, int lane) {
  exchange(x, [&](const uint64_t* all) { std::memcpy(&x, all + lane, sizeof(T)); });
  return x;
}

} // namespace on_cpu

#define threadIdx on_cpu::thread_index
#define blockIdx on_cpu::block_index
#define blockDim on_cpu::block_size

inline void __syncthreads() { on_cpu::wait(on_cpu::of_block); }
inline void __syncwarp() { on_cpu::wait(on_cpu::of_warps[threadIdx.x / 32]); }

template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  return on_cpu::hear(x, lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return on_cpu::hear(x, int(threadIdx.x % 32) ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T x, int step) {
  const int lane = threadIdx.x % 32;
  return on_cpu::hear(x, lane < step ? lane : lane - step);
}
inline uint32_t __reduce_add_sync(unsigned, uint32_t x) {
  uint32_t sum = 0;
  on_cpu::exchange(x, [&](const uint64_t* all) {
    for (int lane = 0; lane < 32; ++lane) sum += uint32_t(all[lane]);
  });
  return sum;
}
inline uint32_t __ballot_sync(unsigned, bool yes) {
  uint32_t votes = 0;
  on_cpu::exchange(uint64_t(yes), [&](const uint64_t* all) {
    for (int lane = 0; lane < 32; ++lane) votes |= uint32_t(all[lane]) << lane;
  });
  return votes;
}

template <class T>
T __ldg(const T* x) {
  return *x;
}
template <class T>
T atomicAdd(T* to, T x) {
  const T before = *to;
  *to += x;
  return before;
}
inline uint32_t atomicAdd(uint32_t* to, int x) { return atomicAdd(to, uint32_t(x)); }
inline uint32_t atomicOr(uint32_t* to, uint32_t x) {
  const uint32_t before = *to;
  *to |= x;
  return before;
}
inline int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(int(x)); }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float __fadd_rd(float x, float y) { // exact sums of doubles are enough for whole numbers and fractions below 1
  const double sum = double(x) + double(y);
  const float rounded = float(sum);
  return rounded > sum ? nextafterf(rounded, -INFINITY) : rounded;
}
inline float __log2f(float x) { return log2f(x); }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }

using std::max;
using std::min;
