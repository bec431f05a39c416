// The copier: moves the tokens that the finder found into stages, from which consumers read them.
#pragma once

#include "shape.cuh"

namespace shadowkv {

// Copies tiles. All 64 rows of a tile are copied, of tokens that are none too. 16 bytes a lane: bulk copies (TMA) of
// single rows were slower (105 against 85 us at 63 rows of 960 tokens on an H200), those of chunks of eight no faster.
template <class Shape>
__device__ __forceinline__ void copy_tiles(const LatentInputs& in, const LatentMemory<Shape>& memory) {
  constexpr int kDim = Shape::kDim, kRank = Shape::kRank, kRing = Shape::kRing;
  const int lane = threadIdx.x % 32;
  // Lanes share the latents of the tile's tokens one after the other, as lines are fetched whole where neighbours ask
  // for them; after so many turns all lanes have the same units of other tokens.
  constexpr int kUnits = kRank / 16, kTurns = kUnits % 5 == 0 ? 5 : kUnits % 3 == 0 ? 3 : 1;
  constexpr int kTokens = 32 * kTurns / kUnits;
  constexpr int kAtOnce = kTurns > 1 ? 2 : 64 / kTokens < 8 ? 64 / kTokens : 8; // turns whose places are in registers
  const char* latents[kTurns];
  uint32_t place_at[kTurns], latents_to[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int token = (32 * i + lane) / kUnits, unit = (32 * i + lane) % kUnits;
    latents[i] = in.latents + unit * 16;
    place_at[i] = token * 16;
    latents_to[i] = token * kRank + (unit + token % 2 * Shape::kOddShift) % kUnits * 16;
  }
  // Of codes, four lanes share a token; they take every eighth token.
  const int of_four = lane % 4, first = lane / 4;
  const char* const codes = in.codes + of_four * 16;
  const uint32_t codes_to = kLatentTile * kRank + code_row<Shape>(first, of_four);
  int stage = 0, stage_parity = 1, slot = 0, slot_parity = 0, done = kRing - Shape::kStages;
  for (int tile = 0;; ++tile) {
    wait_phase(memory.ring_full(slot), slot_parity);
    const uint32_t places = memory.places(slot), full = memory.stage_full(slot), my_place = places + lane * 16 + 8;
    if (load_shared4(places + 12) == uint32_t(kLastTile)) break;
    const uint2 scale[2] = {load_shared8(my_place), load_shared8(my_place + 512)}; // and position, of two tokens
    wait_phase(memory.stage_empty(stage), stage_parity);
    // So the tile that this stage had is no longer read, nor its place in the ring.
    if (tile >= Shape::kStages && lane == 0) arrive(memory.ring_empty(done));
    if (++done == kRing) done = 0;
    const uint32_t into = memory.stage(stage);
#pragma unroll
    for (int token = 0; token < kLatentTile; token += kTokens * kAtOnce) {
      uint32_t place[kAtOnce][kTurns];
#pragma unroll
      for (int i = 0; i < kAtOnce * kTurns; ++i)
        place[i / kTurns][i % kTurns] =
            load_shared4(places + place_at[i % kTurns] + (token + i / kTurns * kTokens) * 16);
#pragma unroll
      for (int i = 0; i < kAtOnce * kTurns; ++i)
        copy16_async(
            into + latents_to[i % kTurns] + (token + i / kTurns * kTokens) * kRank,
            latents[i % kTurns] + uint64_t(place[i / kTurns][i % kTurns]) * 32);
    }
    uint32_t place[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) place[i] = load_shared4(places + (8 * i + first) * 16 + 4);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (of_four < kDim / 32)
        copy16_async(into + codes_to + 8 * i * Shape::kCodeRow, codes + uint64_t(place[i]) * 32);
#pragma unroll
    for (int i = 0; i < 2; ++i) // over where it began, which is known here
      copy4_async(
          my_place + i * 512, in.scale + uint64_t(scale[i].x) * 32 + (scale[i].y & 15) / 2 * 4, int(scale[i].y) >= 0);
    arrive_with_copies(full);
    __syncwarp();
    if (lane == 0) arrive(full); // for what was read in the ring, and is there for others
    if (++stage == Shape::kStages) stage = 0, stage_parity ^= 1;
    if (++slot == kRing) slot = 0, slot_parity ^= 1;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

} // namespace shadowkv
