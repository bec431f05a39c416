// Attention over selected chunks of CPU tensors for PyTorch: checks arguments, finds the chunks and distributes the
// work over its threads.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "attend_selected.h"
#include "constants.h"
#include "cpu/common/binding.h"

namespace {

namespace codec = shadowkv::codec;
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

// Integers [B, ...] per sequence.
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

// Chunks [N, H, C, c, w] of pages or buffers; the tokens of each chunk are contiguous.
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

  // The same for a chunk of a sequence.
  int64_t offset(const Table& pages, int64_t row, int64_t head, int64_t chunk) const {
    const int64_t per_page = rows.size(2), column = checked(chunk, pages.width * per_page, "chunk") / per_page;
    return offset(pages.at(row, column), head, chunk - column * per_page);
  }
};

bool is_latents(int64_t id) { return id >= codec::kLatentDense && id <= codec::kLatentInt4; }

// An axis' arguments of the op. Coded rows have scales [N, H, C, c, 1], the codec's rotation and levels. With slots the
// chunks are in a buffer, and places are its entries; else pages.
struct Axis {
  std::string name;  // singular: key or value
  int64_t codec;
  const Tensor &rows, &places;
  const optional<Tensor>&scale, &scale_pages, &rotation, &levels, &slots;
};

// Keys or values of a batch in their stored form.
class Stored {
 public:
  shadowkv::StoredRows form{};

  // width: of a row or of latents.
  Stored(const Axis& axis, int64_t width, const Tensor& selected)
      : rows_(axis.rows, (axis.name + "s").c_str(), selected.size(1)),
        places_(axis.places, (axis.name + "_places").c_str(), axis.slots ? 3 : 2, selected.size(0)) {
    const std::string name = axis.name + "s";
    form.codec = axis.codec, form.width = shadowkv::row_width(axis.codec, width, axis.rows.size(4));
    TORCH_CHECK(form.width >= 0, "attend_selected on CPUs knows no codec ", axis.codec, " of ", name);
    TORCH_CHECK(
        form.width > 0 && axis.rows.size(4) == form.width, name, " of ", axis.rows.size(4), " elements are none of ",
        width, " dimensions in codec ", axis.codec);
    if (axis.codec == codec::kDense || axis.codec == codec::kLatentDense) {
      form.rows = floats(axis.rows, name.c_str());
    } else {
      const bool int8 = axis.codec == codec::kLatentInt8;
      check(axis.rows, name.c_str(), 5, int8 ? at::kChar : at::kByte);
      form.rows = {axis.rows.const_data_ptr(), int8 ? Dtype::int8 : Dtype::uint8};
    }
    if (axis.codec != codec::kDense && !is_latents(axis.codec)) set_scale(axis, width);
    if (!axis.slots) return;
    slots_.emplace(*axis.slots, (axis.name + "_slots").c_str(), 1, selected.size(0));
    TORCH_CHECK(
        axis.places.sizes() == selected.sizes(), axis.name, "_places has shape ", axis.places.sizes(), ", selected ",
        selected.sizes());
  }

  // The i-th selected chunk of a kv head.
  shadowkv::StoredChunk find(int64_t row, int64_t head, int64_t i, int64_t chunk) const {
    const int64_t column = head * places_.numbers.size(-1) + i;
    return {
        slots_ ? rows_.offset(slots_->at(row), head, places_.at(row, column))
               : rows_.offset(places_, row, head, chunk),
        scale_ ? scale_->offset(*scale_pages_, row, head, chunk) : 0};
  }

