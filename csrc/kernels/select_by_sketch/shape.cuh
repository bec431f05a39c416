// What the launches of a search read and write, and what each passes on in memory to the next.
#pragma once

#include "sketch_rules.h"
#include "weighted_sampling.cuh"

namespace shadowkv {

constexpr int kBatch = 4;       // runs that a warp scores at once
constexpr int kStages = 2;      // batches that a warp copies ahead
constexpr int kSliceRuns = 32;  // that a warp scores at a time, a lane holds the page id of each;
constexpr int kShortSlice = 8;  // this many if there are few
static_assert(kSliceRuns % (kStages * kBatch) == 0 && kShortSlice % (kStages * kBatch) == 0, "slices of whole rounds");

// Warps of a block that scores. Eight with 64 bytes per token would need more shared memory than a block has by default.
template <int kBytes>
constexpr int kScoreWarps = kBytes == 64 ? 4 : 8;

// Blocks that score on a multiprocessor: as many as have registers enough.
template <int kBytes, int kQueries>
constexpr int kScoreBlocks = 3 - (kBytes == 32) - (kQueries == 16);

// What all of a row's chunks share: the number of kept runs, and the linear map from logits to exponents.
struct RowState {
  int count;
  float slope, edge;
  int unused;
};

// What a row passes on in memory to the next launch: scores of the kept runs' chunks, 8 bytes for each of these runs,
// the logarithm (to base 2) of how many runs each stands for, and a RowState.
struct Region {
  int keep, values, kept, weights;
  Region(int64_t pages, int64_t chunk, int64_t k) {
    keep = kept_runs(int(kPageRuns * pages), k * chunk);
    values = int((2 * keep * (kRun / chunk) + 15) / 16 * 16), kept = (8 * keep + 15) / 16 * 16;
    weights = (4 * keep + 15) / 16 * 16;
  }
  __host__ __device__ int64_t bytes() const { return int64_t(values) + kept + weights + 16; }
};

struct SelectBySketch {
  const uint8_t* whole; // [B, H, G, 8, S], of sketch_queries
  const float* unit;    // [B, H, G]
  const int* sum;       // [B, H, G]
  const uint4* coarse;  // [B, H, P], 8 halves each
  const uint8_t *signs, *rest, *scale;
  uint32_t signs_stride, rest_stride, scale_stride; // from one page id to the next, in bytes
  const int64_t* pages;                             // [B, P]
  int64_t pages_stride;                             // of a row, in page ids
  const int64_t* num_pages;                         // [B]
  const int64_t* budget;                            // [B]
  const int64_t *sampled, *seeds;                   // [B], or null if nothing is sampled
  const float* length;                              // [B, H, G]
  float run_sharpness, chunk_sharpness;             // factors of logits in exponents to base 2
  uint32_t first_head;                              // of this layer, among all layers' heads
  uint8_t* workspace; // [B, H, region]
  int64_t* selected;  // [B, H, k]
  float* log_weight;  // [B, H, k], or null if nothing is sampled
  Region region;      // of a row
  int heads, group, num_pages_most, log_chunk, k;
  unsigned rows; // B H
  int slice;     // runs that a warp scores at a time

  __device__ int pages_of(unsigned sequence) const {
    return int(max(int64_t(0), min(num_pages[sequence], int64_t(num_pages_most))));
  }
  __device__ int budget_of(unsigned sequence) const {
    return int(max(int64_t(0), min(budget[sequence], int64_t(k))));
  }
  // Chunks to sample for each of a sequence's rows.
  __device__ int sampled_of(unsigned sequence) const {
    const int top_k = budget_of(sequence);
    return sampled && top_k ? int(max(int64_t(0), min(sampled[sequence], int64_t(k - top_k)))) : 0;
  }
  // Runs that are kept for each of a sequence's rows, unless their scores are -inf.
  __device__ int kept_of(unsigned sequence) const {
    const int runs = kPageRuns * pages_of(sequence), chunks = budget_of(sequence) + sampled_of(sequence);
    return chunks ? kept_runs(runs, int64_t(chunks) << log_chunk) : 0;
  }
  // How many of them are sampled.
  __device__ int sampled_runs_of(unsigned sequence) const {
    const int keep = kept_of(sequence);
    return sampled_of(sequence) && keep < kPageRuns * pages_of(sequence) ? keep / kSampledShare : 0;
  }
  // Random bits of a row's sampling.
  __device__ uint32_t state_of(unsigned row) const {
    return mix_bits(uint32_t(seeds[row / heads]) * 0x9e3779b1u + first_head + row % heads);
  }

  __device__ uint16_t* values(unsigned row) const {
    return reinterpret_cast<uint16_t*>(workspace + row * region.bytes());
  }
  __device__ uint2* kept(unsigned row) const { // page ids and runs
    return reinterpret_cast<uint2*>(workspace + row * region.bytes() + region.values);
  }
  __device__ float* weights(unsigned row) const {
    return reinterpret_cast<float*>(workspace + row * region.bytes() + region.values + region.kept);
  }
  __device__ RowState& state(unsigned row) const {
    return *reinterpret_cast<RowState*>(workspace + (row + 1) * region.bytes() - sizeof(RowState));
  }
};

} // namespace shadowkv
