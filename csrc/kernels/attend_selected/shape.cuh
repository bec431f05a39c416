// What attention over selected chunks reads and writes, and its layout in shared memory.
#pragma once

#include "constants.h"
#include "kernels/common/memory.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/rope_order.cuh"

#include <type_traits>

#include "key_codecs.cuh"
#include "value_codecs.cuh"

namespace shadowkv {

constexpr int kAttendWarps = 4;
constexpr int kAttendQueries = 8; // most query heads of a block: columns of a product

// Scales of fp8 rows.
struct HeadScales {
  const float* scales;   // states of [heads]
  const int64_t* states; // [batch]
  int64_t state;         // elements between consecutive states

  __device__ __forceinline__ float of(int batch, int head) const { return scales[states[batch] * state + head]; }
};

// Page strides count bytes between consecutive page ids, the others elements.
struct AttendInputs {
  const __nv_bfloat16* q;    // [batch, heads * group, dim]
  const int64_t* selected;   // [batch, heads, chunks], -1s last
  const char* keys;          // pages of [64, rank] latents or [heads, 64, dim] rows
  const char* values;        // pages of [heads, 64, dim] codes or rows, or a buffer: see below
  const char* scale;         // pages of [heads, 64, scales] half, for codes, at key_pages
  const int64_t* key_pages;  // [batch, entries]
  const int64_t* value_pages;
  // Null, or the values are the chunks of a buffer [slots, heads, buffer_entries], value_page bytes each, and
  // value_pages has the buffer entry of every selected chunk instead of pages.
  const int64_t* value_slots; // [batch]
  const __nv_bfloat16* basis; // [states, rank, heads, dim]
  const void* mean;           // [states, heads, dim] float or bf16, or null; of centred keys float
  const int64_t* states;      // [batch]
  const int64_t* first;       // [batch], multiples of 64: the position of a row's first token
  const uint2* far_angles;    // [positions / 8, dim / 4], cos and sin of two dimensions as half2, of positions 8 n
  const uint2* near_angles;   // [8, dim / 4], of positions 0 to 7
  const float* rotation;      // [dim, dim], the codec's, for rotated codes
  const float* log_weight;    // [batch, heads, chunks], natural, of the tokens of a chunk; or null for zeros
  HeadScales key_scales, value_scales; // of fp8
  int64_t key_page, value_page, scale_page, key_pages_row, value_pages_row, basis_state, mean_state;
  RopeOrder rope;    // of latents' keys, or of a mean
  float score_scale; // turns q k into a base-2 exponent
  int batch, heads, group, chunks, log_chunk, rank, splits, buffer_entries;
  int key_bytes, strong; // of a token's key; latents in 8 bits, if the others have fewer
  bool mean_is_float;
};

struct AttendOutputs {
  __nv_bfloat16* out; // [batch, heads * group, dim]
  float* lse;         // [batch, heads * group]
  // [batch, heads, splits, group, dim + 4]: weighted sum, largest score, sum of weights; unused with one split.
  float* partial;
};

// Parameters of one instance of the kernel. kRank is the largest rank, or the only one if kExactRank; a warp processes
// kTiles times 16 tokens at a time; a multiprocessor holds kBlocks blocks.
template <class Key_, class Value_, int kDim_, int kRank_, bool kExactRank_, int kTiles_, int kBlocks_>
struct AttendShape {
  using Key = Key_;
  using Value = Value_;
  static constexpr int kDim = kDim_, kRank = kRank_, kTiles = kTiles_, kBlocks = kBlocks_;
  static constexpr bool kExactRank = kExactRank_, kLow = Key::kRebuilt, kCodes = Value::kCoded;
  static constexpr bool kRotated = Value::kRotated;
  static constexpr bool kCentred = std::is_same_v<Key, CentredFp8Keys>;
  static constexpr bool kAngles = kLow || kCentred; // whether keys, or their mean, are rotated
  static constexpr bool kFp8Keys = Key::kId == codec::kFp8, kFp8Values = Value::kId == codec::kFp8;
  static constexpr int kScales = Value::scales(kDim);           // of a token; 1 for rows that have none
  static constexpr int kTokens = 16 * kTiles;
  static constexpr int kPairs = kDim / 16;                      // n8 tiles of dimensions that RoPE pairs with others
  static constexpr int kBasisRow = (kDim == 96 ? 128 : kDim) * 2; // bytes; the swizzle needs whole 128-byte lines
  static constexpr int kRowGap = 16; // rows odd in units of 16 bytes have no bank conflicts
  static constexpr int kValueRow = kCodes ? 0 : Value::row_bytes(kDim) + kRowGap;
  static constexpr int kMergeRow = kDim + 4;                    // floats
  static constexpr int kAngleRow = kDim * 2 + 32;               // bytes of cos and sin of one position, and a gap

