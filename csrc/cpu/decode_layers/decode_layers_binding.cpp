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
using shadowkv::check_states;

constexpr int64_t VECTORS = 6, PROJECTIONS = 4, HEAD_NORMS = 2, RECURRENCES = 4;  // of a layer

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
  const c10::List<bool>& attentions;
  const c10::List<std::optional<Tensor>>& head_norms;
  at::TensorList k_pages, v_pages, recurrences, convolution_states, matrix_states;
  size_t vector = 0, matrix = 0, projection = 0, attention = 0, delta_net = 0;

  // Rows of a projection: sizes that the lists alone say, and that all layers are checked against.
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

  shadowkv::Attention next_attention(const shadowkv::LayerSizes& sizes) {
    const size_t norm = HEAD_NORMS * attention;
    const Tensor &k = k_pages[attention], &v = v_pages[attention];
    ++attention;
    return {
        vector_of(head_norms.get(norm), "query_norm", sizes.dim), vector_of(head_norms.get(norm + 1), "key_norm", sizes.dim),
        const_cast<float*>(k.const_data_ptr<float>()), const_cast<float*>(v.const_data_ptr<float>())};
  }

  shadowkv::DeltaNet next_delta_net(const shadowkv::DeltaNetSizes& sizes) {
    const at::TensorList weights = recurrences.slice(RECURRENCES * delta_net, RECURRENCES);
    const Tensor &inputs = convolution_states[delta_net], &matrices = matrix_states[delta_net];
    ++delta_net;
    check(weights[0], "convolution", 2, at::kFloat);
    TORCH_CHECK(
        weights[0].size(0) == sizes.channels && weights[0].size(1) == sizes.width && weights[0].is_contiguous(),
        "convolution has shape ", weights[0].sizes(), ", not ", sizes.channels, " x ", sizes.width);
    check_states(inputs, {sizes.channels, sizes.width - 1}, at::kFloat);
    const bool narrow = matrices.scalar_type() == at::kBFloat16;
    check_states(matrices, {sizes.heads, sizes.key_dim, sizes.value_dim}, narrow ? at::kBFloat16 : at::kFloat);
    TORCH_CHECK(
        inputs.stride(0) == sizes.inputs_row && matrices.stride(0) == sizes.matrices_row, "states of layers have strides ",
        inputs.strides(), " and ", matrices.strides(), ", not ", sizes.inputs_row, " and ", sizes.matrices_row);
    void* const of_rule = const_cast<void*>(matrices.const_data_ptr());
    return {
        weights[0].const_data_ptr<float>(),
        vector_of(weights[1], "log_rate", sizes.heads),
        vector_of(weights[2], "rate_bias", sizes.heads),
        vector_of(weights[3], "norm", sizes.value_dim),
        const_cast<float*>(inputs.const_data_ptr<float>()),
        narrow ? nullptr : static_cast<float*>(of_rule),
        narrow ? static_cast<shadowkv::BFloat16*>(of_rule) : nullptr};
  }

  shadowkv::Layer next_layer(const shadowkv::LayerSizes& sizes, bool attends) {
    shadowkv::Layer layer = {};
    const int64_t input_rows = attends ? sizes.qkv() : sizes.delta_net.rows();
    const int64_t mixed = attends ? sizes.queries() : sizes.delta_net.values();
    layer.attention_norm = next_vector("attention_norm", sizes.hidden);
    const float* inputs_bias = next_vector("the bias of inputs", input_rows);
    TORCH_CHECK(attends || inputs_bias == nullptr, "inputs of linear attention have a bias");
    const float* out_bias = next_vector("the bias of out", sizes.hidden);
    layer.post_attention_norm = next_vector("post_attention_norm", sizes.hidden);
    layer.mlp_norm = next_vector("mlp_norm", sizes.hidden);
    layer.post_mlp_norm = next_vector("post_mlp_norm", sizes.hidden);
    TORCH_CHECK(layer.attention_norm != nullptr && layer.mlp_norm != nullptr, "a layer lacks a norm");
    layer.inputs = next_projection("inputs", input_rows, sizes.hidden);
    layer.out = next_projection("out", sizes.hidden, mixed);
    layer.gate_up = next_projection("gate_up", 2 * sizes.intermediate, sizes.hidden);
    layer.down = next_projection("down", sizes.hidden, sizes.intermediate);
    layer.inputs.bias = inputs_bias;
    layer.out.bias = out_bias;
    if (attends)
      layer.attention = next_attention(sizes);
    else
      layer.delta_net = next_delta_net(sizes.delta_net);
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

// Whether the lists have what each layer needs. Returns the first layer with attention.
int64_t check_counts(const Lists& lists) {
  const auto is_size = [](const auto& list, int64_t size) { return static_cast<int64_t>(list.size()) == size; };
  const int64_t count = lists.attentions.size(), attending = lists.k_pages.size();
  const int64_t delta_nets = lists.matrix_states.size();
  TORCH_CHECK(
      is_size(lists.vectors, VECTORS * count) && is_size(lists.row_blocks, PROJECTIONS * count) &&
          lists.forms.size() == lists.matrices.size(),
      count, " layers have ", lists.vectors.size(), " vectors and ", lists.row_blocks.size(), " projections, and ",
      lists.matrices.size(), " matrices ", lists.forms.size(), " formats");
  int64_t first = -1, found = 0;
  for (int64_t i = 0; i < count; ++i)
    if (lists.attentions.get(i) && found++ == 0) first = i;
  TORCH_CHECK(
      found > 0 && found == attending && delta_nets == count - found && is_size(lists.v_pages, found) &&
          is_size(lists.head_norms, HEAD_NORMS * found) && is_size(lists.convolution_states, delta_nets) &&
          is_size(lists.recurrences, RECURRENCES * delta_nets),
      found, " of ", count, " layers have attention, and there are ", attending, " and ", lists.v_pages.size(),
      " pages, ", lists.head_norms.size(), " norms of heads, ", lists.convolution_states.size(), " and ", delta_nets,
      " states and ", lists.recurrences.size(), " weights of linear attention");
  return first;
}

// Sizes of linear attention, which the first layer says.
shadowkv::DeltaNetSizes delta_net_sizes(const Lists& lists, bool tiled, double unit_eps) {
  if (lists.matrix_states.empty()) return {};
  const Tensor &weight = lists.recurrences[0], &inputs = lists.convolution_states[0], &matrices = lists.matrix_states[0];
  TORCH_CHECK(
      weight.dim() == 2 && weight.size(1) > 1 && inputs.dim() == 3 && matrices.dim() == 4, "convolution has shape ",
      weight.sizes(), ", states have shapes ", inputs.sizes(), " and ", matrices.sizes());
  const int64_t heads = matrices.size(1), key_dim = matrices.size(2), value_dim = matrices.size(3);
  const int64_t channels = weight.size(0), keys = (channels - heads * value_dim) / 2;
  TORCH_CHECK(
      keys > 0 && 2 * keys + heads * value_dim == channels && keys % key_dim == 0 && heads % (keys / key_dim) == 0,
      channels, " channels are not keys, queries and values of states ", matrices.sizes());
  return {
      heads, keys / key_dim, key_dim, value_dim, channels, weight.size(1), inputs.stride(0), matrices.stride(0), tiled,
      static_cast<float>(unit_eps)};
}

// The new tokens as spans.
std::vector<shadowkv::Span> states_of(
    const Lists& lists, const std::optional<Tensor>& read, const std::optional<Tensor>& write, int64_t batch) {
  std::vector<shadowkv::Span> spans;
  if (lists.matrix_states.empty()) return spans;
  TORCH_CHECK(read.has_value() && write.has_value(), "layers with linear attention have no rows of states");
  int64_t rows = std::numeric_limits<int64_t>::max();
  for (at::TensorList states : {lists.convolution_states, lists.matrix_states})
    for (const Tensor& one : states) rows = std::min(rows, one.size(0));
  const int64_t *from = numbers_of(*read, "row", batch, rows), *to = numbers_of(*write, "row", batch, rows);
  for (int64_t i = 0; i < batch; ++i) spans.push_back({i, i + 1, from[i], to[i]});
  return spans;
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

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> decode_layers(
    const Tensor& x, const std::optional<Tensor>& attended, const std::optional<Tensor>& gate,
    const c10::List<std::optional<Tensor>>& vectors, at::TensorList matrices, std::vector<std::string> forms,
    at::IntArrayRef row_blocks, const c10::List<bool>& attentions, const c10::List<std::optional<Tensor>>& head_norms,
    at::TensorList k_pages, at::TensorList v_pages, at::TensorList recurrences, at::TensorList convolution_states,
    at::TensorList matrix_states, const Tensor& cos, const Tensor& sin, bool interleaved, double eps, double unit_eps,
    bool gated, bool tiled, const Tensor& positions, const Tensor& pages, const Tensor& counts,
    const Tensor& write_page, const Tensor& write_offset, const std::optional<Tensor>& read,
    const std::optional<Tensor>& write, bool to_attention) {
  Lists lists = {
      vectors, matrices, forms, row_blocks, attentions, head_norms, k_pages, v_pages, recurrences, convolution_states,
      matrix_states};
  const int64_t count = attentions.size(), first_attending = check_counts(lists);
  TORCH_CHECK(!attended.has_value() || attentions.get(0), "the first layer has no attention to begin after");
  TORCH_CHECK(!to_attention || attentions.get(count - 1), "the last layer has no attention to end with");
  TORCH_CHECK(
      !attended.has_value() || !to_attention || count > 1,
      "one layer cannot begin after its attention and end with it");
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
      numbers_of(write_offset, "offset", batch, k.size(2)), states_of(lists, read, write, batch)};
  const int64_t qkv_rows = lists.rows_of(PROJECTIONS * first_attending), gate_up_rows = lists.rows_of(2);
  const int64_t query_heads = (qkv_rows / dim - 2 * heads) / (gated ? 2 : 1);
  TORCH_CHECK(
      query_heads > 0 && query_heads % heads == 0 && qkv_rows == ((gated ? 2 : 1) * query_heads + 2 * heads) * dim &&
          gate_up_rows % 2 == 0,
      "projections have ", qkv_rows, " and ", gate_up_rows, " rows, pages have ", heads, " heads of ", dim);
  const shadowkv::LayerSizes sizes = {
      batch, hidden, gate_up_rows / 2, heads, query_heads / heads, dim, gated, k.stride(0), k.stride(1), k.stride(2),
      static_cast<float>(eps), delta_net_sizes(lists, tiled, unit_eps)};
  std::vector<shadowkv::Layer> layers;
  for (int64_t i = 0; i < count; ++i) layers.push_back(lists.next_layer(sizes, attentions.get(i)));

  Tensor stream = at::empty({batch, hidden}, x.options());
  stream.copy_(x);
  Tensor q = at::empty({batch, query_heads, dim}, x.options());
  Tensor out = at::zeros({batch, query_heads, dim}, x.options());
  Tensor lse = at::full({batch, query_heads}, -std::numeric_limits<float>::infinity(), x.options());
  Tensor gates = at::empty({batch, gated ? query_heads : 0, dim}, x.options());
  const auto begin_with = [](Tensor& to, const Tensor& from, const char* name) {
    check(from, name, 3, at::kFloat);
    TORCH_CHECK(from.sizes() == to.sizes(), name, " has shape ", from.sizes(), ", not ", to.sizes());
    to.copy_(from);
  };
  if (attended.has_value()) begin_with(out, *attended, "attended");
  if (gate.has_value()) begin_with(gates, *gate, "gate");
  TORCH_CHECK(attended.has_value() == gate.has_value(), "attended and gate come together");
  if (batch == 0) return {stream, q, out, lse, gates};
  const shadowkv::PagedPlan plan(
      page_ids.const_data_ptr<int64_t>(), valid.const_data_ptr<int64_t>(), batch, page_ids.size(1), heads);
  const shadowkv::LayerBuffers buffers = {
      stream.mutable_data_ptr<float>(), q.mutable_data_ptr<float>(), out.mutable_data_ptr<float>(),
      lse.mutable_data_ptr<float>(), gates.mutable_data_ptr<float>()};
  const int64_t threads = at::get_num_threads();
  shadowkv::DecodeLayers decode(sizes, layers, rope, tokens, plan, buffers, attended.has_value(), to_attention, threads);
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { decode.run(); });
  return {stream, q, out, lse, gates};
}

TORCH_LIBRARY_FRAGMENT(shadowkv, m) {
  m.def(
      "decode_layers(Tensor x, Tensor? attended, Tensor? gate, Tensor?[] vectors, Tensor[] matrices, str[] forms, "
      "int[] row_blocks, bool[] attentions, Tensor?[] head_norms, Tensor(a!)[] k_pages, Tensor(b!)[] v_pages, "
      "Tensor[] recurrences, Tensor(c!)[] convolution_states, Tensor(d!)[] matrix_states, Tensor cos, Tensor sin, "
      "bool interleaved, float eps, float unit_eps, bool gated, bool tiled, Tensor positions, Tensor pages, "
      "Tensor counts, Tensor write_page, Tensor write_offset, Tensor? read, Tensor? write, bool to_attention) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(shadowkv, CPU, m) {
  m.impl("decode_layers", decode_layers);
}

}  // namespace
