// Causal prefill attention over listed blocks on Hopper for PyTorch: checks its arguments and launches on the current
// stream.
#include "kernels/attend_blocks_sm90.cuh"

#include "bindings/tensor_map.h"

#include <algorithm>
#include <cstdint>

namespace shadowkv {
namespace {

template <class Element, int kDim>
void launch(const BlocksCall& call, int64_t works, cudaStream_t stream) {
  using Shape = BlocksShape<Element, kDim>;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(
        attend_blocks_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  STD_TORCH_CHECK(error == cudaSuccess, "attend_blocks_sm90: ", cudaGetErrorString(error));
  const int blocks = int(std::min<int64_t>(works, processors));
  attend_blocks_kernel<Shape><<<blocks, Shape::kThreads, Shape::kSharedBytes, stream>>>(call);
  check_launch("attend_blocks_sm90");
}

void attend_blocks_sm90(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& indices, const Tensor& counts, double scale,
    Tensor& taken, Tensor& out) {
  const Dtype dtype = q.scalar_type();
  STD_TORCH_CHECK(
      dtype == Dtype::Half || dtype == Dtype::BFloat16, "q has dtype ", int(dtype), ", not ", int(Dtype::Half), " or ",
      int(Dtype::BFloat16));
  check(q, "q", dtype, {-1, -1, -1});
  const int64_t n = q.size(0), query_heads = q.size(1), dim = q.size(2), tiles = (n + kBlock - 1) / kBlock;
  STD_TORCH_CHECK(dim == 64 || dim == 128, "head dim ", dim, " is not 64 or 128");
  check(k, "k", dtype, {-1, -1, dim});
  const int64_t m = k.size(0), heads = k.size(1);
  check(v, "v", dtype, {m, heads, dim});
  check_dense(indices, "indices", Dtype::Int, {query_heads, tiles, -1});
  check_dense(counts, "counts", Dtype::Int, {query_heads, tiles});
  check_dense(taken, "taken", Dtype::Int, {1});
  check(out, "out", dtype, {n, query_heads, dim});
  for (const auto& [x, name] : {std::pair{&q, "q"}, {&k, "k"}, {&v, "v"}, {&out, "out"}})
    check_dense_from(*x, name, 2);
  STD_TORCH_CHECK(heads > 0 && query_heads % heads == 0, query_heads, " query heads are no multiple of ", heads,
                  " kv heads");
  STD_TORCH_CHECK(n <= m, n, " queries are more than ", m, " keys");
  STD_TORCH_CHECK(
      m < INT32_MAX - kBlock && query_heads * tiles < INT32_MAX / 2, "no room for ", m, " keys, ", query_heads * tiles,
      " tiles");
  STD_TORCH_CHECK(
      reinterpret_cast<uintptr_t>(out.data_ptr()) % 4 == 0 && (out.stride(0) | out.stride(1)) % 2 == 0,
      "out has rows that do not start at multiples of 4 bytes");
  STD_TORCH_CHECK(scale > 0, "scale ", scale, " is not above zero");
  if (query_heads * n == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  const BlocksCall call = {
      boxes_of(q, "q"), boxes_of(k, "k"), boxes_of(v, "v"),
      static_cast<const int*>(indices.data_ptr()), static_cast<const int*>(counts.data_ptr()),
      static_cast<int*>(taken.data_ptr()), out.data_ptr(), out.stride(0), out.stride(1), float(scale),
      int(n), int(m), int(query_heads), int(query_heads / heads), int(tiles), int(indices.size(2))};
  const cudaStream_t stream = current_stream(q);
  const bool half = dtype == Dtype::Half;
  const auto launched = dim == 64 ? (half ? launch<__half, 64> : launch<__nv_bfloat16, 64>)
                                  : (half ? launch<__half, 128> : launch<__nv_bfloat16, 128>);
  launched(call, query_heads * tiles, stream);
}

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "attend_blocks_sm90(Tensor q, Tensor k, Tensor v, Tensor indices, Tensor counts, float scale, Tensor(a!) taken, "
      "Tensor(b!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) { m.impl("attend_blocks_sm90", TORCH_BOX(&attend_blocks_sm90)); }

} // namespace
} // namespace shadowkv
