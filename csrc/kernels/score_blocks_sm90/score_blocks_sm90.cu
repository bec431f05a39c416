// Scores of blocks of keys on Hopper for PyTorch: checks its arguments and launches on the current stream.
#include "score_blocks_sm90.cuh"

#include "kernels/common/tensor_map.h"

#include <algorithm>
#include <cstdint>

namespace shadowkv {
namespace {

// Splits the blocks of each pair of parts and heads into spans of 4 to 32 blocks, so that multiprocessors with one span
// more than others have little more to do. A change of queries takes about an eighth of the time of a block.
void cut(ScoreCall& call, int blocks, int units, int processors) {
  int64_t least = INT64_MAX;
  for (int span = 4; span <= 32; ++span) {
    const int spans = (blocks + span - 1) / span;
    const int64_t rounds = (int64_t(spans) * units + processors - 1) / processors, time = rounds * (8 * span + 1);
    if (time < least) least = time, call.span = span, call.spans = spans;
  }
}

template <class Element, int kDim>
void launch(ScoreCall call, int blocks, cudaStream_t stream) {
  using Shape = ScoreShape<Element, kDim>;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(
        score_blocks_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  STD_TORCH_CHECK(error == cudaSuccess, "score_blocks_sm90: ", cudaGetErrorString(error));
  const int units = call.heads * call.pairs();
  cut(call, blocks, units, processors);
  const int grid = int(std::min<int64_t>(int64_t(call.spans) * units, processors));
  score_blocks_kernel<Shape><<<grid, Shape::kThreads, Shape::kSharedBytes, stream>>>(call);
  check_launch("score_blocks_sm90");
}

void score_blocks_sm90(
    const Tensor& q, const Tensor& k, const Tensor& sampled, double scale, int64_t sink, int64_t local,
    Tensor& scores) {
  const Dtype dtype = q.scalar_type();
  STD_TORCH_CHECK(
      dtype == Dtype::Half || dtype == Dtype::BFloat16, "q has dtype ", int(dtype), ", not ", int(Dtype::Half), " or ",
      int(Dtype::BFloat16));
  check(q, "q", dtype, {-1, -1, -1});
  const int64_t n = q.size(0), query_heads = q.size(1), dim = q.size(2), tiles = (n + kBlock - 1) / kBlock;
  STD_TORCH_CHECK(dim == 64 || dim == 128, "head dim ", dim, " is not 64 or 128");
  check(k, "k", dtype, {-1, -1, dim});
  const int64_t m = k.size(0), heads = k.size(1), blocks = (m + kBlock - 1) / kBlock;
  STD_TORCH_CHECK(heads > 0 && query_heads % heads == 0, query_heads, " query heads are no multiple of ", heads,
                  " kv heads");
  const int64_t group = query_heads / heads;
  STD_TORCH_CHECK(
      group > 0 && group * kSampled <= kRows, group, " query heads of a kv head are not 1 to ", kRows / kSampled);
  STD_TORCH_CHECK(n > 0 && n <= m, n, " queries are not 1 to ", m, ", the number of keys");
  const int64_t together = kRows / (group * kSampled), parts = (tiles + together - 1) / together;
  check_dense(sampled, "sampled", Dtype::Int, {query_heads, tiles, kSampled});
  check_dense(scores, "scores", Dtype::Float, {blocks, heads, parts, kRows});
  for (const auto& [x, name] : {std::pair{&q, "q"}, {&k, "k"}}) check_dense_from(*x, name, 2);
  STD_TORCH_CHECK(
      m < INT32_MAX - kBlock && blocks * heads * parts < INT32_MAX / 2, "no room for ", m, " keys, ",
      blocks * heads * parts, " blocks of all parts");
  const auto aligned = [&](int axis) { return q.size(axis) == 1 || q.stride(axis) % 8 == 0; };
  STD_TORCH_CHECK(
      reinterpret_cast<uintptr_t>(q.data_ptr()) % 16 == 0 && aligned(0) && aligned(1),
      "q has rows that do not start at multiples of 16 bytes");
  STD_TORCH_CHECK(scale > 0, "scale ", scale, " is not above zero");
  STD_TORCH_CHECK(sink >= 0 && local >= 0, "sink ", sink, " or local ", local, " is below zero");
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  const ScoreCall call = {
      boxes_of(k, "k"), q.data_ptr(), q.stride(0), q.stride(1), static_cast<const int*>(sampled.data_ptr()),
      static_cast<float*>(scores.data_ptr()), float(scale),
      int(n), int(m), int(heads), int(group), int(tiles), int(together), int(parts), int(sink), int(local), 0, 0};
  const int scored = call.end(call.parts - 1) - call.sink;
  if (scored <= 0) return;
  const cudaStream_t stream = current_stream(q);
  const bool half = dtype == Dtype::Half;
  const auto launched = dim == 64 ? (half ? launch<__half, 64> : launch<__nv_bfloat16, 64>)
                                  : (half ? launch<__half, 128> : launch<__nv_bfloat16, 128>);
  launched(call, scored, stream);
}

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "score_blocks_sm90(Tensor q, Tensor k, Tensor sampled, float scale, int sink, int local, Tensor(a!) scores) -> "
      "()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) { m.impl("score_blocks_sm90", TORCH_BOX(&score_blocks_sm90)); }

} // namespace
} // namespace shadowkv
