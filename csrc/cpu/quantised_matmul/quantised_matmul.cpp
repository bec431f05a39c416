#include "quantised_matmul.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <cstring>

#include "cpu/common/instruction_set.h"

namespace shadowkv {

#define SHADOWKV_KERNEL "cpu/quantised_matmul/multiply_blocks.inc.h"
#include "cpu/common/instruction_sets.inc.h"

namespace {

constexpr int64_t TILE_ROWS = 4, MAX_LANES = 16;

// From 16 tokens on, floats are faster: theirs are unpacked once for all tokens (Q4_1, 3,072 x 576, Zen 4).
constexpr int64_t MAX_INTEGER_TOKENS = 12;

}  // namespace

const BlockFormat* find_block_format(std::string_view name) {
  for (const BlockFormat& format : BLOCK_FORMATS)
    if (name == format.name) return &format;
  return nullptr;
}

Activations::Activations(int64_t tokens, int64_t columns)
    : tokens(tokens),
      columns(columns),
      integers(instruction_set() != InstructionSet::baseline && tokens <= MAX_INTEGER_TOKENS),
      floats(integers ? 0 : tokens * columns),
      runs(integers ? tokens * runs_of(columns) : 0) {}

void Activations::write(int64_t token, const float* x) {
  if (!integers) std::memcpy(floats.data() + token * columns, x, columns * sizeof(float));
#ifdef __x86_64__
  else if (instruction_set() == InstructionSet::avx512)
    avx512::make_integers(x, columns, runs.data() + token * runs_of(columns));
  else
    avx2::make_integers(x, columns, runs.data() + token * runs_of(columns));
#endif
}

MatmulScratch::MatmulScratch(int64_t tokens) : panel(TILE_ROWS * PANEL), sums(tokens * TILE_ROWS * MAX_LANES) {}

void multiply_rows(
    const QuantisedMatrix& matrix, const Activations& x, int64_t first, int64_t last, MatmulScratch& scratch, float* out,
    int64_t out_row) {
  if (!x.integers)
    SHADOWKV_BEST(multiply_floats)(
        matrix, x.floats.data(), x.tokens, first, last, scratch.panel.data(), scratch.sums.data(), out, out_row);
#ifdef __x86_64__
  else if (instruction_set() == InstructionSet::avx512)
    avx512::multiply_integers(matrix, x.runs.data(), x.tokens, first, last, out, out_row);
  else
    avx2::multiply_integers(matrix, x.runs.data(), x.tokens, first, last, out, out_row);
#endif
}

void unpack_row(const QuantisedMatrix& matrix, int64_t row, float* out) {
  SHADOWKV_BEST(unpack_blocks)(matrix, row, out);
}

}  // namespace shadowkv
