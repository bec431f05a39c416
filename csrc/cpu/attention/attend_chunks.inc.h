// The kernel of attention over selected chunks, included once per instruction set (instruction_sets.inc.h).

#include "attention_tile.inc.h"
#include "row_codecs.inc.h"

static void apply_rope(const SelectedForm& form, int64_t position, float* key) {
  const int64_t half = form.rope_dim / 2;
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

// Keys [rows, dim] from the latents of some chunks; latents and basis are in the scratch memory.
static void rebuild(const SelectedForm& form, const SelectedChunk* chunks, int64_t rows, const SelectedScratch& s) {
  const int64_t dim = form.dim, rank = form.rank;
  const float ones[ROWS] = {1.0f, 1.0f, 1.0f, 1.0f};
  for (int64_t row = 0; row < rows; ++row) __builtin_memcpy(s.keys + row * dim, s.mean, dim * sizeof(float));
  in_blocks(rows, [&](auto count, int64_t row) {
    add_values<decltype(count)::value>(
        s.latents + row * rank, rank, ones, static_cast<const float*>(s.basis), dim, rank, dim, s.keys + row * dim);
  });
  for (int64_t row = 0; row < rows; ++row)
    apply_rope(form, chunks[row / form.chunk].position + row % form.chunk, s.keys + row * dim);
}

// Rows [count * chunk, dim] of some chunks; coded rows in the order of their codec.
static void read_rows(
    const SelectedForm& form, const StoredRows& from, StoredChunk SelectedChunk::* which, const SelectedChunk* chunks,
    int64_t count, float* to) {
  if (from.codec == codec::kDense) {
    const int64_t size = form.chunk * form.dim;
    for (int64_t i = 0; i < count; ++i) read(from.rows, (chunks[i].*which).rows, size, to + i * size);
    return;
  }
  const uint8_t* codes = static_cast<const uint8_t*>(from.rows.data);
  with_row_codec(from.codec, [&](auto functor) {
    for (int64_t i = 0; i < count; ++i) {
      const StoredChunk& chunk = chunks[i].*which;
      for (int64_t row = 0; row < form.chunk; ++row, to += form.dim)
        functor.decode(
            codes + chunk.rows + row * from.width, to_float(from.scale[chunk.scale + row]), from.levels, form.dim, to);
    }
  });
}

static void read_keys(const SelectedForm& form, const SelectedChunk* chunks, int64_t count, const SelectedScratch& s) {
  if (form.basis.data == nullptr) return read_rows(form, form.keys, &SelectedChunk::key, chunks, count, s.keys);
  for (int64_t i = 0; i < count; ++i)
    read_latents(form.keys, chunks[i].key.rows, form.chunk, form.rank, s.latents + i * form.chunk * form.rank);
  rebuild(form, chunks, count * form.chunk, s);
}

// What the product of a query and the mean key, RoPE-rotated by an angle, is the sum of: by frequency what is
// multiplied by the angle's cosine and by its sine, and what RoPE does not change.
static void multiply_mean(const SelectedForm& form, const SelectedScratch& s) {
  const int64_t half = form.rope_dim / 2, step = form.interleaved ? 2 : 1, apart = form.interleaved ? 1 : half;
  for (int64_t n = 0; n < form.group; ++n) {
    const float* q = s.q + n * form.dim;
    float* products = s.products + n * form.rope_dim;
    for (int64_t i = 0; i < half; ++i) {
      const float a = q[i * step], b = q[i * step + apart], c = s.mean[i * step], e = s.mean[i * step + apart];
      products[i] = a * c + b * e;
      products[half + i] = b * c - a * e;
    }
    s.rest[n] = 0.0f;
    for (int64_t i = form.rope_dim; i < form.dim; ++i) s.rest[n] += q[i] * s.mean[i];
  }
}

// The mean key's contribution to the scores of some chunks.
static void score_mean(const SelectedForm& form, const SelectedChunk* chunks, int64_t rows, const SelectedScratch& s) {
  const int64_t half = form.rope_dim / 2, bytes = half * sizeof(float);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t position = chunks[row / form.chunk].position + row % form.chunk;
    __builtin_memcpy(s.angles + row * form.rope_dim, form.cos + position * half, bytes);
    __builtin_memcpy(s.angles + row * form.rope_dim + half, form.sin + position * half, bytes);
  }
  in_blocks(form.group, [&](auto count, int64_t n) {
    score_keys<decltype(count)::value, float>(
        s.products + n * form.rope_dim, s.angles, form.rope_dim, nullptr, 0, rows, form.rope_dim, s.added + n * TILE);
  });
  for (int64_t n = 0; n < form.group; ++n)
    for (int64_t row = 0; row < rows; ++row) s.added[n * TILE + row] += s.rest[n];
}

