// Matrices in blocks of quantized numbers for PyTorch: checks arguments and distributes the work over its threads.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>

#include "cpu/common/binding.h"
#include "quantized_matmul.h"

namespace {

using at::Tensor;
using shadowkv::check;

// Weights per task: about 10 microseconds of work.
constexpr int64_t WEIGHTS_PER_TASK = 65536;

constexpr int64_t TOKENS_PER_TASK = 16;  // whose activations a thread writes

shadowkv::QuantizedMatrix matrix_of(const Tensor& blocks, std::string_view name) {
  const shadowkv::BlockFormat* format = shadowkv::find_block_format(name);
  TORCH_CHECK(format != nullptr, "no format of blocks is called ", name);
  check(blocks, "blocks", 2, at::kByte);
  TORCH_CHECK(
      blocks.stride(1) == 1 && blocks.size(1) % format->bytes == 0, "blocks of ", format->name, " have ", format->bytes,
      " bytes, and rows have ", blocks.size(1), " in steps of ", blocks.stride(1));
  return {
      blocks.const_data_ptr<uint8_t>(), blocks.stride(0), blocks.size(0),
      blocks.size(1) / format->bytes * format->values, format->kind};
}

int64_t rows_per_task(int64_t columns) {
  return shadowkv::rows_per_task(WEIGHTS_PER_TASK, std::max<int64_t>(columns, 1));
}

Tensor quantized_matmul(const Tensor& x, const Tensor& blocks, std::string_view format) {
  const shadowkv::QuantizedMatrix matrix = matrix_of(blocks, format);
  check(x, "x", 2, at::kFloat);
  TORCH_CHECK(
      x.size(1) == matrix.columns, "x has shape ", x.sizes(), ", rows of blocks have ", matrix.columns, " numbers");
  const Tensor tokens = x.contiguous();
  Tensor out = at::empty({x.size(0), matrix.rows}, x.options());
  if (out.numel() == 0) return out;
  const float* from = tokens.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  shadowkv::Activations activations(x.size(0), matrix.columns);
  at::parallel_for(0, x.size(0), TOKENS_PER_TASK, [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) activations.write(token, from + token * matrix.columns);
  });
  const int64_t rows = rows_per_task(matrix.columns), tasks = (matrix.rows + rows - 1) / rows;
  shadowkv::share_ranges(tasks, [&](int64_t first, int64_t last) {
    shadowkv::MatmulScratch scratch(x.size(0));
    shadowkv::multiply_rows(
        matrix, activations, first * rows, std::min(last * rows, matrix.rows), scratch, to, matrix.rows);
  });
  return out;
}

Tensor dequantize_blocks(const Tensor& blocks, std::string_view format) {
  const shadowkv::QuantizedMatrix matrix = matrix_of(blocks, format);
  Tensor out = at::empty({matrix.rows, matrix.columns}, blocks.options().dtype(at::kFloat));
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, matrix.rows, rows_per_task(matrix.columns), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) shadowkv::unpack_row(matrix, row, to + row * matrix.columns);
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(shadowkv, m) {
  m.def("quantized_matmul(Tensor x, Tensor blocks, str form) -> Tensor");
  m.def("dequantize_blocks(Tensor blocks, str form) -> Tensor");
}

TORCH_LIBRARY_IMPL(shadowkv, CPU, m) {
  m.impl("quantized_matmul", quantized_matmul);
  m.impl("dequantize_blocks", dequantize_blocks);
}

}  // namespace
