// Attention over selected chunks for PyTorch: checks its arguments and launches on the current stream.
#include "../kernels/attend_selected.cuh"

#include "checks.h"

#include <algorithm>
#include <optional>

namespace shadowkv {
namespace {

template <class Shape>
void launch(const AttendInputs& in, const AttendOutputs& to, cudaStream_t stream) {
  const auto kernel = attend_selected_kernel<Shape>;
  const int bytes = Shape::shared_bytes(in.rank);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  STD_TORCH_CHECK(
      error == cudaSuccess, "attend_selected needs ", bytes, " bytes of shared memory: ", cudaGetErrorString(error));
  kernel<<<dim3(in.splits, in.heads, in.batch), kAttendWarps * 32, bytes, stream>>>(in, to);
  check_launch("attend_selected");
  if (in.splits == 1) return;
  merge_selected_kernel<Shape::kDim, Shape::kCodes>
      <<<in.batch * in.heads, kAttendWarps * 32, 0, stream>>>(to, in.rotation, in.group, in.splits);
  check_launch("attend_selected's merge");
}

// Tokens in a tile and blocks per multiprocessor are what the registers hold without spilling.
template <KeyForm kKeys, int kBits>
void launch_latents(const AttendInputs& in, const AttendOutputs& to, int64_t dim, cudaStream_t stream) {
  constexpr int kTiles = kBits < kRowBits ? 2 : 1;
  if (dim == 128 && in.rank == 160)
    return launch<AttendShape<kKeys, kBits, 128, 160, true, kTiles, kTiles == 2 ? 2 : 3>>(in, to, stream);
  switch (dim) {
    case 64: return launch<AttendShape<kKeys, kBits, 64, 256, false, 1, 2>>(in, to, stream);
    case 128: return launch<AttendShape<kKeys, kBits, 128, 256, false, 1, 2>>(in, to, stream);
    case 256: return launch<AttendShape<kKeys, kBits, 256, 256, false, 1, 1>>(in, to, stream);
    case 96: // which are no codes of 3 bits
      if constexpr (kBits != 3) return launch<AttendShape<kKeys, kBits, 96, 256, false, 1, 2>>(in, to, stream);
      [[fallthrough]];
    default: STD_TORCH_CHECK(false, "head dim ", dim, " of ", kBits, " bits is not 64, 96, 128 or 256");
  }
}

void launch_rows(const AttendInputs& in, const AttendOutputs& to, int64_t dim, cudaStream_t stream) {
  constexpr auto kKeys = KeyForm::kRows;
  switch (dim) {
    case 64: return launch<AttendShape<kKeys, kRowBits, 64, 0, false, 1, 4>>(in, to, stream);
    case 96: return launch<AttendShape<kKeys, kRowBits, 96, 0, false, 1, 4>>(in, to, stream);
    case 128: return launch<AttendShape<kKeys, kRowBits, 128, 0, false, 1, 4>>(in, to, stream);
    case 256: return launch<AttendShape<kKeys, kRowBits, 256, 0, false, 1, 2>>(in, to, stream);
    default: STD_TORCH_CHECK(false, "head dim ", dim, " is not 64, 96, 128 or 256");
  }
}

// A page array whose rows vector loads may read: dense inside, and everywhere as aligned as its rows, up to 16 bytes.
void check_pages(const Tensor& x, const char* name) {
  check_dense_from(x, name, 1);
  const int64_t row = x.size(-1) * int64_t(x.element_size()), unit = std::min<int64_t>(row & -row, 16);
  STD_TORCH_CHECK(
      reinterpret_cast<uintptr_t>(x.data_ptr()) % unit == 0 && x.stride(0) * int64_t(x.element_size()) % unit == 0,
      name, " does not start at a multiple of ", unit, " bytes everywhere");
}

// Of a code of these rows; the rest is checked where they are.
int64_t code_bits(const Tensor& codes, int64_t dim) { return codes.size(4) * 8 / dim; }

// Sets what all forms of keys and values share. The number of splits is what the partial results have room for. With
// value_slots the values are chunks of a buffer and value_pages its entries of the selected ones.
AttendInputs common(
    const Tensor& q, const Tensor& selected, const Tensor& keys, const Tensor& key_pages, const Tensor& values,
    const Tensor& value_pages, const std::optional<Tensor>& value_slots, int64_t chunk,
    const std::optional<Tensor>& scale, const std::optional<Tensor>& rotation,
    const std::optional<Tensor>& log_weight, const Tensor& out, const Tensor& lse, const Tensor& partial) {
  const int64_t batch = q.size(0), rows = q.size(1), dim = q.size(2), heads = selected.size(1);
  const int64_t splits = partial.size(2);
  STD_TORCH_CHECK(
      chunk == 1 || chunk == 2 || chunk == 4 || chunk == 8 || chunk == 16, "chunks of ", chunk,
      " tokens: not 1, 2, 4, 8 or 16");
  STD_TORCH_CHECK(
      heads > 0 && rows % heads == 0 && rows / heads <= kAttendQueries, rows, " query heads on ", heads,
      " kv heads: not 1 to 8 each");
  STD_TORCH_CHECK(splits > 0 && heads < 65536 && batch < 65536, "no room for ", splits, " splits, ", batch,
                  " sequences, ", heads, " heads");
  check(q, "q", Dtype::BFloat16, {batch, rows, dim});
  check(selected, "selected", Dtype::Long, {batch, heads, -1});
  check(key_pages, "key pages", Dtype::Long, {batch, -1});
  check(out, "out", Dtype::BFloat16, {batch, rows, dim});
  check(lse, "lse", Dtype::Float, {batch, rows});
  check_dense_from(q, "q", 0);
  check_dense_from(selected, "selected", 0);
  check_dense_from(key_pages, "key pages", 1);
  check_dense_from(out, "out", 0);
  check_dense_from(lse, "lse", 0);
  if (splits > 1) {
    check(partial, "partial", Dtype::Float, {batch, heads, splits, rows / heads, dim + 4});
    check_dense_from(partial, "partial", 0);
  }
  check_pages(keys, "keys");
  check_pages(values, "values");
  AttendInputs in = {};
  const int64_t chunks_of_head = value_slots ? values.size(2) : kPage / chunk;
  if (value_slots) {
    check(*value_slots, "value slots", Dtype::Long, {batch});
    check_dense_from(*value_slots, "value slots", 0);
    check(value_pages, "value entries", Dtype::Long, {batch, heads, selected.size(2)});
    check_dense_from(value_pages, "value entries", 0);
    check_dense_from(values, "values", 0);
    STD_TORCH_CHECK(values.size(0) * heads * chunks_of_head < int64_t(1) << 31, "the buffer has 2^31 entries");
    in.value_slots = static_cast<const int64_t*>(value_slots->data_ptr());
    in.buffer_entries = int(chunks_of_head);
  } else {
    check(value_pages, "value pages", Dtype::Long, {batch, -1});
    check_dense_from(value_pages, "value pages", 1);
  }
  if (scale) {
    STD_TORCH_CHECK(rotation, "codes need a rotation");
    const int64_t bits = code_bits(values, dim);
    check(values, "codes", Dtype::Byte, {-1, heads, chunks_of_head, chunk, dim * bits / 8});
    check(*scale, "scale", Dtype::Half, {-1, heads, kPage});
    check(*rotation, "rotation", Dtype::Float, {dim, dim});
    check_dense_from(*scale, "scale", 1);
    check_dense_from(*rotation, "rotation", 0);
    in.scale = static_cast<const char*>(scale->data_ptr());
    in.scale_page = scale->stride(0) * 2;
    in.rotation = static_cast<const float*>(rotation->data_ptr());
  } else {
    check(values, "values", Dtype::BFloat16, {-1, heads, chunks_of_head, chunk, dim});
  }
  in.log_weight = log_weights(log_weight, selected);
  in.q = static_cast<const __nv_bfloat16*>(q.data_ptr());
  in.selected = static_cast<const int64_t*>(selected.data_ptr());
  in.keys = static_cast<const char*>(keys.data_ptr());
  in.values = static_cast<const char*>(values.data_ptr());
  in.key_pages = static_cast<const int64_t*>(key_pages.data_ptr());
  in.value_pages = static_cast<const int64_t*>(value_pages.data_ptr());
  in.key_page = keys.stride(0) * int64_t(keys.element_size());
  in.value_page = values.stride(value_slots ? 2 : 0) * int64_t(values.element_size());
  in.key_pages_row = key_pages.stride(0);
  in.value_pages_row = value_pages.stride(0);
  in.batch = int(batch), in.heads = int(heads), in.group = int(rows / heads), in.splits = int(splits);
  in.chunks = int(selected.size(2));
  while (1 << in.log_chunk < chunk) ++in.log_chunk;
  return in;
}

AttendOutputs outputs(Tensor& out, Tensor& lse, Tensor& partial) {
  return {
      static_cast<__nv_bfloat16*>(out.data_ptr()), static_cast<float*>(lse.data_ptr()),
      static_cast<float*>(partial.data_ptr())};
}

void attend_selected_latents(
    const Tensor& q, const Tensor& selected, const Tensor& latents, const Tensor& basis,
    const std::optional<Tensor>& mean, const Tensor& slots, const Tensor& key_pages, const Tensor& far_turns,
    const Tensor& near_turns,
    const Tensor& values, const std::optional<Tensor>& scale, const std::optional<Tensor>& rotation,
    const Tensor& value_pages, const std::optional<Tensor>& value_slots, const std::optional<Tensor>& log_weight,
    double score_scale, Tensor& out, Tensor& lse, Tensor& partial) {
  AttendInputs in = common(
      q, selected, latents, key_pages, values, value_pages, value_slots, latents.size(2), scale, rotation,
      log_weight, out, lse, partial);
  const int64_t dim = q.size(2), chunk = latents.size(2), rank = latents.size(3);
  const bool int8 = latents.scalar_type() == Dtype::Char;
  check(latents, "latents", int8 ? Dtype::Char : Dtype::BFloat16, {-1, kPage / chunk, chunk, rank});
  STD_TORCH_CHECK(rank > 0 && rank % 32 == 0 && rank <= 256, "rank ", rank, " is not a multiple of 32 up to 256");
  check(basis, "basis", Dtype::BFloat16, {-1, rank, in.heads, dim});
  check_pages(basis, "basis");
  check(slots, "slots", Dtype::Long, {in.batch});
  check_dense_from(slots, "slots", 0);
  check(far_turns, "far turns", Dtype::Half, {-1, dim / 4, 2, 2});
  check(near_turns, "near turns", Dtype::Half, {8, dim / 4, 2, 2});
  check_dense_from(far_turns, "far turns", 0);
  check_dense_from(near_turns, "near turns", 0);
  if (mean) {
    in.mean_is_float = mean->scalar_type() == Dtype::Float;
    check(*mean, "mean", in.mean_is_float ? Dtype::Float : Dtype::BFloat16, {-1, in.heads, dim});
    check_dense_from(*mean, "mean", 1);
    in.mean = mean->data_ptr();
    in.mean_slot = mean->stride(0);
  }
  in.basis = static_cast<const __nv_bfloat16*>(basis.data_ptr());
  in.basis_slot = basis.stride(0);
  in.slots = static_cast<const int64_t*>(slots.data_ptr());
  in.far_turns = static_cast<const uint2*>(far_turns.data_ptr());
  in.near_turns = static_cast<const uint2*>(near_turns.data_ptr());
  in.score_scale = float(score_scale);
  in.rank = int(rank);
  if (in.batch == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  const AttendOutputs to = outputs(out, lse, partial);
  const cudaStream_t stream = current_stream(q);
  using enum KeyForm;
  const int64_t bits = scale ? code_bits(values, dim) : kRowBits;
  if (int8 && bits == kRowBits) return launch_latents<kLatentsInt8, kRowBits>(in, to, dim, stream);
  if (int8 && bits == 4) return launch_latents<kLatentsInt8, 4>(in, to, dim, stream);
  if (int8 && bits == 3) return launch_latents<kLatentsInt8, 3>(in, to, dim, stream);
  if (int8 && bits == 2) return launch_latents<kLatentsInt8, 2>(in, to, dim, stream);
  if (bits == kRowBits) return launch_latents<kLatentsBf16, kRowBits>(in, to, dim, stream);
  if (bits == 4) return launch_latents<kLatentsBf16, 4>(in, to, dim, stream);
  STD_TORCH_CHECK(false, "values in ", bits, " bits with ", int8 ? "int8" : "bf16", " latents");
}

void attend_selected_rows(
    const Tensor& q, const Tensor& selected, const Tensor& keys, const Tensor& key_pages, const Tensor& values,
    const Tensor& value_pages, const std::optional<Tensor>& value_slots, const std::optional<Tensor>& log_weight,
    double score_scale, Tensor& out, Tensor& lse, Tensor& partial) {
  AttendInputs in = common(
      q, selected, keys, key_pages, values, value_pages, value_slots, keys.size(3), {}, {}, log_weight, out, lse,
      partial);
  const int64_t dim = q.size(2), chunk = keys.size(3);
  check(keys, "keys", Dtype::BFloat16, {-1, in.heads, kPage / chunk, chunk, dim});
  in.score_scale = float(score_scale);
  if (in.batch == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  launch_rows(in, outputs(out, lse, partial), dim, current_stream(q));
}

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "attend_selected_latents(Tensor q, Tensor selected, Tensor latents, Tensor basis, Tensor? mean, Tensor slots, "
      "Tensor key_pages, Tensor far_turns, Tensor near_turns, Tensor values, Tensor? scale, Tensor? rotation, "
      "Tensor value_pages, Tensor? value_slots, Tensor? log_weight, float score_scale, Tensor(a!) out, "
      "Tensor(b!) lse, Tensor(c!) partial) -> ()");
  m.def(
      "attend_selected_rows(Tensor q, Tensor selected, Tensor keys, Tensor key_pages, Tensor values, "
      "Tensor value_pages, Tensor? value_slots, Tensor? log_weight, float score_scale, Tensor(a!) out, "
      "Tensor(b!) lse, Tensor(c!) partial) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) {
  m.impl("attend_selected_latents", TORCH_BOX(&attend_selected_latents));
  m.impl("attend_selected_rows", TORCH_BOX(&attend_selected_rows));
}

} // namespace
} // namespace shadowkv
