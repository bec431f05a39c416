#include "sign_scores.cuh"

#include "kernels/common/checks.h"

namespace shadowkv {

void sign_scores(
    const Tensor planes, const Tensor unit, const Tensor sum, const Tensor signs, const Tensor scale,
    const Tensor pages, const Tensor num_pages, int64_t block_pages, Tensor scores) {
  STD_TORCH_CHECK(planes.dim() == 4, "planes has ", planes.dim(), " dimensions, not 4");
  STD_TORCH_CHECK(signs.dim() == 4, "signs has ", signs.dim(), " dimensions, not 4");
  const int64_t batch = planes.size(0), query_heads = planes.size(1), columns = pages.size(1);
  const int64_t heads = signs.size(1), bytes = signs.size(3), group = heads ? query_heads / heads : 0;
  check_plane_bytes(bytes, "signs");
  STD_TORCH_CHECK(
      group > 0 && group <= kMostQueries && group * heads == query_heads, query_heads, " query heads for ", heads,
      " kv heads");
  STD_TORCH_CHECK(
      block_pages > 0 && block_pages % 4 == 0 && block_pages <= kMaxBlockPages, "a block of ", block_pages,
      " pages is not a multiple of 4 of up to ", kMaxBlockPages);
  check_dense(planes, "planes", Dtype::Byte, {batch, query_heads, kQueryPlanes, bytes});
  check_dense(unit, "unit", Dtype::Float, {batch, query_heads});
  check_dense(sum, "sum", Dtype::Int, {batch, query_heads});
  check_field(signs, "signs", Dtype::Byte, {-1, heads, kPage, bytes});
  check_field(scale, "scale", Dtype::Byte, {-1, heads, kPage});
  check_dense(pages, "pages", Dtype::Long, {batch, columns}, 1);
  check_dense(num_pages, "num_pages", Dtype::Long, {batch});
  check_dense(scores, "scores", Dtype::Half, {batch, heads, kPageRuns * columns});
  check_aligned(address(planes), "planes", 4);
  check_aligned(address(scores), "scores", 16);
  check_blocks(batch, "sequences");
  if (batch == 0 || columns == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(planes.get_device());
  SignScores p{};
  p.planes = static_cast<const uint32_t*>(planes.const_data_ptr());
  p.unit = static_cast<const float*>(unit.const_data_ptr()), p.sum = static_cast<const int*>(sum.const_data_ptr());
  p.signs = static_cast<const uint8_t*>(signs.const_data_ptr());
  p.scale = static_cast<const uint8_t*>(scale.const_data_ptr());
  p.signs_stride = uint32_t(signs.stride(0)), p.scale_stride = uint32_t(scale.stride(0));
  p.pages = static_cast<const int64_t*>(pages.const_data_ptr()), p.pages_stride = pages.stride(0);
  p.num_pages = static_cast<const int64_t*>(num_pages.const_data_ptr());
  p.scores = static_cast<__half*>(scores.mutable_data_ptr());
  p.batch = int(batch), p.heads = int(heads), p.group = int(group), p.columns = int(columns);
  p.block_pages = int(block_pages);
  const cudaError_t error = launch_sign_scores(p, bytes, current_stream(planes));
  STD_TORCH_CHECK(error == cudaSuccess, "sign_scores could not be launched: ", cudaGetErrorString(error));
}

} // namespace shadowkv

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "sign_scores(Tensor planes, Tensor unit, Tensor sum, Tensor signs, Tensor scale, Tensor pages, "
      "Tensor num_pages, int block_pages, Tensor(a!) scores) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) {
  m.impl("sign_scores", TORCH_BOX(&shadowkv::sign_scores));
}
