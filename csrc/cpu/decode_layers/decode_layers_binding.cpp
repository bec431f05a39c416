// Decoder layers of a decode step for PyTorch: checks arguments, and runs the layers on its threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/common/binding.h"
#include "decode_layers.h"

namespace {

using at::Tensor;
using shadowkv::check;

constexpr int64_t VECTORS = 8, PROJECTIONS = 4;  // of a layer

const float* vector_of(const std::optional<Tensor>& x, const char* name, int64_t size) {
  if (!x.has_value()) return nullptr;
  check(*x, name, 1, at::kFloat);
  TORCH_CHECK(x->size(0) == size && x->is_contiguous(), name, " has shape ", x->sizes(), ", not ", size);
  return x->const_data_ptr<float>();
}

// The lists of the op, from which layers take what is theirs, in order.
struct Lists {
  const c10::List<std::optional<Tensor>>& vectors;
  at::TensorList matrices;
  const std::vector<std::string>& forms;
  at::IntArrayRef row_blocks;
  size_t vector = 0, matrix = 0, projection = 0;

  // Rows of a projection of the first layer: sizes that the lists alone say, and that all layers are checked against.
  int64_t rows_of(int64_t number) const {
    int64_t first = 0, rows = 0;
    for (int64_t i = 0; i < number; ++i) first += row_blocks[i];
    for (int64_t i = first; i < first + row_blocks[number]; ++i) {
      TORCH_CHECK(
          i >= 0 && i < static_cast<int64_t>(matrices.size()), "row_blocks are of more than ", matrices.size(), " matrices");
      rows += matrices[i].size(0);
    }
    return rows;
  }

  const float* next_vector(const char* name, int64_t size) { return vector_of(vectors.get(vector++), name, size); }

  shadowkv::Projection next_projection(const char* name, int64_t rows, int64_t columns) {
    shadowkv::Projection result = {{}, nullptr, rows, columns};
    int64_t count = 0;
    for (int64_t i = 0; i < row_blocks[projection]; ++i, ++matrix) {
      TORCH_CHECK(matrix < matrices.size(), "row_blocks are of more than ", matrices.size(), " matrices");
      const Tensor& x = matrices[matrix];
      if (forms[matrix].empty()) {
        check(x, name, 2, at::kFloat);
        TORCH_CHECK(x.size(1) == columns && x.stride(1) == 1, name, " has shape ", x.sizes(), ", not ", columns, " columns");
        result.row_blocks.push_back({std::nullopt, x.const_data_ptr<float>(), x.stride(0), x.size(0)});
      } else {
        const shadowkv::BlockFormat* format = shadowkv::find_block_format(forms[matrix]);
        TORCH_CHECK(format != nullptr, "no format of blocks is called ", forms[matrix]);
        check(x, name, 2, at::kByte);
        TORCH_CHECK(
            x.stride(1) == 1 && x.size(1) * format->values == columns * format->bytes, name, " has rows of ", x.size(1),
            " bytes, not ", columns, " numbers in ", format->name);
        result.row_blocks.push_back(
            {shadowkv::QuantizedMatrix{x.const_data_ptr<uint8_t>(), x.stride(0), x.size(0), columns, format->kind},
             nullptr, 0, x.size(0)});
      }
      count += x.size(0);
    }
    TORCH_CHECK(count == rows, name, " has ", count, " rows, not ", rows);
    ++projection;
    return result;
  }

