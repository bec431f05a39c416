#include "attend_selected.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "constants.h"
#include "cpu/common/instruction_set.h"

namespace shadowkv {

#define SHADOWKV_KERNEL "cpu/attention/attend_chunks.inc.h"
#include "cpu/common/instruction_sets.inc.h"

int64_t row_width(int64_t codec, int64_t dim, int64_t stored) {
  switch (codec) {
    case codec::kDense:
    case codec::kLatentDense:
    case codec::kLatentInt8: return dim;
    case codec::kLatentInt4: return dim % 2 == 0 && dim / 2 <= stored && stored <= dim ? stored : 0;
    case codec::kLloyd8: return dim % 8 ? 0 : dim;
    case codec::kLloyd4:
    case codec::kRotated4: return dim % 16 ? 0 : dim / 2;
    case codec::kLloyd3:
    case codec::kRotated3: return dim % 64 ? 0 : dim * 3 / 8;
    case codec::kLloyd2:
    case codec::kRotated2: return dim % 32 ? 0 : dim / 4;
  }
  return -1;
}

SelectedScratch::SelectedScratch(const SelectedForm& form) {
  const int64_t queries = form.group * form.dim, tile = TILE * form.dim;
  const int64_t rank = form.rank;
  const std::pair<float**, int64_t> parts[] = {
      {&q, queries},         {&out, queries},            {&unordered, queries},
      {&peak, form.group},   {&sum, form.group},         {&scale, form.group},
      {&log_weight, TILE},   {&scores, form.group * TILE},
      {&keys, tile},         {&values, tile},            {&latents, TILE * rank},
      {&mean, form.dim},     {&basis, rank * form.dim},  {&products, queries},
      {&rest, form.group},   {&angles, tile},            {&added, form.group * TILE},
  };
  int64_t total = 0;
  for (const auto& [part, size] : parts) total += size;
  memory_.resize(total);
  float* next = memory_.data();
  for (const auto& [part, size] : parts) *part = std::exchange(next, next + size);
}

template <typename T>
void attend_selected(
    const SelectedForm& form, const SelectedTask& task, const T* q, SelectedScratch& scratch, T* out, float* lse) {
  const int64_t size = form.group * form.dim, count = static_cast<int64_t>(task.chunks.size());
  if (count == 0) {
    for (int64_t i = 0; i < size; ++i) from_float(0.0f, out[i]);
    std::fill(lse, lse + form.group, -std::numeric_limits<float>::infinity());
    return;
  }
  // Scores in units of log 2, so that the softmax needs powers of two only.
  const float scale = static_cast<float>(kLog2E / std::sqrt(static_cast<double>(form.dim)));
  for (int64_t i = 0; i < size; ++i) scratch.q[i] = to_float(q[i]) * scale;
  std::fill(scratch.out, scratch.out + size, 0.0f);
  std::fill(scratch.peak, scratch.peak + form.group, -std::numeric_limits<float>::infinity());
  std::fill(scratch.sum, scratch.sum + form.group, 0.0f);
  SHADOWKV_BEST(attend_chunks)(form, task.chunks.data(), count, task.basis, task.mean, scratch);
  for (int64_t n = 0; n < form.group; ++n) {
    for (int64_t i = n * form.dim; i < (n + 1) * form.dim; ++i) from_float(scratch.out[i] / scratch.sum[n], out[i]);
    lse[n] = (scratch.peak[n] + std::log2(scratch.sum[n])) * kLn2;
  }
}

template void attend_selected<float>(
    const SelectedForm&, const SelectedTask&, const float*, SelectedScratch&, float*, float*);
template void attend_selected<BFloat16>(
    const SelectedForm&, const SelectedTask&, const BFloat16*, SelectedScratch&, BFloat16*, float*);

}  // namespace shadowkv