 private:
  void set_scale(const Axis& axis, int64_t dim) {
    const std::string name = axis.name + "_scale", pages = name + "_pages", rotation = axis.name + "_rotation",
                      levels = axis.name + "_levels";
    const Tensor& scale = needed(axis.scale, name.c_str());
    check(scale, name.c_str(), 5, at::kHalf);
    scale_.emplace(scale, name.c_str(), rows_.rows.size(1));
    scale_pages_.emplace(needed(axis.scale_pages, pages.c_str()), pages.c_str(), 2, places_.numbers.size(0));
    TORCH_CHECK(
        scale.size(3) == rows_.rows.size(3) && scale.size(4) == 1, name, " has shape ", scale.sizes(), ", chunks ",
        rows_.rows.size(3), " tokens");
    rotation_ = needed(axis.rotation, rotation.c_str()).contiguous();
    check(rotation_, rotation.c_str(), 2, at::kFloat);
    check_shape(rotation_, rotation.c_str(), {dim, dim});
    form.scale = static_cast<const shadowkv::Float16*>(scale.const_data_ptr());
    form.rotation = rotation_.const_data_ptr<float>();
    levels_ = needed(axis.levels, levels.c_str()).contiguous();
    check(levels_, levels.c_str(), 1, at::kFloat);
    check_shape(levels_, levels.c_str(), {int64_t{1} << (8 * form.width / dim)});
    form.levels = levels_.const_data_ptr<float>();
  }

  Chunks rows_;
  Table places_;
  optional<Chunks> scale_;
  optional<Table> scale_pages_, slots_;
  Tensor rotation_, levels_;
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

  void set_keys(const Axis& axis) {
    check(axis.rows, "keys", 5, axis.rows.scalar_type());
    form.chunk = axis.rows.size(3);
    TORCH_CHECK(
        form.chunk > 0 && shadowkv::TILE % form.chunk == 0, "chunks of ", form.chunk, " tokens do not divide ",
        shadowkv::TILE);
    form.keys = keys_.emplace(axis, is_latents(axis.codec) ? form.rank : form.dim, selected_).form;
  }

  void set_values(const Axis& axis) {
    TORCH_CHECK(!is_latents(axis.codec), "attend_selected on CPUs knows no codec ", axis.codec, " of values");
    check(axis.rows, "values", 5, axis.rows.scalar_type());
    TORCH_CHECK(
        axis.rows.size(3) == form.chunk, "values have shape ", axis.rows.sizes(), ", chunks ", form.chunk, " tokens");
    form.values = values_.emplace(axis, form.dim, selected_).form;
  }

  // To be called before the keys, which are latents.
  void set_basis(const Tensor& basis) {
    check(basis, "basis", 4, basis.scalar_type());
    form.rank = basis.size(1);
    check_shape(basis, "basis", {basis.size(0), form.rank, heads, form.dim});
    form.basis = floats(basis, "basis"), form.basis_row = basis.stride(1);
    basis_ = basis;
  }

  void set_mean(const Tensor& mean) {
    check_shape(mean, "mean", {basis_.defined() ? basis_.size(0) : mean.size(0), heads, form.dim});
    form.mean = floats(mean, "mean"), mean_ = mean;
  }

  // The index of a row's basis and mean, and the position of its first token.
  void set_places(const Tensor& states, const Tensor& first) {
    key_states_.emplace(states, "key_states", 1, batch), first_.emplace(first, "key_first", 1, batch);
  }

  void set_rope(const Tensor& cos, const Tensor& sin, bool interleaved) {
    cos_ = cos.contiguous(), sin_ = sin.contiguous();
    check(cos, "cos", 2, at::kFloat);
    check(sin, "sin", 2, at::kFloat);
    TORCH_CHECK(
        cos.sizes() == sin.sizes() && 2 * cos.size(1) <= form.dim, "cos has shape ", cos.sizes(), ", sin ",
        sin.sizes(), ", heads have ", form.dim, " dimensions");
    form.cos = cos_.const_data_ptr<float>(), form.sin = sin_.const_data_ptr<float>();
    form.rope_dim = 2 * cos.size(1), form.interleaved = interleaved;
  }

