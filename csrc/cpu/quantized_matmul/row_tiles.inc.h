// Sixteen rows of blocks at a time, as AVX-512 multiplies them: a lane for each row, with the codes of four columns.

constexpr int TILE_LANES = 16;  // rows of a tile

typedef __m512i Wide;

static SHADOWKV_INLINE Wide all_lanes(int32_t x) { return _mm512_set1_epi32(x); }

// 16 bytes of every row, four to a vector.
static SHADOWKV_INLINE void transpose_bytes(const uint8_t* const* rows, int64_t at, Wide* to) {
  Wide quarters[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto piece = [&](int row) { return _mm_loadu_si128((const __m128i*)(rows[row] + at)); };
    Wide x = _mm512_castsi128_si512(piece(i));
    x = _mm512_inserti32x4(x, piece(i + 4), 1);
    x = _mm512_inserti32x4(x, piece(i + 8), 2);
    quarters[i] = _mm512_inserti32x4(x, piece(i + 12), 3);
  }
  const Wide a = _mm512_unpacklo_epi32(quarters[0], quarters[1]), b = _mm512_unpackhi_epi32(quarters[0], quarters[1]);
  const Wide c = _mm512_unpacklo_epi32(quarters[2], quarters[3]), d = _mm512_unpackhi_epi32(quarters[2], quarters[3]);
  to[0] = _mm512_unpacklo_epi64(a, c);
  to[1] = _mm512_unpackhi_epi64(a, c);
  to[2] = _mm512_unpacklo_epi64(b, d);
  to[3] = _mm512_unpackhi_epi64(b, d);
}

// 4 bytes of every row.
static SHADOWKV_INLINE Wide load_column(const uint8_t* const* rows, int64_t at) {
  __m128i quarters[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto number = [&](int row) { return _mm_loadu_si32(rows[4 * i + row] + at); };
    quarters[i] = _mm_unpacklo_epi64(
        _mm_unpacklo_epi32(number(0), number(1)), _mm_unpacklo_epi32(number(2), number(3)));
  }
  const __m256i first = _mm256_set_m128i(quarters[1], quarters[0]), last = _mm256_set_m128i(quarters[3], quarters[2]);
  return _mm512_inserti64x4(_mm512_castsi256_si512(first), last, 1);
}

// The float16 numbers in the lower or upper halves of lanes.
static SHADOWKV_INLINE __m512 lower_halves(Wide x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }
static SHADOWKV_INLINE __m512 upper_halves(Wide x) { return lower_halves(_mm512_srli_epi32(x, 16)); }

static SHADOWKV_INLINE Wide masked(Wide x, int32_t bytes) { return _mm512_and_si512(x, all_lanes(bytes)); }

constexpr int32_t NIBBLES = 0x0f0f0f0f, PAIRS = 0x30303030;

// Byte `at` of lanes as a number.
template <bool SIGNED>
static SHADOWKV_INLINE __m512 byte_of(Wide x, int at) {
  const Wide top = _mm512_slli_epi32(x, 24 - 8 * at);
  return _mm512_cvtepi32_ps(SIGNED ? _mm512_srai_epi32(top, 24) : _mm512_srli_epi32(top, 24));
}

// Of every format: a number is (code - OFFSET) * scale + minimum, with a scale for COLUMNS columns: a unit. `parameters`
// reads scales, and minima where there are any, of the units of a block. `codes` gives the codes of each unit to `use`,
// with its number in the block.
template <BlockKind>
struct RowTile;

template <BlockKind KIND, int OFFSET_OF_CODES, bool MINIMA>
struct SmallBlocks {
  static constexpr int COLUMNS = 32, OFFSET = OFFSET_OF_CODES;
  static constexpr bool HAS_MINIMA = MINIMA;

  static SHADOWKV_INLINE void parameters(const uint8_t* const* rows, int64_t at, __m512* scales, __m512* minima) {
    const Wide column = load_column(rows, at);
    scales[0] = lower_halves(column);
    if (MINIMA) minima[0] = upper_halves(column);
  }
};

template <typename Use>
static SHADOWKV_INLINE void nibble_codes(const uint8_t* const* rows, int64_t at, const Use& use) {
  Wide bytes[4], codes[8];
  transpose_bytes(rows, at, bytes);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    codes[i] = masked(bytes[i], NIBBLES);
    codes[4 + i] = masked(_mm512_srli_epi32(bytes[i], 4), NIBBLES);
  }
  use(0, codes);
}

template <>
struct RowTile<Q4_0> : SmallBlocks<Q4_0, 8, false> {
  template <typename Use>
  static SHADOWKV_INLINE void codes(const uint8_t* const* rows, int64_t at, const Use& use) {
    nibble_codes(rows, at + 2, use);
  }
};

