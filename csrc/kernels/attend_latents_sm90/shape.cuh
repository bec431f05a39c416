// What attention from latents on Hopper reads and writes, how its tiles are distributed, and its shared memory.
#pragma once

#include "constants.h"
#include "kernels/attend_selected/value_codecs.cuh"
#include "kernels/common/hopper.cuh"
#include "kernels/common/memory.cuh"
#include "kernels/common/rope_order.cuh"
#include "kernels/common/scan_warp.cuh"
#include "tile_line.cuh"

#include <cuda_bf16.h>

namespace shadowkv {

// The thread's number, re-read so that the compiler keeps neither it nor what follows from it: registers are scarce.
__device__ __forceinline__ int this_thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

constexpr int kLogLatentTile = 6;
constexpr int kLatentTile = 64;                  // tokens of a tile, 16 per warp
constexpr int kStrong = 32;                      // rank dimensions in 8 bits, the first; the others have 4
constexpr int kLastTile = -2;                    // as a position: no more tiles
static_assert(kLatentTile == 1 << kLogLatentTile);

// Consumer warpgroups of a block, by how many query heads a kv head has at the most: 4, 8 or 16.
template <int kQueries>
constexpr int kLatentConsumers = kQueries == 4 ? 3 : 2;

// Page strides of latents, codes and scale count 32 bytes each, the others elements.
struct LatentInputs {
  const __nv_bfloat16* q;    // [batch, heads * group, dim]
  const int64_t* selected;   // [batch, heads, chunks], -1s last
  const int64_t* most;       // [batch], chunks of a sequence that are not -1 at the most; or null for all
  const char* latents;       // pages of [64] rows of latents
  const char* codes;         // pages of [heads, 64, dim] codes
  const char* scale;         // pages of [heads, 64] half
  const int64_t* key_pages;  // [batch, entries]
  const int64_t* value_pages;
  const __nv_bfloat16* basis; // [states, rank, heads, dim]
  const void* mean;           // [states, heads, dim] float or bf16, or null
  const int64_t* states;      // [batch]
  const int64_t* first;       // [batch], multiples of 64: the position of a row's first token
  const float* rotation;      // [dim, dim], of the values' codec
  const float* log_weight;    // [batch, heads, chunks], natural, of the tokens of a chunk; or null for zeros
  // [dim / 32, 4, 2, 2], revolutions per position, times 2^32: of dimensions 16 i + 8 j + 2 t + e at [i, t, j, e].
  const uint32_t* frequencies;
  uint32_t latent_page, code_page, scale_page;
  int64_t key_pages_row, value_pages_row, basis_state, mean_state;
  RopeOrder rope;
  float score_scale; // turns q k into a base-2 exponent
  int batch, heads, group, chunks, log_chunk;
  bool mean_is_float;

  // Of each of a sequence's units: a sequence and kv head.
  __device__ __forceinline__ int tiles_of(int sequence) const {
    const int own = most ? int(max(int64_t(0), min(__ldg(most + sequence), int64_t(chunks)))) : chunks;
    return (own << log_chunk) + kLatentTile - 1 >> kLogLatentTile;
  }
};

struct LatentOutputs {
  __nv_bfloat16* out; // [batch, heads * group, dim]
  float* lse;         // [batch, heads * group]
  // [batch * heads + blocks, consumers, group, dim + 4]: weighted sum, largest score, sum of weights. What a block has
  // of a unit is at the sum of their numbers: along the line of tiles one of these advances, or both do.
  float* partial;
};

// For the attending kernel and the merging kernel after it.
struct LatentCall {
  LatentInputs in;
  LatentOutputs to;
  int blocks; // of the attending kernel
};

// The part of the line that a block has: `length` tiles from tile `begin` of a unit on, which is the head's of a
// sequence with so many `tiles` a head.
struct Run {
  int sequence, head, tiles, begin, length;
};

// A block's run; for one warp.
__device__ __forceinline__ Run find_run(const LatentInputs& in, int blocks, int block) {
  const int lane = threadIdx.x % 32;
  uint32_t tiles = 0; // of one head of each sequence
  for (int sequence = lane; sequence < in.batch; sequence += 32) tiles += in.tiles_of(sequence);
  const TileLine line = {__reduce_add_sync(~0u, tiles) * in.heads, uint32_t(blocks)};
  const int begin = line.begin(block), length = line.begin(block + 1) - begin;
  if (length == 0) return {0, 0, 0, 0, 0};
  uint32_t before = 0; // tiles of one head of the sequences before
  for (int first = 0;; first += 32) {
    const int own = first + lane < in.batch ? in.tiles_of(first + lane) : 0;
    const uint32_t inclusive = before + scan_warp(own);
    const uint32_t past = __ballot_sync(~0u, inclusive * in.heads > uint32_t(begin));
    before = __shfl_sync(~0u, inclusive, 31);
    if (past == 0) continue;
    const int found = __ffs(past) - 1, of_head = __shfl_sync(~0u, own, found);
    const int within = begin - int(__shfl_sync(~0u, inclusive, found) - of_head) * in.heads;
    return {first + found, within / of_head, of_head, within % of_head, length};
  }
}

// A unit of a block's run, and its tiles that belong to the run.
struct RunUnit {
  int sequence, head, tiles, begin, end, left; // left: tiles of the run after this unit

