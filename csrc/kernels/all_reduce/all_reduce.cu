#include "all_reduce.cuh"

#include "kernels/common/checks.h"

namespace shadowkv {

template <typename T, int kRanks>
static void launch(const AllReduce& call, bool two_shots, cudaStream_t stream) {
  const auto kernel = two_shots ? all_reduce_kernel<T, kRanks, true> : all_reduce_kernel<T, kRanks, false>;
  kernel<<<kReduceBlocks, kReduceThreads, 0, stream>>>(call);
}

template <typename T>
static void launch_for_ranks(const AllReduce& call, bool two_shots, cudaStream_t stream) {
  if (call.ranks == 2)
    launch<T, 2>(call, two_shots, stream);
  else if (call.ranks <= 4)
    launch<T, 4>(call, two_shots, stream);
  else
    launch<T, kMostRanks>(call, two_shots, stream);
}

// buffers: int64 [ranks] on the host, addresses of every rank's buffer, of flags and two regions of `region` bytes.
void all_reduce(
    Tensor x, const Tensor buffers, int64_t rank, int64_t region, Tensor calls, const Tensor aborted, bool two_shots) {
  const int64_t bytes = x.numel() * int64_t(x.element_size()), ranks = buffers.numel();
  STD_TORCH_CHECK(x.is_cuda(), "x is not on a CUDA device");
  STD_TORCH_CHECK(x.is_contiguous(), "x is not contiguous");
  STD_TORCH_CHECK(bytes % 16 == 0 && int64_t(x.data_ptr()) % 16 == 0, "x is not made of aligned vectors of 16 bytes");
  STD_TORCH_CHECK(bytes <= region, "x has ", bytes, " bytes, above ", region);
  STD_TORCH_CHECK(2 <= ranks && ranks <= kMostRanks, ranks, " ranks, not between 2 and ", kMostRanks);
  STD_TORCH_CHECK(0 <= rank && rank < ranks, "rank ", rank, " of ", ranks);
  STD_TORCH_CHECK(!buffers.is_cuda() && buffers.scalar_type() == Dtype::Long, "buffers are not int64 on the host");
  STD_TORCH_CHECK(!aborted.is_cuda() && aborted.scalar_type() == Dtype::Int, "aborted is not int32 on the host");
  check_dense(calls, "calls", Dtype::Int, {kReduceBlocks});
  if (bytes == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  AllReduce call{};
  call.x = static_cast<uint4*>(x.mutable_data_ptr());
  for (int64_t i = 0; i < ranks; ++i)
    call.buffers[i] = reinterpret_cast<char*>(static_cast<const int64_t*>(buffers.const_data_ptr())[i]);
  call.calls = static_cast<uint32_t*>(calls.mutable_data_ptr());
  call.aborted = static_cast<const uint32_t*>(aborted.const_data_ptr());
  call.region = region, call.vectors = bytes / 16, call.rank = int(rank), call.ranks = int(ranks);
  const cudaStream_t stream = current_stream(x);
  switch (x.scalar_type()) {
    case Dtype::BFloat16: launch_for_ranks<__nv_bfloat16>(call, two_shots, stream); break;
    case Dtype::Half: launch_for_ranks<__half>(call, two_shots, stream); break;
    case Dtype::Float: launch_for_ranks<float>(call, two_shots, stream); break;
    default: STD_TORCH_CHECK(false, "x has dtype ", int(x.scalar_type()), ", which is not added up here");
  }
  check_launch("all_reduce");
}

} // namespace shadowkv

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "all_reduce(Tensor(a!) x, Tensor buffers, int rank, int region, Tensor(b!) calls, Tensor aborted, "
      "bool two_shots) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) { m.impl("all_reduce", TORCH_BOX(&shadowkv::all_reduce)); }
