// What the attention kernels share, included once per instruction set (instruction_sets.inc.h).

#include "cpu/common/vectors.inc.h"

constexpr int KEYS = 4;  // keys that share a register tile
constexpr int SPAN = 4;  // vectors of a value row that share a register tile

// 2^x for x <= 0 (-inf too), within 2 units in the last place; results below 2^-126 are 0.
static SHADOWKV_INLINE Floats exp2_of(Floats x) {
  const Floats lowest = Floats{} - 126.0f, shift = Floats{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to integers
  const Floats clamped = x < lowest ? lowest : x;
  const Floats moved = clamped + shift;
  const Floats r = clamped - (moved - shift);
  // Powers of ln 2 over factorials; |r| <= 1/2, so that the first term left out is below 6e-9.
  Floats p = 1.52527338e-5f * r + 1.54035304e-4f;
  p = p * r + 1.33335581e-3f;
  p = p * r + 9.61812911e-3f;
  p = p * r + 5.55041087e-2f;
  p = p * r + 2.40226507e-1f;
  p = p * r + 6.93147181e-1f;
  p = p * r + 1.0f;
  const Floats power = (Floats)(((Bits)moved << 23) + 0x3f800000u);
  return x < lowest ? Floats{} : p * power;
}

static SHADOWKV_INLINE float exp2_of(float x) { return exp2_of(Floats{} + x)[0]; }

static SHADOWKV_INLINE Floats sigmoid(Floats x) {
  const Floats zero = {};
  const Floats power = exp2_of((x < zero ? x : -x) * 1.44269504f);  // e^-|x|
  return (x < zero ? power : zero + 1.0f) / (power + 1.0f);
}

static SHADOWKV_INLINE Floats silu(Floats x) { return x * sigmoid(x); }

// Scores [N, TILE] of N queries [N, dim] with `rows` keys. Also prefetches the values that are needed next, into the
// second cache: with keys they would not fit into the first.
template <int N, typename T>
static void score_keys(
    const float* q, const T* k, int64_t k_row, const T* v, int64_t v_row, int64_t rows, int64_t dim, float* scores) {
  const int64_t whole = dim / LANES * LANES;
  for (int64_t row = 0; row < rows; row += KEYS) {
    const T* keys[KEYS];
    // Past the end, the last key is scored again and its score is overwritten later.
    for (int i = 0; i < KEYS; ++i) keys[i] = k + (row + i < rows ? row + i : rows - 1) * k_row;
    if (v != nullptr)
      for (int i = 0; i < KEYS; ++i)
        for (int64_t x = 0; x < dim; x += 64 / int64_t(sizeof(T))) __builtin_prefetch(v + (row + i) * v_row + x, 0, 2);
    Floats sums[N][KEYS] = {};
    for (int64_t x = 0; x < whole; x += LANES) {
      Floats queries[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) queries[n] = load(q + n * dim + x);
#pragma GCC unroll 4
      for (int i = 0; i < KEYS; ++i) {
        const Floats key = load(keys[i] + x);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[n][i] += queries[n] * key;
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) add_lanes(sums[n], scores + n * TILE + row);
    for (int64_t x = whole; x < dim; ++x)
      for (int n = 0; n < N; ++n)
        for (int i = 0; i < KEYS; ++i) scores[n * TILE + row + i] += q[n * dim + x] * to_float(keys[i][x]);
  }
}

// out [N, dim] = out * scale [N] + weights [N, rows] @ values, in columns [x, x + M * LANES). Also prefetches these
// columns of the keys that are needed next, unless `next` is null.
template <int N, int M, typename T>
static SHADOWKV_INLINE void add_columns(
    const float* weights, int64_t weights_row, const float* scale, const T* v, int64_t v_row, int64_t rows, int64_t dim,
    int64_t x, float* out, const T* next, int64_t next_row) {
  Floats sums[N][M];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i) sums[n][i] = load(out + n * dim + x + i * LANES) * scale[n];
  for (int64_t row = 0; row < rows; ++row) {
    if (next != nullptr)
      for (int64_t i = 0; i < M * LANES; i += 64 / int64_t(sizeof(T)))
        __builtin_prefetch(next + row * next_row + x + i, 0, 2);
    Floats values[M];
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i) values[i] = load(v + row * v_row + x + i * LANES);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int i = 0; i < M; ++i) sums[n][i] += weights[n * weights_row + row] * values[i];
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i) store(out + n * dim + x + i * LANES, sums[n][i]);
}

