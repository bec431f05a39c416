// Runs on their way from pages through a warp's shared memory to its registers.
#pragma once

#include "kernels/common/memory.cuh"
#include "kernels/common/mma.cuh"
#include "shape.cuh"

namespace shadowkv {

// Four runs of one head in a warp's shared memory.
template <int kBytes>
struct Stage {
  static constexpr int kPlane = kBatch * kRun * kBytes;
  static constexpr int kRest = kPlane, kScale = 2 * kPlane, kSize = kScale + kBatch * kRun;
};

// The bits of the half nearest to x, clamped to the largest or the lowest finite one.
__device__ __forceinline__ uint16_t finite_half(float x) {
  uint16_t y;
  asm("cvt.rn.satfinite.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

// Does nothing, but prevents the compiler from recomputing x and y.
__device__ __forceinline__ void keep_in_registers(uint32_t& x, uint32_t& y) { asm volatile("" : "+r"(x), "+r"(y)); }

// Tokens of a plane are 16 bytes apart; with more bytes, the second 16 of all tokens follow all the first, and so on.
template <int kBytes>
__device__ __forceinline__ void copy_token(uint32_t to, const uint8_t* from) {
  if constexpr (kBytes == 8) {
    copy8_async(to, from);
  } else {
#pragma unroll
    for (int half = 0; half < kBytes / 16; ++half) copy16_async(to + half * kBatch * kRun * 16, from + 16 * half);
  }
}

// x[half][r]: 4 bytes of token g of run r, from this lane's place in a plane. With 8 bytes per token, lanes t and t + 2
// have the same bytes, shifted in the latter: their lower 4 bits are the upper 4 bits of the former.
template <int kBytes>
__device__ __forceinline__ void load_plane(uint32_t (&x)[(kBytes + 15) / 16][kBatch], uint32_t from) {
  if constexpr (kBytes == 8) {
#pragma unroll
    for (int run = 0; run < kBatch; ++run) x[0][run] = load_shared4(from + 64 * run) >> (threadIdx.x & 2) * 2;
  } else {
#pragma unroll
    for (int half = 0; half < kBytes / 16; ++half) load_matrices(x[half], from + half * kBatch * kRun * 16);
  }
}

// Four runs in a lane's registers: token g of each, and the scale of token g of run t.
template <int kBytes>
struct RunCodes {
  static constexpr int kHalves = (kBytes + 15) / 16; // words of a token
  uint32_t sign[kHalves][kBatch], low[kHalves][kBatch], scale; // its code
};

// Where a lane writes in its warp's stages, and where it reads.
template <int kBytes>
struct RunStages {
  using Stage = Stage<kBytes>;
  int run, token; // that the lane copies from a batch
  uint32_t to_codes, to_scale, codes_here, scale_here;

  __device__ __forceinline__ explicit RunStages(const uint8_t* memory) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const uint32_t stages = shared_address(memory) + warp * kStages * Stage::kSize;
    run = lane / kRun, token = lane % kRun;
    to_codes = stages + lane * (kBytes < 16 ? kBytes : 16);
    to_scale = stages + Stage::kScale + run * kRun;
    // With 16 bytes or more, ldmatrix takes the addresses to which the lane copied.
    codes_here = kBytes == 8 ? stages + g * 8 + t % 2 * 4 : to_codes;
    scale_here = stages + Stage::kScale + t * kRun + g;
  }

  // Copies a batch of runs to a stage: lane 8 r + i copies token i of run r, lane 8 r its scales.
  __device__ __forceinline__ void
  copy(const SelectBySketch& p, uint2 named, unsigned head, int left, int first, int slot) const {
    const int at = first + run;
    const uint32_t page_id = __shfl_sync(~0u, named.x, at);
    const uint32_t of_page = head * kPageRuns + __shfl_sync(~0u, named.y, at) % kPageRuns;
    if (at < left) {
      const uint32_t codes = (of_page * kRun + token) * kBytes;
      copy_token<kBytes>(to_codes + slot * Stage::kSize, p.signs + uint64_t(page_id) * p.signs_stride + codes);
      copy_token<kBytes>(
          to_codes + slot * Stage::kSize + Stage::kRest, p.rest + uint64_t(page_id) * p.rest_stride + codes);
      if (token == 0)
        copy8_async(to_scale + slot * Stage::kSize, p.scale + uint64_t(page_id) * p.scale_stride + of_page * kRun);
    }
    close_copy_group();
  }

  // Waits for the oldest batch and reads it; its stage may then be filled again.
  __device__ __forceinline__ void load(RunCodes<kBytes>& codes, int slot) const {
    wait_copy_groups<kStages - 1>();
    __syncwarp(); // all lanes' copies have arrived
    load_plane<kBytes>(codes.sign, codes_here + slot * Stage::kSize);
    load_plane<kBytes>(codes.low, codes_here + slot * Stage::kSize + Stage::kRest);
    codes.scale = load_shared1(scale_here + slot * Stage::kSize);
    __syncwarp(); // all lanes are done with the stage
  }
};

} // namespace shadowkv
