// Search of a key sketch: products of its bits by table look-ups, and the two-level selection, on raw pointers.

#pragma once

#include <cstdint>
#include <vector>

#include "cpu/common/numbers.h"
#include "sketch_rules.h"

namespace shadowkv {

constexpr int64_t MAX_PLANE_BYTES = 32;  // per key, so that sums fit in 16 bits

// One kv head's planes of all pages. Strides count elements, the last dimension is contiguous.
struct SketchPlanes {
  const uint8_t* signs;  // [pages, 64, bytes]
  const uint8_t* rest;   // [pages, 64, bytes]; not read if only signs are scored
  const uint8_t* scale;  // [pages, 64], codes
  int64_t signs_page, signs_row, rest_page, rest_row, scale_page;
};

// The queries of one kv head, as whole numbers laid out to match the planes' bits, and their units.
//
// For each byte of a plane and each of its 256 values, a table holds what its bits add to the products with 8 queries
// at a time: a key costs one look-up per byte.
class SketchScorer {
 public:
  // whole [queries, 8, bytes]: row j matches bit j of every byte. In sixteenths, rounded, if only signs are scored.
  SketchScorer(const int8_t* whole, const float* unit, int64_t queries, int64_t bytes, bool in_sixteenths);

  // The largest product of any query with a key whose levels are 1 and -1.
  float with_signs(const uint8_t* signs) const;

  // The same for levels -1.5, -0.5, 0.5 and 1.5.
  float with_both(const uint8_t* signs, const uint8_t* rest) const;

 private:
  static constexpr int64_t LANES = 8;
  typedef int16_t Sums __attribute__((vector_size(2 * LANES)));  // 127 times 256 dimensions at most

  struct Queries {
    std::vector<Sums> table;  // [bytes, 256]
    float unit[LANES];
    int32_t sum[LANES];
    int64_t count;

    Sums look_up(const uint8_t* plane, int64_t bytes) const;
  };

  std::vector<Queries> groups_;
  int64_t bytes_;
};

// A mapped query, laid out to match the planes of keys; the PyTorch reference documents its fields.
struct MappedQuery {
  int8_t* whole;    // [8, bytes]
  uint8_t* planes;  // [4, bytes]
  float *unit, *length;
  int32_t *sum, *plane_sum;
};

// A query q [dim] times its map [dim, dim], as whole numbers; dim is a multiple of 8 up to 8 * MAX_PLANE_BYTES.
void map_query(const float* q, const BFloat16* map, int64_t dim, int64_t bytes, const MappedQuery& out);

// Scores of the runs of some pages, as in the PyTorch reference.
void score_runs(
    const SketchScorer& scorer, const SketchPlanes& planes, const int64_t* pages, int64_t count, Float16* best);

// One kv head's part of a selection; the PyTorch reference documents its meaning.
struct SketchSelection {
  const Float16* coarse;  // [8 pages]
  const int64_t* pages;
  int64_t num_pages;
  int64_t keep, sampled_runs; // runs examined, and how many of them are sampled
  int64_t budget, sampled;    // chunks of the top-k, and sampled ones
  int64_t chunk;              // tokens
  float length;                        // of queries, which makes coarse scores logits
  float run_sharpness, chunk_sharpness; // factors of logits in weights
  uint32_t run_random, chunk_random;
};

// Writes up to `width` chunk numbers, ascending, and the logarithm of how many chunks each stands for. The scorer's units
// make products logits.
void select_chunks(
    const SketchScorer& scorer, const SketchPlanes& planes, const SketchSelection& in, int64_t width,
    int64_t* selected, float* log_weight);

}  // namespace shadowkv
