// The copier: moves the tokens that the finder found into stages, from which consumers read them.
#pragma once

#include "shape.cuh"

namespace shadowkv {

// How a warp shares the rows of a tile's tokens, kUnit bytes per lane: lanes take consecutive units, as lines are
// fetched whole when neighbours request them; after kCycles cycles, all lanes have the same units of other tokens.
template <int kRow, int kUnit>
struct RowCycles {
  static constexpr int kUnits = kRow / kUnit, kCycles = kUnits % 5 == 0 ? 5 : kUnits % 3 == 0 ? 3 : 1;
  static constexpr int kTokens = 32 * kCycles / kUnits;    // per kCycles cycles
  static constexpr int kRounds = kLatentTile / kTokens;   // of kTokens each
  // Rounds whose places are held in registers, which are scarce.
  static constexpr int kAtOnce = kCycles > 1 ? kUnit / 8 : kRounds < 8 ? kRounds : 8;
  static_assert(kUnits * kTokens == 32 * kCycles && kRounds % kAtOnce == 0);

  __device__ static int token(int cycle) { return (32 * cycle + int(threadIdx.x) % 32) / kUnits; }
  __device__ static int unit(int cycle) { return (32 * cycle + int(threadIdx.x) % 32) % kUnits; }
};

// What a lane copies of every tile's latents, by cycles of a round. `from`: its unit of a row, relative to the start of
// the latents; `place`: the index of the row's place among a tile's places in the ring; `to`: the unit's target in a
// stage.
template <class Shape>
struct LatentCopies {
  static constexpr int kBytes = Shape::kLatentBytes;
  using Rows = RowCycles<kBytes, 16>;
  const char* from[Rows::kCycles];
  uint32_t place[Rows::kCycles], to[Rows::kCycles];

  __device__ __forceinline__ explicit LatentCopies(const char* latents) {
#pragma unroll
    for (int i = 0; i < Rows::kCycles; ++i) {
      const int token = Rows::token(i), unit = Rows::unit(i);
      from[i] = latents + unit * 16;
      place[i] = token * 16;
      to[i] = token * Shape::kLatentRow + unit * 16;
    }
  }

  __device__ __forceinline__ void copy(uint32_t places, uint32_t into) const {
#pragma unroll
    for (int round = 0; round < Rows::kRounds; round += Rows::kAtOnce) {
      uint64_t row[Rows::kAtOnce][Rows::kCycles];
#pragma unroll
      for (int r = 0; r < Rows::kAtOnce; ++r) {
#pragma unroll
        for (int i = 0; i < Rows::kCycles; ++i) {
          const uint32_t at = places + place[i] + (round + r) * Rows::kTokens * 16;
          row[r][i] = uint64_t(load_shared4(at)) * 32;
          if constexpr (kBytes % 32) row[r][i] += (load_shared4(at + 12) & kPage - 1) * kBytes;
        }
      }
#pragma unroll
      for (int r = 0; r < Rows::kAtOnce; ++r) {
#pragma unroll
        for (int i = 0; i < Rows::kCycles; ++i)
          copy16_async(into + to[i] + (round + r) * Rows::kTokens * Shape::kLatentRow, from[i] + row[r][i]);
      }
    }
  }
};

// Likewise for the codes of values.
template <class Shape>
struct CodeCopies {
  static constexpr int kCodeRow = Shape::kCodeRow, kUnit = kCodeRow % 16 == 0 ? 16 : 8;
  using Rows = RowCycles<kCodeRow, kUnit>;
  const char* from[Rows::kCycles];
  uint32_t place[Rows::kCycles], to[Rows::kCycles];

