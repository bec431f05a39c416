// Groups of 32 activations as integers, and sums of their products with the codes of blocks, included once per
// instruction set that multiplies bytes.
//
// Codes are multiplied as the integers that they are. Activations become integers of 21 bits, times a scale for every
// 32, which loses about what float32 loses in the sum of a product, and these three digits of 7 bits, as bytes are what
// CPUs multiply fastest. Sums of a group are exact.

typedef float Floats8 __attribute__((vector_size(32)));
typedef int32_t Ints8 __attribute__((vector_size(32)));

constexpr int DIGIT_BITS = 7;
constexpr float LARGEST = 63 * (1 + (1 << DIGIT_BITS) + (1 << 2 * DIGIT_BITS));  // with all digits in [-64, 63]

static SHADOWKV_INLINE Floats8 load8(const float* from) {
  Floats8 x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}

static SHADOWKV_INLINE void store8(float* to, Floats8 x) { __builtin_memcpy(to, &x, sizeof x); }

static SHADOWKV_INLINE float sum_lanes(Floats8 x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

typedef __m256i Codes;

static SHADOWKV_INLINE Codes load_codes(const uint8_t* from) { return _mm256_loadu_si256((const __m256i*)from); }

// The lower halves of 16 bytes come first.
static SHADOWKV_INLINE Codes load_nibbles(const uint8_t* from) {
  const __m128i x = _mm_loadu_si128((const __m128i*)from);
  return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(x, 4), x), _mm256_set1_epi8(15));
}

// Q8_0's are signed.
static SHADOWKV_INLINE Codes add_128(Codes x) { return _mm256_xor_si256(x, _mm256_set1_epi8(-128)); }

static SHADOWKV_INLINE Codes low_nibbles(Codes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }

static SHADOWKV_INLINE Codes high_nibbles(Codes x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }

// Bits `shift` and `shift` + 1 of each byte, above its four lower bits.
template <int SHIFT>
static SHADOWKV_INLINE Codes with_upper_bits(Codes lower, Codes upper) {
  const Codes moved = SHIFT < 4 ? _mm256_slli_epi16(upper, 4 - SHIFT) : _mm256_srli_epi16(upper, SHIFT - 4);
  return _mm256_or_si256(lower, _mm256_and_si256(moved, _mm256_set1_epi8(48)));
}

static SHADOWKV_INLINE float half_to_float(const uint8_t* from) {
  uint16_t bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  return _cvtsh_ss(bits);
}

// `count` numbers, 1 to 8, each STEP bytes behind the one before; 0 in lanes past them.
template <int64_t STEP>
static SHADOWKV_INLINE Floats8 halves_to_floats(const uint8_t* from, int64_t count) {
  __m128i halves = _mm_setzero_si128();
#define INSERT(i)                                     \
  {                                                   \
    int16_t bits;                                     \
    __builtin_memcpy(&bits, from + i * STEP, 2);      \
    halves = _mm_insert_epi16(halves, bits, i);       \
  }
  switch (count) {
    default: INSERT(7) [[fallthrough]];
    case 7: INSERT(6) [[fallthrough]];
    case 6: INSERT(5) [[fallthrough]];
    case 5: INSERT(4) [[fallthrough]];
    case 4: INSERT(3) [[fallthrough]];
    case 3: INSERT(2) [[fallthrough]];
    case 2: INSERT(1) [[fallthrough]];
    case 1: INSERT(0)
  }
#undef INSERT
  return (Floats8)_mm256_cvtph_ps(halves);
}

// sums + products of 32 codes with a digit of each number, four to a lane.
static SHADOWKV_INLINE __m256i add_digits(__m256i sums, Codes codes, const int8_t* digits) {
  const __m256i x = _mm256_loadu_si256((const __m256i*)digits);
#if SHADOWKV_LANES == 16
  return _mm256_dpbusd_epi32(sums, codes, x);
#else  // 255 * 64 * 2 is no more than 16 bits hold
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
#endif
}

