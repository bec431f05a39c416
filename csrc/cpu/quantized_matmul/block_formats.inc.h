// Blocks of quantized numbers as floats, included once per instruction set (instruction_sets.inc.h). Results are exact
// but for the addition of a minimum.

#include "cpu/common/vectors.inc.h"

#if defined(__clang__) || SHADOWKV_LANES == 4

typedef uint8_t Bytes __attribute__((vector_size(SHADOWKV_LANES)));
typedef int8_t SignedBytes __attribute__((vector_size(SHADOWKV_LANES)));

static SHADOWKV_INLINE Ints widen(const uint8_t* from) {
  Bytes x;
  __builtin_memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, Ints);
}

static SHADOWKV_INLINE Ints widen_signed(const uint8_t* from) {
  SignedBytes x;
  __builtin_memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, Ints);
}

#else  // GCC compiles a single-instruction conversion to eight instructions

typedef char Chars __attribute__((vector_size(16)));
typedef int64_t Pair __attribute__((vector_size(16)));

static SHADOWKV_INLINE Chars load_bytes(const uint8_t* from) {
  Pair x = {};
#if SHADOWKV_LANES == 16
  __builtin_memcpy(&x, from, 16);
#else
  int64_t low;
  __builtin_memcpy(&low, from, 8);
  x[0] = low;
#endif
  return (Chars)x;
}

#if SHADOWKV_LANES == 16
static SHADOWKV_INLINE Ints widen(const uint8_t* from) {
  return (Ints)__builtin_ia32_pmovzxbd512_mask(load_bytes(from), Ints{}, -1);
}

static SHADOWKV_INLINE Ints widen_signed(const uint8_t* from) {
  return (Ints)__builtin_ia32_pmovsxbd512_mask(load_bytes(from), Ints{}, -1);
}
#else
static SHADOWKV_INLINE Ints widen(const uint8_t* from) { return (Ints)__builtin_ia32_pmovzxbd256(load_bytes(from)); }

static SHADOWKV_INLINE Ints widen_signed(const uint8_t* from) {
  return (Ints)__builtin_ia32_pmovsxbd256(load_bytes(from));
}
#endif

#endif

static SHADOWKV_INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

static SHADOWKV_INLINE float read_half(const uint8_t* from) {
  Float16 x;
  __builtin_memcpy(&x, from, sizeof x);
  return to_float(x);
}

// 16 bytes of 4-bit codes: the lower halves come first.
struct UnpackQ4_0 {
  static constexpr BlockFormat FORMAT = BLOCK_FORMATS[Q4_0];

  static SHADOWKV_INLINE void unpack(const uint8_t* block, float* to) {
    const float scale = read_half(block);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += LANES) {
      const Ints codes = widen(block + 2 + i);
      store(to + i, to_floats((codes & 15) - 8) * scale);
      store(to + 16 + i, to_floats((codes >> 4) - 8) * scale);
    }
  }
};

struct UnpackQ4_1 {
  static constexpr BlockFormat FORMAT = BLOCK_FORMATS[Q4_1];

  static SHADOWKV_INLINE void unpack(const uint8_t* block, float* to) {
    const float scale = read_half(block), minimum = read_half(block + 2);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += LANES) {
      const Ints codes = widen(block + 4 + i);
      store(to + i, to_floats(codes & 15) * scale + minimum);
      store(to + 16 + i, to_floats(codes >> 4) * scale + minimum);
    }
  }
};

struct UnpackQ8_0 {
  static constexpr BlockFormat FORMAT = BLOCK_FORMATS[Q8_0];

  static SHADOWKV_INLINE void unpack(const uint8_t* block, float* to) {
    const float scale = read_half(block);
#pragma GCC unroll 8
    for (int i = 0; i < 32; i += LANES) store(to + i, to_floats(widen_signed(block + 2 + i)) * scale);
  }
};

// 8 groups of 32 4-bit codes, two groups in 32 bytes; scales and minima of the groups have 6 bits, stored in two pieces
// for the last four groups.
struct UnpackQ4_K {
  static constexpr BlockFormat FORMAT = BLOCK_FORMATS[Q4_K];

  static SHADOWKV_INLINE void read_scales(const uint8_t* block, float* scales, float* minima) {
    const float unit = read_half(block), unit_of_minima = read_half(block + 2);
    const uint8_t* packed = block + 4;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      scales[i] = unit * (packed[i] & 63);
      minima[i] = unit_of_minima * (packed[4 + i] & 63);
      scales[4 + i] = unit * ((packed[8 + i] & 15) | (packed[i] >> 6) << 4);
      minima[4 + i] = unit_of_minima * (packed[8 + i] >> 4 | (packed[4 + i] >> 6) << 4);
    }
  }

  static SHADOWKV_INLINE void unpack(const uint8_t* block, float* to) {
    float scales[8], minima[8];
    read_scales(block, scales, minima);
    for (int pair = 0; pair < 4; ++pair) {
#pragma GCC unroll 8
      for (int i = 0; i < 32; i += LANES) {
        const Ints codes = widen(block + 16 + 32 * pair + i);
        store(to + 64 * pair + i, to_floats(codes & 15) * scales[2 * pair] - minima[2 * pair]);
        store(to + 64 * pair + 32 + i, to_floats(codes >> 4) * scales[2 * pair + 1] - minima[2 * pair + 1]);
      }
    }
  }
};

// Two halves of 128 codes: 4 lower bits in 64 bytes, 2 upper bits in 32, and a scale for every 16.
struct UnpackQ6_K {
  static constexpr BlockFormat FORMAT = BLOCK_FORMATS[Q6_K];

  static SHADOWKV_INLINE void unpack(const uint8_t* block, float* to) {
    const float unit = read_half(block + 208);
    for (int half = 0; half < 2; ++half) {
      const uint8_t *lower = block + 64 * half, *upper = block + 128 + 32 * half;
      float scales[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) scales[i] = unit * static_cast<int8_t>(block[192 + 8 * half + i]);
#pragma GCC unroll 8
      for (int i = 0; i < 32; i += LANES) {
        const Ints first = widen(lower + i), second = widen(lower + 32 + i), bits = widen(upper + i);
        float* at = to + 128 * half + i;
        store(at, to_floats(((first & 15) | (bits & 3) << 4) - 32) * scales[i / 16]);
        store(at + 32, to_floats(((second & 15) | (bits & 12) << 2) - 32) * scales[2 + i / 16]);
        store(at + 64, to_floats((first >> 4 | (bits & 48)) - 32) * scales[4 + i / 16]);
        store(at + 96, to_floats((second >> 4 | (bits & 192) >> 2) - 32) * scales[6 + i / 16]);
      }
    }
  }
};

// Calls `use` with the functor for a kind of blocks.
template <typename Use>
static SHADOWKV_INLINE void with_blocks(BlockKind kind, const Use& use) {
  switch (kind) {
    case Q4_0: return use(UnpackQ4_0());
    case Q4_1: return use(UnpackQ4_1());
    case Q8_0: return use(UnpackQ8_0());
    case Q4_K: return use(UnpackQ4_K());
    case Q6_K: return use(UnpackQ6_K());
  }
}
