// What the bindings of paged decode attention share: checks, and launches on the current stream.
#pragma once

#include "paged_attention.cuh"

#include "kernels/common/checks.h"

#include <optional>
#include <utility>

namespace shadowkv {

// What is the same for all kinds of rows; the dtypes and shapes of q, k, v and pages have been checked already. The
// number of splits follows from the size of the partial results. `starts` are the first rows of sequences with up to
// `most_rows` each; without them each row is a sequence.
template <typename Rows>
PagedInputs<Rows> paged_inputs(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& pages, const std::optional<Tensor>& starts,
    int64_t most_rows, int64_t splits, const Rows& rows) {
  using Element = typename Rows::Element;
  const int64_t query_heads = q.size(1), heads = k.size(1);
  if (starts) check_dense(*starts, "starts of sequences", Dtype::Long, {-1});
  const int64_t sequences = starts ? starts->size(0) - 1 : q.size(0);
  STD_TORCH_CHECK(
      sequences >= 0 && most_rows > 0 && (starts || most_rows == 1), sequences, " sequences with up to ", most_rows,
      " rows");
  check_dense_from(q, "q", 0);
  for (const auto& [x, name] : {std::pair{&k, "k"}, {&v, "v"}, {&pages, "pages"}}) check_dense_from(*x, name, 1);
  for (const auto& [x, name] : {std::pair{&q, "q"}, {&k, "k"}, {&v, "v"}})
    check_aligned(address(*x) | bytes_apart(*x), name, 16);
  STD_TORCH_CHECK(
      heads > 0 && query_heads % heads == 0, query_heads, " query heads are no multiple of ", heads, " kv heads");
  STD_TORCH_CHECK(splits > 0, "no room for ", splits, " splits");
  check_blocks(sequences, "sequences");
  check_blocks(heads, "kv heads");
  return {
      static_cast<const __nv_bfloat16*>(q.data_ptr()),
      static_cast<const Element*>(k.data_ptr()),
      static_cast<const Element*>(v.data_ptr()),
      static_cast<const int64_t*>(pages.data_ptr()),
      starts ? static_cast<const int64_t*>(starts->data_ptr()) : nullptr,
      k.stride(0), v.stride(0), pages.stride(0), int(sequences), int(most_rows), int(heads), int(query_heads / heads),
      int(pages.size(1)), int(splits), rows};
}

inline PagedOutputs paged_outputs(
    const Tensor& q, const Tensor& out, const Tensor& lse, const Tensor& partial_out, const Tensor& partial_lse) {
  const int64_t batch = q.size(0), rows = q.size(1), dim = q.size(2), splits = partial_lse.size(2);
  check_dense(out, "out", Dtype::BFloat16, {batch, rows, dim});
  check_dense(lse, "lse", Dtype::Float, {batch, rows});
  check_dense(partial_out, "partial_out", Dtype::Float, {batch, rows, splits, dim});
  check_dense(partial_lse, "partial_lse", Dtype::Float, {batch, rows, splits});
  return {
      static_cast<__nv_bfloat16*>(out.data_ptr()), static_cast<float*>(lse.data_ptr()),
      static_cast<float*>(partial_out.data_ptr()), static_cast<float*>(partial_lse.data_ptr())};
}

template <typename Rows, int kDim, int kBlocks, bool kAhead, int kProducts>
void launch_paged_kernel(
    const PagedInputs<Rows>& in, const PagedOutputs& to, int64_t query_heads, cudaStream_t stream) {
  const dim3 grid(in.splits * in.query_blocks(kProducts * kPagedQueries), in.heads, in.sequences);
  paged_attention_kernel<Rows, kDim, kBlocks, kAhead, kProducts><<<grid, kPagedWarps * 32, 0, stream>>>(in, to);
  check_launch("paged_attention");
  if (in.splits == 1) return;
  // The merge's blocks start while the last partial results are computed, and wait for them in the kernel.
  const cudaError_t error = launch_early(
      merge_splits_kernel<kDim, __nv_bfloat16>, query_heads, kMergeThreads, 0, stream, to, in.splits);
  STD_TORCH_CHECK(error == cudaSuccess, "paged_attention's merge: ", cudaGetErrorString(error));
}

// Launches the kernel for heads of one of the first dimensions. If `wide`, its blocks read keys and values once for the
// queries of two products.
template <typename Rows, int kDim, int kNumber>
void launch_paged_products(
    const PagedInputs<Rows>& in, const PagedOutputs& to, int64_t query_heads, bool wide, cudaStream_t stream) {
  if (wide) launch_paged_kernel<Rows, kDim, Rows::kWideBlocks[kNumber], true, 2>(in, to, query_heads, stream);
  else launch_paged_kernel<Rows, kDim, Rows::kBlocks[kNumber], true, 1>(in, to, query_heads, stream);
}

// Runs attention with the arguments of paged_inputs and paged_outputs.
template <typename Rows>
void launch_paged_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& pages, const std::optional<Tensor>& starts,
    int64_t most_rows, const Rows& rows, const Tensor& out, const Tensor& lse, const Tensor& partial_out,
    const Tensor& partial_lse) {
  const auto in = paged_inputs(q, k, v, pages, starts, most_rows, partial_lse.size(2), rows);
  const PagedOutputs to = paged_outputs(q, out, lse, partial_out, partial_lse);
  if (in.sequences == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  const cudaStream_t stream = current_stream(q);
  const int64_t query_heads = q.size(0) * q.size(1);
  const bool wide = in.most_rows * in.group > kPagedQueries; // blocks have the queries of two products
  switch (q.size(2)) {
    case 64: return launch_paged_products<Rows, 64, 0>(in, to, query_heads, wide, stream);
    case 96: return launch_paged_products<Rows, 96, 1>(in, to, query_heads, wide, stream);
    case 128: return launch_paged_products<Rows, 128, 2>(in, to, query_heads, wide, stream);
    case 256:
      return launch_paged_kernel<Rows, 256, Rows::kBlocks[3], Rows::kWidestAhead, 1>(in, to, query_heads, stream);
    default: STD_TORCH_CHECK(false, "head dim ", q.size(2), " is not 64, 96, 128 or 256");
  }
}

} // namespace shadowkv
