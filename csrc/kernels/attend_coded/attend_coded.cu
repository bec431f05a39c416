// Attention over all coded tokens for PyTorch: checks its arguments and launches on the current stream.
#include "attend_coded.cuh"

#include "block_products.cuh"
#include "codecs.h"
#include "kernels/common/checks.h"
#include "levels.cuh"
#include "step_products.cuh"

namespace shadowkv {
namespace {

template <class Keys, class Values, bool kCentred>
void launch(const CodedInputs& in, const MeanInputs& mean, const SplitOutputs<float>& to, cudaStream_t stream) {
  const int query_blocks = (in.group + kCodedQueries - 1) / kCodedQueries;
  const dim3 grid(in.splits * query_blocks, in.heads, in.batch);
  const auto kernel = attend_coded_kernel<Keys, Values, kCentred>;
  constexpr int kBytes = sizeof(CodedShared<Keys, Values, kCentred>);
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  STD_TORCH_CHECK(error == cudaSuccess, "attend_coded's ", kBytes, " bytes of shared memory: ",
                  cudaGetErrorString(error));
  // Otherwise the L1 cache may take memory that further blocks need.
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  STD_TORCH_CHECK(error == cudaSuccess, "attend_coded's share of shared memory: ", cudaGetErrorString(error));
  kernel<<<grid, kCodedWarps<kCentred> * 32, kBytes, stream>>>(in, mean, to);
  check_launch("attend_coded");
  if (in.splits == 1) return;
  // The merge's blocks start while the last partial results are computed, and wait for them in the kernel.
  error = launch_early(
      merge_splits_kernel<kCodedDim, float>, in.batch * in.heads * in.group, kMergeThreads, 0, stream, to, in.splits);
  STD_TORCH_CHECK(error == cudaSuccess, "attend_coded's merge: ", cudaGetErrorString(error));
}

struct Launch {
  const CodedInputs& in;
  const MeanInputs& mean;
  const SplitOutputs<float>& to;
  bool centred;
  cudaStream_t stream;

  template <class Keys, class Values>
  void of() const {
    if (centred) return launch<Keys, Values, true>(in, mean, to, stream);
    launch<Keys, Values, false>(in, mean, to, stream);
  }

  template <class Keys>
  void of_lloyd(int64_t value_codec) const {
    switch (value_codec) {
      case codec::kLloyd4: return of<Keys, LevelValues<Lloyd4>>();
      case codec::kLloyd3: return of<Keys, LevelValues<Lloyd3>>();
      case codec::kLloyd2: return of<Keys, LevelValues<Lloyd2>>();
    }
  }

