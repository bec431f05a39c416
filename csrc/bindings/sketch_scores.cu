#include "kernels/sketch_scores.cuh"

#include "bindings/checks.h"

namespace shadowkv {

// A page field that the kernel reads 8 or 16 bytes at a time.
static void check_field(
    const Tensor& x, const char* name, Dtype dtype, std::initializer_list<int64_t> shape, int64_t itemsize,
    int64_t aligned) {
  check(x, name, dtype, shape);
  check_dense_from(x, name, 1);
  const int64_t step = x.stride(0) * itemsize, start = int64_t(x.const_data_ptr());
  STD_TORCH_CHECK(step < int64_t(1) << 32, name, " has pages ", step, " bytes apart, 2**32 or more");
  STD_TORCH_CHECK((step | start) % aligned == 0, name, " has pages that are not aligned to ", aligned, " bytes");
}

void sketch_scores(
    const Tensor q, const Tensor codes, const Tensor scale, const Tensor excluded, const Tensor pages,
    const Tensor num_chunks, int64_t run_pages, Tensor logits, Tensor lse) {
  check(q, "q", Dtype::Float, {-1, -1, -1});
  check_dense_from(q, "q", 0);
  const int64_t batch = q.size(0), dim = q.size(2);
  STD_TORCH_CHECK(codes.dim() == 5, "codes has ", codes.dim(), " dimensions, not 5");
  const int64_t heads = codes.size(1), chunks = codes.size(2), bytes = codes.size(4), num_pages = pages.size(1);
  const int64_t group = heads ? q.size(1) / heads : 0;
  STD_TORCH_CHECK(bytes == 16 || bytes == 32 || bytes == 64, "codes has rows of ", bytes, " bytes, not 16, 32 or 64");
  STD_TORCH_CHECK(dim % 16 == 0 && dim <= 4 * bytes, "a head dim of ", dim, " does not suit codes of ", bytes);
  STD_TORCH_CHECK(chunks > 0 && kPage % chunks == 0, chunks, " chunks do not divide a page");
  STD_TORCH_CHECK(
      group > 0 && group <= 8 && group * heads == q.size(1), q.size(1), " query heads for ", heads, " kv heads");
  STD_TORCH_CHECK(
      run_pages > 0 && run_pages % 2 == 0 && run_pages <= kMostRunPages, "a run of ", run_pages,
      " pages is not an even number of up to ", kMostRunPages);
  const int64_t runs = (num_pages + run_pages - 1) / run_pages;
  check_field(codes, "codes", Dtype::Byte, {-1, heads, chunks, kPage / chunks, bytes}, 1, 16);
  check_field(scale, "scale", Dtype::Half, {-1, heads, kPage}, 2, 16);
  check_field(excluded, "excluded", Dtype::Bool, {-1, heads, chunks}, 1, 8);
  check(pages, "pages", Dtype::Long, {batch, num_pages});
  check_dense_from(pages, "pages", 1);
  check(num_chunks, "num_chunks", Dtype::Long, {batch});
  check_dense_from(num_chunks, "num_chunks", 0);
  check(logits, "logits", Dtype::Float, {batch, heads, group, num_pages * chunks});
  check_dense_from(logits, "logits", 0);
  check(lse, "lse", Dtype::Float, {batch, heads, group, runs});
  check_dense_from(lse, "lse", 0);
  if (batch == 0 || num_pages == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  SketchScores p{};
  p.q = static_cast<const float*>(q.const_data_ptr());
  p.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
  p.scale = static_cast<const __half*>(scale.const_data_ptr());
  p.excluded = static_cast<const uint8_t*>(excluded.const_data_ptr());
  p.codes_stride = uint32_t(codes.stride(0)), p.scale_stride = uint32_t(2 * scale.stride(0));
  p.excluded_stride = uint32_t(excluded.stride(0));
  p.pages = static_cast<const int64_t*>(pages.const_data_ptr()), p.pages_stride = pages.stride(0);
  p.num_chunks = static_cast<const int64_t*>(num_chunks.const_data_ptr());
  p.logits = static_cast<float*>(logits.mutable_data_ptr());
  p.lse = static_cast<float*>(lse.mutable_data_ptr());
  p.batch = int(batch), p.heads = int(heads), p.group = int(group), p.dim = int(dim);
  p.num_pages = int(num_pages), p.chunks_of_page = int(chunks), p.run_pages = int(run_pages), p.runs = int(runs);
  const cudaError_t error = launch_sketch_scores(p, bytes, current_stream(q));
  STD_TORCH_CHECK(error == cudaSuccess, "sketch_scores could not be launched: ", cudaGetErrorString(error));
}

} // namespace shadowkv

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "sketch_scores(Tensor q, Tensor codes, Tensor scale, Tensor excluded, Tensor pages, Tensor num_chunks, "
      "int run_pages, Tensor(a!) logits, Tensor(b!) lse) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) {
  m.impl("sketch_scores", TORCH_BOX(&shadowkv::sketch_scores));
}
