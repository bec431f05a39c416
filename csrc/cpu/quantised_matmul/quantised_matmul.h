// Products with matrices whose rows are blocks of quantised numbers, and those rows as floats, on raw pointers.
//
// The formats are ggml's: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h

#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "cpu/common/numbers.h"

namespace shadowkv {

enum BlockKind { Q4_0, Q4_1, Q8_0, Q4_K, Q6_K };

struct BlockFormat {
  BlockKind kind;
  const char* name;
  int64_t values, bytes;  // of a block
};

// By kind.
constexpr BlockFormat BLOCK_FORMATS[] = {
    {Q4_0, "Q4_0", 32, 18}, {Q4_1, "Q4_1", 32, 20}, {Q8_0, "Q8_0", 32, 34}, {Q4_K, "Q4_K", 256, 144},
    {Q6_K, "Q6_K", 256, 210}};

// Null if there is none with that name.
const BlockFormat* find_block_format(std::string_view name);

struct QuantisedMatrix {
  const uint8_t* blocks;  // [rows, columns / values of a block * its bytes]
  int64_t row_bytes;      // from one row to the next
  int64_t rows, columns;
  BlockKind kind;
};

constexpr int64_t PANEL = 1024;  // columns of a few rows that are floats at a time, a multiple of all blocks' values

// Working memory of one thread.
struct MatmulScratch {
  std::vector<float> panel;  // [rows of a tile, PANEL]
  std::vector<float> sums;   // [tokens, rows of a tile, lanes of a vector]

  explicit MatmulScratch(int64_t tokens);
};

// out [tokens, rows of the matrix], in columns `first` to `last`, = x [tokens, columns] times these rows of the matrix.
// Elements are bitwise equal regardless of the rows and tokens that they are computed with.
void multiply_rows(
    const QuantisedMatrix& matrix, const float* x, int64_t tokens, int64_t first, int64_t last, MatmulScratch& scratch,
    float* out);

// out [columns] = a row.
void unpack_row(const QuantisedMatrix& matrix, int64_t row, float* out);

}  // namespace shadowkv
