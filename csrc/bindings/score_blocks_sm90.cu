// Scores of blocks of keys on Hopper for PyTorch: checks its arguments and launches on the current stream.
#include "kernels/score_blocks_sm90.cuh"

#include "bindings/tensor_map.h"

#include <algorithm>
#include <cstdint>

namespace shadowkv {
namespace {

// Cuts so many blocks of each of so many pairs of parts and heads into spans of 4 to 32, so that the multiprocessors
// that have one span more than others have little more to do. A change of queries takes about an eighth of a block.
void cut(ScoreCall& call, int blocks, int units, int processors) {
  int64_t least = INT64_MAX;
  for (int span = 4; span <= 32; ++span) {
    const int spans = (blocks + span - 1) / span;
    const int64_t rounds = (int64_t(spans) * units + processors - 1) / processors, time = rounds * (8 * span + 1);
    if (time < least) least = time, call.span = span, call.spans = spans;
  }
}

template <int kDim>
void launch(ScoreCall call, int blocks, cudaStream_t stream) {
  using Shape = ScoreShape<kDim>;
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
    const Tensor& queries, const Tensor& query_steps, int64_t dim, int64_t group, const Tensor& keys,
    const Tensor& key_steps, int64_t n, int64_t m, double scale, int64_t sink, int64_t local, Tensor& scores) {
  STD_TORCH_CHECK(dim == 64 || dim == 128, "head dim ", dim, " is not 64 or 128");
  STD_TORCH_CHECK(
      group > 0 && group * kSampled <= kRows, group, " query heads of a kv head are not 1 to ", kRows / kSampled);
  STD_TORCH_CHECK(n > 0 && n <= m, n, " queries are not 1 to ", m, ", the number of keys");
  STD_TORCH_CHECK(m < INT32_MAX - kBlock, "no room for ", m, " keys");
  const int64_t tiles = (n + kBlock - 1) / kBlock, blocks = (m + kBlock - 1) / kBlock;
  const int64_t together = kRows / (group * kSampled), parts = (tiles + together - 1) / together;
  check(keys, "keys", Dtype::Char, {-1, -1, kBoxBytes / kBlock});
  check_dense_from(keys, "keys", 2);
  const int64_t heads = keys.size(1);
  check_dense(queries, "queries", Dtype::Char, {heads * parts * kRows, 1, kBoxBytes / kBlock});
  STD_TORCH_CHECK(keys.size(0) % kBlock == 0, keys.size(0), " keys are not of whole blocks of ", kBlock);
  check_dense(query_steps, "query steps", Dtype::Float, {heads, parts, kRows});
  check_dense(key_steps, "key steps", Dtype::Float, {keys.size(0) / kBlock, heads});
  check_dense(scores, "scores", Dtype::Float, {blocks, heads, parts, kRows});
  STD_TORCH_CHECK(blocks * heads * parts < INT32_MAX / 2, "no room for ", blocks * heads * parts, " blocks of all parts");
  STD_TORCH_CHECK(scale > 0, "scale ", scale, " is not above zero");
  STD_TORCH_CHECK(sink >= 0 && local >= 0, "sink ", sink, " or local ", local, " is below zero");
  const torch::stable::accelerator::DeviceGuard guard(keys.get_device());
  ScoreCall call = {};
  call.query_steps = static_cast<const float*>(query_steps.data_ptr());
  call.key_steps = static_cast<const float*>(key_steps.data_ptr());
  call.scores = static_cast<float*>(scores.data_ptr());
  call.scale = float(scale);
  call.n = int(n), call.m = int(m), call.heads = int(heads), call.tiles = int(tiles), call.together = int(together);
  call.parts = int(parts), call.of_tile = int(group) * kSampled, call.used = call.together * call.of_tile;
  call.sink = int(sink), call.local = int(local);
  const int end = call.end(call.parts - 1);
  if (heads == 0 || end <= call.sink) return;
  STD_TORCH_CHECK(end <= key_steps.size(0), "there are ", key_steps.size(0), " blocks of keys, not ", end);
  call.q = boxes_of(queries, "queries"), call.k = boxes_of(keys, "keys");
  const auto launched = dim == 64 ? launch<64> : launch<128>;
  launched(call, end - call.sink, current_stream(keys));
}

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "score_blocks_sm90(Tensor queries, Tensor query_steps, int dim, int group, Tensor keys, Tensor key_steps, int n, "
      "int m, float scale, int sink, int local, Tensor(a!) scores) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) { m.impl("score_blocks_sm90", TORCH_BOX(&score_blocks_sm90)); }

} // namespace
} // namespace shadowkv