template <>
struct RowTile<Q4_1> : SmallBlocks<Q4_1, 0, true> {
  template <typename Use>
  static SHADOWKV_INLINE void codes(const uint8_t* const* rows, int64_t at, const Use& use) {
    nibble_codes(rows, at + 4, use);
  }
};

template <>
struct RowTile<Q8_0> : SmallBlocks<Q8_0, 128, false> {
  template <typename Use>
  static SHADOWKV_INLINE void codes(const uint8_t* const* rows, int64_t at, const Use& use) {
    Wide codes[8];
    transpose_bytes(rows, at + 2, codes);
    transpose_bytes(rows, at + 18, codes + 4);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) codes[i] = _mm512_xor_si512(codes[i], all_lanes(0x80808080));  // they are signed
    use(0, codes);
  }
};

template <>
struct RowTile<Q4_K> {
  static constexpr int COLUMNS = 32, OFFSET = 0;
  static constexpr bool HAS_MINIMA = true;

  static SHADOWKV_INLINE void parameters(const uint8_t* const* rows, int64_t at, __m512* scales, __m512* minima) {
    Wide head[4];
    transpose_bytes(rows, at, head);
    const __m512 unit = lower_halves(head[0]);
    const __m512 unit_of_minima = _mm512_sub_ps(_mm512_setzero_ps(), upper_halves(head[0]));
    const Wide upper_scales = masked(_mm512_srli_epi32(head[1], 2), PAIRS);
    const Wide upper_minima = masked(_mm512_srli_epi32(head[2], 2), PAIRS);
    const Wide steps[2] = {masked(head[1], 0x3f3f3f3f), _mm512_or_si512(masked(head[3], NIBBLES), upper_scales)};
    const Wide least[2] = {
        masked(head[2], 0x3f3f3f3f),
        _mm512_or_si512(masked(_mm512_srli_epi32(head[3], 4), NIBBLES), upper_minima)};
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      scales[i] = _mm512_mul_ps(unit, byte_of<false>(steps[i / 4], i % 4));
      minima[i] = _mm512_mul_ps(unit_of_minima, byte_of<false>(least[i / 4], i % 4));
    }
  }

  template <typename Use>
  static SHADOWKV_INLINE void codes(const uint8_t* const* rows, int64_t at, const Use& use) {
    for (int pair = 0; pair < 4; ++pair) {
      Wide bytes[8], codes[8];
      transpose_bytes(rows, at + 16 + 32 * pair, bytes);
      transpose_bytes(rows, at + 32 + 32 * pair, bytes + 4);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) codes[i] = masked(bytes[i], NIBBLES);
      use(2 * pair, codes);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) codes[i] = masked(_mm512_srli_epi32(bytes[i], 4), NIBBLES);
      use(2 * pair + 1, codes);
    }
  }
};

template <>
struct RowTile<Q6_K> {
  static constexpr int COLUMNS = 16, OFFSET = 32;
  static constexpr bool HAS_MINIMA = false;

  static SHADOWKV_INLINE void parameters(const uint8_t* const* rows, int64_t at, __m512* scales, __m512*) {
    Wide steps[4];
    transpose_bytes(rows, at + 192, steps);
    const __m512 unit = upper_halves(load_column(rows, at + 206));
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) scales[i] = _mm512_mul_ps(unit, byte_of<true>(steps[i / 4], i % 4));
  }

  template <typename Use>
  static SHADOWKV_INLINE void codes(const uint8_t* const* rows, int64_t at, const Use& use) {
    for (int piece = 0; piece < 4; ++piece) {  // 16 columns of each of the four groups of 128 columns
      const int half = piece / 2, first = 8 * half + piece % 2;
      Wide lower[2][4], upper[4], codes[4];
      transpose_bytes(rows, at + 64 * half + 16 * (piece % 2), lower[0]);
      transpose_bytes(rows, at + 64 * half + 16 * (piece % 2) + 32, lower[1]);
      transpose_bytes(rows, at + 128 + 32 * half + 16 * (piece % 2), upper);
#pragma GCC unroll 4
      for (int group = 0; group < 4; ++group) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const Wide low = group < 2 ? lower[group][i] : _mm512_srli_epi32(lower[group - 2][i], 4);
          const Wide high = upper[i];
          const Wide moved = group < 2 ? _mm512_slli_epi32(high, 4 - 2 * group) : _mm512_srli_epi32(high, 2 * group - 4);
          codes[i] = _mm512_or_si512(masked(low, NIBBLES), masked(moved, PAIRS));
        }
        use(first + 2 * group, codes);
      }
    }
  }
};
