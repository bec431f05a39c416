// The finder: locates the tokens of a block's tiles, as far ahead of the copies as the ring has room.
#pragma once

#include "shape.cuh"

namespace shadowkv {

constexpr int kFindBatch = 4; // tiles that are looked up at a time

// A lane's values for a batch of tiles: of tokens `lane` and 32 + lane of each tile.
using OfTokens = int[kFindBatch][2];

// A place in the line of all tiles.
struct LinePlace {
  int sequence, head, row, tiles, tile; // row: where the unit's chunks begin in `selected`; tile: of the unit's tiles

  __device__ __forceinline__ explicit LinePlace(const LatentInputs& in, const Run& run)
      : sequence(run.sequence),
        head(run.head),
        row((run.sequence * in.heads + run.head) * in.chunks),
        tiles(run.tiles),
        tile(run.begin) {}
  __device__ __forceinline__ bool exists(const LatentInputs& in) const { return sequence < in.batch; }
  __device__ __forceinline__ void advance(const LatentInputs& in) {
    if (++tile < tiles || !exists(in)) return;
    tile = 0, row += in.chunks;
    if (++head < in.heads) return;
    head = 0, tiles = 0;
    while (++sequence < in.batch && (tiles = in.tiles_of(sequence)) == 0) row += in.heads * in.chunks;
  }
};

// Names and numbers are under 2^31: only the lower 32 of their 64 bits matter.
__device__ __forceinline__ int load_low(const int64_t* p) { return __ldg(reinterpret_cast<const int*>(p)); }

// Where a token of a chunk is in its sequence, relative to the row's first token.
__device__ __forceinline__ int position_of(const LatentInputs& in, int chunk, int half) {
  const int lane = threadIdx.x % 32;
  return (chunk << in.log_chunk) + (half * 32 + lane & (1 << in.log_chunk) - 1);
}

// The chunks of the tokens of a batch that begins `at` a place, which is advanced past it; -1 for no token.
__device__ __forceinline__ void find_chunks(const LatentInputs& in, LinePlace& at, OfTokens& chunk) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kFindBatch; ++i) {
    const bool any = at.exists(in);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = (at.tile * kLatentTile + half * 32 + lane) >> in.log_chunk;
      chunk[i][half] = any && index < in.chunks ? load_low(in.selected + (at.row + index)) : -1;
    }
    at.advance(in);
  }
}

// The pages of these chunks, if they are among the `left` tiles of the run; 0 otherwise.
__device__ __forceinline__ void find_pages(
    const LatentInputs& in, LinePlace at, int left, const OfTokens& chunk, OfTokens& key_page,
    OfTokens& value_page) {
#pragma unroll
  for (int i = 0; i < kFindBatch; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      key_page[i][half] = value_page[i][half] = 0;
      if (i < left && chunk[i][half] >= 0) {
        const uint32_t entry = uint32_t(position_of(in, chunk[i][half], half)) / kPage;
        key_page[i][half] = load_low(in.key_pages + (uint32_t(at.sequence) * uint32_t(in.key_pages_row) + entry));
        value_page[i][half] = load_low(in.value_pages + (uint32_t(at.sequence) * uint32_t(in.value_pages_row) + entry));
      }
    }
    at.advance(in);
  }
}

// Writes to the ring, in a tile's `places`, where its tokens are. first: the position of the row's first token.
template <class Shape>
__device__ __forceinline__ void write_places(
    const LatentInputs& in, uint32_t places, int head, int first, const int (&chunk)[2], const int (&key_page)[2],
    const int (&value_page)[2]) {
  constexpr int kLatentBytes = Shape::kLatentBytes, kCodeRow = Shape::kCodeRow;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // A missing token uses the latents of some row, which are masked, and the codes of some row, with scale zero.
    const bool exists = chunk[half] >= 0;
    const int position = position_of(in, chunk[half], half);
    const uint32_t row = position & kPage - 1;
    const uint32_t latent = key_page[half] * in.latent_page + (kLatentBytes % 32 == 0 ? row * (kLatentBytes / 32) : 0);
    const uint32_t code = value_page[half] * in.code_page + head * (kPage * kCodeRow / 32) +
        (kCodeRow % 32 == 0 ? row * (kCodeRow / 32) : 0);
    const uint32_t scale = value_page[half] * in.scale_page + head * (kPage / 16) + row / 16;
    store_shared16(
        places + (half * 32 + lane) * 16,
        exists ? make_uint4(latent, scale, code, first + position) : make_uint4(0, 0, 0, ~0u));
  }
}

// Finds the tokens of the block's tiles and writes their places to the ring, as far ahead of the copies as it has room.
// Takes four tiles at a time: the loads of a batch do not wait for each other, and chunk numbers are read a batch
// ahead. The line is walked without a break between units; tiles without tokens are skipped.
template <class Shape>
__device__ __forceinline__ void find_tokens(const LatentInputs& in, const Run run, const LatentMemory<Shape>& memory) {
  const int lane = threadIdx.x % 32;
  LinePlace here(in, run), ahead = here;
  OfTokens chunk, chunk_ahead;
  find_chunks(in, ahead, chunk);
  int slot = 0, parity = 1;
  for (int left = run.length; left > 0; left -= kFindBatch) {
    OfTokens key_page, value_page;
    find_pages(in, here, left, chunk, key_page, value_page);
    find_chunks(in, ahead, chunk_ahead);
#pragma unroll
    for (int i = 0; i < kFindBatch; ++i) {
      if (i < left && __shfl_sync(~0u, chunk[i][0], 0) >= 0) {
        const int first = load_low(in.first + uint32_t(here.sequence));
        wait_phase(memory.ring_empty(slot), parity);
        write_places<Shape>(in, memory.places(slot), here.head, first, chunk[i], key_page[i], value_page[i]);
        __syncwarp();
        if (lane == 0) arrive(memory.ring_full(slot));
        if (++slot == Shape::kRing) slot = 0, parity ^= 1;
      }
      here.advance(in);
    }
#pragma unroll
    for (int i = 0; i < kFindBatch; ++i) chunk[i][0] = chunk_ahead[i][0], chunk[i][1] = chunk_ahead[i][1];
  }
  wait_phase(memory.ring_empty(slot), parity);
  if (lane == 0) {
    store_shared16(memory.places(slot), make_uint4(0, 0, 0, uint32_t(kLastTile)));
    arrive(memory.ring_full(slot));
  }
}

} // namespace shadowkv
