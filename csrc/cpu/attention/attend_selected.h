// Decode attention over selected chunks, from the form that they are stored in, on raw pointers: chunks are gathered,
// keys rebuilt and RoPE-rotated, and a tile of both attended to with an online softmax. All in float32.

#pragma once

#include <cstdint>
#include <vector>

#include "attention_tile.h"
#include "codecs.h"
#include "cpu/common/numbers.h"

namespace shadowkv {

// Keys after RoPE, latents or values: chunks [chunk, width] of elements that mean what `codec` says.
struct StoredRows {
  int64_t codec;
  Numbers rows;
  int64_t width;
  const Float16* scale;   // chunks [chunk] of coded rows
  const float* rotation;  // [dim, dim], the codec's, by which those were multiplied before they were coded
  const float* levels;    // what their codes stand for, where that is a table
};

// How keys and values are stored. The tokens of a chunk are contiguous.
struct SelectedForm {
  int64_t dim, group, chunk;  // chunk: tokens, a divisor of TILE
  StoredRows keys, values;

  // Of latents: key = RoPE(latents x basis + mean). Of coded keys without their mean: key = row + RoPE(mean).
  int64_t rank;
  Numbers basis;           // [rank, dim] per sequence and head; null if keys are rows
  int64_t basis_row;
  Numbers mean;            // [dim] per sequence and head; null for zero, float32 of coded keys
  const float *cos, *sin;  // [positions, rope_dim / 2]
  int64_t rope_dim;        // leading dimensions that RoPE rotates
  bool interleaved;
};

// Elements that a codec stores per row of `dim` dimensions, or per latents of that rank: 0 if it does not take such
// rows, -1 if it is unknown. `stored` is the actual number, which decides for codecs whose rows of one rank may differ.
int64_t row_width(int64_t codec, int64_t dim, int64_t stored);

// Where a chunk is, in elements.
struct StoredChunk {
  int64_t rows, scale;
};

// One selected chunk of a kv head.
struct SelectedChunk {
  StoredChunk key, value;
  int64_t position;  // of its first token
  float log_weight;  // in units of log 2
};

// The selection of one kv head of a sequence, and where its basis and mean are.
struct SelectedTask {
  std::vector<SelectedChunk> chunks;
  int64_t basis, mean;
};

// Working memory of one thread.
struct SelectedScratch {
  explicit SelectedScratch(const SelectedForm& form);
  SelectedScratch(const SelectedScratch&) = delete;

  float *q, *out, *unordered;      // [group, dim]
  float *peak, *sum, *scale;       // [group]
  float *scores, *log_weight;      // [group, TILE], [TILE]
  float *products, *rest;          // [group, dim], [group]: queries' products with the mean, by frequency and besides
  float *angles, *added;           // [TILE, dim], [group, TILE]: cosines and sines, and what the mean adds to scores
  float *keys, *values, *latents;  // [TILE, dim], [TILE, dim], [TILE, rank]
  float *basis, *mean;             // [rank, dim], [dim]

 private:
  std::vector<float> memory_;
};

// out [group, dim] and lse [group] for queries [group, dim]; 0 and -inf if nothing is selected.
template <typename T>
void attend_selected(
    const SelectedForm& form, const SelectedTask& task, const T* q, SelectedScratch& scratch, T* out, float* lse);

}  // namespace shadowkv