  shadowkv::Layer next_layer(
      const shadowkv::LayerSizes& sizes, int64_t qkv_rows, int64_t gate_up_rows, const Tensor& k, const Tensor& v) {
    shadowkv::Layer layer = {};
    layer.attention_norm = next_vector("attention_norm", sizes.hidden);
    const float* qkv_bias = next_vector("the bias of qkv", qkv_rows);
    layer.query_norm = next_vector("query_norm", sizes.dim);
    layer.key_norm = next_vector("key_norm", sizes.dim);
    const float* out_bias = next_vector("the bias of out", sizes.hidden);
    layer.post_attention_norm = next_vector("post_attention_norm", sizes.hidden);
    layer.mlp_norm = next_vector("mlp_norm", sizes.hidden);
    layer.post_mlp_norm = next_vector("post_mlp_norm", sizes.hidden);
    TORCH_CHECK(layer.attention_norm != nullptr && layer.mlp_norm != nullptr, "a layer lacks a norm");
    layer.qkv = next_projection("qkv", qkv_rows, sizes.hidden);
    layer.out = next_projection("out", sizes.hidden, sizes.heads * sizes.group * sizes.dim);
    layer.gate_up = next_projection("gate_up", gate_up_rows, sizes.hidden);
    layer.down = next_projection("down", sizes.hidden, sizes.intermediate);
    layer.qkv.bias = qkv_bias;
    layer.out.bias = out_bias;
    layer.k = const_cast<float*>(k.const_data_ptr<float>());
    layer.v = const_cast<float*>(v.const_data_ptr<float>());
    return layer;
  }
};

void check_pages(const Tensor& pages, const Tensor& counts, int64_t num_pages, int64_t rows) {
  const int64_t *page = pages.const_data_ptr<int64_t>(), *count = counts.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < pages.numel(); ++i) {
    TORCH_CHECK_INDEX(count[i] >= 0 && count[i] <= rows, "count ", count[i], " is not in [0, ", rows, "]");
    TORCH_CHECK_INDEX(
        count[i] == 0 || (page[i] >= 0 && page[i] < num_pages), "page ", page[i], " is not in [0, ", num_pages, ")");
  }
}

const int64_t* numbers_of(const Tensor& x, const char* name, int64_t size, int64_t limit) {
  check(x, name, 1, at::kLong);
  TORCH_CHECK(x.size(0) == size && x.is_contiguous(), name, " has shape ", x.sizes(), ", not ", size);
  const int64_t* numbers = x.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < size; ++i)
    TORCH_CHECK_INDEX(numbers[i] >= 0 && numbers[i] < limit, name, " ", numbers[i], " is not in [0, ", limit, ")");
  return numbers;
}