// Keys are rows that their codec rotated before it coded them: queries are rotated, too, instead of each key back.
static void rotate_queries(const SelectedForm& form, const SelectedScratch& s) {
  const int64_t dim = form.dim;
  const float ones[ROWS] = {1.0f, 1.0f, 1.0f, 1.0f};
  __builtin_memset(s.unordered, 0, form.group * dim * sizeof(float));
  in_blocks(form.group, [&](auto count, int64_t n) {
    add_values<decltype(count)::value>(
        s.q + n * dim, dim, ones, form.keys.rotation, dim, dim, dim, s.unordered + n * dim);
  });
  with_row_codec(form.keys.codec, [&](auto functor) {
    for (int64_t n = 0; n < form.group; ++n)
      for (int64_t i = 0; i < dim; ++i) s.q[n * dim + i] = s.unordered[n * dim + functor.dimension_of(i, dim)];
  });
}

// The output is a sum of rows that their codec rotated: it is rotated back, instead of each of them.
static void rotate_back(const SelectedForm& form, const SelectedScratch& s) {
  const int64_t dim = form.dim;
  with_row_codec(form.values.codec, [&](auto functor) {
    for (int64_t n = 0; n < form.group; ++n)
      for (int64_t i = 0; i < dim; ++i) s.unordered[n * dim + functor.dimension_of(i, dim)] = s.out[n * dim + i];
  });
  for (int64_t first = 0; first < dim; first += TILE) {
    const int64_t rows = dim - first < TILE ? dim - first : TILE;
    in_blocks(form.group, [&](auto count, int64_t n) {
      score_keys<decltype(count)::value, float>(
          s.unordered + n * dim, form.values.rotation + first * dim, dim, nullptr, 0, rows, dim, s.scores + n * TILE);
    });
    for (int64_t n = 0; n < form.group; ++n)
      __builtin_memcpy(s.out + n * dim + first, s.scores + n * TILE, rows * sizeof(float));
  }
}

// Attention of the queries in the scratch memory, before division by the sums.
static void attend_chunks(
    const SelectedForm& form, const SelectedChunk* chunks, int64_t count, int64_t basis, int64_t mean,
    const SelectedScratch& s) {
  const int64_t dim = form.dim, per_tile = TILE / form.chunk;
  const bool centred = form.mean.data != nullptr && form.basis.data == nullptr;
  if (form.mean.data != nullptr) read(form.mean, mean, dim, s.mean);
  if (centred) multiply_mean(form, s);
  if (form.keys.rotation != nullptr) rotate_queries(form, s);
  if (form.basis.data != nullptr)
    for (int64_t i = 0; i < form.rank; ++i) read(form.basis, basis + i * form.basis_row, dim, s.basis + i * dim);
  for (int64_t first = 0; first < count; first += per_tile) {
    const int64_t some = count - first < per_tile ? count - first : per_tile, rows = some * form.chunk;
    read_keys(form, chunks + first, some, s);
    read_rows(form, form.values, &SelectedChunk::value, chunks + first, some, s.values);
    for (int64_t row = 0; row < rows; ++row) s.log_weight[row] = chunks[first + row / form.chunk].log_weight;
    if (centred) score_mean(form, chunks + first, rows, s);
    in_blocks(form.group, [&](auto block, int64_t n) {
      attend_tile<decltype(block)::value, float>(
          s.q + n * dim, s.keys, dim, s.values, dim, rows, dim, s.log_weight, centred ? s.added + n * TILE : nullptr,
          false, s.scores + n * TILE, s.scale + n, s.peak + n, s.sum + n, s.out + n * dim);
    });
  }
  if (form.values.rotation != nullptr) rotate_back(form, s);
}
