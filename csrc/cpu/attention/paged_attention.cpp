#include "paged_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "constants.h"
#include "cpu/common/instruction_set.h"

namespace shadowkv {

#define SHADOWKV_KERNEL "cpu/attention/attend_pages.inc.h"
#include "cpu/common/instruction_sets.inc.h"

namespace {

// Pages per task: about 10 microseconds of work, so that threads finish together.
constexpr int64_t PAGES_PER_TASK = 8;

}  // namespace

PagedPlan::PagedPlan(const int64_t* pages, const int64_t* counts, int64_t batch, int64_t width, int64_t heads) {
  first_partial.push_back(0);
  for (int64_t sequence = 0; sequence < batch; ++sequence) {
    const int64_t first = static_cast<int64_t>(entries.size());
    for (int64_t i = sequence * width; i < (sequence + 1) * width; ++i)
      if (counts[i] > 0) entries.push_back({pages[i], counts[i]});
    const int64_t last = static_cast<int64_t>(entries.size());
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t start = first; start < last; start += PAGES_PER_TASK)
        tasks.push_back(
            {sequence, head, start, std::min(start + PAGES_PER_TASK, last), static_cast<int64_t>(tasks.size())});
      first_partial.push_back(static_cast<int64_t>(tasks.size()));
    }
  }
}

PagedPartials::PagedPartials(const PagedPlan& plan, int64_t group, int64_t dim)
    : out(plan.tasks.size() * group * dim),
      peak(plan.tasks.size() * group, -std::numeric_limits<float>::infinity()),
      sum(plan.tasks.size() * group) {}

PagedScratch::PagedScratch(int64_t group, int64_t dim) : q(group * dim), scores(group * TILE), scale(group) {}

template <typename T>
void run_task(
    const PagedInputs<T>& in, const PagedPlan& plan, const PageTask& task, PagedScratch& scratch,
    PagedPartials& partials) {
  // Scores in units of log 2, so that the softmax needs powers of two only.
  const float scale = static_cast<float>(kLog2E / std::sqrt(static_cast<double>(in.dim)));
  const int64_t size = in.group * in.dim;
  const T* q = in.q + (task.sequence * in.heads + task.head) * size;
  for (int64_t i = 0; i < size; ++i) scratch.q[i] = to_float(q[i]) * scale;
  SHADOWKV_BEST(attend_pages<T>)(
      in, plan.entries.data() + task.first, plan.entries.data() + task.last, task.head, scratch.q.data(),
      scratch.scores.data(), scratch.scale.data(), partials.peak.data() + task.partial * in.group,
      partials.sum.data() + task.partial * in.group, partials.out.data() + task.partial * size);
}

template <typename T>
void merge_tasks(
    const PagedInputs<T>& in, const PagedPlan& plan, const PagedPartials& partials, int64_t sequence, int64_t head,
    T* out, float* lse) {
  const int64_t first = plan.first_partial[sequence * in.heads + head];
  const int64_t last = plan.first_partial[sequence * in.heads + head + 1];
  std::vector<float> total(in.dim);
  for (int64_t n = 0; n < in.group; ++n) {
    float peak = -std::numeric_limits<float>::infinity(), sum = 0.0f;
    for (int64_t i = first; i < last; ++i) peak = std::max(peak, partials.peak[i * in.group + n]);
    std::fill(total.begin(), total.end(), 0.0f);
    for (int64_t i = first; i < last; ++i) {
      const float weight = std::exp2(partials.peak[i * in.group + n] - peak);
      sum += weight * partials.sum[i * in.group + n];
      const float* part = partials.out.data() + (i * in.group + n) * in.dim;
      for (int64_t x = 0; x < in.dim; ++x) total[x] += weight * part[x];
    }
    for (int64_t x = 0; x < in.dim; ++x) from_float(first == last ? 0.0f : total[x] / sum, out[n * in.dim + x]);
    lse[n] = first == last ? peak : (peak + std::log2(sum)) * kLn2;
  }
}

template void run_task<float>(
    const PagedInputs<float>&, const PagedPlan&, const PageTask&, PagedScratch&, PagedPartials&);
template void run_task<BFloat16>(
    const PagedInputs<BFloat16>&, const PagedPlan&, const PageTask&, PagedScratch&, PagedPartials&);
template void merge_tasks<float>(
    const PagedInputs<float>&, const PagedPlan&, const PagedPartials&, int64_t, int64_t, float*, float*);
template void merge_tasks<BFloat16>(
    const PagedInputs<BFloat16>&, const PagedPlan&, const PagedPartials&, int64_t, int64_t, BFloat16*, float*);

}  // namespace shadowkv