  // Finds the chunks of one kv head of a row.
  void find(int64_t row, int64_t head, shadowkv::SelectedTask& task) const {
    task.chunks.clear();
    const int64_t first = (row * heads + head) * width_;
    const int64_t* selected = selected_.const_data_ptr<int64_t>() + first;
    for (int64_t i = 0; i < width_; ++i) {
      if (selected[i] < 0) continue;
      shadowkv::SelectedChunk chunk = {};
      chunk.key = keys_->find(row, head, i, selected[i]);
      chunk.value = values_->find(row, head, i, selected[i]);
      if (first_) {
        chunk.position = first_->at(row) + selected[i] * form.chunk;
        checked(chunk.position, cos_.size(0), "position");
        checked(chunk.position + form.chunk - 1, cos_.size(0), "position");
      }
      if (log_weight_.defined()) chunk.log_weight = log_weight_.const_data_ptr<float>()[first + i] * shadowkv::kLog2E;
      task.chunks.push_back(chunk);
    }
    if (task.chunks.empty() || !first_) return;
    const int64_t state = checked(key_states_->at(row), (basis_.defined() ? basis_ : mean_).size(0), "state");
    if (basis_.defined()) task.basis = state * basis_.stride(0) + head * basis_.stride(2);
    if (mean_.defined()) task.mean = state * mean_.stride(0) + head * mean_.stride(1);
  }

 private:
  Tensor selected_, log_weight_, basis_, mean_, cos_, sin_;
  int64_t width_;
  optional<Stored> keys_, values_;
  optional<Table> key_states_, first_;
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

// Codecs are those of codecs.h; latents need a basis and what belongs to it, coded keys without their mean need all of
// that except a basis.
std::tuple<Tensor, Tensor> attend_selected(
    const Tensor& q, const Tensor& selected, const optional<Tensor>& log_weight, int64_t key_codec, const Tensor& keys,
    const Tensor& key_pages, const optional<Tensor>& key_scale, const optional<Tensor>& key_scale_pages,
    const optional<Tensor>& key_rotation, const optional<Tensor>& key_levels, const optional<Tensor>& basis,
    const optional<Tensor>& mean, const optional<Tensor>& key_states, const optional<Tensor>& key_first,
    const optional<Tensor>& cos, const optional<Tensor>& sin, bool interleaved, int64_t value_codec,
    const Tensor& values, const Tensor& value_places, const optional<Tensor>& value_scale,
    const optional<Tensor>& value_scale_pages, const optional<Tensor>& value_rotation,
    const optional<Tensor>& value_levels, const optional<Tensor>& value_slots) {
  SelectedArguments in(q, selected, log_weight);
  if (is_latents(key_codec)) in.set_basis(needed(basis, "basis"));
  if (mean) in.set_mean(*mean);
  if (is_latents(key_codec) || mean) {
    in.set_places(needed(key_states, "key_states"), needed(key_first, "key_first"));
    in.set_rope(needed(cos, "cos"), needed(sin, "sin"), interleaved);
  }
  in.set_keys({"key", key_codec, keys, key_pages, key_scale, key_scale_pages, key_rotation, key_levels, {}});
  in.set_values(
      {"value", value_codec, values, value_places, value_scale, value_scale_pages, value_rotation, value_levels,
       value_slots});
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
      "attend_selected(Tensor q, Tensor selected, Tensor? log_weight, int key_codec, Tensor keys, Tensor key_pages, "
      "Tensor? key_scale, Tensor? key_scale_pages, Tensor? key_rotation, Tensor? key_levels, Tensor? basis, "
      "Tensor? mean, Tensor? key_states, Tensor? key_first, Tensor? cos, Tensor? sin, bool interleaved, "
      "int value_codec, Tensor values, Tensor value_places, Tensor? value_scale, Tensor? value_scale_pages, Tensor? value_rotation, "
      "Tensor? value_levels, Tensor? value_slots) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(shadowkv, CPU, m) {
  m.impl("attend_selected", attend_selected);
}

}  // namespace
