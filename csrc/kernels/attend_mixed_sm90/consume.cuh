// The consumers: warpgroups that attend, one page each in turn.
#pragma once

#include "fill.cuh"
#include "kernels/common/half_keys.cuh"
#include "kernels/common/wgmma.cuh"
#include "values.cuh"

namespace shadowkv {

// A warp's 16 rows of latents as the products' first factors, signed: codes in the mantissas of 1024, from which 1024
// and the stored value of zero are subtracted, exactly. A lane's four latents take up to 32 bits, which may begin
// anywhere.
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
      // The second word may be past the row, and is then not used.
      const uint32_t four = __funnelshift_r(load_shared4(at), load_shared4(at + 4), place.y);
      const uint32_t pairs = __byte_perm(four, four >> 2 * width, 0x5410); // two in each half
      a[step][half] = bits(__hsub2(half2_of(pairs & place.z | 0x64006400u), half2_of(place.w)));
      a[step][half + 2] = bits(__hsub2(half2_of(pairs >> width & place.z | 0x64006400u), half2_of(place.w)));
    }
  }
}

// Issues the product of a warpgroup's latents and half h of a head's basis.
template <class Shape>
__device__ __forceinline__ void begin_mixed_keys(
    float (&k)[32], const uint32_t (&a)[Shape::kSteps][4], const char* basis, int h) {
  // Tells the compiler that this is uniform across a warp, so that it need not be in vector registers.
  const uint32_t b = __shfl_sync(~0u, swizzled_rows(shared_address(basis)), 0) + h * (Shape::kHalfBytes / 16);
  begin_products();
  first_product(k, a[0], b);
#pragma unroll
  for (int step = 1; step < Shape::kSteps; ++step) add_product(k, a[step], b + step * 128);
  close_products();
}

// Keys of half h of a head, of tokens g and g + 8, with their mean, RoPE-rotated within their page.
__device__ __forceinline__ void
rope_keys(HalfKeys& keys, const float (&k)[32], const uint4* means, const uint4* angles, int h) {
  keys.take(k);
  __half2 mean[8];
#pragma unroll
  for (int i = 0; i < 2; ++i) reinterpret_cast<uint4*>(mean)[i] = means[8 * h + i];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    keys.x[i] = __hadd2(keys.x[i], mean[i / 2]), keys.y[i] = __hadd2(keys.y[i], mean[4 + i / 2]);
  Angles by;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    reinterpret_cast<uint4*>(by.cosine)[i] = angles[(4 * h + i) * 128];
    reinterpret_cast<uint4*>(by.sine)[i] = angles[(4 * h + i + 2) * 128];
  }
  keys.apply_rope(by);
}

// See keep.
template <class Shape>
__device__ __forceinline__ void keep_keys(const HalfKeys& keys, bool never, const MixedMemory<Shape>& memory) {
  uint32_t all[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) all[i] = bits(keys.x[i]), all[8 + i] = bits(keys.y[i]);
  keep(all, never, shared_address(memory.angles()));
}

// Issues their product with the queries: s is (tokens g, g + 8; queries 2t, 2t + 1).
template <class Shape>
__device__ __forceinline__ void begin_scores(float (&s)[4], const HalfKeys& keys, uint32_t queries, int h) {
  constexpr int kEight = Shape::kQueries * 16; // bytes of eight dimensions
  begin_products();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2 *x = keys.x + 2 * i, *y = keys.y + 2 * i;
    const uint32_t at = queries + (4 * h + i) * 2 * kEight;
    if (h == 0 && i == 0)
      query_product<false, kEight>(s, bits(x[0]), bits(x[1]), bits(y[0]), bits(y[1]), at);
    else
      query_product<true, kEight>(s, bits(x[0]), bits(x[1]), bits(y[0]), bits(y[1]), at);
  }
  close_products();
}

// Attends to a warp's 16 tokens of a page. While a head's values are weighted, the product of the next head's keys is
// running, or else those of other consumers.
template <class Shape>
__device__ __forceinline__ void attend_page(
    const MixedMemory<Shape>& memory, int stage, const bool (&attended)[2], bool never, MixedSums<Shape> (&sums)[2]) {
  const int warp = threadIdx.x / 32 % 4;
  const uint4* const angles = memory.angles() + threadIdx.x % 128;
  uint32_t a[Shape::kSteps][4];
  load_mixed_latents<Shape>(a, shared_address(memory.stage(stage)) + warp * (16 * Shape::kLatentRow), memory.places());
  float k[32];
  begin_mixed_keys<Shape>(k, a, memory.basis(), 0);
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    const uint32_t queries = __shfl_sync(~0u, shared_address(memory.queries(stage)), 0) + head * Shape::kQueryBytes;
    const char* const basis = memory.basis() + head * (2 * Shape::kHalfBytes);
    const uint4* const means = memory.mean() + head * 16 + threadIdx.x % 4 * 2;
    float s[4];
    HalfKeys keys[2];
    wait_product_groups<0>(), settle(k);
    rope_keys(keys[0], k, means, angles, 0);
    begin_scores<Shape>(s, keys[0], queries, 0);
    begin_mixed_keys<Shape>(k, a, basis, 1);
    wait_product_groups<0>(), settle(k);
    keep_keys(keys[0], never, memory);
    rope_keys(keys[1], k, means, angles, 1);
    begin_scores<Shape>(s, keys[1], queries, 1);
    if (head == 0) {
      begin_mixed_keys<Shape>(k, a, basis + 2 * Shape::kHalfBytes, 0);
      wait_product_groups<1>();
    } else {
      wait_product_groups<0>();
    }
    settle(s);
    keep_keys(keys[1], never, memory);
    // A warp without any valid token would have no largest score.
    if (!__any_sync(~0u, attended[0] || attended[1])) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // With few queries, lanes from t = 2 on have no columns of their own and take those of t - 2.
      if constexpr (Shape::kFew) s[j] = __shfl_sync(~0u, s[j], threadIdx.x & 29);
      s[j] = attended[j / 2] ? s[j] : -INFINITY;
    }
    sums[head].add(s, memory.codes(stage) + (head * kPage + warp * 16) * kValueRow, memory.codebook());
  }
}

template <class Shape>
__device__ __forceinline__ void consume_pages(
    const MixedShare& share, const MixedMemory<Shape>& memory, int consumer, MixedSums<Shape> (&sums)[2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  for (int i = consumer; i < share.count; i += Shape::kConsumers) {
    const int stage = i % Shape::kStages;
    wait_phase(memory.full(stage), i / Shape::kStages % 2);
    const uint32_t place = share.page(i) * kPage + warp * 16 + lane / 4 - share.low, span = share.high - share.low;
    attend_page<Shape>(memory, stage, {place < span, place + 8 < span}, share.step == 0, sums);
    __syncwarp();
    if (lane == 0) arrive(memory.empty(stage));
  }
}

} // namespace shadowkv
