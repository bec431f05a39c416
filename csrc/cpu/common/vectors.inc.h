// Vectors of floats and tiles of them in registers, included once per instruction set (instruction_sets.inc.h), using
// the vector extensions of GCC and Clang instead of intrinsics.

constexpr int LANES = SHADOWKV_LANES;
constexpr int ROWS = 4;  // queries, or rows of any product, that share a register tile

typedef float Floats __attribute__((vector_size(4 * SHADOWKV_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * SHADOWKV_LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * SHADOWKV_LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * SHADOWKV_LANES)));

static SHADOWKV_INLINE Floats load(const float* from) {
  Floats x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}

static SHADOWKV_INLINE Floats load(const BFloat16* from) {
  Halves x;
  __builtin_memcpy(&x, from, sizeof x);
  return (Floats)(__builtin_convertvector(x, Bits) << 16);
}

static SHADOWKV_INLINE void store(float* to, Floats x) { __builtin_memcpy(to, &x, sizeof x); }

// Sums of the lanes of four vectors.
static SHADOWKV_INLINE void add_lanes(const Floats* x, float* sums) {
#if SHADOWKV_LANES == 16
#define LOW 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define HIGH 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define LOW_PAIRS 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_PAIRS 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#elif SHADOWKV_LANES == 8
#define LOW 0, 8, 1, 9, 4, 12, 5, 13
#define HIGH 2, 10, 3, 11, 6, 14, 7, 15
#define LOW_PAIRS 0, 1, 8, 9, 4, 5, 12, 13
#define HIGH_PAIRS 2, 3, 10, 11, 6, 7, 14, 15
#else
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#define LOW_PAIRS 0, 1, 4, 5
#define HIGH_PAIRS 2, 3, 6, 7
#endif
  const Floats a = SHADOWKV_SHUFFLE(x[0], x[1], LOW) + SHADOWKV_SHUFFLE(x[0], x[1], HIGH);
  const Floats b = SHADOWKV_SHUFFLE(x[2], x[3], LOW) + SHADOWKV_SHUFFLE(x[2], x[3], HIGH);
  Floats all = SHADOWKV_SHUFFLE(a, b, LOW_PAIRS) + SHADOWKV_SHUFFLE(a, b, HIGH_PAIRS);
#if SHADOWKV_LANES == 16
  all += SHADOWKV_SHUFFLE(all, all, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  all += SHADOWKV_SHUFFLE(all, all, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
#elif SHADOWKV_LANES == 8
  all += SHADOWKV_SHUFFLE(all, all, 4, 5, 6, 7, 0, 1, 2, 3);
#endif
  __builtin_memcpy(sums, &all, 4 * sizeof(float));
#undef LOW
#undef HIGH
#undef LOW_PAIRS
#undef HIGH_PAIRS
}

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls `work` for every block of up to ROWS of `count` rows with its size, as a type, and its first row.
template <typename Work>
static SHADOWKV_INLINE void in_blocks(int64_t count, const Work& work) {
  for (int64_t first = 0; first < count; first += ROWS) {
    switch (count - first) {
      case 1: work(Count<1>{}, first); break;
      case 2: work(Count<2>{}, first); break;
      case 3: work(Count<3>{}, first); break;
      default: work(Count<ROWS>{}, first);
    }
  }
}
