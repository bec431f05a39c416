// Attention over selected chunks of CPU tensors for PyTorch: checks arguments, finds the chunks and spreads the work
// over its threads.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "../cpu/attend_selected.h"
#include "cpu_common.h"

namespace {

using at::Tensor;
using shadowkv::check;
using shadowkv::Dtype;
using shadowkv::Numbers;
using std::optional;

// Raises unless x has that shape and its last dimension is contiguous.
void check_shape(const Tensor& x, const char* name, at::IntArrayRef sizes) {
  check(x, name, static_cast<int64_t>(sizes.size()), x.scalar_type());
  TORCH_CHECK(x.sizes() == sizes, name, " has shape ", x.sizes(), ", not ", sizes);
  TORCH_CHECK(x.stride(-1) == 1, name, " has strides ", x.strides(), "; the last must be 1");
}

Numbers floats(const Tensor& x, const char* name) {
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, name, " is ", dtype, ", not Float or BFloat16");
  return {x.const_data_ptr(), dtype == at::kFloat ? Dtype::float32 : Dtype::bfloat16};
}

const Tensor& needed(const optional<Tensor>& x, const char* name) {
  TORCH_CHECK(x.has_value(), name, " is needed here");
  return *x;
}

int64_t checked(int64_t number, int64_t end, const char* name) {
  TORCH_CHECK_INDEX(number >= 0 && number < end, name, " ", number, " is not in [0, ", end, ")");
  return number;
}

// Whole numbers [B, ...] of each sequence.
struct Table {
  Tensor numbers;
  int64_t width;

  Table(const Tensor& x, const char* name, int64_t dims, int64_t batch)
      : numbers(x.contiguous()), width(x.numel() / std::max<int64_t>(batch, 1)) {
    check(x, name, dims, at::kLong);
    TORCH_CHECK(x.size(0) == batch, name, " has shape ", x.sizes(), ", not ", batch, " rows");
  }

  int64_t at(int64_t row, int64_t column = 0) const {
    return numbers.const_data_ptr<int64_t>()[row * width + column];
  }
};

// Chunks [N, H, C, c, w] of pages or of buffers; the tokens of each lie together.
struct Chunks {
  Tensor rows;

  Chunks(const Tensor& rows, const char* name, int64_t heads) : rows(rows) {
    check(rows, name, 5, rows.scalar_type());
    TORCH_CHECK(
        rows.size(1) == heads && rows.size(2) > 0, name, " has shape ", rows.sizes(), ", selected has ", heads,
        " heads");
    TORCH_CHECK(
        rows.stride(4) == 1 && rows.stride(3) == rows.size(4), name, " has strides ", rows.strides(),
        "; the tokens of a chunk must lie together");
  }

  int64_t offset(int64_t page, int64_t head, int64_t entry) const {
    return checked(page, rows.size(0), "page") * rows.stride(0) + head * rows.stride(1) +
        checked(entry, rows.size(2), "entry") * rows.stride(2);
  }

  // The same of a chunk of a sequence.
  int64_t offset(const Table& pages, int64_t row, int64_t head, int64_t chunk) const {
    const int64_t per_page = rows.size(2), column = checked(chunk, pages.width * per_page, "chunk") / per_page;
    return offset(pages.at(row, column), head, chunk - column * per_page);
  }
};

class SelectedArguments {
 public:
  shadowkv::SelectedForm form{};
  int64_t batch, heads;

  SelectedArguments(const Tensor& q, const Tensor& selected, const optional<Tensor>& log_weight)
      : selected_(selected.contiguous()) {
    check(q, "q", 3, q.scalar_type());
    check(selected, "selected", 3, at::kLong);
    batch = q.size(0), heads = selected.size(1), width_ = selected.size(2);
    TORCH_CHECK(selected.size(0) == batch, "selected has shape ", selected.sizes(), ", q has shape ", q.sizes());
    TORCH_CHECK(
        heads > 0 && q.size(1) % heads == 0, q.size(1), " query heads are no multiple of ", heads, " kv heads");
    form.group = q.size(1) / heads, form.dim = q.size(2);
    if (!log_weight) return;
    check(*log_weight, "log_weight", 3, at::kFloat);
    TORCH_CHECK(
        log_weight->sizes() == selected.sizes(), "log_weight has shape ", log_weight->sizes(), ", selected ",
        selected.sizes());
    log_weight_ = log_weight->contiguous();
  }

