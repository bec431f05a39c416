// Attention over selected tokens from latents on Hopper, for PyTorch: checks its arguments and launches on the current
// stream.
#include "../kernels/attend_latents_sm90.cuh"

#include "checks.h"

#include <algorithm>
#include <optional>

namespace shadowkv {
namespace {

template <class Shape>
void launch(const LatentCall& call, cudaStream_t stream) {
  const LatentInputs& in = call.in;
  cudaError_t error = launch_early(
      attend_latents_kernel<Shape>, call.runs.blocks, Shape::kThreads, Shape::kSharedBytes, stream, call);
  STD_TORCH_CHECK(error == cudaSuccess, "attend_latents_sm90: ", cudaGetErrorString(error));
  const int units = 8 / in.group;
  error = launch_early(
      merge_latents_kernel<Shape::kDim, Shape::kConsumers>, (in.batch * in.heads + units - 1) / units,
      Shape::kDim * 2, 0, stream, call);
  STD_TORCH_CHECK(error == cudaSuccess, "attend_latents_sm90's merge: ", cudaGetErrorString(error));
}

template <int kDim, int kBits, bool kFew>
void launch_rank(int64_t rank, const LatentCall& call, cudaStream_t stream) {
  switch (rank) {
    case 32: return launch<LatentShape<kDim, 32, kBits, kFew>>(call, stream);
    case 64: return launch<LatentShape<kDim, 64, kBits, kFew>>(call, stream);
    case 96: return launch<LatentShape<kDim, 96, kBits, kFew>>(call, stream);
    case 128: return launch<LatentShape<kDim, 128, kBits, kFew>>(call, stream);
    case 160: return launch<LatentShape<kDim, 160, kBits, kFew>>(call, stream);
    default: STD_TORCH_CHECK(false, "rank ", rank, " is not a multiple of 32 up to 160");
  }
}

template <int kDim, int kBits>
void launch_group(int64_t rank, const LatentCall& call, cudaStream_t stream) {
  const auto run = call.in.group <= 4 ? launch_rank<kDim, kBits, true> : launch_rank<kDim, kBits, false>;
  run(rank, call, stream);
}

template <int kDim>
void launch_bits(int64_t bits, int64_t rank, const LatentCall& call, cudaStream_t stream) {
  switch (bits) {
    case 4: return launch_group<kDim, 4>(rank, call, stream);
    case 3: return launch_group<kDim, 3>(rank, call, stream);
    case 2: return launch_group<kDim, 2>(rank, call, stream);
    default: STD_TORCH_CHECK(false, "values in ", bits, " bits: not 4, 3 or 2");
  }
}

// A page array whose rows vector loads may read, and whose pages lie multiples of 32 bytes apart.
void check_pages(const Tensor& x, const char* name) {
  check_dense_from(x, name, 1);
  STD_TORCH_CHECK(
      reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 && x.stride(0) * int64_t(x.element_size()) % 32 == 0, name,
      " does not start at a multiple of 16 bytes, or its pages are not multiples of 32 bytes apart");
}

void attend_latents_sm90(
    const Tensor& q, const Tensor& selected, const Tensor& latents, const Tensor& basis,
    const std::optional<Tensor>& mean, const Tensor& slots, const Tensor& key_pages, const Tensor& frequencies,
    const Tensor& codes, const Tensor& scale, const Tensor& rotation, const Tensor& value_pages,
    const std::optional<Tensor>& log_weight, double score_scale, int64_t blocks, Tensor& out, Tensor& lse,
    Tensor& partial) {
  const int64_t batch = q.size(0), rows = q.size(1), dim = q.size(2), heads = selected.size(1);
  const int64_t chunk = latents.size(2), rank = latents.size(3), bits = codes.size(4) * 8 / dim;
  STD_TORCH_CHECK(dim == 64 || dim == 128, "head dim ", dim, " is not 64 or 128");
  STD_TORCH_CHECK(
      chunk == 1 || chunk == 2 || chunk == 4 || chunk == 8 || chunk == 16, "chunks of ", chunk,
      " tokens: not 1, 2, 4, 8 or 16");
  STD_TORCH_CHECK(
      heads > 0 && rows % heads == 0 && rows / heads <= kAttendQueries, rows, " query heads on ", heads,
      " kv heads: not 1 to 8 each");
  check(q, "q", Dtype::BFloat16, {batch, rows, dim});
  check(selected, "selected", Dtype::Long, {batch, heads, -1});
  check(latents, "latents", Dtype::Char, {-1, kPage / chunk, chunk, rank});
  check(basis, "basis", Dtype::BFloat16, {-1, rank, heads, dim});
  check(slots, "slots", Dtype::Long, {batch});
  check(key_pages, "key pages", Dtype::Long, {batch, -1});
  check(frequencies, "frequencies", Dtype::Int, {dim / 32, 4, 2, 2});
  check(codes, "codes", Dtype::Byte, {-1, heads, kPage / chunk, chunk, dim * bits / 8});
  check(scale, "scale", Dtype::Half, {-1, heads, kPage});
  check(rotation, "rotation", Dtype::Float, {dim, dim});
  check(value_pages, "value pages", Dtype::Long, {batch, -1});
  check(out, "out", Dtype::BFloat16, {batch, rows, dim});
  check(lse, "lse", Dtype::Float, {batch, rows});
  check(partial, "partial", Dtype::Float, {batch, heads, -1, rows / heads, dim + 4});
  check_pages(latents, "latents");
  check_pages(basis, "basis");
  check_pages(codes, "codes");
  check_dense_from(q, "q", 0);
  check_dense_from(selected, "selected", 0);
  check_dense_from(slots, "slots", 0);
  check_dense_from(key_pages, "key pages", 1);
  check_dense_from(frequencies, "frequencies", 0);
  check_dense_from(scale, "scale", 1);
  STD_TORCH_CHECK(
      reinterpret_cast<uintptr_t>(scale.data_ptr()) % 4 == 0 && scale.stride(0) % 16 == 0,
      "scale does not start at a multiple of 4 bytes, or its pages are not multiples of 32 bytes apart");
  check_dense_from(rotation, "rotation", 0);
  check_dense_from(value_pages, "value pages", 1);
  check_dense_from(out, "out", 0);
  check_dense_from(lse, "lse", 0);
  check_dense_from(partial, "partial", 0);
  LatentInputs in = {};
  if (mean) {
    in.mean_is_float = mean->scalar_type() == Dtype::Float;
    check(*mean, "mean", in.mean_is_float ? Dtype::Float : Dtype::BFloat16, {-1, heads, dim});
    check_dense_from(*mean, "mean", 1);
    in.mean = mean->data_ptr();
    in.mean_slot = mean->stride(0);
  }
  in.log_weight = log_weights(log_weight, selected);
  in.q = static_cast<const __nv_bfloat16*>(q.data_ptr());
  in.selected = static_cast<const int64_t*>(selected.data_ptr());
  in.latents = static_cast<const char*>(latents.data_ptr());
  in.codes = static_cast<const char*>(codes.data_ptr());
  in.scale = static_cast<const char*>(scale.data_ptr());
  in.key_pages = static_cast<const int64_t*>(key_pages.data_ptr());
  in.value_pages = static_cast<const int64_t*>(value_pages.data_ptr());
  in.basis = static_cast<const __nv_bfloat16*>(basis.data_ptr());
  in.slots = static_cast<const int64_t*>(slots.data_ptr());
  in.rotation = static_cast<const float*>(rotation.data_ptr());
  in.frequencies = static_cast<const uint32_t*>(frequencies.data_ptr());
  in.latent_page = uint32_t(latents.stride(0) / 32);
  in.code_page = uint32_t(codes.stride(0) / 32);
  in.scale_page = uint32_t(scale.stride(0) / 16);
  in.key_pages_row = key_pages.stride(0);
  in.value_pages_row = value_pages.stride(0);
  in.basis_slot = basis.stride(0);
  in.score_scale = float(score_scale);
  in.batch = int(batch), in.heads = int(heads), in.group = int(rows / heads), in.chunks = int(selected.size(2));
  while (1 << in.log_chunk < chunk) ++in.log_chunk;
  if (batch == 0) return;
  const Runs runs(in, int(blocks));
  STD_TORCH_CHECK(blocks > 0 && blocks <= runs.total, blocks, " blocks for ", runs.total, " tiles");
  const int consumers = in.group <= 4 ? 3 : 2;
  const int least = runs.total / int(blocks); // tiles of a block; a unit may have one of its first and last block's
  STD_TORCH_CHECK(
      partial.size(2) >= std::min(runs.tiles, (runs.tiles - 2 + least) / least + 1) * consumers,
      "no room for the segments of ", blocks, " blocks");
  const LatentOutputs to = {
      static_cast<__nv_bfloat16*>(out.data_ptr()), static_cast<float*>(lse.data_ptr()),
      static_cast<float*>(partial.data_ptr()), int(partial.size(2))};
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  const auto run = dim == 64 ? launch_bits<64> : launch_bits<128>;
  run(bits, rank, {in, to, runs}, current_stream(q));
}

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "attend_latents_sm90(Tensor q, Tensor selected, Tensor latents, Tensor basis, Tensor? mean, Tensor slots, "
      "Tensor key_pages, Tensor frequencies, Tensor codes, Tensor scale, Tensor rotation, Tensor value_pages, "
      "Tensor? log_weight, float score_scale, int blocks, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) partial) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) { m.impl("attend_latents_sm90", TORCH_BOX(&attend_latents_sm90)); }

} // namespace
} // namespace shadowkv
