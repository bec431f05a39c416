#include "select_top_chunks.cuh"

#include "kernels/common/checks.h"

namespace shadowkv {

template <int kVector, int kHeads, int kThreads>
static void launch(const SelectTopChunks& p, int64_t rows, cudaStream_t stream) {
  const int bytes = p.workspace ? 0 : int(4 * select_words(p.chunks));
  const auto kernel = select_top_chunks_kernel<kVector, kHeads, kThreads>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  STD_TORCH_CHECK(error == cudaSuccess, p.chunks, " chunks do not fit in shared memory: ", cudaGetErrorString(error));
  kernel<<<unsigned(rows), kThreads, bytes, stream>>>(p);
}

// All rows run at once if possible: with fewer threads each if there are more than two per multiprocessor.
template <int kVector, int kHeads>
static void launch(const SelectTopChunks& p, int64_t rows, cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  (rows <= 2 * processors ? launch<kVector, kHeads, 512> : launch<kVector, kHeads, 256>)(p, rows, stream);
}

void select_top_chunks(
    const Tensor logits, const Tensor lse, const Tensor budget, const Tensor workspace, Tensor selected) {
  check_dense(logits, "logits", Dtype::Float, {-1, -1, -1, -1});
  const int64_t batch = logits.size(0), heads = logits.size(1), group = logits.size(2), chunks = logits.size(3);
  STD_TORCH_CHECK(group <= kSelectGroup, group, " query heads of a kv head, more than ", kSelectGroup);
  check_dense(lse, "lse", Dtype::Float, {batch, heads, group, -1});
  check_dense(budget, "budget", Dtype::Long, {batch});
  check(workspace, "workspace", Dtype::Int, {batch * heads, -1});
  if (workspace.size(1) != 0) {
    check_dense(workspace, "workspace", Dtype::Int, {batch * heads, select_words(chunks)});
  }
  check_dense(selected, "selected", Dtype::Long, {batch, heads, -1});
  if (batch * heads == 0 || selected.size(2) == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(logits.get_device());
  SelectTopChunks p{};
  p.logits = static_cast<const float*>(logits.const_data_ptr());
  p.lse = static_cast<const float*>(lse.const_data_ptr());
  p.budget = static_cast<const int64_t*>(budget.const_data_ptr());
  p.workspace = workspace.size(1) ? static_cast<uint32_t*>(workspace.mutable_data_ptr()) : nullptr;
  p.selected = static_cast<int64_t*>(selected.mutable_data_ptr());
  p.heads = int(heads), p.group = int(group), p.chunks = int(chunks), p.parts = int(lse.size(3));
  p.k = int(selected.size(2));
  const bool aligned = chunks % 4 == 0 && int64_t(logits.const_data_ptr()) % 16 == 0;
  (!aligned ? launch<1, 0> : group == 4 ? launch<4, 4> : launch<4, 0>)(p, batch * heads, current_stream(logits));
  check_launch("select_top_chunks");
}

} // namespace shadowkv

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "select_top_chunks(Tensor logits, Tensor lse, Tensor budget, Tensor(a!) workspace, Tensor(b!) selected) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) {
  m.impl("select_top_chunks", TORCH_BOX(&shadowkv::select_top_chunks));
}