  void of_codecs(int64_t key_codec, int64_t value_codec) const {
    switch (key_codec) {
      case codec::kLloyd4: return of_lloyd<LevelKeys<Lloyd4>>(value_codec);
      case codec::kLloyd3: return of_lloyd<LevelKeys<Lloyd3>>(value_codec);
      case codec::kLloyd2: return of_lloyd<LevelKeys<Lloyd2>>(value_codec);
      case codec::kPolarInt4: return of<LevelKeys<PolarInt4>, LevelValues<PolarInt4>>();
      case codec::kTq3: return of<BlockKeys, BlockValues>();
      case codec::kKvarn4: return of<SteppedKeys, SteppedValues>();
    }
  }
};

// What is stored per token.
struct StoredRow {
  int64_t bytes, scales;
  Dtype scale;
};

template <class Page>
constexpr StoredRow stored_row() {
  return {Page::kStoredRow, Page::kScales, sizeof(typename Page::Scale) == 4 ? Dtype::Float : Dtype::Half};
}

StoredRow row_of(int64_t codec, const char* name) {
  switch (codec) {
    case codec::kLloyd4: return stored_row<CodedPage<Lloyd4>>();
    case codec::kLloyd3: return stored_row<CodedPage<Lloyd3>>();
    case codec::kLloyd2: return stored_row<CodedPage<Lloyd2>>();
    case codec::kPolarInt4: return stored_row<CodedPage<PolarInt4>>();
    case codec::kTq3: return stored_row<BlockPage>();
    case codec::kKvarn4: return stored_row<SteppedKeyPage>();
    case codec::kKvarn2: return stored_row<SteppedValuePage>();
    default: STD_TORCH_CHECK(false, "attend_coded does not know codec ", codec, " of ", name);
  }
}

// Lloyd codecs can be combined freely, the others only as their policies pair them.
void check_pair(int64_t keys, int64_t values) {
  const auto is_lloyd = [](int64_t x) { return x == codec::kLloyd4 || x == codec::kLloyd3 || x == codec::kLloyd2; };
  const bool known = keys == codec::kKvarn4 ? values == codec::kKvarn2
                     : is_lloyd(keys)       ? is_lloyd(values)
                                            : values == keys && keys != codec::kKvarn2;
  STD_TORCH_CHECK(known, "attend_coded does not take keys of codec ", keys, " with values of codec ", values);
}

CodedPages coded_pages(
    const char* name, int64_t codec, int64_t batch, int64_t heads, int64_t entries, const Tensor& codes,
    const Tensor& scale, const Tensor& pages, const Tensor& scale_pages, int64_t levels, double step) {
  const StoredRow row = row_of(codec, name);
  check_field(codes, name, Dtype::Byte, {-1, heads, kPage, row.bytes});
  if (row.scales > 0) check_field(scale, name, row.scale, {-1, heads, kPage, row.scales});
  check_dense(pages, name, Dtype::Long, {batch, entries}, 1);
  check_dense(scale_pages, name, Dtype::Long, {batch, entries}, 1);
  return {
      static_cast<const uint8_t*>(codes.data_ptr()), static_cast<const uint8_t*>(scale.data_ptr()),
      static_cast<const int64_t*>(pages.data_ptr()), static_cast<const int64_t*>(scale_pages.data_ptr()),
      uint32_t(codes.stride(0)), uint32_t(scale.stride(0) * int64_t(scale.element_size())), pages.stride(0),
      scale_pages.stride(0), {uint32_t(levels), uint32_t(uint64_t(levels) >> 32)}, float(step)};
}

// The number of splits follows from the size of the partial results. Levels are bytes of a 64-bit integer.
void attend_coded(
    const Tensor& q, const Tensor& begin, const Tensor& end, int64_t key_codec, const Tensor& key_codes,
    const Tensor& key_scale, const Tensor& key_pages, const Tensor& key_scale_pages, int64_t key_levels,
    double key_step, int64_t value_codec, const Tensor& value_codes, const Tensor& value_scale,
    const Tensor& value_pages, const Tensor& value_scale_pages, int64_t value_levels, double value_step,
    const std::optional<Tensor>& rope_q, const std::optional<Tensor>& mean, const std::optional<Tensor>& states,
    const std::optional<Tensor>& first, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
    double magnitude, bool interleaved, Tensor& out, Tensor& lse, Tensor& partial_out, Tensor& partial_lse) {
  const int64_t batch = q.size(0), rows = q.size(1), heads = key_codes.size(1), splits = partial_lse.size(2);
  const int64_t entries = key_pages.size(1);
  check_dense(q, "q", Dtype::Float, {-1, -1, kCodedDim});
  check_dense(begin, "begin", Dtype::Long, {batch});
  check_dense(end, "end", Dtype::Long, {batch});
  check_dense(out, "out", Dtype::Float, {batch, rows, kCodedDim});
  check_dense(lse, "lse", Dtype::Float, {batch, rows});
  check_dense(partial_out, "partial_out", Dtype::Float, {batch, rows, splits, kCodedDim});
  check_dense(partial_lse, "partial_lse", Dtype::Float, {batch, rows, splits});
  STD_TORCH_CHECK(heads > 0 && rows % heads == 0, rows, " query heads are no multiple of ", heads, " kv heads");
  STD_TORCH_CHECK(splits > 0 && entries < 1 << 25, "no room for ", splits, " splits, ", entries, " pages");
  check_blocks(batch, "sequences");
  check_blocks(heads, "kv heads");
  CodedInputs in = {static_cast<const float*>(q.data_ptr())};
  in.keys = coded_pages(
      "keys", key_codec, batch, heads, entries, key_codes, key_scale, key_pages, key_scale_pages, key_levels, key_step);
  in.values = coded_pages(
      "values", value_codec, batch, heads, entries, value_codes, value_scale, value_pages, value_scale_pages,
      value_levels, value_step);
  check_pair(key_codec, value_codec);
  in.begin = static_cast<const int64_t*>(begin.data_ptr()), in.end = static_cast<const int64_t*>(end.data_ptr());
  in.batch = int(batch), in.heads = int(heads), in.group = int(rows / heads);
  in.entries = int(entries), in.splits = int(splits);
  MeanInputs centre = {};
  if (mean) {
    STD_TORCH_CHECK(rope_q && states && first && cos && sin, "keys without their mean lack arguments");
    check_dense(*rope_q, "queries after RoPE", Dtype::Float, {batch, rows, kCodedDim});
    check_dense(*mean, "mean", Dtype::Float, {-1, heads, kCodedDim}, 1);
    check_dense(*states, "states", Dtype::Long, {batch});
    check_dense(*first, "first", Dtype::Long, {batch});
    const int64_t positions = cos->size(0), half = cos->size(1);
    check_dense(*cos, "cos", Dtype::Float, {-1, -1});
    check_dense(*sin, "sin", Dtype::Float, {positions, half});
    STD_TORCH_CHECK(half % 4 == 0 && half <= kFrequencies && positions > 0 && positions < int64_t(1) << 31,
                    "tables of ", positions, " positions and ", half, " frequencies");
    centre = {
        static_cast<const float*>(rope_q->data_ptr()), static_cast<const float*>(mean->data_ptr()),
        static_cast<const int64_t*>(states->data_ptr()), static_cast<const int64_t*>(first->data_ptr()),
        static_cast<const float*>(cos->data_ptr()), static_cast<const float*>(sin->data_ptr()), mean->stride(0),
        float(magnitude), int(half), int(positions), interleaved};
  }
  if (batch == 0 || rows == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  const SplitOutputs<float> to = {
      static_cast<float*>(out.data_ptr()), static_cast<float*>(lse.data_ptr()),
      static_cast<float*>(partial_out.data_ptr()), static_cast<float*>(partial_lse.data_ptr())};
  Launch{in, centre, to, mean.has_value(), current_stream(q)}.of_codecs(key_codec, value_codec);
}

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "attend_coded(Tensor q, Tensor begin, Tensor end, int key_codec, Tensor key_codes, Tensor key_scale, "
      "Tensor key_pages, Tensor key_scale_pages, int key_levels, float key_step, int value_codec, Tensor value_codes, "
      "Tensor value_scale, Tensor value_pages, Tensor value_scale_pages, int value_levels, float value_step, "
      "Tensor? rope_q, Tensor? mean, Tensor? states, Tensor? first, Tensor? cos, Tensor? sin, float magnitude, "
      "bool interleaved, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) partial_out, Tensor(d!) partial_lse) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) {
  m.impl("attend_coded", TORCH_BOX(&attend_coded));
}

} // namespace
} // namespace shadowkv
