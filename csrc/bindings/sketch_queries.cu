#include "kernels/sketch_queries.cuh"

#include "bindings/checks.h"

namespace shadowkv {

void sketch_queries(const Tensor q, const Tensor rotation, Tensor whole, Tensor planes, Tensor unit, Tensor sum) {
  check(q, "q", q.scalar_type(), {-1, -1, -1});
  check_dense_from(q, "q", 0);
  const int64_t batch = q.size(0), heads = q.size(1), dim = q.size(2);
  check(rotation, "rotation", Dtype::Float, {dim, dim});
  check_dense_from(rotation, "rotation", 0);
  STD_TORCH_CHECK(int64_t(rotation.const_data_ptr()) % 16 == 0, "rotation is not aligned to 16 bytes");
  check(whole, "whole", Dtype::Char, {batch, heads, 8, -1});
  check_dense_from(whole, "whole", 0);
  const int64_t bytes = whole.size(3);
  STD_TORCH_CHECK(bytes == 8 || bytes == 16 || bytes == 32, "whole has rows of ", bytes, " bytes, not 8, 16 or 32");
  STD_TORCH_CHECK(dim % 8 == 0 && dim <= 8 * bytes, "a head dim of ", dim, " does not suit rows of ", bytes);
  check(planes, "planes", Dtype::Byte, {batch, heads, 8, bytes});
  check_dense_from(planes, "planes", 0);
  check(unit, "unit", Dtype::Float, {batch, heads});
  check_dense_from(unit, "unit", 0);
  check(sum, "sum", Dtype::Int, {batch, heads});
  check_dense_from(sum, "sum", 0);
  if (batch * heads == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  const cudaStream_t stream = current_stream(q);
  SketchQueries p{};
  p.q = q.const_data_ptr(), p.rotation = static_cast<const float*>(rotation.const_data_ptr());
  p.whole = static_cast<uint32_t*>(whole.mutable_data_ptr());
  p.planes = static_cast<uint32_t*>(planes.mutable_data_ptr());
  p.unit = static_cast<float*>(unit.mutable_data_ptr()), p.sum = static_cast<int*>(sum.mutable_data_ptr());
  p.queries = int(batch * heads), p.dim = int(dim);
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
      "sketch_queries(Tensor q, Tensor rotation, Tensor(a!) whole, Tensor(b!) planes, Tensor(c!) unit, "
      "Tensor(d!) sum) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) {
  m.impl("sketch_queries", TORCH_BOX(&shadowkv::sketch_queries));
}
