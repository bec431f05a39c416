// Matrices in blocks of quantised numbers for PyTorch: checks arguments and distributes the work over its threads.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>

#include "cpu/common/binding.h"
#include "quantised_matmul.h"

namespace {

using at::Tensor;
using shadowkv::check;

// Weights per task: about 10 microseconds of work.
constexpr int64_t WEIGHTS_PER_TASK = 65536;

shadowkv::QuantisedMatrix matrix_of(const Tensor& blocks, std::string_view name) {
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

// Rows per task, a multiple of what the kernel processes at a time.
int64_t rows_per_task(int64_t columns) {
  return 4 * std::max<int64_t>(1, WEIGHTS_PER_TASK / (4 * std::max<int64_t>(columns, 1)));
}

Tensor quantised_matmul(const Tensor& x, const Tensor& blocks, std::string_view format) {
  const shadowkv::QuantisedMatrix matrix = matrix_of(blocks, format);
  check(x, "x", 2, at::kFloat);
  TORCH_CHECK(
      x.size(1) == matrix.columns, "x has shape ", x.sizes(), ", rows of blocks have ", matrix.columns, " numbers");
  const Tensor tokens = x.contiguous();
  Tensor out = at::empty({x.size(0), matrix.rows}, x.options());
  if (out.numel() == 0) return out;
  shadowkv::Activations activations(x.size(0), matrix.columns);
  for (int64_t token = 0; token < x.size(0); ++token)
    activations.write(token, tokens.const_data_ptr<float>() + token * matrix.columns);
  const int64_t run = rows_per_task(matrix.columns), tasks = (matrix.rows + run - 1) / run;
  float* to = out.mutable_data_ptr<float>();
  shadowkv::share_tasks(tasks, [&](const auto& next) {
    shadowkv::MatmulScratch scratch(x.size(0));
    for (int64_t i; (i = next()) < tasks;)
      shadowkv::multiply_rows(
          matrix, activations, i * run, std::min((i + 1) * run, matrix.rows), scratch, to, matrix.rows);
  });
  return out;
}

Tensor dequantise_blocks(const Tensor& blocks, std::string_view format) {
  const shadowkv::QuantisedMatrix matrix = matrix_of(blocks, format);
  Tensor out = at::empty({matrix.rows, matrix.columns}, blocks.options().dtype(at::kFloat));
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, matrix.rows, rows_per_task(matrix.columns), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) shadowkv::unpack_row(matrix, row, to + row * matrix.columns);
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(shadowkv, m) {
  m.def("quantised_matmul(Tensor x, Tensor blocks, str form) -> Tensor");
  m.def("dequantise_blocks(Tensor blocks, str form) -> Tensor");
}

TORCH_LIBRARY_IMPL(shadowkv, CPU, m) {
  m.impl("quantised_matmul", quantised_matmul);
  m.impl("dequantise_blocks", dequantise_blocks);
}

}  // namespace
