// Attention over all compressed tokens from mixed latents and vectors on Hopper for PyTorch: checks its arguments and
// launches on the current stream.
#include "attend_mixed_sm90.cuh"

#include "kernels/common/checks.h"

#include <utility>

namespace shadowkv {
namespace {

using Ranks = std::integer_sequence<int, 96, 128, 160, 192>; // supported by the kernel

template <class Shape>
void launch(const MixedInputs& in, const SplitOutputs<__nv_bfloat16>& to, cudaStream_t stream) {
  const auto kernel = attend_mixed_kernel<Shape>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  STD_TORCH_CHECK(error == cudaSuccess, "attend_mixed_sm90's ", Shape::kSharedBytes, " bytes of shared memory: ",
                  cudaGetErrorString(error));
  kernel<<<dim3(in.splits, in.heads / 2, in.batch), Shape::kThreads, Shape::kSharedBytes, stream>>>(in, to);
  check_launch("attend_mixed_sm90");
  if (in.splits == 1) return;
  // The merge's blocks start as the last blocks of this launch end, and wait for their results.
  error = launch_early(
      merge_splits_kernel<kMixedDim, __nv_bfloat16>, in.batch * in.heads * in.group, kMergeThreads, 0, stream, to, in.splits);
  STD_TORCH_CHECK(error == cudaSuccess, "attend_mixed_sm90's merge: ", cudaGetErrorString(error));
}

template <int... kRanks>
void launch_rank(
    std::integer_sequence<int, kRanks...>, int64_t rank, const MixedInputs& in, const SplitOutputs<__nv_bfloat16>& to,
    cudaStream_t stream) {
  const auto launched = [&]<int kRank>() {
    if (rank != kRank) return false;
    in.group <= 4 ? launch<MixedShape<kRank, true>>(in, to, stream) : launch<MixedShape<kRank, false>>(in, to, stream);
    return true;
  };
  STD_TORCH_CHECK((launched.template operator()<kRanks>() || ...), "attend_mixed_sm90 is not made for rank ", rank);
}

// The number of splits follows from the size of the partial results.
void attend_mixed_sm90(
    const Tensor& q, const Tensor& begin, const Tensor& end, const Tensor& latents, const Tensor& basis,
    const Tensor& step, const Tensor& widths, const Tensor& mean, const Tensor& key_states, const Tensor& first,
    const Tensor& key_pages, const Tensor& frequencies, const Tensor& codes, const Tensor& largest,
    const Tensor& codebook, const Tensor& value_states, const Tensor& value_pages, double score_scale, Tensor& out,
    Tensor& lse, Tensor& partial_out, Tensor& partial_lse) {
  const int64_t batch = q.size(0), rows = q.size(1), heads = basis.size(2), rank = basis.size(1);
  const int64_t splits = partial_lse.size(2), entries = key_pages.size(1);
  STD_TORCH_CHECK(heads > 0 && heads % 2 == 0 && rows % heads == 0 && rows / heads <= 8, rows, " query heads on ",
                  heads, " kv heads: not 1 to 8 each, of an even number");
  STD_TORCH_CHECK(splits > 0 && entries < 1 << 25, "no room for ", splits, " splits, ", entries, " pages");
  check_blocks(batch, "sequences");
  check_blocks(heads / 2, "pairs of kv heads");
  check_dense(q, "q", Dtype::BFloat16, {batch, rows, kMixedDim});
  check_dense(begin, "begin", Dtype::Long, {batch});
  check_dense(end, "end", Dtype::Long, {batch});
  check_field(latents, "latents", Dtype::Byte, {-1, kPage, rank / 2});
  check_dense(basis, "basis", Dtype::Char, {-1, rank, heads, kMixedDim}, 1);
  check_aligned(address(basis) | bytes_apart(basis), "basis", 8);
  check_dense(step, "step", Dtype::Float, {-1, rank}, 1);
  check_dense(widths, "widths", Dtype::Byte, {-1, rank}, 1);
  check_dense(mean, "mean", Dtype::BFloat16, {-1, heads, kMixedDim}, 1);
  check_dense(key_states, "states of keys", Dtype::Long, {batch});
  check_dense(first, "first", Dtype::Long, {batch});
  check_dense(key_pages, "pages of keys", Dtype::Long, {batch, entries}, 1);
  check_dense(frequencies, "frequencies", Dtype::Int, {kMixedDim / 32, 4, 2, 2});
  check_field(codes, "codes", Dtype::Byte, {-1, heads, kPage, kValueRow});
  check_dense(largest, "largest", Dtype::Float, {-1, heads, kMixedDim}, 1);
  check_dense(codebook, "codebook", Dtype::Float, {-1, 1, kEntries, kVector}, 1);
  check_aligned(address(codebook) | bytes_apart(codebook), "codebook", 16);
  check_dense(value_states, "states of values", Dtype::Long, {batch});
  check_dense(value_pages, "pages of values", Dtype::Long, {batch, entries}, 1);
  check_dense(out, "out", Dtype::BFloat16, {batch, rows, kMixedDim});
  check_dense(lse, "lse", Dtype::Float, {batch, rows});
  check_dense(partial_out, "partial_out", Dtype::Float, {batch, rows, splits, kMixedDim});
  check_dense(partial_lse, "partial_lse", Dtype::Float, {batch, rows, splits});
  const MixedInputs in = {
      static_cast<const __nv_bfloat16*>(q.data_ptr()), static_cast<const char*>(latents.data_ptr()),
      static_cast<const char*>(codes.data_ptr()), static_cast<const int64_t*>(key_pages.data_ptr()),
      static_cast<const int64_t*>(value_pages.data_ptr()), static_cast<const int64_t*>(key_states.data_ptr()),
      static_cast<const int64_t*>(value_states.data_ptr()), static_cast<const int64_t*>(first.data_ptr()),
      static_cast<const int64_t*>(begin.data_ptr()), static_cast<const int64_t*>(end.data_ptr()),
      static_cast<const int8_t*>(basis.data_ptr()), static_cast<const float*>(step.data_ptr()),
      static_cast<const uint8_t*>(widths.data_ptr()), static_cast<const __nv_bfloat16*>(mean.data_ptr()),
      static_cast<const float*>(largest.data_ptr()), static_cast<const float*>(codebook.data_ptr()),
      static_cast<const uint32_t*>(frequencies.data_ptr()), key_pages.stride(0), value_pages.stride(0),
      basis.stride(0), step.stride(0), widths.stride(0), mean.stride(0), largest.stride(0), codebook.stride(0),
      uint32_t(latents.stride(0)), uint32_t(codes.stride(0)), float(score_scale), int(batch), int(heads),
      int(rows / heads), int(entries), int(splits)};
  if (batch == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  const SplitOutputs<__nv_bfloat16> to = {
      static_cast<__nv_bfloat16*>(out.data_ptr()), static_cast<float*>(lse.data_ptr()),
      static_cast<float*>(partial_out.data_ptr()), static_cast<float*>(partial_lse.data_ptr())};
  launch_rank(Ranks{}, rank, in, to, current_stream(q));
}

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "attend_mixed_sm90(Tensor q, Tensor begin, Tensor end, Tensor latents, Tensor basis, Tensor step, "
      "Tensor widths, Tensor mean, Tensor key_states, Tensor first, Tensor key_pages, Tensor frequencies, "
      "Tensor codes, Tensor largest, Tensor codebook, Tensor value_states, Tensor value_pages, float score_scale, "
      "Tensor(a!) out, Tensor(b!) lse, Tensor(c!) partial_out, Tensor(d!) partial_lse) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) {
  m.impl("attend_mixed_sm90", TORCH_BOX(&attend_mixed_sm90));
}

} // namespace
} // namespace shadowkv