// Sums of (code - offset) * number: lanes 0 to 3 are of the first 16, the others of the last.
template <int OFFSET>
static SHADOWKV_INLINE Ints8 multiply_codes(Codes codes, const int32_t* numbers) {
  const int8_t* digits = (const int8_t*)numbers;
  __m256i sums = add_digits(_mm256_setzero_si256(), codes, digits);
  sums = add_digits(_mm256_slli_epi32(sums, DIGIT_BITS), codes, digits + 32);
  sums = add_digits(_mm256_slli_epi32(sums, DIGIT_BITS), codes, digits + 64);
  if (OFFSET == 0) return (Ints8)sums;
  const __m256i totals = _mm256_loadu_si256((const __m256i*)(numbers + 24));
  return (Ints8)_mm256_sub_epi32(sums, _mm256_slli_epi32(totals, __builtin_ctz(OFFSET ? OFFSET : 1)));
}

// The most significant digits come first; behind the digits are sums of four numbers each.
static SHADOWKV_INLINE void write_digits(const int32_t* x, int32_t* to) {
  int8_t* digits = (int8_t*)to;
  for (int i = 0; i < 8; ++i) to[24 + i] = x[4 * i] + x[4 * i + 1] + x[4 * i + 2] + x[4 * i + 3];
  for (int i = 0; i < 32; ++i) {
    const int32_t low = ((x[i] + 64) & 127) - 64, rest = (x[i] - low) >> DIGIT_BITS;
    const int32_t middle = ((rest + 64) & 127) - 64;
    digits[64 + i] = (int8_t)low;
    digits[32 + i] = (int8_t)middle;
    digits[i] = (int8_t)((rest - middle) >> DIGIT_BITS);
  }
}

// Of every format: a number is (code - OFFSET) * scale + minimum. `parameters` reads scales, and minima where there are
// any, of up to 8 groups of 32 from a block on, `codes` the codes of one of them. Where a group has two SCALES, those of
// all first halves come before those of the second.
template <BlockKind>
struct BlockCodes;

// 16 bytes of 4-bit codes: the lower halves come first.
template <>
struct BlockCodes<Q4_0> {
  static constexpr int SCALES = 1, OFFSET = 8;
  static constexpr bool HAS_MINIMA = false;

  static SHADOWKV_INLINE void parameters(const uint8_t* block, int64_t groups, Floats8* scales, Floats8&) {
    *scales = halves_to_floats<BLOCK_FORMATS[Q4_0].bytes>(block, groups);
  }

  static SHADOWKV_INLINE Codes codes(const uint8_t* block, int64_t group) {
    return load_nibbles(block + group * BLOCK_FORMATS[Q4_0].bytes + 2);
  }
};

template <>
struct BlockCodes<Q4_1> {
  static constexpr int SCALES = 1, OFFSET = 0;
  static constexpr bool HAS_MINIMA = true;

  static SHADOWKV_INLINE void parameters(const uint8_t* block, int64_t groups, Floats8* scales, Floats8& minima) {
    *scales = halves_to_floats<BLOCK_FORMATS[Q4_1].bytes>(block, groups);
    minima = halves_to_floats<BLOCK_FORMATS[Q4_1].bytes>(block + 2, groups);
  }

  static SHADOWKV_INLINE Codes codes(const uint8_t* block, int64_t group) {
    return load_nibbles(block + group * BLOCK_FORMATS[Q4_1].bytes + 4);
  }
};

template <>
struct BlockCodes<Q8_0> {
  static constexpr int SCALES = 1, OFFSET = 128;
  static constexpr bool HAS_MINIMA = false;

  static SHADOWKV_INLINE void parameters(const uint8_t* block, int64_t groups, Floats8* scales, Floats8&) {
    *scales = halves_to_floats<BLOCK_FORMATS[Q8_0].bytes>(block, groups);
  }

