// Stored numbers as floats: plain ones, coded rows and latents; included once per instruction set
// (instruction_sets.inc.h). A functor of rows decodes one row in its own order, in which dimension `dimension_of(at)`
// is at `at`.

template <typename T>
static void read(const T* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

static void read(const Numbers& from, int64_t offset, int64_t count, float* to) {
  switch (from.dtype) {
    case Dtype::float32: return read(static_cast<const float*>(from.data) + offset, count, to);
    case Dtype::bfloat16: return read(static_cast<const BFloat16*>(from.data) + offset, count, to);
    case Dtype::int8: return read(static_cast<const int8_t*>(from.data) + offset, count, to);
    case Dtype::uint8: return;  // codes, which are not numbers
  }
}

constexpr int BLOCK = 8;  // bytes of codes that are decoded together, a divisor of the bytes of a row

// The nibbles of 4 bytes, each in a separate byte.
static SHADOWKV_INLINE void spread(const uint8_t* from, uint8_t* to) {
  uint32_t nibbles;
  __builtin_memcpy(&nibbles, from, sizeof nibbles);
  uint64_t x = nibbles;
  x = (x | x << 16) & 0x0000ffff0000ffff;
  x = (x | x << 8) & 0x00ff00ff00ff00ff;
  x = (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
  __builtin_memcpy(to, &x, sizeof x);
}

// The upper bits of 16 codes of a lane, twice, in the order of their codes: they are stored in the order of
// SelectorLanes (shadowkv/kvcache/codecs/packing.py).
static SHADOWKV_INLINE uint32_t sorted_upper(const uint8_t* from) {
  uint32_t x;
  __builtin_memcpy(&x, from, sizeof x);
  // First all pairs of a byte's codes, then the nibbles of two bytes.
  x = (x & 0xc3c3c3c3) | (x & 0x0c0c0c0c) << 2 | (x & 0x30303030) >> 2;
  return (x & 0xf00ff00f) | (x & 0x00f000f0) << 4 | (x & 0x0f000f00) >> 4;
}

// Codes in lanes (shadowkv/kvcache/codecs/packing.py): levels in equal steps, or from a table [2^BITS].
template <int BITS, bool TABLE>
struct LaneRows {
  static constexpr int WIDTH = BITS == 3 ? 2 : BITS, PLACES = 8 / WIDTH;

  // First come the lowest codes of all bytes, then the next, and so on. With 3 bits, the upper bits follow in a second
  // plane, a nibble for each byte of the lower bits; for levels from a table, whole runs of 16 codes have another
  // order.
  static void decode(
      const uint8_t* __restrict codes, float step, const float* __restrict levels, int64_t dim, float* __restrict to) {
    constexpr float MIDDLE = ((1 << BITS) - 1) / 2.0f;
    const int64_t bytes = dim / PLACES;
    for (int64_t first = 0; first < bytes; first += BLOCK) {
      uint8_t upper[BLOCK] = {};
      if constexpr (BITS == 3) {
        const uint8_t* from = codes + bytes + first / 2;
        const uint32_t sorted = TABLE && dim % 128 == 0 ? sorted_upper(from) : 0;
        spread(TABLE && dim % 128 == 0 ? reinterpret_cast<const uint8_t*>(&sorted) : from, upper);
      }
#pragma GCC unroll 4
      for (int place = 0; place < PLACES; ++place) {
        for (int i = 0; i < BLOCK; ++i) {
          int code = codes[first + i] >> place * WIDTH & ((1 << WIDTH) - 1);
          if constexpr (BITS == 3) code |= (upper[i] >> place & 1) << 2;
          to[place * bytes + first + i] = (TABLE ? levels[code] : static_cast<float>(code) - MIDDLE) * step;
        }
      }
    }
  }

  // Dimension 8 i + g is number i of lane g.
  static SHADOWKV_INLINE int64_t dimension_of(int64_t at, int64_t dim) {
    const int64_t bytes = dim / PLACES, per_lane = bytes / 8;
    const int64_t place = at / bytes, lane = at % bytes / per_lane, byte = at % per_lane;
    return 8 * (byte * PLACES + place) + lane;
  }
};

// Calls `use` with the functor for a codec, which must be one of coded rows.
template <typename Use>
static void with_row_codec(int64_t codec, const Use& use) {
  switch (codec) {
    case codec::kRotated4: return use(LaneRows<4, false>());
    case codec::kRotated3: return use(LaneRows<3, false>());
    case codec::kRotated2: return use(LaneRows<2, false>());
    case codec::kLloyd8: return use(LaneRows<8, true>());
    case codec::kLloyd4: return use(LaneRows<4, true>());
    case codec::kLloyd3: return use(LaneRows<3, true>());
    case codec::kLloyd2: return use(LaneRows<2, true>());
  }
}

// Latents of shadowkv/kvcache/codecs/latents.py as floats: `rows` of them, each with `rank` dimensions.
static void read_latents(const StoredRows& from, int64_t offset, int64_t rows, int64_t rank, float* __restrict to) {
  if (from.codec != codec::kLatentInt4) return read(from.rows, offset, rows * rank, to);
  const int64_t strong = 2 * from.width - rank, pairs = from.width - strong;
  const uint8_t* __restrict row = static_cast<const uint8_t*>(from.rows.data) + offset;
  for (; rows > 0; --rows, row += from.width, to += rank) {
    for (int64_t i = 0; i < strong; ++i) to[i] = static_cast<float>(row[i] - 128);
    const uint8_t* __restrict weak = row + strong;
    float* __restrict rest = to + strong;
    int64_t i = 0;
    for (; i + BLOCK / 2 <= pairs; i += BLOCK / 2) {
      uint8_t codes[BLOCK];
      spread(weak + i, codes);
      for (int j = 0; j < BLOCK; ++j) rest[2 * i + j] = static_cast<float>(codes[j] - 8);
    }
    for (; i < pairs; ++i) {
      rest[2 * i] = static_cast<float>((weak[i] & 15) - 8);
      rest[2 * i + 1] = static_cast<float>((weak[i] >> 4) - 8);
    }
  }
}
