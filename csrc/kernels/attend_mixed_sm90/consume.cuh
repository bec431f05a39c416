// The consumers: warpgroups that attend, every second page each.
#pragma once

#include "../attend_latents_sm90/keys.cuh"
#include "fill.cuh"
#include "values.cuh"

namespace shadowkv {

// A warp's 16 rows of latents as the products' first factors, signed: codes in the mantissas of 1024, from which 1024
// and what zero is stored as are taken, exactly. Four latents of a lane lie in up to 32 bits, which may begin anywhere.
template <class Shape>
__device__ __forceinline__ void
load_mixed_latents(uint32_t (&a)[Shape::kSteps][4], uint32_t rows, const uint4* places) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int step = 0; step < Shape::kSteps; ++step) {
    const uint4 place = places[step * 4 + t];
    const uint32_t width = place.y >> 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = rows + (half * 8 + g) * Shape::kLatentRow + place.x;
      // The second word may be behind the row, and what is read of it is then not used.
      const uint32_t four = __funnelshift_r(load_shared4(at), load_shared4(at + 4), place.y);
      const uint32_t pairs = __byte_perm(four, four >> 2 * width, 0x5410); // two in each half
      a[step][half] = bits(__hsub2(half2_of(pairs & place.z | 0x64006400u), half2_of(place.w)));
      a[step][half + 2] = bits(__hsub2(half2_of(pairs >> width & place.z | 0x64006400u), half2_of(place.w)));
    }
  }
}

// Begins the product of a warpgroup's latents and half h of a head's basis, and adds the mean.
template <class Shape>
__device__ __forceinline__ void begin_mixed_keys(
    float (&k)[32], const uint32_t (&a)[Shape::kSteps][4], const char* basis, int h) {
  const uint32_t ones = threadIdx.x % 4 == 0 ? 0x3c003c00u : 0;
  const uint32_t mean_factor[4] = {ones, ones, 0, 0};
  // The same in all lanes, as the compiler is told by this: it may stay out of their registers.
  const uint32_t b = __shfl_sync(~0u, swizzled_rows(shared_address(basis)), 0) + h * Shape::kRows * 8;
  begin_products();
  first_product(k, mean_factor, b + Shape::kSteps * 128);
#pragma unroll
  for (int step = 0; step < Shape::kSteps; ++step) add_product(k, a[step], b + step * 128);
  close_products();
}

// Scores of a warp's 16 tokens of one head: (tokens g, g + 8; queries 2t, 2t + 1).
template <class Shape>
__device__ __forceinline__ void score_page(
    float (&s)[4], const uint32_t (&a)[Shape::kSteps][4], const MixedMemory<Shape>& memory, int stage, int head) {
  const int lane = threadIdx.x % 32;
  const uint32_t queries = shared_address(memory.queries(stage)) + head * Shape::kQueryBytes +
      (lane / 4 % Shape::kQueries * 4 + lane % 4) * 16;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float k[32];
    begin_mixed_keys<Shape>(k, a, memory.basis() + head * (2 * Shape::kRows * 128), h);
    const uint4* const turns = memory.turns() + h * 4 * 128 + threadIdx.x % 128;
    wait_products(k);
    HalfKeys keys;
    keys.take(k);
    Turns by;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      reinterpret_cast<uint4*>(by.cosine)[i] = turns[i * 128];
      reinterpret_cast<uint4*>(by.sine)[i] = turns[i * 128 + 256];
    }
    keys.rotate(by);
    keys.score<Shape::kQueries * 64>(s, queries + h * (Shape::kQueries * 128));
  }
}

template <class Shape>
__device__ __forceinline__ void consume_pages(
    const MixedInputs& in, const MixedShare& share, const MixedMemory<Shape>& memory, int consumer,
    MixedSums<Shape> (&sums)[2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  for (int i = consumer; i < share.count; i += kMixedConsumers) {
    const int stage = i % Shape::kStages;
    wait_phase(memory.full(stage), i / Shape::kStages % 2);
    uint32_t a[Shape::kSteps][4];
    load_mixed_latents<Shape>(
        a, shared_address(memory.stage(stage)) + warp * (16 * Shape::kLatentRow), memory.places());
    const uint32_t place = share.page(i) * kPage + warp * 16 + lane / 4 - share.low, span = share.high - share.low;
    const bool there[2] = {place < span, place + 8 < span};
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float s[4] = {};
      score_page<Shape>(s, a, memory, stage, head);
      // A warp none of whose tokens counts would have no largest score.
      if (__any_sync(~0u, there[0] || there[1])) {
#pragma unroll
        for (int j = 0; j < 4; ++j) s[j] = there[j / 2] ? s[j] : -INFINITY;
        sums[head].add(s, memory.codes(stage) + (head * kPage + warp * 16) * kValueRow, memory.codebook());
      }
    }
    __syncwarp();
    if (lane == 0) arrive(memory.empty(stage));
  }
}

} // namespace shadowkv