  static SHADOWKV_INLINE Codes codes(const uint8_t* block, int64_t group) {
    return add_128(load_codes(block + group * BLOCK_FORMATS[Q8_0].bytes + 2));
  }
};

template <>
struct BlockCodes<Q4_K> {
  static constexpr int SCALES = 1, OFFSET = 0;
  static constexpr bool HAS_MINIMA = true;

  static SHADOWKV_INLINE void parameters(const uint8_t* block, int64_t, Floats8* scales, Floats8& minima) {
    float of_groups[8], least[8];
    UnpackQ4_K::read_scales(block, of_groups, least);
    *scales = load8(of_groups);
    minima = -load8(least);
  }

  static SHADOWKV_INLINE Codes codes(const uint8_t* block, int64_t group) {
    const Codes pair = load_codes(block + 16 + 32 * (group / 2));
    return group % 2 == 0 ? low_nibbles(pair) : high_nibbles(pair);
  }
};

// Two halves of 128 codes, whose 2 upper bits are apart.
template <>
struct BlockCodes<Q6_K> {
  static constexpr int SCALES = 2, OFFSET = 32;
  static constexpr bool HAS_MINIMA = false;

  static SHADOWKV_INLINE void parameters(const uint8_t* block, int64_t, Floats8* scales, Floats8&) {
    const float unit = half_to_float(block + 208);
    for (int group = 0; group < 8; ++group)
      for (int half = 0; half < 2; ++half) scales[half][group] = unit * (int8_t)block[192 + 2 * group + half];
  }

  static SHADOWKV_INLINE Codes codes(const uint8_t* block, int64_t group) {
    const uint8_t *lower = block + 64 * (group / 4), *upper = block + 128 + 32 * (group / 4);
    switch (group % 4) {
      case 0: return with_upper_bits<0>(low_nibbles(load_codes(lower)), load_codes(upper));
      case 1: return with_upper_bits<2>(low_nibbles(load_codes(lower + 32)), load_codes(upper));
      case 2: return with_upper_bits<4>(high_nibbles(load_codes(lower)), load_codes(upper));
      default: return with_upper_bits<6>(high_nibbles(load_codes(lower + 32)), load_codes(upper));
    }
  }
};

// 32 activations as integers, their scale, which is NaN where a number is not finite, and their sum.
static SHADOWKV_INLINE void make_group(const float* x, int32_t* to, float& scale, float& total) {
  int32_t bits[32], largest_bits = 0, numbers[32], sum = 0;
  __builtin_memcpy(bits, x, sizeof bits);
  for (int i = 0; i < 32; ++i) {
    const int32_t magnitude = bits[i] & 0x7fffffff;
    largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
  }
  const bool finite = largest_bits < 0x7f800000;
  float largest;
  __builtin_memcpy(&largest, &largest_bits, sizeof largest);
  const bool usable = finite && largest > 1e-30f;  // the inverse of less could be infinite
  const float inverse = usable ? LARGEST / largest : 0.0f;
  for (int i = 0; i < 32; ++i) {
    const float scaled = usable ? x[i] * inverse : 0.0f;
    numbers[i] = (int32_t)(scaled + (scaled < 0.0f ? -0.5f : 0.5f));
    sum += numbers[i];
  }
  write_digits(numbers, to);
  scale = finite ? largest / LARGEST : __builtin_nanf("");
  total = (float)sum * scale;
}

static void make_integers(const float* x, int64_t columns, IntegerGroups* to) {
  for (int64_t group = 0; group < groups_of(columns) * 8; ++group) {
    IntegerGroups& groups = to[group / 8];
    if (32 * group < columns)
      make_group(x + 32 * group, groups.numbers[group % 8], groups.scale[group % 8], groups.total[group % 8]);
    else
      groups.scale[group % 8] = groups.total[group % 8] = 0.0f;
  }
}
