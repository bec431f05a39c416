// Products of activations that are two bytes each with tiles of rows, for AVX-512 with VNNI.

#include "row_tiles.inc.h"

static SHADOWKV_INLINE Wide four_bytes(const int8_t* from) {
  int32_t bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return all_lanes(bytes);
}

// 32 activations as integers. Their scale is NaN where one is not finite.
static SHADOWKV_INLINE void make_byte_group(const float* x, ByteGroup& to) {
  constexpr float LARGEST = 127 * 257;  // with both bytes in [-128, 127]
  const __m512 numbers[2] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)};
  const Wide most = _mm512_max_epi32(
      masked(_mm512_castps_si512(numbers[0]), 0x7fffffff), masked(_mm512_castps_si512(numbers[1]), 0x7fffffff));
  const int32_t bits = _mm512_reduce_max_epi32(most);
  float largest;
  __builtin_memcpy(&largest, &bits, sizeof largest);
  const bool finite = bits < 0x7f800000, usable = finite && largest > 1e-30f;  // the inverse of less could be infinite
  const __m512 inverse = _mm512_set1_ps(usable ? LARGEST / largest : 0.0f);
  for (int half = 0; half < 2; ++half) {
    const Wide integers = usable ? _mm512_cvtps_epi32(_mm512_mul_ps(numbers[half], inverse)) : _mm512_setzero_si512();
    const Wide low = _mm512_srai_epi32(_mm512_slli_epi32(integers, 24), 24);
    const Wide high = _mm512_srai_epi32(_mm512_sub_epi32(integers, low), 8);
    _mm_storeu_si128((__m128i*)(to.high + 16 * half), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i*)(to.low + 16 * half), _mm512_cvtepi32_epi8(low));
    to.negative[half] = -_mm512_reduce_add_epi32(integers);
  }
  to.scale = finite ? largest / LARGEST : __builtin_nanf("");
  to.total = (float)-(to.negative[0] + to.negative[1]) * to.scale;
}

static void make_bytes(const float* x, int64_t columns, ByteGroup* to) {
  for (int64_t i = 0; i < columns; i += 32) make_byte_group(x + i, to[i / 32]);
}

// What the integers of a sum of products begin with, for codes from -OFFSET on.
template <typename Tile>
static SHADOWKV_INLINE Wide before_products(const ByteGroup& group, int half) {
  if (Tile::OFFSET == 0) return _mm512_setzero_si512();
  const int32_t negative = Tile::COLUMNS == 16 ? group.negative[half] : group.negative[0] + group.negative[1];
  return all_lanes(negative * Tile::OFFSET);
}

// Rows of a tile from `first` on. Past the end the last one is multiplied again, and its products are discarded.
static SHADOWKV_INLINE void rows_of_tile(
    const QuantizedMatrix& matrix, int64_t first, int64_t last, const uint8_t** rows) {
  for (int row = 0; row < TILE_LANES; ++row)
    rows[row] = matrix.blocks + (first + row < last ? first + row : last - 1) * matrix.row_bytes;
}

static SHADOWKV_INLINE uint16_t valid_lanes(int64_t rows) {
  return rows >= TILE_LANES ? 0xffff : (1 << rows) - 1;
}

