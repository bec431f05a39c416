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

static QueryType query_type(const Tensor& q) {
  switch (q.scalar_type()) {
    case Dtype::Float: return QueryType::kFloat;
    case Dtype::BFloat16: return QueryType::kBFloat16;
    case Dtype::Half: return QueryType::kHalf;
    default: STD_TORCH_CHECK(false, "q has dtype ", int(q.scalar_type()), ", not float32, bfloat16 or float16");
  }
}

void sign_scores(
    const Tensor q, const Tensor signs, const Tensor scale, const Tensor pages, const Tensor num_pages,
    const Tensor rotation, int64_t run_pages, Tensor packed, Tensor scores) {
  check(q, "q", q.scalar_type(), {-1, -1, -1});
  check_dense_from(q, "q", 0);
  const int64_t batch = q.size(0), dim = q.size(2), columns = pages.size(1);
  STD_TORCH_CHECK(signs.dim() == 4, "signs has ", signs.dim(), " dimensions, not 4");
  const int64_t heads = signs.size(1), bytes = signs.size(3), group = heads ? q.size(1) / heads : 0;
  STD_TORCH_CHECK(bytes == 8 || bytes == 16 || bytes == 32, "signs has rows of ", bytes, " bytes, not 8, 16 or 32");
  STD_TORCH_CHECK(dim % 8 == 0 && dim <= 8 * bytes, "a head dim of ", dim, " does not suit signs of ", bytes);
  STD_TORCH_CHECK(
      group > 0 && group <= 8 && group * heads == q.size(1), q.size(1), " query heads for ", heads, " kv heads");
  STD_TORCH_CHECK(
      run_pages > 0 && run_pages % 4 == 0 && run_pages <= kMostRunPages, "a run of ", run_pages,
      " pages is not a multiple of 4 of up to ", kMostRunPages);
  check_field(signs, "signs", Dtype::Byte, {-1, heads, kPage, bytes}, 1);
  check_field(scale, "scale", Dtype::Half, {-1, heads, kPage}, 2);
  check(pages, "pages", Dtype::Long, {batch, columns});
  check_dense_from(pages, "pages", 1);
  check(num_pages, "num_pages", Dtype::Long, {batch});
  check_dense_from(num_pages, "num_pages", 0);
  check(rotation, "rotation", Dtype::Float, {dim, dim});
  check_dense_from(rotation, "rotation", 0);
  check(packed, "packed", Dtype::Int, {batch, heads * group, kPlanes * bytes / 4 + 2});
  check_dense_from(packed, "packed", 0);
  check(scores, "scores", Dtype::Half, {batch, heads, 8 * columns});
  check_dense_from(scores, "scores", 0);
  SignScores p{};
  p.type = query_type(q);
  if (batch == 0 || columns == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  p.q = q.const_data_ptr();
  p.rotation = static_cast<const float*>(rotation.const_data_ptr());
  p.signs = static_cast<const uint8_t*>(signs.const_data_ptr());
  p.scale = static_cast<const __half*>(scale.const_data_ptr());
  p.signs_stride = uint32_t(signs.stride(0)), p.scale_stride = uint32_t(2 * scale.stride(0));
  p.pages = static_cast<const int64_t*>(pages.const_data_ptr()), p.pages_stride = pages.stride(0);
  p.num_pages = static_cast<const int64_t*>(num_pages.const_data_ptr());
  p.packed = packed.mutable_data_ptr();
  p.scores = static_cast<__half*>(scores.mutable_data_ptr());
  p.batch = int(batch), p.heads = int(heads), p.group = int(group), p.dim = int(dim), p.columns = int(columns);
  p.run_pages = int(run_pages);
  const cudaError_t error = launch_sign_scores(p, bytes, current_stream(q));
  STD_TORCH_CHECK(error == cudaSuccess, "sign_scores could not be launched: ", cudaGetErrorString(error));
}

} // namespace shadowkv

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "sign_scores(Tensor q, Tensor signs, Tensor scale, Tensor pages, Tensor num_pages, Tensor rotation, "
      "int run_pages, Tensor(a!) packed, Tensor(b!) scores) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) {
  m.impl("sign_scores", TORCH_BOX(&shadowkv::sign_scores));
}