  __device__ __forceinline__ explicit CodeCopies(const char* codes) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Rows::kCycles; ++i) {
      const int token = Rows::token(i), unit = Rows::unit(i);
      from[i] = codes + unit * kUnit;
      place[i] = token * 16 + 8;
      to[i] = kLatentTile * Shape::kLatentRow +
          (Shape::kSwapped ? row_at<Shape>(token) + (unit * kUnit ^ moved_at<Shape>(token)) : (32 * i + lane) * kUnit);
    }
  }

  __device__ __forceinline__ void copy(uint32_t places, uint32_t into) const {
#pragma unroll
    for (int round = 0; round < Rows::kRounds; round += Rows::kAtOnce) {
      uint64_t row[Rows::kAtOnce][Rows::kCycles];
#pragma unroll
      for (int r = 0; r < Rows::kAtOnce; ++r) {
#pragma unroll
        for (int i = 0; i < Rows::kCycles; ++i) {
          const uint32_t at = places + place[i] + (round + r) * Rows::kTokens * 16;
          if constexpr (kCodeRow % 32 == 0) {
            row[r][i] = uint64_t(load_shared4(at)) * 32;
          } else {
            const uint2 head_and_position = load_shared8(at);
            row[r][i] = uint64_t(head_and_position.x) * 32 + (head_and_position.y & kPage - 1) * kCodeRow;
          }
        }
      }
#pragma unroll
      for (int r = 0; r < Rows::kAtOnce; ++r) {
#pragma unroll
        for (int i = 0; i < Rows::kCycles; ++i) {
          const uint32_t target = into + to[i] + (round + r) * Rows::kTokens * kCodeRow;
          if constexpr (kUnit == 16)
            copy16_async(target, from[i] + row[r][i]);
          else
            copy8_async(target, from[i] + row[r][i]);
        }
      }
    }
  }
};

// Copies the scales of a lane's two tokens into the ring, over the places of their codes, which no lane reads any more.
// `place`: of the first token in the ring.
__device__ __forceinline__ void copy_scales(const char* scales, uint32_t place) {
  uint4 scale[2]; // places of the tokens' scales, and their positions
#pragma unroll
  for (int i = 0; i < 2; ++i) scale[i] = load_shared16(place + i * 512);
  __syncwarp(); // all lanes have read where their codes begin
#pragma unroll
  for (int i = 0; i < 2; ++i)
    copy4_async(
        place + i * 512 + 8, scales + uint64_t(scale[i].y) * 32 + (scale[i].w & 15) / 2 * 4, int(scale[i].w) >= 0);
}

// Copies tiles. All 64 rows of a tile are copied, even for missing tokens. Copies have 16 bytes per lane: bulk copies
// (TMA) of single rows were slower, even of latents or 3-bit codes alone by a separate warp (150 against 87 us at 63
// rows of 960 tokens on an H200), and those of chunks of eight were no faster. The copier is not the bottleneck either:
// a second copier, or prefetching scales in the finder, gained nothing, and without copies the rest takes 80 us.
template <class Shape>
__device__ __forceinline__ void copy_tiles(const LatentInputs& in, const LatentMemory<Shape>& memory) {
  constexpr int kRing = Shape::kRing;
  const int lane = threadIdx.x % 32;
  const LatentCopies<Shape> latents(in.latents);
  const CodeCopies<Shape> codes(in.codes);
  int stage = 0, stage_parity = 1, slot = 0, slot_parity = 0, done = kRing - Shape::kStages;
  for (int tile = 0;; ++tile) {
    wait_phase(memory.ring_full(slot), slot_parity);
    const uint32_t places = memory.places(slot), full = memory.stage_full(slot), my_place = places + lane * 16;
    if (load_shared4(places + 12) == uint32_t(kLastTile)) break;
    wait_phase(memory.stage_empty(stage), stage_parity);
    // Then neither the tile that this stage held nor its slot in the ring is read any more.
    if (tile >= Shape::kStages && lane == 0) arrive(memory.ring_empty(done));
    if (++done == kRing) done = 0;
    const uint32_t into = memory.stage(stage);
    latents.copy(places, into);
    codes.copy(places, into);
    copy_scales(in.scale, my_place);
    arrive_with_copies(full);
    __syncwarp();
    if (lane == 0) arrive(full); // what was read in the ring and is written there for others
    if (++stage == Shape::kStages) stage = 0, stage_parity ^= 1;
    if (++slot == kRing) slot = 0, slot_parity ^= 1;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

} // namespace shadowkv