  void set_keys(const Tensor& keys, const Tensor& pages) {
    keys_.emplace(keys, "keys", heads);
    key_pages_.emplace(pages, "key_pages", 2, batch);
    form.keys = keys.scalar_type() == at::kChar ? Numbers{keys.const_data_ptr(), Dtype::int8} : floats(keys, "keys");
    form.chunk = keys.size(3), form.key_width = keys.size(4);
    TORCH_CHECK(
        form.chunk > 0 && shadowkv::TILE % form.chunk == 0, "chunks of ", form.chunk, " tokens do not divide ",
        shadowkv::TILE);
  }

  void set_exact_keys() {
    TORCH_CHECK(form.keys.dtype != Dtype::int8, "keys are Char, which only latents are");
    TORCH_CHECK(form.key_width == form.dim, "keys have ", form.key_width, " dimensions, q has ", form.dim);
  }

  void set_basis(const Tensor& basis, const optional<Tensor>& mean, const Tensor& slots) {
    check_shape(basis, "basis", {basis.size(0), form.key_width, heads, form.dim});
    form.basis = floats(basis, "basis"), form.basis_row = basis.stride(1);
    basis_ = basis, key_slots_.emplace(slots, "key_slots", 1, batch);
    if (!mean) return;
    check_shape(*mean, "mean", {basis.size(0), heads, form.dim});
    form.mean = floats(*mean, "mean"), mean_ = *mean;
  }

  void set_rotation(const Tensor& cos, const Tensor& sin, bool interleaved) {
    cos_ = cos.contiguous(), sin_ = sin.contiguous();
    check(cos, "cos", 2, at::kFloat);
    check(sin, "sin", 2, at::kFloat);
    TORCH_CHECK(
        cos.sizes() == sin.sizes() && 2 * cos.size(1) <= form.dim, "cos has shape ", cos.sizes(), ", sin ",
        sin.sizes(), ", heads have ", form.dim, " dimensions");
    form.cos = cos_.const_data_ptr<float>(), form.sin = sin_.const_data_ptr<float>();
    form.turning = 2 * cos.size(1), form.interleaved = interleaved;
  }

  // Places: the pages, or, with slots, the entries of each sequence's buffer.
  void set_values(const Tensor& values, const Tensor& places, const optional<Tensor>& slots) {
    values_.emplace(values, "values", heads);
    value_places_.emplace(places, "value_places", slots ? 3 : 2, batch);
    TORCH_CHECK(values.size(3) == form.chunk, "values have shape ", values.sizes(), ", chunks ", form.chunk, " tokens");
    if (!slots) return;
    value_slots_.emplace(*slots, "value_slots", 1, batch);
    TORCH_CHECK(
        places.sizes() == selected_.sizes(), "value_places has shape ", places.sizes(), ", selected ",
        selected_.sizes());
  }

  void set_exact_values() {
    const int64_t width = values_->rows.size(4);
    TORCH_CHECK(width == form.dim, "values have ", width, " dimensions, q has ", form.dim);
    form.values = floats(values_->rows, "values");
  }

  // scale: [N, H, C, c, 1].
  void set_codes(const Tensor& scale, const Tensor& pages, const Tensor& rotation) {
    const Tensor& codes = values_->rows;
    check(codes, "values", 5, at::kByte);
    check(scale, "scale", 5, at::kHalf);
    scale_.emplace(scale, "scale", heads);
    scale_pages_.emplace(pages, "scale_pages", 2, batch);
    TORCH_CHECK(
        scale.size(3) == form.chunk && scale.size(4) == 1, "scale has shape ", scale.sizes(), ", chunks ", form.chunk,
        " tokens");
    check(rotation, "rotation", 2, at::kFloat);
    TORCH_CHECK(
        rotation.size(0) == form.dim && rotation.size(1) == form.dim, "rotation has shape ", rotation.sizes(),
        ", heads have ", form.dim, " dimensions");
    rotation_ = rotation.contiguous();
    form.codes = codes.const_data_ptr<uint8_t>();
    form.scale = static_cast<const shadowkv::Float16*>(scale.const_data_ptr());
    form.rotation = rotation_.const_data_ptr<float>();
    form.bits = codes.size(4) * 8 / std::max<int64_t>(form.dim, 1);
    const int64_t multiple = form.bits == 4 ? 16 : form.bits == 3 ? 64 : 32;
    TORCH_CHECK(
        form.bits >= 2 && form.bits <= 4 && form.dim % multiple == 0 && codes.size(4) * 8 == form.bits * form.dim,
        "codes of ", codes.size(4), " bytes are none of ", form.dim, " dimensions in 4, 3 or 2 bits");
  }

