// The kernel of attention over selected chunks, included once per instruction set (instruction_sets.inc.h).

#include "attention_tile.inc.h"

template <typename T>
static void read(const T* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

static void read(const Numbers& from, int64_t offset, int64_t count, float* to) {
  switch (from.dtype) {
    case Dtype::float32: return read(static_cast<const float*>(from.data) + offset, count, to);
    case Dtype::bfloat16: return read(static_cast<const BFloat16*>(from.data) + offset, count, to);
    case Dtype::int8: return read(static_cast<const int8_t*>(from.data) + offset, count, to);
  }
}

constexpr int BLOCK = 8;  // bytes of codes that are decoded together, a divisor of how many a row has

// The nibbles of 4 bytes, each in a byte of its own.
static SHADOWKV_INLINE void spread(const uint8_t* from, uint8_t* to) {
  uint32_t nibbles;
  __builtin_memcpy(&nibbles, from, sizeof nibbles);
  uint64_t x = nibbles;
  x = (x | x << 16) & 0x0000ffff0000ffff;
  x = (x | x << 8) & 0x00ff00ff00ff00ff;
  x = (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
  __builtin_memcpy(to, &x, sizeof x);
}

// A row of codes times its step. First come the lowest codes of all bytes, then the next, and so on: `dimension_of`
// says which dimension is where. Of 3 bits the upper ones are in a plane behind, a nibble for each byte of the lower.
template <int BITS>
static void decode(const uint8_t* __restrict codes, float step, int64_t dim, float* __restrict to) {
  constexpr int WIDTH = BITS == 4 ? 4 : 2, PLACES = 8 / WIDTH;
  constexpr float MIDDLE = ((1 << BITS) - 1) / 2.0f;
  const int64_t bytes = dim / PLACES;
  for (int64_t first = 0; first < bytes; first += BLOCK) {
    uint8_t upper[BLOCK] = {};
    if constexpr (BITS == 3) spread(codes + bytes + first / 2, upper);
#pragma GCC unroll 4
    for (int place = 0; place < PLACES; ++place) {
      for (int i = 0; i < BLOCK; ++i) {
        int code = codes[first + i] >> place * WIDTH & ((1 << WIDTH) - 1);
        if constexpr (BITS == 3) code |= (upper[i] >> place & 1) << 2;
        to[place * bytes + first + i] = (static_cast<float>(code) - MIDDLE) * step;
      }
    }
  }
}

// Dimension 16 i + 8 half + g is in the bytes of lane g.
static SHADOWKV_INLINE int64_t dimension_of(int64_t at, int bits, int64_t dim) {
  const int64_t places = bits == 4 ? 2 : 4, bytes = dim / places, per_lane = bytes / 8;
  const int64_t place = at / bytes, lane = at % bytes / per_lane, byte = at % per_lane;
  return 16 * (byte * (places / 2) + place / 2) + 8 * (place % 2) + lane;
}

static void turn(const SelectedForm& form, int64_t position, float* key) {
  const int64_t half = form.turning / 2;
  const float *cos = form.cos + position * half, *sin = form.sin + position * half;
  const auto pair = [&](int64_t i, float& first, float& second) {
    const float a = first, b = second;
    first = a * cos[i] - b * sin[i];
    second = b * cos[i] + a * sin[i];
  };
  if (form.interleaved)
    for (int64_t i = 0; i < half; ++i) pair(i, key[2 * i], key[2 * i + 1]);
  else
    for (int64_t i = 0; i < half; ++i) pair(i, key[i], key[i + half]);
}

// Keys [rows, dim] of the latents of some chunks, which are in the scratch, as is the basis.
static void rebuild(const SelectedForm& form, const SelectedChunk* chunks, int64_t rows, const SelectedScratch& s) {
  const int64_t dim = form.dim, rank = form.key_width;
  const float ones[ROWS] = {1.0f, 1.0f, 1.0f, 1.0f};
  for (int64_t row = 0; row < rows; ++row) __builtin_memcpy(s.keys + row * dim, s.mean, dim * sizeof(float));
  in_blocks(rows, [&](auto count, int64_t row) {
    add_values<decltype(count)::value>(
        s.latents + row * rank, rank, ones, static_cast<const float*>(s.basis), dim, rank, dim, s.keys + row * dim);
  });
  for (int64_t row = 0; row < rows; ++row)
    turn(form, chunks[row / form.chunk].position + row % form.chunk, s.keys + row * dim);
}

static void read_keys(const SelectedForm& form, const SelectedChunk* chunks, int64_t count, const SelectedScratch& s) {
  const int64_t size = form.chunk * form.key_width;
  float* to = form.basis.data == nullptr ? s.keys : s.latents;
  for (int64_t i = 0; i < count; ++i) read(form.keys, chunks[i].key, size, to + i * size);
  if (form.basis.data != nullptr) rebuild(form, chunks, count * form.chunk, s);
}

template <int BITS>
static void read_codes(const SelectedForm& form, const SelectedChunk* chunks, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t row = 0; row < form.chunk; ++row, to += form.dim)
      decode<BITS>(
          form.codes + chunks[i].value + row * (form.dim * BITS / 8), to_float(form.scale[chunks[i].scale + row]),
          form.dim, to);
}

static void read_values(const SelectedForm& form, const SelectedChunk* chunks, int64_t count, float* to) {
  const int64_t size = form.chunk * form.dim;
  if (form.values.data != nullptr) {
    for (int64_t i = 0; i < count; ++i) read(form.values, chunks[i].value, size, to + i * size);
    return;
  }
  switch (form.bits) {
    case 4: return read_codes<4>(form, chunks, count, to);
    case 3: return read_codes<3>(form, chunks, count, to);
    default: return read_codes<2>(form, chunks, count, to);
  }
}

// The output is a sum of rotated rows: it is rotated back, instead of each of them.
static void rotate_back(const SelectedForm& form, const SelectedScratch& s) {
  const int64_t dim = form.dim;
  for (int64_t n = 0; n < form.group; ++n)
    for (int64_t i = 0; i < dim; ++i) s.unordered[n * dim + dimension_of(i, form.bits, dim)] = s.out[n * dim + i];
  for (int64_t first = 0; first < dim; first += TILE) {
    const int64_t rows = dim - first < TILE ? dim - first : TILE;
    in_blocks(form.group, [&](auto count, int64_t n) {
      score_keys<decltype(count)::value, float>(
          s.unordered + n * dim, form.rotation + first * dim, dim, nullptr, 0, rows, dim, s.scores + n * TILE);
    });
    for (int64_t n = 0; n < form.group; ++n)
      __builtin_memcpy(s.out + n * dim + first, s.scores + n * TILE, rows * sizeof(float));
  }
}

// Attention of the scratch's queries, before it is divided by its sums.
static void attend_chunks(
    const SelectedForm& form, const SelectedChunk* chunks, int64_t count, int64_t basis, int64_t mean,
    const SelectedScratch& s) {
  const int64_t dim = form.dim, per_tile = TILE / form.chunk;
  if (form.basis.data != nullptr)
    for (int64_t i = 0; i < form.key_width; ++i) read(form.basis, basis + i * form.basis_row, dim, s.basis + i * dim);
  if (form.mean.data != nullptr) read(form.mean, mean, dim, s.mean);
  for (int64_t first = 0; first < count; first += per_tile) {
    const int64_t some = count - first < per_tile ? count - first : per_tile, rows = some * form.chunk;
    read_keys(form, chunks + first, some, s);
    read_values(form, chunks + first, some, s.values);
    for (int64_t row = 0; row < rows; ++row) s.log_weight[row] = chunks[first + row / form.chunk].log_weight;
    in_blocks(form.group, [&](auto block, int64_t n) {
      attend_tile<decltype(block)::value, float>(
          s.q + n * dim, s.keys, dim, s.values, dim, rows, dim, s.log_weight, false, s.scores + n * TILE, s.scale + n,
          s.peak + n, s.sum + n, s.out + n * dim);
    });
  }
  if (form.codes != nullptr) rotate_back(form, s);
}