template <int N, typename T>
static void add_values(
    const float* weights, int64_t weights_row, const float* scale, const T* v, int64_t v_row, int64_t rows, int64_t dim,
    float* out, const T* next = nullptr, int64_t next_row = 0) {
  int64_t x = 0;
  for (; x + SPAN * LANES <= dim; x += SPAN * LANES)
    add_columns<N, SPAN>(weights, weights_row, scale, v, v_row, rows, dim, x, out, next, next_row);
  for (; x + LANES <= dim; x += LANES)
    add_columns<N, 1>(weights, weights_row, scale, v, v_row, rows, dim, x, out, next, next_row);
  for (; x < dim; ++x)
    for (int n = 0; n < N; ++n) {
      float sum = out[n * dim + x] * scale[n];
      for (int64_t row = 0; row < rows; ++row) sum += weights[n * weights_row + row] * to_float(v[row * v_row + x]);
      out[n * dim + x] = sum;
    }
}

// Turns scores [TILE] into weights relative to the new peak; returns the factor for earlier sums.
static SHADOWKV_INLINE float weigh(float* scores, int64_t rows, float* peak, float* sum) {
  const int64_t padded = (rows + LANES - 1) / LANES * LANES;
  for (int64_t row = rows; row < padded; ++row) scores[row] = -__builtin_inff();
  Floats highest = load(scores);
  for (int64_t row = LANES; row < padded; row += LANES) {
    const Floats x = load(scores + row);
    highest = x > highest ? x : highest;
  }
  float top = *peak;
  for (int i = 0; i < LANES; ++i) top = highest[i] > top ? highest[i] : top;
  Floats total = {};
  for (int64_t row = 0; row < padded; row += LANES) {
    const Floats weight = exp2_of(load(scores + row) - top);
    store(scores + row, weight);
    total += weight;
  }
  const float scale = exp2_of(*peak - top);
  float added = 0.0f;
  for (int i = 0; i < LANES; ++i) added += total[i];
  *sum = *sum * scale + added;
  *peak = top;
  return scale;
}

// Adds up to TILE keys and values to the sums of N queries. `log_weight` [rows], in units of log 2, is added to the
// scores of all queries, and `added` [N, TILE] to those of each query; null for nothing. `next_k` are the keys of the
// next tile, to prefetch; null for none.
template <int N, typename T>
static void attend_tile(
    const float* q, const T* k, int64_t k_row, const T* v, int64_t v_row, int64_t rows, int64_t dim,
    const float* log_weight, const float* added, bool fetch_values, float* scores, float* scale, float* peak,
    float* sum, float* out, const T* next_k = nullptr) {
  score_keys<N>(q, k, k_row, fetch_values ? v : nullptr, v_row, rows, dim, scores);
  for (int n = 0; n < N; ++n) {
    if (log_weight != nullptr)
      for (int64_t row = 0; row < rows; ++row) scores[n * TILE + row] += log_weight[row];
    if (added != nullptr)
      for (int64_t row = 0; row < rows; ++row) scores[n * TILE + row] += added[n * TILE + row];
    scale[n] = weigh(scores + n * TILE, rows, peak + n, sum + n);
  }
  add_values<N>(scores, TILE, scale, v, v_row, rows, dim, out, next_k, k_row);
}
