// What a decoder layer computes of single rows, and products with matrices of floats, included once per instruction set
// (instruction_sets.inc.h).

#include "cpu/attention/attention_tile.inc.h"

// x += added; null adds nothing.
static void add_row(float* x, const float* added, int64_t size) {
  if (added == nullptr) return;
  for (int64_t i = 0; i < size; ++i) x[i] += added[i];
}

// out = x / rms(x) * weight; out may be x.
static void norm_row(const float* x, const float* weight, float eps, int64_t size, float* out) {
  Floats squares = {};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
  float sum = 0.0f;
  for (int lane = 0; lane < LANES; ++lane) sum += squares[lane];
  for (; i < size; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / __builtin_sqrtf(sum / (float)size + eps);
  for (int64_t n = 0; n < size; ++n) out[n] = x[n] * scale * weight[n];
}

// Rotates pairs of x [dim] by angles with these cos and sin [pairs]: neighbours, or `pairs` apart.
static void rotate_row(float* x, const float* cos, const float* sin, int64_t pairs, bool interleaved) {
  const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    float *first = x + i * step, *second = first + apart;
    const float a = *first, b = *second;
    *first = a * cos[i] - b * sin[i];
    *second = b * cos[i] + a * sin[i];
  }
}

// x *= sigmoid(gate)
static void gate_row(float* x, const float* gate, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(x + i, load(x + i) * sigmoid(load(gate + i)));
  for (; i < size; ++i) x[i] *= sigmoid(Floats{} + gate[i])[0];
}

// out = silu(gate) * up; out may be up.
static void activate_row(const float* gate, const float* up, int64_t size, float* out) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(out + i, silu(load(gate + i)) * load(up + i));
  for (; i < size; ++i) out[i] = silu(Floats{} + gate[i])[0] * up[i];
}

// out [N] = products of N tokens, `columns` apart, with a row.
template <int N>
static SHADOWKV_INLINE void multiply_row(const float* row, const float* x, int64_t columns, float* out) {
  Floats sums[N] = {};
  int64_t i = 0;
  for (; i + LANES <= columns; i += LANES) {
    const Floats weights = load(row + i);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[n] += load(x + n * columns + i) * weights;
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    out[n] = 0.0f;
    for (int lane = 0; lane < LANES; ++lane) out[n] += sums[n][lane];
    for (int64_t rest = i; rest < columns; ++rest) out[n] += x[n * columns + rest] * row[rest];
  }
}

// out [tokens, ...], rows `out_row` apart, in columns `first` to `last`, = x [tokens, columns] times these rows.
static void multiply_plain(
    const float* rows, int64_t row_size, int64_t columns, const float* x, int64_t tokens, int64_t first, int64_t last,
    float* out, int64_t out_row) {
  for (int64_t row = first; row < last; ++row)
    in_blocks(tokens, [&](auto count, int64_t token) {
      constexpr int N = decltype(count)::value;
      float products[N];
      multiply_row<N>(rows + row * row_size, x + token * columns, columns, products);
      for (int n = 0; n < N; ++n) out[(token + n) * out_row + row] = products[n];
    });
}
