// Attention over coded tokens by threads that take turns.
#include "kernels/attend_coded/attend_coded.cuh"
#include "kernels/attend_coded/block_products.cuh"
#include "kernels/attend_coded/levels.cuh"
#include "kernels/attend_coded/step_products.cuh"

namespace shadowkv {
namespace {

template <class Keys, class Values>
bool run(const CodedInputs& in, const SplitOutputs<float>& to) {
  static_assert(sizeof(CodedShared<Keys, Values, false>) <= sizeof(coded_memory));
  const dim3 grid = {unsigned(in.splits * ((in.group + kCodedQueries - 1) / kCodedQueries)), unsigned(in.heads)};
  const auto before = [] {
    on_cpu::block_index.z = 0;
    std::memset(coded_memory, 255, sizeof(coded_memory)); // what a kernel reads it has to have written: bytes of NaN
  };
  return on_cpu::run(
      grid, kCodedWarps<false> * 32, before, [&] { attend_coded_kernel<Keys, Values, false>(in, MeanInputs{}, to); });
}

} // namespace
} // namespace shadowkv

struct Rows {
  const uint8_t *codes, *scales;
  const int64_t *pages, *scale_pages;
  int64_t codec, page, scale_page;
  uint64_t levels;
  double step;
};

// False where threads wait for others that have ended. Of one sequence.
extern "C" bool attend(
    const float* q, const Rows* keys, const Rows* values, const int64_t* begin, const int64_t* end, int heads,
    int group, int entries, int splits, float* out, float* lse, float* partial_out, float* partial_lse) {
  using namespace shadowkv;
  const auto of = [&](const Rows& x) -> CodedPages {
    return {x.codes, x.scales, x.pages, x.scale_pages, uint32_t(x.page), uint32_t(x.scale_page), entries, entries,
            {uint32_t(x.levels), uint32_t(x.levels >> 32)}, float(x.step)};
  };
  const CodedInputs in = {q, of(*keys), of(*values), begin, end, 1, heads, group, entries, splits};
  const SplitOutputs<float> to = {out, lse, partial_out, partial_lse};
  switch (keys->codec) {
    case codec::kLloyd4: return run<LevelKeys<Lloyd4>, LevelValues<Lloyd3>>(in, to);
    case codec::kLloyd3: return run<LevelKeys<Lloyd3>, LevelValues<Lloyd2>>(in, to);
    case codec::kPolarInt4: return run<LevelKeys<PolarInt4>, LevelValues<PolarInt4>>(in, to);
    case codec::kTq3: return run<BlockKeys, BlockValues>(in, to);
    case codec::kKvarn4: return run<SteppedKeys, SteppedValues>(in, to);
    default: return false;
  }
}