  __device__ __forceinline__ explicit RunUnit(const Run& run)
      : sequence(run.sequence),
        head(run.head),
        tiles(run.tiles),
        begin(run.begin),
        end(min(run.tiles, run.begin + run.length)),
        left(run.length - (end - run.begin)) {}
  // Goes to the next unit of the run; false if there is none.
  __device__ __forceinline__ bool advance(const LatentInputs& in) {
    if (left == 0) return false;
    if (++head == in.heads) {
      head = 0;
      do tiles = in.tiles_of(++sequence);
      while (tiles == 0);
    }
    begin = 0, end = min(tiles, left), left -= end;
    return true;
  }
  __device__ __forceinline__ int number(const LatentInputs& in) const { return sequence * in.heads + head; }
};

// What consumers have to know of a unit: its number, its first tile in the run, how many of its tiles have tokens, and
// whether another unit follows.
struct FilledUnit {
  int number, begin, count, more;
};

// kQueries: at most so many, 4, 8 or 16. With four, the columns of the values' product are those queries twice, over
// dimensions from 16 j and from 16 j + dim / 2 on of eight tokens, instead of eight queries over 16 tokens: half the
// sums, in as many products. With 16, keys and values that are in registers are multiplied with two sets of eight.
template <class Value_, int kDim_, int kRank_, int kQueries_>
struct LatentShape {
  using Value = Value_;
  static constexpr int kDim = kDim_, kRank = kRank_;
  static constexpr int kQueries = kQueries_;
  static constexpr bool kFew = kQueries == 4;
  static constexpr int kSets = kFew ? 1 : kQueries / 8, kColumns = kQueries / kSets; // queries of a product: a set
  static constexpr int kSums = kDim / 16 / (kFew ? 2 : 1); // fragments of them, of a set
  static constexpr int kHalves = kDim / 64;   // of the product's columns: 32 dimensions and those RoPE pairs them with
  static constexpr int kSteps = kRank / 16;   // of the product
  static constexpr int kRows = kRank + 8;     // of the basis, then the mean
  static constexpr int kLatentBytes = (kRank + kStrong) / 2; // of a token, in memory
  // Bytes from one token to the next in a stage: four bytes per lane of eight rows are in different banks.
  static constexpr int kLatentRow = (kLatentBytes / 16 | 1) * 16;
  static constexpr int kCodeRow = Value::row_bytes(kDim); // bytes
  static constexpr bool kSwapped = kCodeRow == 32 || kCodeRow == 64; // rows of some neighbours swap, see row_at
  static constexpr int kMergeRow = kDim + 4;  // floats

  // Registers: a multiprocessor has 512 for four warpgroups, or 504 for three.
  static constexpr int kConsumers = kLatentConsumers<kQueries>;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = kFew ? 56 : kSets == 1 ? 88 : 72;
  static constexpr int kConsumerRegisters = kFew ? 152 : kSets == 1 ? 208 : 216;

  // Shared memory: two units; per consumer, sums of two warps and the states of all warps; the rest; as many stages as
  // fit.
  static constexpr int kBasisBytes = kHalves * kRows * 128;
  static constexpr int kSetBytes = kDim / 16 * 256; // of a set of queries
  static constexpr int kUnitBytes = kBasisBytes + kSets * kSetBytes;
  static constexpr int kStateBytes = 4 * kQueries * 16;
  static constexpr int kMergeBytes = 2 * kQueries * kMergeRow * 4 + kStateBytes;
  static constexpr int kSumBytes = 2 * kDim * 4;
  // Tiles in the ring; a multiple of the consumers, see LatentMemory.
  static constexpr int kRing = 12, kRingBytes = kRing * kLatentTile * 16;
  static constexpr int kFixedBytes =
      2 * kUnitBytes + kConsumers * kMergeBytes + kSumBytes + kRingBytes + kDim * 2 + 512;
  static constexpr int kStageBytes = kLatentTile * (kLatentRow + kCodeRow);
  static constexpr int kRoom = (227 * 1024 - kFixedBytes) / kStageBytes;
  static constexpr int kStages = kRoom < 8 ? kRoom : 8;
  static constexpr int kSharedBytes = kFixedBytes + kStages * kStageBytes;
  static_assert(kMergeBytes >= kSets * 128 * 16 + kStateBytes && kFixedBytes % 128 == 0);
  static_assert(Value::kRotated && Value::scales(kDim) == 1, "what is copied, and merged");
  static_assert(kStages >= kConsumers && kRing > kStages && kRing % kConsumers == 0);
};

// The parts of a block's shared memory. Tile n of a run (counting tiles with tokens) has slot n % kRing of the ring,
// stage n % kStages and consumer n % kConsumers. Barriers, who waits at them, and for whom:
//   ring_full     the copier, for the finder
//   ring_empty    the finder before tile n + kRing, for the copier at tile n + kStages
//   stage_full    the consumer, for the copier and its copies; one per slot of the ring: as kRing is a multiple of the
//                 consumers, they then use only barriers whose last phase they waited for themselves. With one per
//                 stage, a consumer could arrive before the phase of another consumer's tile is over, and mistake that
//                 phase's parity for its own.
//   stage_empty   the copier before tile n + kStages, for the consumer's four warps
//   unit_full     the consumers, for the threads that fill units; unit_empty the other way round
// A slot is rewritten only after its tile was consumed, as the copier waited for that before its own arrival; the
// finder waits only for copies of earlier tiles, so there is no deadlock.
template <class Shape>
struct LatentMemory {
  char* const first;

