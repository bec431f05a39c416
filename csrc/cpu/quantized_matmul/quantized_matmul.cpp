#include "quantized_matmul.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>

#include "cpu/common/instruction_set.h"

namespace shadowkv {

#define SHADOWKV_KERNEL "cpu/quantized_matmul/multiply_blocks.inc.h"
#include "cpu/common/instruction_sets.inc.h"

namespace {

constexpr int64_t TASK_ROWS = 16, TILE_ROWS = 4, MAX_LANES = 16;

// From 16 tokens on, floats are faster than AVX2's integers: theirs are unpacked once for all tokens (Q4_1, 3,072 x 576,
// Zen 4).
constexpr int64_t MAX_DIGITS_TOKENS = 12;

}  // namespace

const BlockFormat* find_block_format(std::string_view name) {
  for (const BlockFormat& format : BLOCK_FORMATS)
    if (name == format.name) return &format;
  return nullptr;
}

int64_t rows_per_task(int64_t weights, int64_t columns) {
  return TASK_ROWS * std::max<int64_t>(1, weights / (TASK_ROWS * columns));
}

Activations::Form Activations::form_of(int64_t tokens) {
  if (instruction_set() == InstructionSet::avx512) return Form::bytes;
  return tokens > MAX_DIGITS_TOKENS || instruction_set() == InstructionSet::baseline ? Form::floats : Form::digits;
}

Activations::Activations(int64_t tokens, int64_t columns)
    : tokens(tokens),
      columns(columns),
      form(columns % 32 ? Form::floats : form_of(tokens)),  // plain weights alone have such columns
      floats(form == Form::floats ? tokens * columns : 0),
      groups(form == Form::digits ? tokens * groups_of(columns) : 0),
      bytes(form == Form::bytes ? tokens * (columns / 32) : 0) {}

void Activations::write(int64_t token, const float* x) {
  if (form == Form::floats) std::memcpy(floats.data() + token * columns, x, columns * sizeof(float));
#ifdef __x86_64__
  else if (form == Form::digits)
    avx2::make_integers(x, columns, groups.data() + token * groups_of(columns));
  else
    avx512::make_bytes(x, columns, bytes.data() + token * (columns / 32));
#endif
}

MatmulScratch::MatmulScratch(int64_t tokens)
    : panel(TILE_ROWS * PANEL), sums(tokens * TILE_ROWS * MAX_LANES) {}

void multiply_rows(
    const QuantizedMatrix& matrix, const Activations& x, int64_t first, int64_t last, MatmulScratch& scratch,
    float* out, int64_t out_row) {
  if (x.form == Activations::Form::floats)
    SHADOWKV_BEST(multiply_floats)(
        matrix, x.floats.data(), x.tokens, first, last, scratch.panel.data(), scratch.sums.data(), out, out_row);
#ifdef __x86_64__
  else if (x.form == Activations::Form::digits)
    avx2::multiply_integers(matrix, x.groups.data(), x.tokens, first, last, out, out_row);
  else
    avx512::multiply_bytes(matrix, x.bytes.data(), x.tokens, first, last, out, out_row);
#endif
}

void unpack_row(const QuantizedMatrix& matrix, int64_t row, float* out) {
  SHADOWKV_BEST(unpack_blocks)(matrix, row, out);
}

}  // namespace shadowkv
