#include "kernels/draw_chunks.cuh"

#include <optional>

#include "bindings/checks.h"

namespace shadowkv {

void draw_chunks(
    Tensor selected, int64_t first, const std::optional<Tensor> excluded, const Tensor pages, const Tensor num_chunks,
    const Tensor found, const Tensor drawn, const Tensor seeds, int64_t layer) {
  check(selected, "selected", Dtype::Long, {-1, -1, -1});
  check_dense_from(selected, "selected", 0);
  const int64_t batch = selected.size(0), heads = selected.size(1), k = selected.size(2);
  STD_TORCH_CHECK(first >= 0 && first < int64_t(1) << 31, "the first chunk is ", first, ", not 0 to 2**31 - 1");
  check(pages, "pages", Dtype::Long, {batch, -1});
  check_dense_from(pages, "pages", 1);
  const auto numbers = [&](const Tensor& x, const char* name) {
    check(x, name, Dtype::Long, {batch});
    check_dense_from(x, name, 0);
    return static_cast<const int64_t*>(x.const_data_ptr());
  };
  DrawChunks p{};
  p.num_chunks = numbers(num_chunks, "num_chunks"), p.found = numbers(found, "found");
  p.drawn = numbers(drawn, "drawn"), p.seeds = numbers(seeds, "seeds");
  if (batch * heads * k * pages.size(1) == 0) return;
  STD_TORCH_CHECK(batch < 65536, "a batch of ", batch, ", more than a grid takes");

  p.selected = static_cast<int64_t*>(selected.mutable_data_ptr());
  if (excluded) {
    check(*excluded, "excluded", Dtype::Bool, {-1, heads, -1});
    check_dense_from(*excluded, "excluded", 1);
    p.excluded = static_cast<const uint8_t*>(excluded->const_data_ptr()), p.excluded_stride = excluded->stride(0);
    p.page_chunks = int(excluded->size(2));
  }
  p.pages = static_cast<const int64_t*>(pages.const_data_ptr()), p.pages_stride = pages.stride(0);
  p.first_head = uint32_t(layer * heads), p.heads = int(heads);
  p.first = int(first), p.columns = int(pages.size(1)), p.k = int(k);
  const torch::stable::accelerator::DeviceGuard guard(selected.get_device());
  const cudaError_t error = launch_draw_chunks(p, batch, current_stream(selected));
  STD_TORCH_CHECK(error == cudaSuccess, "draw_chunks could not be launched: ", cudaGetErrorString(error));
}

} // namespace shadowkv

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "draw_chunks(Tensor(a!) selected, int first, Tensor? excluded, Tensor pages, Tensor num_chunks, Tensor found, "
      "Tensor drawn, Tensor seeds, int layer) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) { m.impl("draw_chunks", TORCH_BOX(&shadowkv::draw_chunks)); }
