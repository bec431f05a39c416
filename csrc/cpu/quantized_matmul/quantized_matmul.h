// Products with matrices whose rows are blocks of quantized numbers, and those rows as floats, on raw pointers.
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

struct QuantizedMatrix {
  const uint8_t* blocks;  // [rows, columns / values of a block * its bytes]
  int64_t row_bytes;      // from one row to the next
  int64_t rows, columns;
  BlockKind kind;
};

constexpr int64_t PANEL = 1024;  // columns of a few rows that are floats at a time, a multiple of all blocks' values

// 256 activations of a token as integers, with a scale for every 32, and the sums of these 32.
struct IntegerGroups {
  int32_t numbers[8][32];  // three digits each, and sums of four
  float scale[8], total[8];
};

// 32 activations of a token as integers of 16 bits, 256 * high + low, with their scale, the sum of the numbers that these
// stand for, and those of the integers in each half with their signs changed.
struct ByteGroup {
  int8_t high[32], low[32];
  float scale, total;
  int32_t negative[2];
};

// Of a token with that many activations.
constexpr int64_t groups_of(int64_t columns) { return (columns + 255) / 256; }

// Rows that a thread takes at a time, about so many weights, a multiple of what any kernel multiplies at a time.
int64_t rows_per_task(int64_t weights, int64_t columns);

// Activations [tokens, columns] in the form in which so many are multiplied fastest on this machine.
class Activations {
 public:
  Activations(int64_t tokens, int64_t columns);

  // Writes a token's activations [columns]; from any thread.
  void write(int64_t token, const float* x);

 private:
  friend void multiply_rows(
      const QuantizedMatrix&, const Activations&, int64_t, int64_t, struct MatmulScratch&, float*, int64_t);

  enum class Form { floats, digits, bytes };

  static Form form_of(int64_t tokens);

  int64_t tokens, columns;
  Form form;
  // One of these:
  std::vector<float> floats;      // [tokens, columns]
  std::vector<IntegerGroups> groups;  // [tokens, groups_of(columns)]
  std::vector<ByteGroup> bytes;     // [tokens, columns / 32]
};

// Working memory of one thread.
struct MatmulScratch {
  std::vector<float> panel;  // [rows of a tile, PANEL]
  std::vector<float> sums;   // [tokens, rows of a tile, lanes of a vector]

  explicit MatmulScratch(int64_t tokens);
};

// out [tokens, ...], rows `out_row` apart, in columns `first` to `last`, = x times these rows of the matrix. Elements
// are bitwise equal regardless of the rows that they are computed with, and of the tokens where these have the same form.
void multiply_rows(
    const QuantizedMatrix& matrix, const Activations& x, int64_t first, int64_t last, MatmulScratch& scratch,
    float* out, int64_t out_row);

// out [columns] = a row.
void unpack_row(const QuantizedMatrix& matrix, int64_t row, float* out);

}  // namespace shadowkv
