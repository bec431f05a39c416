// The producers: one warp copies pages, others rotate the queries (RoPE) to them.
#pragma once

#include "fill.cuh"

namespace shadowkv {

// Starts a copy whose bytes, a multiple of 16, arrive at the barrier.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
      "r"(bytes), "r"(barrier)
      : "memory");
}

// A page's latents are contiguous, and so are two heads' codes of values.
template <class Shape>
__device__ __forceinline__ void
copy_pages(const MixedInputs& in, const MixedShare& share, const MixedMemory<Shape>& memory) {
  const int lane = threadIdx.x % 32;
  const int64_t* const key_pages = in.key_pages + share.sequence * in.key_pages_row;
  const int64_t* const value_pages = in.value_pages + share.sequence * in.value_pages_row;
  for (int done = 0; done < share.count; done += 32) {
    // Reads the ids of 32 pages at a time; they are under 2^32.
    const int mine = share.page(min(done + lane, share.count - 1));
    const uint32_t key_id = uint32_t(key_pages[mine]), value_id = uint32_t(value_pages[mine]);
    for (int i = done; i < min(done + 32, share.count); ++i) {
      const uint32_t key = __shfl_sync(~0u, key_id, i - done), value = __shfl_sync(~0u, value_id, i - done);
      if (lane > 0) continue;
      const int stage = i % Shape::kStages;
      wait_phase(memory.empty(stage), i / Shape::kStages % 2 ^ 1);
      const uint32_t full = memory.full(stage);
      arrive_expecting(full, Shape::kLatentBytes + Shape::kCodeBytes);
      copy_bulk(
          shared_address(memory.stage(stage)), in.latents + uint64_t(key) * in.latent_page, Shape::kLatentBytes, full);
      copy_bulk(
          shared_address(memory.codes(stage)),
          in.codes + uint64_t(value) * in.code_page + share.head * (kPage * kValueRow), Shape::kCodeBytes, full);
    }
    __syncwarp();
  }
}

// Rotates the queries of two heads (RoPE) back by the position of each page, in a thread their dimensions f and f +
// 64, and leaves them as the second factors of scores (query_product): of all queries eight dimensions, then those that
// RoPE pairs them with, then the next eight. Of four queries only four are there; products take what lies behind for
// others.
template <class Shape>
__device__ __forceinline__ void
rope_queries(const MixedInputs& in, const MixedShare& share, const MixedMemory<Shape>& memory, int f) {
  constexpr int kQueries = Shape::kQueries;
  const uint32_t frequency = frequency_of(in, f);
  const int first = int(in.first[share.sequence]);
  uint32_t asked[2 * kQueries]; // in bf16, the lower half that of dimension f
#pragma unroll
  for (int i = 0; i < 2 * kQueries; ++i) {
    const int head = share.head + i / kQueries, query = i % kQueries;
    const __nv_bfloat16* const q =
        in.q + ((share.sequence * in.heads + head) * in.group + min(query, in.group - 1)) * kMixedDim;
    const uint32_t x = __bfloat16_as_ushort(q[f]), y = __bfloat16_as_ushort(q[f + kMixedHalf]);
    asked[i] = query < in.group ? x | y << 16 : 0;
  }
  const int place = f / 8 * (kQueries * 32) + f % 8 * 2;
  for (int i = 0; i < share.count; ++i) {
    const int stage = i % Shape::kStages;
    const float angle = angle_of(frequency, first + share.page(i) * kPage);
    const float cosine = __cosf(angle) * in.score_scale, sine = __sinf(angle) * in.score_scale;
    wait_phase(memory.empty(stage), i / Shape::kStages % 2 ^ 1);
    char* const to = memory.queries(stage) + place;
#pragma unroll
    for (int j = 0; j < 2 * kQueries; ++j) {
      const float2 q = unpack_bf16(asked[j]);
      char* const at = to + j / kQueries * Shape::kQueryBytes + j % kQueries * 16;
      *reinterpret_cast<__half*>(at) = __float2half(q.x * cosine + q.y * sine);
      *reinterpret_cast<__half*>(at + kQueries * 16) = __float2half(q.y * cosine - q.x * sine);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // products read them through the async proxy
    __syncwarp();
    if (f % 32 == 0) arrive(memory.full(stage));
  }
}

} // namespace shadowkv
