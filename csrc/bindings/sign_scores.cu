#include "kernels/sign_scores.cuh"

#include "bindings/checks.h"

namespace shadowkv {

// A page field that the kernel reads 16 bytes at a time.
static void check_field(
    const Tensor& x, const char* name, Dtype dtype, std::initializer_list<int64_t> shape, int64_t itemsize) {
  check(x, name, dtype, shape);
  check_dense_from(x, name, 1);
  const int64_t step = x.stride(0) * itemsize, start = int64_t(x.const_data_ptr());
  STD_TORCH_CHECK(step < int64_t(1) << 32, name, " has pages ", step, " bytes apart, 2**32 or more");
  STD_TORCH_CHECK((step | start) % 16 == 0, name, " has pages that are not aligned to 16 bytes");
}

void sign_scores(
    const Tensor planes, const Tensor unit, const Tensor sum, const Tensor signs, const Tensor scale,
    const Tensor pages, const Tensor num_pages, int64_t run_pages, Tensor scores) {
  STD_TORCH_CHECK(planes.dim() == 4, "planes has ", planes.dim(), " dimensions, not 4");
  STD_TORCH_CHECK(signs.dim() == 4, "signs has ", signs.dim(), " dimensions, not 4");
  const int64_t batch = planes.size(0), query_heads = planes.size(1), columns = pages.size(1);
  const int64_t heads = signs.size(1), bytes = signs.size(3), group = heads ? query_heads / heads : 0;
  STD_TORCH_CHECK(bytes == 8 || bytes == 16 || bytes == 32, "signs has rows of ", bytes, " bytes, not 8, 16 or 32");
  STD_TORCH_CHECK(
      group > 0 && group <= 8 && group * heads == query_heads, query_heads, " query heads for ", heads, " kv heads");
  STD_TORCH_CHECK(
      run_pages > 0 && run_pages % 4 == 0 && run_pages <= kMostRunPages, "a run of ", run_pages,
      " pages is not a multiple of 4 of up to ", kMostRunPages);
  check(planes, "planes", Dtype::Byte, {batch, query_heads, kPlanes, bytes});
  check_dense_from(planes, "planes", 0);
  check(unit, "unit", Dtype::Float, {batch, query_heads});
  check_dense_from(unit, "unit", 0);
  check(sum, "sum", Dtype::Int, {batch, query_heads});
  check_dense_from(sum, "sum", 0);
  check_field(signs, "signs", Dtype::Byte, {-1, heads, kPage, bytes}, 1);
  check_field(scale, "scale", Dtype::Half, {-1, heads, kPage}, 2);
  check(pages, "pages", Dtype::Long, {batch, columns});
  check_dense_from(pages, "pages", 1);
  check(num_pages, "num_pages", Dtype::Long, {batch});
  check_dense_from(num_pages, "num_pages", 0);
  check(scores, "scores", Dtype::Half, {batch, heads, 8 * columns});
  check_dense_from(scores, "scores", 0);
  if (batch == 0 || columns == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(planes.get_device());
  SignScores p{};
  p.planes = static_cast<const uint32_t*>(planes.const_data_ptr());
  p.unit = static_cast<const float*>(unit.const_data_ptr()), p.sum = static_cast<const int*>(sum.const_data_ptr());
  p.signs = static_cast<const uint8_t*>(signs.const_data_ptr());
  p.scale = static_cast<const __half*>(scale.const_data_ptr());
  p.signs_stride = uint32_t(signs.stride(0)), p.scale_stride = uint32_t(2 * scale.stride(0));
  p.pages = static_cast<const int64_t*>(pages.const_data_ptr()), p.pages_stride = pages.stride(0);
  p.num_pages = static_cast<const int64_t*>(num_pages.const_data_ptr());
  p.scores = static_cast<__half*>(scores.mutable_data_ptr());
  p.batch = int(batch), p.heads = int(heads), p.group = int(group), p.columns = int(columns);
  p.run_pages = int(run_pages);
  const cudaError_t error = launch_sign_scores(p, bytes, current_stream(planes));
  STD_TORCH_CHECK(error == cudaSuccess, "sign_scores could not be launched: ", cudaGetErrorString(error));
}

} // namespace shadowkv

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "sign_scores(Tensor planes, Tensor unit, Tensor sum, Tensor signs, Tensor scale, Tensor pages, "
      "Tensor num_pages, int run_pages, Tensor(a!) scores) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) {
  m.impl("sign_scores", TORCH_BOX(&shadowkv::sign_scores));
}
