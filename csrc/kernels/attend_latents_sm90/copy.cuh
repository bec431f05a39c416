// The copier: moves the tokens that the finder found into stages, from which consumers read them.
#pragma once

#include "shape.cuh"

namespace shadowkv {

// How a warp shares the rows of a tile's tokens, kUnit bytes a lane: lanes take units one after the other, as lines are
// fetched whole where neighbours ask for them; after so many turns all lanes have the same units of other tokens.
template <int kRow, int kUnit>
struct RowTurns {
  static constexpr int kUnits = kRow / kUnit, kTurns = kUnits % 5 == 0 ? 5 : kUnits % 3 == 0 ? 3 : 1;
  static constexpr int kTokens = 32 * kTurns / kUnits;     // after so many turns
  static constexpr int kRounds = kLatentTile / kTokens;    // of them
  // Rounds whose places are in registers, which are scarce.
  static constexpr int kAtOnce = kTurns > 1 ? kUnit / 8 : kRounds < 8 ? kRounds : 8;
  static_assert(kUnits * kTokens == 32 * kTurns && kRounds % kAtOnce == 0);

  __device__ static int token(int turn) { return (32 * turn + int(threadIdx.x) % 32) / kUnits; }
  __device__ static int unit(int turn) { return (32 * turn + int(threadIdx.x) % 32) % kUnits; }
};

// Copies tiles. All 64 rows of a tile are copied, of tokens that are none too. 16 bytes a lane: bulk copies (TMA) of
// single rows were slower, even of latents or 3-bit codes alone by a warp of their own (150 against 87 us at 63 rows of
// 960 tokens on an H200), those of chunks of eight no faster. Nor is the copier what others wait for: a second one, or
// scales that the finder fetches into the cache, won nothing, and without copies the rest takes 80 us.
template <class Shape>
__device__ __forceinline__ void copy_tiles(const LatentInputs& in, const LatentMemory<Shape>& memory) {
  constexpr int kCodeRow = Shape::kCodeRow, kRing = Shape::kRing;
  constexpr int kLatentBytes = Shape::kLatentBytes, kLatentRow = Shape::kLatentRow;
  constexpr int kCodeUnit = kCodeRow % 16 == 0 ? 16 : 8;
  using Latents = RowTurns<kLatentBytes, 16>;
  using Codes = RowTurns<kCodeRow, kCodeUnit>;
  const int lane = threadIdx.x % 32;
  const char* latents[Latents::kTurns];
  uint32_t latents_place[Latents::kTurns], latents_to[Latents::kTurns];
#pragma unroll
  for (int i = 0; i < Latents::kTurns; ++i) {
    const int token = Latents::token(i), unit = Latents::unit(i);
    latents[i] = in.latents + unit * 16;
    latents_place[i] = token * 16;
    latents_to[i] = token * kLatentRow + unit * 16;
  }
  const char* codes[Codes::kTurns];
  uint32_t codes_place[Codes::kTurns], codes_to[Codes::kTurns];
#pragma unroll
  for (int i = 0; i < Codes::kTurns; ++i) {
    codes[i] = in.codes + Codes::unit(i) * kCodeUnit;
    codes_place[i] = Codes::token(i) * 16 + 8;
    const int token = Codes::token(i);
    codes_to[i] = kLatentTile * kLatentRow +
        (Shape::kSwapped ? row_at<Shape>(token) + (Codes::unit(i) * kCodeUnit ^ moved_at<Shape>(token))
                         : (32 * i + lane) * kCodeUnit);
  }
  int stage = 0, stage_parity = 1, slot = 0, slot_parity = 0, done = kRing - Shape::kStages;
  for (int tile = 0;; ++tile) {
    wait_phase(memory.ring_full(slot), slot_parity);
    const uint32_t places = memory.places(slot), full = memory.stage_full(slot), my_place = places + lane * 16;
    if (load_shared4(places + 12) == uint32_t(kLastTile)) break;
    wait_phase(memory.stage_empty(stage), stage_parity);
    // So the tile that this stage had is no longer read, nor its place in the ring.
    if (tile >= Shape::kStages && lane == 0) arrive(memory.ring_empty(done));
    if (++done == kRing) done = 0;
    const uint32_t into = memory.stage(stage);
#pragma unroll
    for (int round = 0; round < Latents::kRounds; round += Latents::kAtOnce) {
      uint64_t from[Latents::kAtOnce][Latents::kTurns];
#pragma unroll
      for (int r = 0; r < Latents::kAtOnce; ++r) {
#pragma unroll
        for (int i = 0; i < Latents::kTurns; ++i) {
          const uint32_t place = places + latents_place[i] + (round + r) * Latents::kTokens * 16;
          from[r][i] = uint64_t(load_shared4(place)) * 32;
          if constexpr (kLatentBytes % 32) from[r][i] += (load_shared4(place + 12) & kPage - 1) * kLatentBytes;
        }
      }
#pragma unroll
      for (int r = 0; r < Latents::kAtOnce; ++r) {
#pragma unroll
        for (int i = 0; i < Latents::kTurns; ++i)
          copy16_async(
              into + latents_to[i] + (round + r) * Latents::kTokens * kLatentRow, latents[i] + from[r][i]);
      }
    }
#pragma unroll
    for (int round = 0; round < Codes::kRounds; round += Codes::kAtOnce) {
      uint64_t from[Codes::kAtOnce][Codes::kTurns];
#pragma unroll
      for (int r = 0; r < Codes::kAtOnce; ++r) {
#pragma unroll
        for (int i = 0; i < Codes::kTurns; ++i) {
          const uint32_t place = places + codes_place[i] + (round + r) * Codes::kTokens * 16;
          if constexpr (kCodeRow % 32 == 0) {
            from[r][i] = uint64_t(load_shared4(place)) * 32;
          } else {
            const uint2 head_and_position = load_shared8(place);
            from[r][i] = uint64_t(head_and_position.x) * 32 + (head_and_position.y & kPage - 1) * kCodeRow;
          }
        }
      }
#pragma unroll
      for (int r = 0; r < Codes::kAtOnce; ++r) {
#pragma unroll
        for (int i = 0; i < Codes::kTurns; ++i) {
          const uint32_t to = into + codes_to[i] + (round + r) * Codes::kTokens * kCodeRow;
          if constexpr (kCodeUnit == 16)
            copy16_async(to, codes[i] + from[r][i]);
          else
            copy8_async(to, codes[i] + from[r][i]);
        }
      }
    }
    uint4 scale[2]; // where two tokens' are, and their positions
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[i] = load_shared16(my_place + i * 512);
    __syncwarp(); // as they come over where codes began, which is known by now
#pragma unroll
    for (int i = 0; i < 2; ++i)
      copy4_async(
          my_place + i * 512 + 8, in.scale + uint64_t(scale[i].y) * 32 + (scale[i].w & 15) / 2 * 4,
          int(scale[i].w) >= 0);
    arrive_with_copies(full);
    __syncwarp();
    if (lane == 0) arrive(full); // for what was read in the ring, and is there for others
    if (++stage == Shape::kStages) stage = 0, stage_parity ^= 1;
    if (++slot == kRing) slot = 0, slot_parity ^= 1;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

} // namespace shadowkv