// out [N, ...] of N tokens, `token_groups` apart, in the columns of a tile's rows.
template <BlockKind KIND, int N>
static SHADOWKV_INLINE void multiply_row_tile(
    const uint8_t* const* rows, int64_t ahead, int64_t columns, const ByteGroup* x, int64_t token_groups, float* out,
    int64_t out_row, uint16_t valid) {
  typedef RowTile<KIND> Tile;
  constexpr BlockFormat FORMAT = BLOCK_FORMATS[KIND];
  constexpr int64_t UNIT_BYTES = TILE_LANES * FORMAT.bytes * Tile::COLUMNS / FORMAT.values;
  const uint8_t* next = rows[0] + ahead;
  __m512 sums[N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) sums[n] = _mm512_setzero_ps();
  for (int64_t start = 0; start < columns; start += FORMAT.values) {
    const int64_t at = start / FORMAT.values * FORMAT.bytes;
    __m512 scales[FORMAT.values / Tile::COLUMNS], minima[FORMAT.values / Tile::COLUMNS];
    Tile::parameters(rows, at, scales, minima);
    Tile::codes(rows, at, [&](int unit, const Wide* codes) __attribute__((always_inline)) {
      // Of a later tile, into the second cache: pieces of rows are too short for the hardware prefetcher.
      for (int64_t i = 0; i < UNIT_BYTES; i += 64)
        __builtin_prefetch(next + TILE_LANES * at + unit * UNIT_BYTES + i, 0, 2);
      const int half = Tile::COLUMNS == 16 ? unit % 2 : 0;
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        const ByteGroup& group = x[n * token_groups + (start + unit * Tile::COLUMNS) / 32];
        Wide high = _mm512_setzero_si512(), low = before_products<Tile>(group, half);
#pragma GCC unroll 8
        for (int i = 0; i < Tile::COLUMNS / 4; ++i) {
          high = _mm512_dpbusd_epi32(high, codes[i], four_bytes(group.high + 16 * half + 4 * i));
          low = _mm512_dpbusd_epi32(low, codes[i], four_bytes(group.low + 16 * half + 4 * i));
        }
        const Wide products = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
        const __m512 factor = _mm512_mul_ps(scales[unit], _mm512_set1_ps(group.scale));
        sums[n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), factor, sums[n]);
        if (Tile::HAS_MINIMA) sums[n] = _mm512_fmadd_ps(minima[unit], _mm512_set1_ps(group.total), sums[n]);
      }
    });
  }
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) _mm512_mask_storeu_ps(out + n * out_row, valid, sums[n]);
}

// Tokens that share the codes of a tile in registers: as many as there are registers for, and up to eight of others.
constexpr int WHOLE = 16, MAX_OTHERS = 8;

constexpr int64_t TOKENS_AT_ONCE = 64;  // that stay in the second cache beside a tile of rows

// Calls `work` with Count<count>, or Count<MAX_OTHERS> where that is less.
template <int N, typename Work>
static SHADOWKV_INLINE void with_count(int64_t count, const Work& work) {
  if constexpr (N < MAX_OTHERS)
    if (count > N) return with_count<N + 1>(count, work);
  work(Count<N>{});
}

// Bytes from a tile to the one that is prefetched meanwhile, in whole tiles. The next tile of short rows would come too
// late.
constexpr int64_t AHEAD = 16384;

// Up to TOKENS_AT_ONCE tokens: rows stay in the caches while they are multiplied with a block of these after the other.
template <BlockKind KIND>
static void multiply_row_tiles(
    const QuantizedMatrix& matrix, const ByteGroup* x, int64_t tokens, int64_t first, int64_t last, float* out,
    int64_t out_row) {
  const int64_t token_groups = matrix.columns / 32, tile = TILE_LANES * matrix.row_bytes;
  const int64_t ahead = (AHEAD + tile - 1) / tile * tile;
  for (int64_t row = first; row < last; row += TILE_LANES) {
    const uint8_t* rows[TILE_LANES];
    rows_of_tile(matrix, row, last, rows);
    int64_t token = 0;
    const auto multiply = [&](auto count) {
      constexpr int N = decltype(count)::value;
      multiply_row_tile<KIND, N>(
          rows, ahead, matrix.columns, x + token * token_groups, token_groups,
          out + token * out_row + row, out_row, valid_lanes(last - row));
      token += N;
    };
    while (tokens - token >= WHOLE) multiply(Count<WHOLE>{});
    while (token < tokens) with_count<1>(tokens - token, multiply);
  }
}

static void multiply_bytes(
    const QuantizedMatrix& matrix, const ByteGroup* x, int64_t tokens, int64_t first, int64_t last, float* out,
    int64_t out_row) {
  with_blocks(matrix.kind, [&](auto blocks) {
    for (int64_t token = 0; token < tokens; token += TOKENS_AT_ONCE)
      multiply_row_tiles<decltype(blocks)::FORMAT.kind>(
          matrix, x + token * (matrix.columns / 32), tokens - token < TOKENS_AT_ONCE ? tokens - token : TOKENS_AT_ONCE,
          first, last, out + token * out_row, out_row);
  });
}