// Pages that all layers have, whose keys and values are in the same places.
int64_t check_layers(at::TensorList k_pages, at::TensorList v_pages) {
  const Tensor& k = k_pages[0];
  int64_t num_pages = std::numeric_limits<int64_t>::max();
  for (at::TensorList parts : {k_pages, v_pages})
    for (const Tensor& part : parts) {
      check(part, "pages of keys or values", 4, at::kFloat);
      TORCH_CHECK(
          part.strides() == k.strides() && part.stride(3) == 1 && part.sizes().slice(1) == k.sizes().slice(1),
          "pages have shapes ", k.sizes(), " and ", part.sizes(), ", strides ", k.strides(), " and ", part.strides());
      num_pages = std::min(num_pages, part.size(0));
    }
  return num_pages;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> decode_layers(
    const Tensor& x, const std::optional<Tensor>& attended, const c10::List<std::optional<Tensor>>& vectors,
    at::TensorList matrices, std::vector<std::string> forms, at::IntArrayRef row_blocks, at::TensorList k_pages,
    at::TensorList v_pages, const Tensor& cos, const Tensor& sin, bool interleaved, double eps, const Tensor& positions,
    const Tensor& pages, const Tensor& counts, const Tensor& write_page, const Tensor& write_offset,
    bool to_attention) {
  const int64_t count = k_pages.size();
  TORCH_CHECK(
      count > 0 && v_pages.size() == k_pages.size() && static_cast<int64_t>(vectors.size()) == VECTORS * count &&
          static_cast<int64_t>(row_blocks.size()) == PROJECTIONS * count && forms.size() == matrices.size(),
      count, " layers have ", vectors.size(), " vectors and ", row_blocks.size(), " projections, and ", matrices.size(),
      " matrices ", forms.size(), " formats");
  TORCH_CHECK(!attended.has_value() || !to_attention || count > 1, "one layer cannot begin behind its attention and end with it");
  check(x, "x", 2, at::kFloat);
  check(cos, "cos", 2, at::kFloat);
  check(sin, "sin", 2, at::kFloat);
  check(pages, "pages", 2, at::kLong);
  check(counts, "counts", 2, at::kLong);
  const Tensor& k = k_pages[0];
  const int64_t num_pages = check_layers(k_pages, v_pages);
  const int64_t batch = x.size(0), hidden = x.size(1), heads = k.size(1), dim = k.size(3);
  shadowkv::Rope rope = {cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), cos.size(1), interleaved};
  TORCH_CHECK(
      cos.sizes() == sin.sizes() && cos.is_contiguous() && sin.is_contiguous() && 2 * cos.size(1) <= dim, "cos has shape ",
      cos.sizes(), ", sin ", sin.sizes(), ", heads have ", dim, " dimensions");
  TORCH_CHECK(
      pages.size(0) == batch && pages.sizes() == counts.sizes(), "pages has shape ", pages.sizes(), ", counts ",
      counts.sizes(), ", x ", x.sizes());
  const Tensor page_ids = pages.contiguous(), valid = counts.contiguous();
  check_pages(page_ids, valid, num_pages, k.size(2));
  const shadowkv::NewTokens tokens = {
      numbers_of(positions, "position", batch, cos.size(0)), numbers_of(write_page, "page", batch, num_pages),
      numbers_of(write_offset, "offset", batch, k.size(2))};

  Lists lists = {vectors, matrices, forms, row_blocks};
  const int64_t qkv_rows = lists.rows_of(0), gate_up_rows = lists.rows_of(2);
  const int64_t query_heads = qkv_rows / dim - 2 * heads;
  TORCH_CHECK(
      query_heads > 0 && query_heads % heads == 0 && qkv_rows % dim == 0 && gate_up_rows % 2 == 0, "projections have ",
      qkv_rows, " and ", gate_up_rows, " rows, pages have ", heads, " heads of ", dim);
  const shadowkv::LayerSizes sizes = {
      batch,       hidden,      gate_up_rows / 2, heads, query_heads / heads, dim, k.stride(0), k.stride(1), k.stride(2),
      static_cast<float>(eps)};
  std::vector<shadowkv::Layer> layers;
  for (int64_t i = 0; i < count; ++i)
    layers.push_back(lists.next_layer(sizes, qkv_rows, gate_up_rows, k_pages[i], v_pages[i]));

  Tensor stream = at::empty({batch, hidden}, x.options());
  stream.copy_(x);
  Tensor q = at::empty({batch, query_heads, dim}, x.options());
  Tensor out = at::zeros({batch, query_heads, dim}, x.options());
  Tensor lse = at::full({batch, query_heads}, -std::numeric_limits<float>::infinity(), x.options());
  if (attended.has_value()) {
    check(*attended, "attended", 3, at::kFloat);
    TORCH_CHECK(attended->sizes() == out.sizes(), "attended has shape ", attended->sizes(), ", not ", out.sizes());
    out.copy_(*attended);
  }
  if (batch == 0) return {stream, q, out, lse};
  const shadowkv::PagedPlan plan(
      page_ids.const_data_ptr<int64_t>(), valid.const_data_ptr<int64_t>(), batch, page_ids.size(1), heads);
  const shadowkv::LayerBuffers buffers = {
      stream.mutable_data_ptr<float>(), q.mutable_data_ptr<float>(), out.mutable_data_ptr<float>(),
      lse.mutable_data_ptr<float>()};
  const int64_t threads = at::get_num_threads();
  shadowkv::DecodeLayers decode(sizes, layers, rope, tokens, plan, buffers, attended.has_value(), to_attention, threads);
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { decode.run(); });
  return {stream, q, out, lse};
}

TORCH_LIBRARY_FRAGMENT(shadowkv, m) {
  m.def(
      "decode_layers(Tensor x, Tensor? attended, Tensor?[] vectors, Tensor[] matrices, str[] forms, int[] row_blocks, "
      "Tensor(a!)[] k_pages, Tensor(b!)[] v_pages, Tensor cos, Tensor sin, bool interleaved, float eps, "
      "Tensor positions, Tensor pages, Tensor counts, Tensor write_page, Tensor write_offset, bool to_attention) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(shadowkv, CPU, m) {
  m.impl("decode_layers", decode_layers);
}

}  // namespace
