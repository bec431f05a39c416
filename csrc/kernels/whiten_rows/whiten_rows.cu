#include "whiten_rows.cuh"

#include "kernels/common/checks.h"

namespace shadowkv {

inline cudaError_t launch_whiten_rows(const WhitenRows& call, cudaStream_t stream) {
  const int bytes = call.shared_bytes();
  const cudaError_t error =
      cudaFuncSetAttribute(whiten_rows_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const dim3 grid((call.n + kWhitenTile - 1) / kWhitenTile, call.matrices);
  whiten_rows_kernel<<<grid, kWhitenWarps * kWhitenTile, bytes, stream>>>(call);
  return cudaGetLastError();
}

void whiten_rows(const Tensor rows, const Tensor products, double shift, Tensor out) {
  check_dense(rows, "rows", Dtype::Float, {-1, -1, -1});
  const int64_t matrices = rows.size(0), rank = rows.size(1), n = rows.size(2);
  check_dense(products, "products", Dtype::Float, {matrices, rank, rank});
  check_dense(out, "out", Dtype::Float, {matrices, rank, n});
  STD_TORCH_CHECK(rank <= kWhitenMostRows, "rank ", rank, " is above ", kWhitenMostRows);
  check_blocks(matrices, "matrices");
  STD_TORCH_CHECK(n < int64_t(1) << 30, "rows of ", n, " numbers are too long");
  if (rows.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(rows.get_device());
  WhitenRows call{};
  call.rows = static_cast<const float*>(rows.const_data_ptr());
  call.products = static_cast<const float*>(products.const_data_ptr());
  call.out = static_cast<float*>(out.mutable_data_ptr());
  call.matrices = int(matrices), call.rank = int(rank), call.n = int(n), call.shift = float(shift);
  const cudaError_t error = launch_whiten_rows(call, current_stream(rows));
  STD_TORCH_CHECK(error == cudaSuccess, "whiten_rows could not be launched: ", cudaGetErrorString(error));
}

} // namespace shadowkv

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def("whiten_rows(Tensor rows, Tensor products, float shift, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) { m.impl("whiten_rows", TORCH_BOX(&shadowkv::whiten_rows)); }
