// Chunks drawn at random behind those that were found, one block a row and kv head. What is drawn does not depend on
// what was found, so it is there before the search ends. A found chunk then says itself which run it is of: no search
// for either among the other.
#pragma once

#include <cstdint>

#include "kernels/early_launch.cuh"

namespace shadowkv {

constexpr int kDrawThreads = 512;

struct DrawChunks {
  int64_t* selected;       // [B, H, k]
  const uint8_t* excluded; // [H, C] of each page name, or null
  int64_t excluded_stride; // from one page name to the next, in bytes
  const int64_t* pages;    // [B, P]
  int64_t pages_stride;    // of a row, in names
  const int64_t *num_chunks, *found, *drawn, *seeds; // [B]
  uint32_t first_head;                               // of this layer, among all layers' heads
  int heads, page_chunks, columns, first, k;

  int bytes() const { return k * int(sizeof(int) + 1); }
};

// Chris Wellons' lowbias32.
__device__ __forceinline__ uint32_t mix_bits(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352d;
  x = (x ^ x >> 15) * 0x846ca68b;
  return x ^ x >> 16;
}

// What it reads before it waits was written before the launch that finds the chunks.
__global__ void __launch_bounds__(kDrawThreads, 2048 / kDrawThreads) draw_chunks_kernel(const DrawChunks p) {
  extern __shared__ int draws[]; // of every run
  bool* dropped = reinterpret_cast<bool*>(draws + p.k);
  __shared__ int kept[kDrawThreads / 32];
  const int head = blockIdx.x, row = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int before = int(max(int64_t(0), min(p.found[row], int64_t(p.k))));
  const int runs = int(max(int64_t(0), min(p.drawn[row], int64_t(p.k - before))));
  const uint64_t total = uint64_t(max(int64_t(0), p.num_chunks[row] - p.first));

  const uint32_t state = mix_bits(uint32_t(p.seeds[row]) * 0x9e3779b1u + p.first_head + head);
  for (int run = threadIdx.x; run < runs; run += kDrawThreads) {
    const uint64_t start = run * total / runs, size = (run + 1) * total / runs - start;
    const int chunk = p.first + int(start + (mix_bits(state + run * 0x85ebca77u) * size >> 32));
    draws[run] = chunk;
    dropped[run] = total == 0;
    if (p.excluded && total) {
      const int64_t name = p.pages[row * p.pages_stride + min(chunk / p.page_chunks, p.columns - 1)];
      dropped[run] = p.excluded[name * p.excluded_stride + head * p.page_chunks + chunk % p.page_chunks];
    }
  }
  __syncthreads();
  wait_for_launch_before();
  let_next_launch_begin();
  if (runs == 0) return;

  int64_t* selected = p.selected + (int64_t(row) * p.heads + head) * p.k;
  bool missing = false;
  for (int i = threadIdx.x; i < before; i += kDrawThreads) {
    const int64_t chunk = selected[i];
    missing |= chunk < 0;
    if (chunk < p.first || total == 0) continue;
    // The last run that begins with it or before. Runs of no chunks, where there are more runs than chunks, come before
    // the one that has the chunk they draw.
    const uint64_t owner = (uint64_t(chunk - p.first + 1) * runs - 1) / total;
    for (int run = int(min(owner, uint64_t(runs - 1))); run >= 0 && draws[run] == chunk; --run) dropped[run] = true;
  }
  if (__syncthreads_or(missing)) return;

  int count = before;
  for (int first = 0; first < runs; first += kDrawThreads) {
    const int run = first + threadIdx.x;
    const bool keep = run < runs && !dropped[run];
    const uint32_t lanes = __ballot_sync(~0u, keep);
    if (lane == 0) kept[warp] = __popc(lanes);
    __syncthreads();
    const int others = lane < kDrawThreads / 32 ? kept[lane] : 0;
    const int place = count + __reduce_add_sync(~0u, lane < warp ? others : 0) + __popc(lanes & ((1u << lane) - 1));
    if (keep) selected[place] = draws[run];
    count += __reduce_add_sync(~0u, others);
    __syncthreads();
  }
  for (int i = count + threadIdx.x; i < p.k; i += kDrawThreads) selected[i] = -1;
}

inline cudaError_t launch_draw_chunks(const DrawChunks& p, int64_t batch, cudaStream_t stream) {
  return launch_early(draw_chunks_kernel, dim3(p.heads, unsigned(batch)), dim3(kDrawThreads), p.bytes(), stream, p);
}

} // namespace shadowkv