  // Most bytes of a token's key in shared memory.
  __host__ __device__ static constexpr int key_bytes(int rank) { return (kLow ? rank : kDim) * Key::kBits / 8; }
  // A key's row in shared memory. Of latents: an odd multiple of what the four lanes of a quad read, to avoid bank
  // conflicts.
  __host__ __device__ static constexpr int key_row(int rank) {
    if constexpr (!kLow) return key_bytes(rank) + kRowGap;
    else return (key_bytes(rank) / (4 * Key::kLeast) | 1) * 4 * Key::kLeast;
  }
  __host__ __device__ static constexpr int basis_bytes(int rank) { return kLow ? rank * kBasisRow : 0; }
  // Shared memory: basis, mean (of centred keys, its products with queries), angles, query fragments; per warp a tile
  // of keys, of values and where its rows are.
  static constexpr int kMeanBytes = kCentred ? kPairs * 256 : kLow ? kDim * 2 : 0;
  __host__ __device__ static constexpr int table_bytes(int rank) {
    return basis_bytes(rank) + kMeanBytes + (kAngles ? 8 * kAngleRow : 0) + kPairs * 256;
  }
  __host__ __device__ static constexpr int warp_bytes(int rank) {
    return kTokens * (key_row(rank) + kValueRow + 20 + 4 * kScales);
  }
  static constexpr int kMergeBytes = (kAttendWarps + 1) * kAttendQueries * kMergeRow * 4 + 256;
  __host__ __device__ static constexpr int shared_bytes(int rank) {
    const int all = table_bytes(rank) + kAttendWarps * warp_bytes(rank);
    return all > kMergeBytes ? all : kMergeBytes;
  }
};

// The queries of a block. A kv head with more of them has several blocks, each of which rebuilds the keys.
struct BlockQueries {
  int split, first, count;

  __device__ __forceinline__ explicit BlockQueries(const AttendInputs& in)
      : split(blockIdx.x % in.splits),
        first(blockIdx.x / in.splits * kAttendQueries),
        count(min(in.group - first, kAttendQueries)) {}
};

// The tables of a block.
template <class Shape>
struct AttendTables {
  char* const basis;
  char* const mean;
  char* const near_angles;
  uint2* const queries;

  __device__ __forceinline__ AttendTables(char* shared, int rank)
      : basis(shared),
        mean(shared + Shape::basis_bytes(rank)),
        near_angles(mean + Shape::kMeanBytes),
        queries(reinterpret_cast<uint2*>(shared + Shape::table_bytes(rank) - Shape::kPairs * 256)) {}
};

// Per warp: a tile's keys, its values if they are rows, and for each token the places of its key and value, its
// position and its scales, stored field by field for all tokens.
template <class Shape>
struct AttendTile {
  static constexpr int kTokens = Shape::kTokens;
  const int key_row;
  char* const keys;
  char* const values;
  const char** const key_rows;
  const char** const value_rows;
  int* const positions;
  float* const scales;

  __device__ __forceinline__ AttendTile(char* shared, int rank)
      : key_row(Shape::key_row(rank)),
        keys(shared + Shape::table_bytes(rank) + threadIdx.x / 32 * Shape::warp_bytes(rank)),
        values(keys + kTokens * key_row),
        key_rows(reinterpret_cast<const char**>(values + kTokens * Shape::kValueRow)),
        value_rows(key_rows + kTokens),
        positions(reinterpret_cast<int*>(value_rows + kTokens)),
        scales(reinterpret_cast<float*>(positions + kTokens)) {}
};

} // namespace shadowkv
