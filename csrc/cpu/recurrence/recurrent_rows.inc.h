// The kernels of the gated delta rule, of the state space model and of the causal convolution, included once per
// instruction set (instruction_sets.inc.h).

#include "cpu/attention/attention_tile.inc.h"

// Vectors of a state's row that share a register tile: whole rows of 128 where registers hold two sums of each.
constexpr int STATE_SPAN = SHADOWKV_LANES == 16 ? 8 : 4;

template <typename V>
static SHADOWKV_INLINE V load_as(const float* from) {
  V x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}

// M vectors V of columns of the state [key_dim, columns], from `from` to `to`, and of the result.
//
// With S' = decay S + k c, where c = beta (v - decay k S), the result is q S' = decay q S + (q k) c: both products with
// the old state come from one pass over it, and a second one, which finds it in the core's caches, writes the new one.
// Without correction, c is beta v, and the result has skip v besides.
template <typename V, int M, bool CORRECTS>
static SHADOWKV_INLINE void step_columns(
    const DeltaToken& token, const float* from, float* to, int64_t key_dim, int64_t columns, const float* v,
    float* out) {
  constexpr int64_t WIDTH = sizeof(V) / sizeof(float);
  V known[M] = {}, found[M] = {}, change[M];
  for (int64_t i = 0; i < key_dim; ++i) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const V state = load_as<V>(from + i * columns + m * WIDTH);
      if constexpr (CORRECTS) known[m] += token.k[i] * state;
      found[m] += token.q[i] * state;
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const V value = load_as<V>(v + m * WIDTH);
    V result;
    if constexpr (CORRECTS) {
      change[m] = (value - token.decay * known[m]) * token.beta;
      result = token.decay * found[m] + token.product * change[m];
    } else {
      change[m] = value * token.beta;
      result = token.decay * found[m] + token.product * change[m] + token.skip * value;
    }
    __builtin_memcpy(out + m * WIDTH, &result, sizeof result);
  }
  for (int64_t i = 0; i < key_dim; ++i) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const V state = token.decay * load_as<V>(from + i * columns + m * WIDTH) + token.k[i] * change[m];
      __builtin_memcpy(to + i * columns + m * WIDTH, &state, sizeof state);
    }
  }
}

template <bool CORRECTS>
static void step_all_columns(
    const DeltaToken& token, const float* from, float* to, int64_t key_dim, int64_t columns, float* out) {
  int64_t x = 0;
  for (; x + STATE_SPAN * LANES <= columns; x += STATE_SPAN * LANES)
    step_columns<Floats, STATE_SPAN, CORRECTS>(token, from + x, to + x, key_dim, columns, token.v + x, out + x);
  for (; x + LANES <= columns; x += LANES)
    step_columns<Floats, 1, CORRECTS>(token, from + x, to + x, key_dim, columns, token.v + x, out + x);
  for (; x < columns; ++x)
    step_columns<float, 1, CORRECTS>(token, from + x, to + x, key_dim, columns, token.v + x, out + x);
}

static void step_state(
    const DeltaToken& token, bool corrects, const float* from, float* to, int64_t key_dim, int64_t columns,
    float* out) {
  const auto step = corrects ? step_all_columns<true> : step_all_columns<false>;
  step(token, from, to, key_dim, columns, out);
}

// out [W, CHANNELS_PER_TASK] summed over W with weights, and the bias, through SiLU. `oldest` is the row of the oldest
// input.
static void convolve_channels(
    const float* weight, const float* bias, const float* inputs, int64_t width, int64_t oldest, float* out) {
  for (int64_t x = 0; x < CHANNELS_PER_TASK; x += LANES) {
    Floats sum = load(bias + x);
    for (int64_t i = 0; i < width; ++i) {
      const int64_t row = oldest + i < width ? oldest + i : oldest + i - width;
      sum += load(weight + i * CHANNELS_PER_TASK + x) * load(inputs + row * CHANNELS_PER_TASK + x);
    }
    store(out + x, silu(sum));
  }
}
