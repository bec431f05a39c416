// Decode attention over rows of 8-bit floats for PyTorch: checks its arguments and launches on the current stream.
#include "binding.h"

namespace shadowkv {
namespace {

const int64_t* numbers(const Tensor& x, const char* name, int64_t batch) {
  check_dense(x, name, Dtype::Long, {batch});
  return static_cast<const int64_t*>(x.data_ptr());
}

const float* scales(const Tensor& x, const char* name, int64_t heads) {
  check_dense(x, name, Dtype::Float, {-1, heads, 1}, 1);
  return static_cast<const float*>(x.data_ptr());
}

void attend_fp8(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_scale, const Tensor& v_scale,
    const Tensor& k_state, const Tensor& v_state, const Tensor& k_pages, const Tensor& v_pages, const Tensor& begin,
    const Tensor& end, const std::optional<Tensor>& starts, int64_t most_rows, Tensor& out, Tensor& lse,
    Tensor& partial_out, Tensor& partial_lse) {
  const int64_t batch = q.size(0), dim = q.size(2), heads = k.size(1);
  check(q, "q", Dtype::BFloat16, {-1, -1, -1});
  check(k, "k", Dtype::Byte, {-1, -1, kPage, dim});
  check(v, "v", Dtype::Byte, {-1, heads, kPage, dim});
  check(k_pages, "k_pages", Dtype::Long, {batch, -1});
  check_dense(v_pages, "v_pages", Dtype::Long, {batch, k_pages.size(1)}, 1);
  const Fp8Rows rows = {
      static_cast<const int64_t*>(v_pages.data_ptr()), v_pages.stride(0),
      numbers(begin, "begin", batch), numbers(end, "end", batch),
      scales(k_scale, "k_scale", heads), scales(v_scale, "v_scale", heads),
      numbers(k_state, "k_state", batch), numbers(v_state, "v_state", batch),
      k_scale.stride(0), v_scale.stride(0)};
  launch_paged_attention(q, k, v, k_pages, starts, most_rows, rows, out, lse, partial_out, partial_lse);
}

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "attend_fp8(Tensor q, Tensor k, Tensor v, Tensor k_scale, Tensor v_scale, Tensor k_state, Tensor v_state, "
      "Tensor k_pages, Tensor v_pages, Tensor begin, Tensor end, Tensor? starts, int most_rows, Tensor(a!) out, "
      "Tensor(b!) lse, Tensor(c!) partial_out, Tensor(d!) partial_lse) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) {
  m.impl("attend_fp8", TORCH_BOX(&attend_fp8));
}

} // namespace
} // namespace shadowkv
