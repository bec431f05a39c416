#include "select_by_sketch.cuh"

#include <numbers>
#include <optional>

#include "kernels/common/checks.h"

namespace shadowkv {

namespace {

// Sets the arguments of sampling: either all are given or nothing is sampled.
void set_sampling(
    SelectBySketch& p, int64_t batch, int64_t heads, int64_t k, const std::optional<Tensor>& sampled,
    const std::optional<Tensor>& seeds, double run_sharpness, double chunk_sharpness, int64_t layer,
    const std::optional<Tensor>& log_weight) {
  STD_TORCH_CHECK(
      sampled.has_value() == seeds.has_value() && sampled.has_value() == log_weight.has_value(),
      "sampled, seeds and log_weight go together");
  if (!sampled) return;
  check_dense(*sampled, "sampled", Dtype::Long, {batch});
  check_dense(*seeds, "seeds", Dtype::Long, {batch});
  check_dense(*log_weight, "log_weight", Dtype::Float, {batch, heads, k});
  p.sampled = static_cast<const int64_t*>(sampled->const_data_ptr());
  p.seeds = static_cast<const int64_t*>(seeds->const_data_ptr());
  p.log_weight = static_cast<float*>(log_weight->mutable_data_ptr());
  p.run_sharpness = float(run_sharpness * std::numbers::log2e);
  p.chunk_sharpness = float(chunk_sharpness * std::numbers::log2e);
  p.first_head = uint32_t(layer * heads);
}

} // namespace

void select_by_sketch(
    const Tensor whole, const Tensor unit, const Tensor sum, const Tensor coarse, const Tensor signs,
    const Tensor rest, const Tensor scale, const Tensor pages, const Tensor num_pages, const Tensor budget,
    const int64_t chunk, const std::optional<Tensor> sampled, const std::optional<Tensor> seeds, const Tensor length,
    const double run_sharpness, const double chunk_sharpness, const int64_t layer, Tensor workspace, Tensor selected,
    std::optional<Tensor> log_weight) {
  STD_TORCH_CHECK(whole.dim() == 4, "whole has ", whole.dim(), " dimensions, not 4");
  const int64_t batch = whole.size(0), query_heads = whole.size(1);
  STD_TORCH_CHECK(signs.dim() == 4, "signs has ", signs.dim(), " dimensions, not 4");
  const int64_t heads = signs.size(1), bytes = signs.size(3), columns = pages.size(1);
  const int64_t group = heads ? query_heads / heads : 0;
  check_plane_bytes(bytes, "signs");
  STD_TORCH_CHECK(
      group > 0 && group <= kMostQueries && group * heads == query_heads, query_heads, " query heads for ", heads,
      " kv heads");
  check_dense(whole, "whole", Dtype::Char, {batch, query_heads, 8, bytes});
  check_dense(unit, "unit", Dtype::Float, {batch, query_heads});
  check_dense(sum, "sum", Dtype::Int, {batch, query_heads});
  check_dense(length, "length", Dtype::Float, {batch, query_heads});
  check_field(signs, "signs", Dtype::Byte, {-1, heads, kPage, bytes});
  check_field(rest, "rest", Dtype::Byte, {-1, heads, kPage, bytes});
  check_field(scale, "scale", Dtype::Byte, {-1, heads, kPage});
  STD_TORCH_CHECK(
      chunk == 1 || chunk == 2 || chunk == 4 || chunk == 8, "chunks of ", chunk, " tokens, not 1, 2, 4 or 8");
  check_dense(coarse, "coarse", Dtype::Half, {batch, heads, kPageRuns * columns});
  check_aligned(address(whole), "whole", 4);
  check_aligned(address(coarse), "coarse", 16);
  check_dense(pages, "pages", Dtype::Long, {batch, columns}, 1);
  check_dense(num_pages, "num_pages", Dtype::Long, {batch});
  check_dense(budget, "budget", Dtype::Long, {batch});
  check_dense(selected, "selected", Dtype::Long, {batch, heads, -1});
  const int64_t k = selected.size(2);
  const Region region(columns, chunk, k);
  SelectBySketch p{.region = region};
  set_sampling(p, batch, heads, k, sampled, seeds, run_sharpness, chunk_sharpness, layer, log_weight);
  check_dense(workspace, "workspace", Dtype::Byte, {batch * heads, region.bytes()});
  check_aligned(address(workspace), "workspace", 16);
  check_blocks(batch * heads, "kv heads of sequences");
  if (batch * heads == 0 || k == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(whole.get_device());
  p.whole = static_cast<const uint8_t*>(whole.const_data_ptr());
  p.unit = static_cast<const float*>(unit.const_data_ptr()), p.sum = static_cast<const int*>(sum.const_data_ptr());
  p.length = static_cast<const float*>(length.const_data_ptr());
  p.coarse = static_cast<const uint4*>(coarse.const_data_ptr());
  p.signs = static_cast<const uint8_t*>(signs.const_data_ptr());
  p.rest = static_cast<const uint8_t*>(rest.const_data_ptr());
  p.scale = static_cast<const uint8_t*>(scale.const_data_ptr());
  p.signs_stride = uint32_t(signs.stride(0)), p.rest_stride = uint32_t(rest.stride(0));
  p.scale_stride = uint32_t(scale.stride(0));
  p.pages = static_cast<const int64_t*>(pages.const_data_ptr()), p.pages_stride = pages.stride(0);
  p.num_pages = static_cast<const int64_t*>(num_pages.const_data_ptr());
  p.budget = static_cast<const int64_t*>(budget.const_data_ptr());
  p.workspace = static_cast<uint8_t*>(workspace.mutable_data_ptr());
  p.selected = static_cast<int64_t*>(selected.mutable_data_ptr());
  p.rows = unsigned(batch * heads), p.heads = int(heads), p.group = int(group);
  p.num_pages_most = int(columns), p.log_chunk = chunk == 8 ? 3 : int(chunk / 2), p.k = int(k);
  const cudaError_t error = launch_select_by_sketch(p, bytes, current_stream(whole));
  STD_TORCH_CHECK(error == cudaSuccess, "select_by_sketch could not be launched: ", cudaGetErrorString(error));
}

} // namespace shadowkv

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "select_by_sketch(Tensor whole, Tensor unit, Tensor sum, Tensor coarse, Tensor signs, Tensor rest, "
      "Tensor scale, Tensor pages, Tensor num_pages, Tensor budget, int chunk, Tensor? sampled, Tensor? seeds, "
      "Tensor length, float run_sharpness, float chunk_sharpness, int layer, Tensor(a!) workspace, "
      "Tensor(b!) selected, Tensor(c!)? log_weight) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) {
  m.impl("select_by_sketch", TORCH_BOX(&shadowkv::select_by_sketch));
}
