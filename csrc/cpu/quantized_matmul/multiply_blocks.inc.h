// The kernels of products with quantized matrices, included once per instruction set (instruction_sets.inc.h).

#include "block_formats.inc.h"
#if SHADOWKV_LANES == 16
#include "multiply_row_tiles.inc.h"
#elif SHADOWKV_LANES == 8
#include "multiply_integers.inc.h"
#endif

// The first `count` numbers from a block on.
template <typename Blocks>
static SHADOWKV_INLINE void unpack_numbers(const uint8_t* block, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += Blocks::FORMAT.values) {
    Blocks::unpack(block, to + i);
    block += Blocks::FORMAT.bytes;
  }
}

// sums [N, ROWS, LANES] += products of N tokens with ROWS rows of a panel, lane by lane.
template <int N>
static SHADOWKV_INLINE void add_products(
    const float* x, int64_t x_row, const float* panel, int64_t columns, float* sums) {
  Floats total[N][ROWS];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) total[n][row] = load(sums + (n * ROWS + row) * LANES);
  for (int64_t i = 0; i < columns; i += LANES) {
    Floats weights[ROWS];
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) weights[row] = load(panel + row * PANEL + i);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Floats token = load(x + n * x_row + i);
#pragma GCC unroll 4
      for (int row = 0; row < ROWS; ++row) total[n][row] += token * weights[row];
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) store(sums + (n * ROWS + row) * LANES, total[n][row]);
}

template <typename Blocks>
static void multiply_tile(
    const QuantizedMatrix& matrix, const float* x, int64_t tokens, int64_t first, int64_t last, float* panel,
    float* sums, float* out, int64_t out_row) {
  const uint8_t* rows[ROWS];
  // Past the end, the last row is multiplied again and its products are discarded.
  for (int row = 0; row < ROWS; ++row)
    rows[row] = matrix.blocks + (first + row < last ? first + row : last - 1) * matrix.row_bytes;
  for (int64_t i = 0; i < tokens * ROWS; ++i) store(sums + i * LANES, Floats{});
  for (int64_t start = 0; start < matrix.columns; start += PANEL) {
    const int64_t columns = matrix.columns - start < PANEL ? matrix.columns - start : PANEL;
    for (int row = 0; row < ROWS; ++row) {
      const uint8_t* block = rows[row] + start / Blocks::FORMAT.values * Blocks::FORMAT.bytes;
      // The same for the next tile: pieces of rows are too short for the hardware prefetcher.
      for (int64_t i = 0; i < columns / Blocks::FORMAT.values * Blocks::FORMAT.bytes; i += 64)
        __builtin_prefetch(block + ROWS * matrix.row_bytes + i);
      unpack_numbers<Blocks>(block, columns, panel + row * PANEL);
    }
    in_blocks(tokens, [&](auto count, int64_t token) {
      add_products<decltype(count)::value>(
          x + token * matrix.columns + start, matrix.columns, panel, columns, sums + token * ROWS * LANES);
    });
  }
  for (int64_t token = 0; token < tokens; ++token) {
    Floats lanes[ROWS];
    for (int row = 0; row < ROWS; ++row) lanes[row] = load(sums + (token * ROWS + row) * LANES);
    float products[ROWS];
    add_lanes(lanes, products);
    for (int row = 0; row < ROWS && first + row < last; ++row)
      out[token * out_row + first + row] = products[row];
  }
}

static void multiply_floats(
    const QuantizedMatrix& matrix, const float* x, int64_t tokens, int64_t first, int64_t last, float* panel,
    float* sums, float* out, int64_t out_row) {
  with_blocks(matrix.kind, [&](auto blocks) {
    for (int64_t row = first; row < last; row += ROWS)
      multiply_tile<decltype(blocks)>(matrix, x, tokens, row, last, panel, sums, out, out_row);
  });
}

static void unpack_blocks(const QuantizedMatrix& matrix, int64_t row, float* out) {
  with_blocks(matrix.kind, [&](auto blocks) {
    unpack_numbers<decltype(blocks)>(matrix.blocks + row * matrix.row_bytes, matrix.columns, out);
  });
}
