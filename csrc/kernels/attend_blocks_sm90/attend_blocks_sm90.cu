// Prefill attention on Hopper for PyTorch, over listed blocks, packed sequences or everything: checks its arguments and
// launches on the current stream.
#include "attend_blocks_sm90.cuh"

#include "kernels/common/tensor_map.h"

#include <algorithm>
#include <cstdint>

namespace shadowkv {
namespace {

template <class Element, int kDim, Over kOver>
void launch(const BlocksCall& call, cudaStream_t stream) {
  using Shape = BlocksShape<Element, kDim>;
  const auto kernel = attend_blocks_kernel<Shape, kOver>;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  STD_TORCH_CHECK(error == cudaSuccess, "attend_blocks_sm90: ", cudaGetErrorString(error));
  kernel<<<std::min(call.query_heads * call.tiles, processors), Shape::kThreads, Shape::kSharedBytes, stream>>>(call);
  check_launch("attend_blocks_sm90");
}

template <Over kOver>
void launch(const Tensor& q, const BlocksCall& call) {
  const bool half = q.scalar_type() == Dtype::Half;
  const auto launched = q.size(2) == 64 ? (half ? launch<__half, 64, kOver> : launch<__nv_bfloat16, 64, kOver>)
                                        : (half ? launch<__half, 128, kOver> : launch<__nv_bfloat16, 128, kOver>);
  launched(call, current_stream(q));
}

// The call without what it attends to, with that many tiles per head.
BlocksCall checked(
    const Tensor& q, const Tensor& k, const Tensor& v, double scale, bool causal, int64_t tiles, Tensor& taken,
    Tensor& out) {
  const Dtype dtype = q.scalar_type();
  STD_TORCH_CHECK(
      dtype == Dtype::Half || dtype == Dtype::BFloat16, "q has dtype ", int(dtype), ", not ", int(Dtype::Half), " or ",
      int(Dtype::BFloat16));
  check(q, "q", dtype, {-1, -1, -1});
  const int64_t n = q.size(0), query_heads = q.size(1), dim = q.size(2);
  STD_TORCH_CHECK(dim == 64 || dim == 128, "head dim ", dim, " is not 64 or 128");
  check(k, "k", dtype, {-1, -1, dim});
  const int64_t m = k.size(0), heads = k.size(1);
  check(v, "v", dtype, {m, heads, dim});
  check_dense(taken, "taken", Dtype::Int, {1});
  check(out, "out", dtype, {n, query_heads, dim});
  for (const auto& [x, name] : {std::pair{&q, "q"}, {&k, "k"}, {&v, "v"}, {&out, "out"}})
    check_dense_from(*x, name, 2);
  STD_TORCH_CHECK(heads > 0 && query_heads % heads == 0, query_heads, " query heads are no multiple of ", heads,
                  " kv heads");
  STD_TORCH_CHECK(!causal || n <= m, n, " queries are more than ", m, " keys");
  STD_TORCH_CHECK(m > 0 || n == 0, "there are no keys");
  STD_TORCH_CHECK(
      m < INT32_MAX - kBlock && n < INT32_MAX - kBlock && query_heads * tiles < INT32_MAX / 2, "no room for ", m,
      " keys, ", n, " queries, ", query_heads * tiles, " tiles");
  STD_TORCH_CHECK(
      reinterpret_cast<uintptr_t>(out.data_ptr()) % 4 == 0 && (out.stride(0) | out.stride(1)) % 2 == 0,
      "out has rows that do not start at multiples of 4 bytes");
  STD_TORCH_CHECK(scale > 0, "scale ", scale, " is not above zero");
  BlocksCall call = {};
  if (query_heads * n > 0) call.q = boxes_of(q, "q"), call.k = boxes_of(k, "k"), call.v = boxes_of(v, "v");
  call.taken = static_cast<int*>(taken.data_ptr());
  call.out = out.data_ptr(), call.out_token = out.stride(0), call.out_head = out.stride(1);
  call.scale = float(scale);
  call.n = int(n), call.m = int(m), call.query_heads = int(query_heads), call.group = int(query_heads / heads);
  call.tiles = int(tiles);
  return call;
}

void attend_blocks_sm90(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& indices, const Tensor& counts,
    const Tensor& weights, double scale, Tensor& taken, Tensor& out, Tensor& lse) {
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  BlocksCall call = checked(q, k, v, scale, true, (q.size(0) + kBlock - 1) / kBlock, taken, out);
  check_dense(indices, "indices", Dtype::Int, {call.query_heads, call.tiles, -1});
  check_dense(counts, "counts", Dtype::Int, {call.query_heads, call.tiles});
  check_dense(weights, "weights", Dtype::Float, {call.query_heads, call.tiles, indices.size(2)});
  check_dense(lse, "lse", Dtype::Float, {call.n, call.query_heads});
  if (call.query_heads * call.n == 0) return;
  call.lse = static_cast<float*>(lse.data_ptr());
  call.indices = static_cast<const int*>(indices.data_ptr()), call.counts = static_cast<const int*>(counts.data_ptr());
  call.weights = static_cast<const float*>(weights.data_ptr());
  call.blocks = int(indices.size(2));
  launch<Over::kListed>(q, call);
}

void attend_sequences_sm90(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& starts,
    const std::optional<Tensor>& key_starts, bool causal, double scale, Tensor& taken, Tensor& out,
    const std::optional<Tensor>& lse) {
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  if (starts) check_dense(*starts, "starts", Dtype::Int, {-1});
  const int64_t sequences = starts ? starts->size(0) - 1 : 1, own = (q.size(0) + kBlock - 1) / kBlock;
  BlocksCall call = checked(q, k, v, scale, causal, starts ? q.size(0) / kBlock + sequences : own, taken, out);
  if (starts) {
    STD_TORCH_CHECK(causal, "packed sequences attend causally");
    STD_TORCH_CHECK(
        key_starts || call.n == call.m, call.n, " packed queries are not as many as ", call.m, " keys");
    if (key_starts) check_dense(*key_starts, "key_starts", Dtype::Int, {sequences + 1});
    call.starts = static_cast<const int*>(starts->data_ptr()), call.sequences = int(sequences);
    call.key_starts = key_starts ? static_cast<const int*>(key_starts->data_ptr()) : call.starts;
  }
  if (lse) {
    check_dense(*lse, "lse", Dtype::Float, {call.n, call.query_heads});
    call.lse = static_cast<float*>(lse->data_ptr());
  }
  if (call.query_heads * call.n == 0) return;
  if (causal)
    launch<Over::kSequence>(q, call);
  else
    launch<Over::kEverything>(q, call);
}

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "attend_blocks_sm90(Tensor q, Tensor k, Tensor v, Tensor indices, Tensor counts, Tensor weights, float scale, "
      "Tensor(a!) taken, Tensor(b!) out, Tensor(c!) lse) -> ()");
  m.def(
      "attend_sequences_sm90(Tensor q, Tensor k, Tensor v, Tensor? starts, Tensor? key_starts, bool causal, float scale, "
      "Tensor(a!) taken, Tensor(b!) out, Tensor(c!)? lse) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) {
  m.impl("attend_blocks_sm90", TORCH_BOX(&attend_blocks_sm90));
  m.impl("attend_sequences_sm90", TORCH_BOX(&attend_sequences_sm90));
}

} // namespace
} // namespace shadowkv