  __device__ char* basis(int unit) const { return first + unit % 2 * Shape::kUnitBytes; }
  __device__ uint2* queries(int unit) const { return reinterpret_cast<uint2*>(basis(unit) + Shape::kBasisBytes); }
  __device__ float* merge(int consumer) const {
    return reinterpret_cast<float*>(first + 2 * Shape::kUnitBytes + consumer * Shape::kMergeBytes);
  }
  __device__ float* sums() const { return merge(Shape::kConsumers); }
  // For each token of a tile: where its latents, scale and codes begin, in units of 32 bytes, and its position, or -1.
  // If rows of latents are not multiples of 32 bytes, it is where their page begins; if rows of codes are not, where
  // their head begins. The scale, with its neighbour, later replaces the place of the codes.
  __device__ uint32_t places(int slot) const {
    return shared_address(sums()) + Shape::kSumBytes + slot * kLatentTile * 16;
  }
  __device__ FilledUnit* filled() const { // two units
    return reinterpret_cast<FilledUnit*>(reinterpret_cast<char*>(sums()) + Shape::kSumBytes + Shape::kRingBytes);
  }
  __device__ FilledUnit& filled(int unit) const { return filled()[unit % 2]; }
  __device__ Run& run() const { return *reinterpret_cast<Run*>(filled() + 2); }
  __device__ uint32_t barriers() const { return shared_address(filled() + 4); }
  // Tiles are copied into stages; barriers of the ring signal their arrival.
  __device__ uint32_t stage_full(int slot) const { return barriers() + slot * 8; }
  __device__ uint32_t ring_full(int slot) const { return barriers() + (Shape::kRing + slot) * 8; }
  __device__ uint32_t ring_empty(int slot) const { return barriers() + (2 * Shape::kRing + slot) * 8; }
  __device__ uint32_t stage_empty(int i) const { return barriers() + (3 * Shape::kRing + i) * 8; }
  __device__ uint32_t unit_full(int unit) const {
    return barriers() + (3 * Shape::kRing + Shape::kStages + unit % 2) * 8;
  }
  __device__ uint32_t unit_empty(int unit) const { return unit_full(unit) + 16; }
  __device__ uint32_t stage(int i) const { return shared_address(first + Shape::kFixedBytes) + i * Shape::kStageBytes; }
  __device__ uint32_t frequencies() const { return stage(0) - Shape::kDim * 2; }
};

// Which of 32 ranks is in a row of the second factor, for two products of 16: a lane has a word of eight consecutive
// codes, or for strong ones a word of four for each product. Ranks above 32 are only an added offset.
__device__ constexpr int rank_of(int row, bool strong) {
  const int lane = row >> 1 & 3, step = row >> 4 & 1, half = row >> 3 & 1, other = row & 1;
  return (row & ~31) + (strong ? step * 16 + lane * 4 + half * 2 + other : lane * 8 + other * 4 + step * 2 + half);
}

// Where a byte of a token's codes is among those of 16 tokens. Lanes read every second token at once, from different
// banks: rows of 48 and 24 bytes are naturally laid out so; in rows of 64 and 32 bytes, 16-byte units change places.
// A token's row begins at row_at, and its byte i is byte i ^ moved_at there.
template <class Shape>
__device__ __forceinline__ int row_at(int token) {
  return (Shape::kSwapped ? token ^ (token >> 2 & 1) : token) * Shape::kCodeRow;
}

template <class Shape>
__device__ __forceinline__ int moved_at(int token) {
  return Shape::kCodeRow == 64 ? (token >> 1 & 1) << 5 : 0;
}

} // namespace shadowkv
