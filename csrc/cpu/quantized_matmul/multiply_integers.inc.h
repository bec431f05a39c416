// Products of few tokens with quantized matrices in integers, included once per instruction set that multiplies bytes.

#include "integer_groups.inc.h"

// A group's factor in all lanes, or those of its halves.
template <int SCALES>
static SHADOWKV_INLINE Floats8 spread(const float* factor) {
  const float low = factor[0], high = factor[SCALES == 2 ? 8 : 0];
  return Floats8{low, low, low, low, high, high, high, high};
}

// out [N, R] = products of N tokens, `token_groups` apart, with R rows; also prefetches rows that many bytes ahead.
template <BlockKind KIND, int R, int N>
static SHADOWKV_INLINE void multiply_integer_tile(
    const uint8_t* const* rows, int64_t ahead, int64_t columns, const IntegerGroups* x, int64_t token_groups,
    float* out) {
  typedef BlockCodes<KIND> Blocks;
  constexpr BlockFormat FORMAT = BLOCK_FORMATS[KIND];
  constexpr int SCALES = Blocks::SCALES;
  Floats8 sums[R][N] = {}, minima[R][N] = {};
  for (int64_t start = 0; start < columns; start += 256, ++x) {
    const int64_t groups = columns - start < 256 ? (columns - start) / 32 : 8;
    const uint8_t* blocks[R];
    float factors[R][N][SCALES * 8];
#pragma GCC unroll 4
    for (int row = 0; row < R; ++row) {
      Floats8 of_row[SCALES], least = {};
      blocks[row] = rows[row] + start / FORMAT.values * FORMAT.bytes;
      // Of rows to come: pieces of rows are too short for the hardware prefetcher.
      for (int64_t i = 0; i < 256 / FORMAT.values * FORMAT.bytes; i += 64)
        __builtin_prefetch(blocks[row] + ahead + i);
      Blocks::parameters(blocks[row], groups, of_row, least);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const IntegerGroups& token = x[n * token_groups];
        for (int i = 0; i < SCALES; ++i) store8(factors[row][n] + 8 * i, of_row[i] * load8(token.scale));
        if (Blocks::HAS_MINIMA) minima[row][n] += least * load8(token.total);
      }
    }
    for (int64_t group = 0; group < groups; ++group) {
#pragma GCC unroll 4
      for (int row = 0; row < R; ++row) {
        const Codes codes = Blocks::codes(blocks[row], group);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          const float* factor = factors[row][n] + group;
          const Ints8 products = multiply_codes<Blocks::OFFSET>(codes, x[n * token_groups].numbers[group]);
          sums[row][n] += __builtin_convertvector(products, Floats8) * spread<SCALES>(factor);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int row = 0; row < R; ++row) out[n * R + row] = sum_lanes(sums[row][n] + minima[row][n]);
}

// The tokens of a tile stay in the innermost cache while rows are read for them, and again for the next tile's.
template <BlockKind KIND>
static void multiply_kind(
    const QuantizedMatrix& matrix, const IntegerGroups* x, int64_t tokens, int64_t first, int64_t last, float* out,
    int64_t out_row) {
  constexpr int R = 2;
  const int64_t groups = groups_of(matrix.columns);
  in_blocks(tokens, [&](auto count, int64_t token) {
    constexpr int N = decltype(count)::value;
    for (int64_t row = first; row < last; row += R) {
      // Past the end, the last row is multiplied again and its products are discarded.
      const uint8_t* rows[R];
      for (int i = 0; i < R; ++i) rows[i] = matrix.blocks + (row + i < last ? row + i : last - 1) * matrix.row_bytes;
      float products[N * R];
      multiply_integer_tile<KIND, R, N>(
          rows, 2 * R * matrix.row_bytes, matrix.columns, x + token * groups, groups, products);
      for (int n = 0; n < N; ++n)
        for (int i = 0; i < R && row + i < last; ++i) out[(token + n) * out_row + row + i] = products[n * R + i];
    }
  });
}

static void multiply_integers(
    const QuantizedMatrix& matrix, const IntegerGroups* x, int64_t tokens, int64_t first, int64_t last, float* out,
    int64_t out_row) {
  with_blocks(matrix.kind, [&](auto blocks) {
    multiply_kind<decltype(blocks)::FORMAT.kind>(matrix, x, tokens, first, last, out, out_row);
  });
}
