// What attention from mixed latents on Hopper reads, which pages belong to a block, and its shared memory.
#pragma once

#include "constants.h"
#include "kernels/common/hopper.cuh"
#include "kernels/common/memory.cuh"

#include <cuda_bf16.h>

namespace shadowkv {

constexpr int kMixedDim = 128;
constexpr int kMixedHalf = kMixedDim / 2;      // dimensions that RoPE pairs with the others
constexpr int kSameWidth = 16;                 // latents that follow each other and have one: a step of the product
constexpr int kVector = 4;                     // dimensions of an entry of a codebook
constexpr int kEntries = 256;
constexpr int kValueRow = kMixedDim / kVector; // bytes
constexpr int kCopies = 16;                    // of the codebook: lanes read their own, from banks of their own
constexpr int kQueryWarps = kMixedHalf / 32;   // they rotate queries (RoPE): a thread for each frequency

// Strides count bytes between consecutive page ids, and elements between consecutive states.
struct MixedInputs {
  const __nv_bfloat16* q;    // [batch, heads * group, 128]
  const char* latents;       // pages of [64, rank / 2] bytes
  const char* codes;         // pages of [heads, 64, 32] bytes
  const int64_t* key_pages;  // [batch, entries]
  const int64_t* value_pages;
  const int64_t* key_states; // [batch]
  const int64_t* value_states;
  const int64_t* first;     // [batch], multiples of 64: the position of a row's first token
  const int64_t* begin;     // [batch]
  const int64_t* end;
  const int8_t* basis;       // [states, rank, heads, 128]
  const float* step;         // [states, rank], of the basis
  const uint8_t* widths;     // [states, rank], of latents
  const __nv_bfloat16* mean; // [states, heads, 128]
  const float* largest;      // [states, heads, 128]: divisors of the values
  const float* codebook;     // [states, 256, 4]
  const uint32_t* frequencies; // as LatentInputs has them
  int64_t key_pages_row, value_pages_row, basis_state, step_state, widths_state, mean_state, largest_state, codebook_state;
  uint32_t latent_page, code_page;
  float score_scale; // turns q k into a base-2 exponent
  int batch, heads, group, entries, splits;
};

// A block's part of its sequence and two kv heads: pages first, first + step, etc.
struct MixedShare {
  int64_t sequence;
  int head;            // the first of two
  int first, step, count;
  int low, high;       // tokens that are attended to

  __device__ explicit MixedShare(const MixedInputs& in)
      : sequence(blockIdx.z),
        head(2 * blockIdx.y),
        step(in.splits),
        low(int(in.begin[sequence])),
        high(int(in.end[sequence])) {
    const int last = high > low ? min(in.entries, (high + kPage - 1) / kPage) : 0;
    first = low / kPage + blockIdx.x;
    count = last > first ? (last - first + step - 1) / step : 0;
  }
  __device__ int page(int i) const { return first + i * step; }
};

// kFew: at most four queries per head. The columns of the values' product are then those queries twice, over two halves
// of the dimensions of eight tokens, instead of eight queries over 16 tokens: half the sums, in as many products.
template <int kRank_, bool kFew_>
struct MixedShape {
  static constexpr int kRank = kRank_;
  static constexpr bool kFew = kFew_;
  static constexpr int kQueries = kFew ? 4 : 8;
  static constexpr int kSums = kFew ? 4 : 8;  // fragments of them
  static constexpr int kSteps = kRank / kSameWidth; // of the keys' product
  static constexpr int kLatentRow = kRank / 2;
  // Consumer warpgroups, and registers of their threads and of the producers': 512 for four warpgroups, 504 for three.
  static constexpr int kConsumers = kFew ? 3 : 2;
  static constexpr int kFillThreads = 128 * kConsumers;
  static constexpr int kThreads = kFillThreads + 128;
  static constexpr int kProducerRegisters = kFew ? 32 : 40, kConsumerRegisters = kFew ? 160 : 232;

  static constexpr int kHalfBytes = kRank * 128, kBasisBytes = 4 * kHalfBytes; // of 2 heads x 2 halves of the product's columns
  static constexpr int kMeanBytes = 2 * kMixedDim * 2;
  static constexpr int kAngleBytes = kPage * kMixedHalf * 4;
  static constexpr int kCodebookBytes = kEntries * kCopies * 8;
  static constexpr int kLatentBytes = kPage * kLatentRow, kCodeBytes = 2 * kPage * kValueRow;
  static constexpr int kQueryBytes = kQueries * kMixedDim * 2; // of a head
  static constexpr int kStageBytes = kLatentBytes + kCodeBytes + 2 * kQueryBytes;
  static constexpr int kFixedBytes = kBasisBytes + kAngleBytes + kCodebookBytes + kMeanBytes + kSteps * 4 * 16 + 128;
  // Each is one consumer's: with one for either, that of a page to come might take the phase before for its own.
  static constexpr int kRoom = (227 * 1024 - kFixedBytes) / kStageBytes / kConsumers * kConsumers;
  static constexpr int kStages = kRoom < 6 ? kRoom : 6;
  static constexpr int kSharedBytes = kFixedBytes + kStages * kStageBytes;
  static_assert(kRank % kSameWidth == 0 && kStages >= kConsumers);
};

// A warp's final results of a head, by query; scores are base-2 exponents.
template <class Shape>
struct MixedResults {
  float peak[Shape::kQueries], sum[Shape::kQueries];
  float out[Shape::kQueries][kMixedDim + 4];
};

// The parts of a block's shared memory.
template <class Shape>
struct MixedMemory {
  char* const base;

  __device__ char* basis() const { return base; }
  __device__ MixedResults<Shape>& results(int warp, int head) const { // replaces everything before the stages
    static_assert(
        sizeof(MixedResults<Shape>) * 2 * 4 * Shape::kConsumers <=
        Shape::kBasisBytes + Shape::kAngleBytes + Shape::kCodebookBytes);
    return reinterpret_cast<MixedResults<Shape>*>(base)[2 * warp + head];
  }
  // Cosines and sines of the angles of a page's tokens, as a consumer's threads read them: [2, 4, 128] of 16 bytes.
  __device__ uint4* angles() const { return reinterpret_cast<uint4*>(base + Shape::kBasisBytes); }
  // [256, 16] entries of four halves: all copies of one after the other.
  __device__ char* codebook() const { return base + Shape::kBasisBytes + Shape::kAngleBytes; }
  __device__ char* stage(int i) const { return codebook() + Shape::kCodebookBytes + i * Shape::kStageBytes; }
  __device__ char* codes(int i) const { return stage(i) + Shape::kLatentBytes; }
  __device__ char* queries(int i) const { return codes(i) + Shape::kCodeBytes; }
  // Where lane t finds its four of 16 latents: [steps, 4], see LatentPlace.
  __device__ uint4* places() const { return reinterpret_cast<uint4*>(stage(Shape::kStages)); }
  // Per head and half of the product's columns, those of each t: [2, 2, 4] times 16 halves.
  __device__ uint4* mean() const { return places() + Shape::kSteps * 4; }
  __device__ uint32_t full(int i) const { return shared_address(mean()) + Shape::kMeanBytes + 8 * i; }
  __device__ uint32_t empty(int i) const { return full(i) + 8 * Shape::kStages; }
};

} // namespace shadowkv
