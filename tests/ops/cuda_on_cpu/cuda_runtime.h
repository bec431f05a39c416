// As much of CUDA as kernels of plain C++ need, for a CPU: a thread block is as many threads, one block after the other.
// Shuffles and barriers wait for all that take part, as they do on a GPU, so what races there may race here.
#pragma once

#include <algorithm>
#include <barrier>
#include <math.h>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__
#define __align__(bytes)

struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace on_cpu {

struct Block {
  std::barrier<> threads;
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  std::vector<float> said; // by each thread, to its warp
  explicit Block(int count) : threads(count), said(count) {
    for (int i = 0; i < count / 32; ++i) warps.push_back(std::make_unique<std::barrier<>>(32));
  }
};

inline Block* block;
inline thread_local dim3 thread_index;
inline dim3 block_index, block_size;

// Runs a kernel's body for all threads of all blocks of a grid, one after the other; `before` each.
inline void run(dim3 grid, int threads, const std::function<void()>& before, const std::function<void()>& body) {
  block_size = {unsigned(threads)};
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      block_index = {x, y};
      before();
      Block own(threads);
      block = &own;
      std::vector<std::thread> all;
      for (int i = 0; i < threads; ++i)
        all.emplace_back([&, i] {
          thread_index = {unsigned(i)};
          body();
        });
      for (std::thread& one : all) one.join();
    }
}

} // namespace on_cpu

#define threadIdx on_cpu::thread_index
#define blockIdx on_cpu::block_index
#define blockDim on_cpu::block_size

inline void __syncthreads() { on_cpu::block->threads.arrive_and_wait(); }
inline void __syncwarp() { on_cpu::block->warps[threadIdx.x / 32]->arrive_and_wait(); }
inline float __shfl_sync(unsigned, float x, int lane) {
  on_cpu::block->said[threadIdx.x] = x;
  __syncwarp();
  const float found = on_cpu::block->said[threadIdx.x / 32 * 32 + lane];
  __syncwarp();
  return found;
}
template <class T>
inline T __ldg(const T* x) {
  return *x;
}
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
