// The finder: where the tokens of a block's tiles are, as far ahead of the copies as the ring has room.
#pragma once

#include "shape.cuh"

namespace shadowkv {

// Finds the tokens of the block's tiles and says in the ring where they are, as far ahead of the copies as it has room.
// Four tiles at a time: the loads of a batch do not wait for each other, chunk numbers are read a batch ahead. The line
// is walked without a break between units; tiles without tokens are left out.
template <class Shape>
__device__ __forceinline__ void find_tokens(const LatentInputs& in, const Run run, const LatentMemory<Shape>& memory) {
  constexpr int kBatch = 4, kLatentBytes = Shape::kLatentBytes;
  const int lane = threadIdx.x % 32;
  struct Place {
    int batch, head, row, tile; // row: where the unit's chunks begin in `selected`
  };
  const auto next_of = [&](Place& at) {
    if (++at.tile < run.tiles) return;
    at.tile = 0, at.row += in.chunks;
    if (++at.head == in.heads) at.head = 0, ++at.batch;
  };
  // Names and numbers are under 2^31: of their 64 bits the lower 32 count.
  const auto low = [](const int64_t* p) { return __ldg(reinterpret_cast<const int*>(p)); };
  const auto position_of = [&](int chunk, int half) {
    return (chunk << in.log_chunk) + (half * 32 + lane & (1 << in.log_chunk) - 1);
  };
  Place here = {
      run.first_unit / in.heads, run.first_unit % in.heads, run.first_unit * in.chunks, run.unit_begin(0)};
  Place ahead = here;
  int chunk[kBatch][2], chunk_ahead[kBatch][2]; // of tokens `lane` and 32 + lane
  const auto find_chunks = [&](int (&into)[kBatch][2]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool any = ahead.batch < in.batch;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int index = (ahead.tile * kLatentTile + half * 32 + lane) >> in.log_chunk;
        into[i][half] = any && index < in.chunks ? low(in.selected + (ahead.row + index)) : -1;
      }
      next_of(ahead);
    }
  };
  find_chunks(chunk);
  int slot = 0, parity = 1;
  for (int left = run.end - run.begin; left > 0; left -= kBatch) {
    int key_page[kBatch][2], value_page[kBatch][2];
    {
      Place paged = here;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          key_page[i][half] = value_page[i][half] = 0;
          if (i < left && chunk[i][half] >= 0) {
            const uint32_t entry = uint32_t(position_of(chunk[i][half], half)) / kPage;
            key_page[i][half] = low(in.key_pages + (uint32_t(paged.batch) * uint32_t(in.key_pages_row) + entry));
            value_page[i][half] = low(in.value_pages + (uint32_t(paged.batch) * uint32_t(in.value_pages_row) + entry));
          }
        }
        next_of(paged);
      }
    }
    find_chunks(chunk_ahead);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i < left && __shfl_sync(~0u, chunk[i][0], 0) >= 0) {
        const int first = low(in.first + uint32_t(here.batch));
        wait_phase(memory.ring_empty(slot), parity);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // No token has some row's latents, which are masked, and some row's codes, of scale zero.
          const bool found = chunk[i][half] >= 0;
          const int position = position_of(chunk[i][half], half);
          const uint32_t row = position & kPage - 1;
          const uint32_t latent =
              key_page[i][half] * in.latent_page + (kLatentBytes % 32 == 0 ? row * (kLatentBytes / 32) : 0);
          const uint32_t code = value_page[i][half] * in.code_page + here.head * (kPage * Shape::kCodeRow / 32) +
              (Shape::kCodeRow % 32 == 0 ? row * (Shape::kCodeRow / 32) : 0);
          const uint32_t scale = value_page[i][half] * in.scale_page + here.head * (kPage / 16) + row / 16;
          store_shared16(
              memory.places(slot) + (half * 32 + lane) * 16,
              found ? make_uint4(latent, scale, code, first + position) : make_uint4(0, 0, 0, ~0u));
        }
        __syncwarp();
        if (lane == 0) arrive(memory.ring_full(slot));
        if (++slot == Shape::kRing) slot = 0, parity ^= 1;
      }
      next_of(here);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) chunk[i][0] = chunk_ahead[i][0], chunk[i][1] = chunk_ahead[i][1];
  }
  wait_phase(memory.ring_empty(slot), parity);
  if (lane == 0) {
    store_shared16(memory.places(slot), make_uint4(0, 0, 0, uint32_t(kLastTile)));
    arrive(memory.ring_full(slot));
  }
}

} // namespace shadowkv
