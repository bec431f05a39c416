// Decode attention over selected chunks, from the form that they are stored in, on raw pointers: chunks are gathered,
// keys rebuilt and rotated, and a tile of both attended to with an online softmax. All in float32.

#pragma once

#include <cstdint>
#include <vector>

#include "attention_tile.h"
#include "float16.h"
#include "numbers.h"

namespace shadowkv {

// How keys and values are stored. The tokens of a chunk lie together.
struct SelectedForm {
  int64_t dim, group, chunk;  // chunk: tokens, a divisor of TILE

  Numbers keys;       // chunks [chunk, key_width]: rotated keys, or latents
  int64_t key_width;  // dim, or the rank

  // Of latents: key = rotated(latents x basis + mean).
  Numbers basis;           // [rank, dim] per sequence and head; null where keys are kept as they are
  int64_t basis_row;
  Numbers mean;            // [dim] per sequence and head; null for zero
  const float *cos, *sin;  // [positions, turning / 2]
  int64_t turning;         // leading dimensions that rotate
  bool interleaved;

  Numbers values;         // chunks [chunk, dim]; null where they are coded
  const uint8_t* codes;   // chunks [chunk, dim * bits / 8], in the layout of packing.py
  int bits;               // 4, 3 or 2
  const Float16* scale;   // chunks [chunk]
  const float* rotation;  // [dim, dim]; rows were multiplied by it before they were coded
};

// One selected chunk of a kv head. Offsets count elements.
struct SelectedChunk {
  int64_t key, value, scale;
  int64_t position;  // of its first token
  float log_weight;  // in units of log 2
};

// What one kv head of a sequence selected, and where its basis and mean are.
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
  float *keys, *values, *latents;  // [TILE, dim], [TILE, dim], [TILE, key_width]
  float *basis, *mean;             // [key_width, dim], [dim]

 private:
  std::vector<float> memory_;
};

// out [group, dim] and lse [group] of queries [group, dim]; 0 and -inf where nothing is selected.
template <typename T>
void attend_selected(
    const SelectedForm& form, const SelectedTask& task, const T* q, SelectedScratch& scratch, T* out, float* lse);

}  // namespace shadowkv
