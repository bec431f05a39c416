#include "sketch_queries.cuh"

#include "kernels/common/checks.h"

namespace shadowkv {

void sketch_queries(
    const Tensor q, const Tensor maps, const Tensor states, Tensor whole, Tensor unit, Tensor sum, Tensor planes,
    Tensor plane_sum, Tensor length) {
  check_dense(q, "q", q.scalar_type(), {-1, -1, -1});
  const int64_t batch = q.size(0), query_heads = q.size(1), dim = q.size(2);
  check_dense(maps, "maps", Dtype::BFloat16, {-1, -1, dim, dim}, 1);
  const int64_t heads = maps.size(1), group = heads ? query_heads / heads : 0;
  STD_TORCH_CHECK(
      group > 0 && group <= kMostQueries && group * heads == query_heads, query_heads, " query heads for ", heads,
      " kv heads");
  check_aligned(address(maps) | bytes_apart(maps), "maps", 8);
  check_dense(states, "states", Dtype::Long, {batch});
  check_dense(whole, "whole", Dtype::Char, {batch, query_heads, 8, -1});
  const int64_t bytes = whole.size(3);
  check_plane_bytes(bytes, "whole");
  STD_TORCH_CHECK(dim % 8 == 0 && dim <= 8 * bytes, "a head dim of ", dim, " does not suit rows of ", bytes);
  check_dense(planes, "planes", Dtype::Byte, {batch, query_heads, kQueryPlanes, bytes});
  check_aligned(address(whole), "whole", 4);
  check_aligned(address(planes), "planes", 4);
  check_dense(unit, "unit", Dtype::Float, {batch, query_heads});
  check_dense(sum, "sum", Dtype::Int, {batch, query_heads});
  check_dense(plane_sum, "plane_sum", Dtype::Int, {batch, query_heads});
  check_dense(length, "length", Dtype::Float, {batch, query_heads});
  if (batch == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  const cudaStream_t stream = current_stream(q);
  SketchQueries p{};
  p.q = q.const_data_ptr();
  p.maps = static_cast<const __nv_bfloat16*>(maps.const_data_ptr()), p.maps_stride = maps.stride(0);
  p.states = static_cast<const int64_t*>(states.const_data_ptr());
  p.whole = static_cast<uint32_t*>(whole.mutable_data_ptr());
  p.unit = static_cast<float*>(unit.mutable_data_ptr()), p.sum = static_cast<int*>(sum.mutable_data_ptr());
  p.planes = static_cast<uint32_t*>(planes.mutable_data_ptr());
  p.length = static_cast<float*>(length.mutable_data_ptr());
  p.plane_sum = static_cast<int*>(plane_sum.mutable_data_ptr());
  p.rows = int(batch), p.heads = int(heads), p.group = int(group), p.dim = int(dim);
  cudaError_t error = cudaErrorInvalidValue;
  switch (q.scalar_type()) {
    case Dtype::Float: error = launch_sketch_queries<float>(p, bytes, stream); break;
    case Dtype::BFloat16: error = launch_sketch_queries<__nv_bfloat16>(p, bytes, stream); break;
    case Dtype::Half: error = launch_sketch_queries<__half>(p, bytes, stream); break;
    default: STD_TORCH_CHECK(false, "q has dtype ", int(q.scalar_type()), ", not float32, bfloat16 or float16");
  }
  STD_TORCH_CHECK(error == cudaSuccess, "sketch_queries could not be launched: ", cudaGetErrorString(error));
}

} // namespace shadowkv

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "sketch_queries(Tensor q, Tensor maps, Tensor states, Tensor(a!) whole, Tensor(b!) unit, Tensor(c!) sum, "
      "Tensor(d!) planes, Tensor(e!) plane_sum, Tensor(f!) length) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) {
  m.impl("sketch_queries", TORCH_BOX(&shadowkv::sketch_queries));
}
