// Products of many tokens, whose activations are bytes, with panels of rows that are unpacked once for all of them.

constexpr int PANEL_TILES = 2, PANEL_ROWS = PANEL_TILES * TILE_LANES;
constexpr int TOKENS = 6;  // that share a register tile

// Lines of a unit in a panel: codes of four columns, then scales, then minima, of one tile after the other each.
template <typename Tile>
constexpr int UNIT_LINES = PANEL_TILES * (Tile::COLUMNS / 4 + 1 + Tile::HAS_MINIMA);

// Columns of a tile's rows from the blocks at `at` on, into its lines of a panel, in the order of `unit_at`.
template <BlockKind KIND>
static void pack_tile(const uint8_t* const* rows, int64_t at, int64_t columns, PanelLine* to) {
  typedef RowTile<KIND> Tile;
  constexpr BlockFormat FORMAT = BLOCK_FORMATS[KIND];
  constexpr int CODES = Tile::COLUMNS / 4;
  for (int64_t start = 0; start < columns; start += FORMAT.values, at += FORMAT.bytes) {
    __m512 scales[FORMAT.values / Tile::COLUMNS], minima[FORMAT.values / Tile::COLUMNS];
    Tile::parameters(rows, at, scales, minima);
    Tile::codes(rows, at, [&](int unit, const Wide* codes) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int i = 0; i < CODES; ++i) _mm512_store_si512(to + PANEL_TILES * i, codes[i]);
      _mm512_store_ps(to + PANEL_TILES * CODES, scales[unit]);
      if (Tile::HAS_MINIMA) _mm512_store_ps(to + PANEL_TILES * (CODES + 1), minima[unit]);
      to += UNIT_LINES<Tile>;
    });
  }
}

// out [TOKENS, ...] of tokens at x, in a panel's rows, += products with its columns; `begin` takes 0 for what out has.
template <BlockKind KIND>
static void multiply_panel(
    const PanelLine* panel, int64_t columns, const ByteRun* const* x, bool begin, float* const* out,
    const uint16_t* valid) {
  typedef RowTile<KIND> Tile;
  constexpr int CODES = Tile::COLUMNS / 4, BLOCK_UNITS = BLOCK_FORMATS[KIND].values / Tile::COLUMNS;
  __m512 sums[TOKENS][PANEL_TILES];
#pragma GCC unroll 6
  for (int n = 0; n < TOKENS; ++n)
#pragma GCC unroll 2
    for (int tile = 0; tile < PANEL_TILES; ++tile)
      sums[n][tile] = begin ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(valid[tile], out[n] + tile * TILE_LANES);
  const int64_t units = columns / Tile::COLUMNS;
  for (int64_t place = 0; place < units; ++place, panel += UNIT_LINES<Tile>) {
    const int64_t unit = place - place % BLOCK_UNITS + Tile::unit_at(place % BLOCK_UNITS);
    const int64_t run = unit * Tile::COLUMNS / 32;
    const int half = Tile::COLUMNS == 16 ? unit % 2 : 0;
    Wide products[TOKENS][PANEL_TILES];
#pragma GCC unroll 6
    for (int n = 0; n < TOKENS; ++n) {
      const Wide start = before_products<Tile>(x[n][run], half);
#pragma GCC unroll 2
      for (int tile = 0; tile < PANEL_TILES; ++tile) products[n][tile] = start;
    }
#pragma GCC unroll 8
    for (int i = 0; i < CODES; ++i) {
      const Wide codes[PANEL_TILES] = {
          _mm512_load_si512(panel + PANEL_TILES * i), _mm512_load_si512(panel + PANEL_TILES * i + 1)};
#pragma GCC unroll 6
      for (int n = 0; n < TOKENS; ++n) {
        const Wide bytes = four_bytes(x[n][run].numbers + 16 * half + 4 * i);
#pragma GCC unroll 2
        for (int tile = 0; tile < PANEL_TILES; ++tile)
          products[n][tile] = _mm512_dpbusd_epi32(products[n][tile], codes[tile], bytes);
      }
    }
#pragma GCC unroll 2
    for (int tile = 0; tile < PANEL_TILES; ++tile) {
      const __m512 scales = _mm512_load_ps(panel + PANEL_TILES * CODES + tile);
#pragma GCC unroll 6
      for (int n = 0; n < TOKENS; ++n) {
        const __m512 factor = _mm512_mul_ps(scales, _mm512_set1_ps(x[n][run].scale));
        sums[n][tile] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[n][tile]), factor, sums[n][tile]);
      }
      if (Tile::HAS_MINIMA) {
        const __m512 minima = _mm512_load_ps(panel + PANEL_TILES * (CODES + 1) + tile);
#pragma GCC unroll 6
        for (int n = 0; n < TOKENS; ++n)
          sums[n][tile] = _mm512_fmadd_ps(minima, _mm512_set1_ps(x[n][run].total), sums[n][tile]);
      }
    }
  }
#pragma GCC unroll 6
  for (int n = 0; n < TOKENS; ++n)
#pragma GCC unroll 2
    for (int tile = 0; tile < PANEL_TILES; ++tile)
      _mm512_mask_storeu_ps(out[n] + tile * TILE_LANES, valid[tile], sums[n][tile]);
}

template <BlockKind KIND>
static void multiply_panels(
    const QuantisedMatrix& matrix, const ByteRun* x, int64_t tokens, int64_t first, int64_t last, PanelLine* panel,
    float* out, int64_t out_row) {
  constexpr BlockFormat FORMAT = BLOCK_FORMATS[KIND];
  const int64_t token_runs = matrix.columns / 32;
  for (int64_t row = first; row < last; row += PANEL_ROWS) {
    const uint8_t* rows[PANEL_ROWS];
    rows_of_tile(matrix, row, last, PANEL_ROWS, rows);
    const uint16_t valid[PANEL_TILES] = {valid_lanes(last - row), valid_lanes(last - row - TILE_LANES)};
    for (int64_t start = 0; start < matrix.columns; start += PANEL) {
      const int64_t columns = matrix.columns - start < PANEL ? matrix.columns - start : PANEL;
      for (int tile = 0; tile < PANEL_TILES; ++tile)
        pack_tile<KIND>(rows + tile * TILE_LANES, start / FORMAT.values * FORMAT.bytes, columns, panel + tile);
      for (int64_t token = 0; token < tokens; token += TOKENS) {
        const ByteRun* from[TOKENS];
        float* to[TOKENS];
        for (int n = 0; n < TOKENS; ++n) {  // past the end the last one is multiplied again, to the same place
          const int64_t at = token + n < tokens ? token + n : tokens - 1;
          from[n] = x + at * token_runs + start / 32;
          to[n] = out + at * out_row + row;
        }
        multiply_panel<KIND>(panel, columns, from, start == 0, to, valid);
      }
    }
  }
}

static void multiply_bytes(
    const QuantisedMatrix& matrix, const ByteRun* x, int64_t tokens, int64_t first, int64_t last, PanelLine* panel,
    float* out, int64_t out_row) {
  with_blocks(matrix.kind, [&](auto blocks) {
    constexpr BlockKind KIND = decltype(blocks)::FORMAT.kind;
    if (tokens <= FEW_TOKENS)
      multiply_row_tiles<KIND>(matrix, x, tokens, first, last, out, out_row);
    else
      multiply_panels<KIND>(matrix, x, tokens, first, last, panel, out, out_row);
  });
}