  // Finds the chunks of one kv head of a sequence.
  void find(int64_t row, int64_t head, shadowkv::SelectedTask& task) const {
    task.chunks.clear();
    const int64_t first = (row * heads + head) * width_;
    const int64_t* selected = selected_.const_data_ptr<int64_t>() + first;
    for (int64_t i = 0; i < width_; ++i) {
      if (selected[i] < 0) continue;
      shadowkv::SelectedChunk chunk = {};
      chunk.key = keys_->offset(*key_pages_, row, head, selected[i]);
      chunk.value = value_slots_
          ? values_->offset(value_slots_->at(row), head, value_places_->at(row, head * width_ + i))
          : values_->offset(*value_places_, row, head, selected[i]);
      if (scale_) chunk.scale = scale_->offset(*scale_pages_, row, head, selected[i]);
      chunk.position = selected[i] * form.chunk;
      if (basis_.defined()) checked(chunk.position + form.chunk - 1, cos_.size(0), "position");
      if (log_weight_.defined()) chunk.log_weight = log_weight_.const_data_ptr<float>()[first + i] * LOG2_E;
      task.chunks.push_back(chunk);
    }
    if (task.chunks.empty() || !basis_.defined()) return;
    const int64_t slot = checked(key_slots_->at(row), basis_.size(0), "slot");
    task.basis = slot * basis_.stride(0) + head * basis_.stride(2);
    if (mean_.defined()) task.mean = slot * mean_.stride(0) + head * mean_.stride(1);
  }

 private:
  static constexpr float LOG2_E = 1.44269504f;

  Tensor selected_, log_weight_, basis_, mean_, cos_, sin_, rotation_;
  int64_t width_;
  optional<Chunks> keys_, values_, scale_;
  optional<Table> key_pages_, key_slots_, value_places_, value_slots_, scale_pages_;
};

template <typename T>
void attend(const SelectedArguments& in, const Tensor& q, Tensor& out, Tensor& lse) {
  const int64_t tasks = in.batch * in.heads, size = in.form.group * in.form.dim;
  const T* queries = static_cast<const T*>(q.const_data_ptr());
  T* outs = static_cast<T*>(out.mutable_data_ptr());
  float* sums = lse.mutable_data_ptr<float>();
  shadowkv::share_tasks(tasks, [&](const auto& next) {
    shadowkv::SelectedScratch scratch(in.form);
    shadowkv::SelectedTask task = {};
    for (int64_t i; (i = next()) < tasks;) {
      in.find(i / in.heads, i % in.heads, task);
      shadowkv::attend_selected(
          in.form, task, queries + i * size, scratch, outs + i * size, sums + i * in.form.group);
    }
  });
}

// Keys are latents where there is a basis, values are codes where there is a rotation of them, and they are in a buffer
// where there are slots of it; value_places are their pages, or the buffer's entries.
std::tuple<Tensor, Tensor> attend_selected(
    const Tensor& q, const Tensor& selected, const optional<Tensor>& log_weight, const Tensor& keys,
    const Tensor& key_pages, const optional<Tensor>& basis, const optional<Tensor>& mean,
    const optional<Tensor>& key_slots, const optional<Tensor>& cos, const optional<Tensor>& sin, bool interleaved,
    const Tensor& values, const Tensor& value_places, const optional<Tensor>& value_slots,
    const optional<Tensor>& scale, const optional<Tensor>& scale_pages, const optional<Tensor>& value_rotation) {
  SelectedArguments in(q, selected, log_weight);
  in.set_keys(keys, key_pages);
  if (basis) {
    in.set_basis(*basis, mean, needed(key_slots, "key_slots"));
    in.set_rotation(needed(cos, "cos"), needed(sin, "sin"), interleaved);
  } else {
    in.set_exact_keys();
  }
  in.set_values(values, value_places, value_slots);
  if (value_rotation)
    in.set_codes(needed(scale, "scale"), needed(scale_pages, "scale_pages"), *value_rotation);
  else
    in.set_exact_values();
  const Tensor queries = q.contiguous();
  Tensor out = at::empty_like(queries);
  Tensor lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat));
  if (floats(q, "q").dtype == Dtype::float32)
    attend<float>(in, queries, out, lse);
  else
    attend<shadowkv::BFloat16>(in, queries, out, lse);
  return {out, lse};
}

TORCH_LIBRARY_FRAGMENT(shadowkv, m) {
  m.def(
      "attend_selected(Tensor q, Tensor selected, Tensor? log_weight, Tensor keys, Tensor key_pages, Tensor? basis, "
      "Tensor? mean, Tensor? key_slots, Tensor? cos, Tensor? sin, bool interleaved, Tensor values, "
      "Tensor value_places, Tensor? value_slots, Tensor? scale, Tensor? scale_pages, Tensor? value_rotation) -> "
      "(Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(shadowkv, CPU, m) {
  m.impl("attend_selected", attend_selected);
}

}  // namespace
