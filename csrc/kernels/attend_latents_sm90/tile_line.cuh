// How tiles are distributed over thread blocks.
#pragma once

#include <cstdint>

namespace shadowkv {

// The line of the tiles of all units, each sequence's as many as it has, is split into equal runs, one per block. With
// fewer tiles than blocks, the first blocks have one each and the last have none: no block without tiles is between
// others that share a unit. The merge reads what all blocks from a unit's first to its last have left of it. Tiles times
// blocks are under 2^32 (binding.h): divisions of 64 bits take too long for one row.
struct TileLine {
  uint32_t tiles, runs;

  __device__ TileLine(uint32_t tiles_, uint32_t blocks) : tiles(tiles_), runs(tiles_ < blocks ? tiles_ : blocks) {}

  // The first tile of a block's run, which ends where that of the next block begins.
  __device__ int begin(uint32_t block) const { return int(block < runs ? block * tiles / runs : tiles); }
  // The block whose run has this tile.
  __device__ int block_of(uint32_t tile) const { return int(((tile + 1) * runs - 1) / tiles); }
};

} // namespace shadowkv
