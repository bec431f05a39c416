#include "quantised_matmul.h"

#include "cpu/common/instruction_set.h"

namespace shadowkv {

#define SHADOWKV_KERNEL "cpu/quantised_matmul/multiply_blocks.inc.h"
#include "cpu/common/instruction_sets.inc.h"

namespace {

constexpr int64_t TILE_ROWS = 4, MOST_LANES = 16;

}  // namespace

const BlockFormat* find_block_format(std::string_view name) {
  for (const BlockFormat& format : BLOCK_FORMATS)
    if (name == format.name) return &format;
  return nullptr;
}

MatmulScratch::MatmulScratch(int64_t tokens) : panel(TILE_ROWS * PANEL), sums(tokens * TILE_ROWS * MOST_LANES) {}

void multiply_rows(
    const QuantisedMatrix& matrix, const float* x, int64_t tokens, int64_t first, int64_t last, MatmulScratch& scratch,
    float* out) {
  SHADOWKV_BEST(multiply_blocks)(matrix, x, tokens, first, last, scratch.panel.data(), scratch.sums.data(), out);
}

void unpack_row(const QuantisedMatrix& matrix, int64_t row, float* out) {
  SHADOWKV_BEST(unpack_blocks)(matrix, row, out);
}

}  // namespace shadowkv
