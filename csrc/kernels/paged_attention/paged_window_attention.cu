// Paged decode attention within a window for PyTorch: checks its arguments and launches on the current stream.
#include "binding.h"

namespace shadowkv {
namespace {

void paged_window_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& pages, const Tensor& begins, const Tensor& counts,
    const std::optional<Tensor>& starts, int64_t most_rows, Tensor& out, Tensor& lse, Tensor& partial_out,
    Tensor& partial_lse) {
  const int64_t batch = q.size(0), dim = q.size(2), heads = k.size(1);
  check(q, "q", Dtype::BFloat16, {-1, -1, -1});
  check(k, "k", Dtype::BFloat16, {-1, -1, kPage, dim});
  check(v, "v", Dtype::BFloat16, {-1, heads, kPage, dim});
  check(pages, "pages", Dtype::Long, {batch, -1});
  check_dense(begins, "begins", Dtype::Long, {batch, pages.size(1)}, 1);
  check_dense(counts, "counts", Dtype::Long, {batch, pages.size(1)}, 1);
  const WindowRows rows = {
      {static_cast<const int64_t*>(counts.data_ptr()), counts.stride(0)},
      static_cast<const int64_t*>(begins.data_ptr()),
      begins.stride(0)};
  launch_paged_attention(q, k, v, pages, starts, most_rows, rows, out, lse, partial_out, partial_lse);
}

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "paged_window_attention(Tensor q, Tensor k, Tensor v, Tensor pages, Tensor begins, Tensor counts, "
      "Tensor? starts, int most_rows, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) partial_out, "
      "Tensor(d!) partial_lse) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) {
  m.impl("paged_window_attention", TORCH_BOX(&paged_window_attention));
}

} // namespace
} // namespace shadowkv
