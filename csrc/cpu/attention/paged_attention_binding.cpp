// Attention on CPU tensors for PyTorch: checks device, dtype, shape and stride, and distributes the work over its
// threads.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/common/binding.h"
#include "cpu/common/instruction_set.h"
#include "paged_attention.h"

namespace {

using at::Tensor;
using shadowkv::check;

void check_pages(const Tensor& pages, const Tensor& counts, int64_t num_pages, int64_t page_rows) {
  const int64_t *page = pages.const_data_ptr<int64_t>(), *count = counts.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < pages.numel(); ++i) {
    TORCH_CHECK_INDEX(count[i] >= 0 && count[i] <= page_rows, "count ", count[i], " is not in [0, ", page_rows, "]");
    TORCH_CHECK_INDEX(
        count[i] == 0 || (page[i] >= 0 && page[i] < num_pages), "page ", page[i], " is not in [0, ", num_pages, ")");
  }
}

template <typename T>
void attend(
    const Tensor& q, const Tensor& k, const Tensor& v, const shadowkv::PagedPlan& plan, Tensor& out, Tensor& lse) {
  const int64_t batch = q.size(0), heads = k.size(1), group = q.size(1) / heads, dim = q.size(2);
  const shadowkv::PagedInputs<T> in = {
      static_cast<const T*>(q.const_data_ptr()),
      static_cast<const T*>(k.const_data_ptr()),
      static_cast<const T*>(v.const_data_ptr()),
      k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2), batch, heads, group, dim};
  shadowkv::PagedPartials partials(plan, group, dim);
  T* outs = static_cast<T*>(out.mutable_data_ptr());
  float* sums = lse.mutable_data_ptr<float>();
  const auto merge = [&](int64_t i) {
    shadowkv::merge_tasks(in, plan, partials, i / heads, i % heads, outs + i * group * dim, sums + i * group);
  };
  // The thread that finishes the last task of a sequence and head merges them all: a second parallel loop would be a
  // second barrier.
  std::vector<std::atomic<int64_t>> left(batch * heads);
  for (int64_t i = 0; i < batch * heads; ++i) {
    left[i] = plan.first_partial[i + 1] - plan.first_partial[i];
    if (left[i] == 0) merge(i);
  }
  const int64_t tasks = static_cast<int64_t>(plan.tasks.size());
  shadowkv::share_tasks(tasks, [&](const auto& next) {
    shadowkv::PagedScratch scratch(group, dim);
    for (int64_t i; (i = next()) < tasks;) {
      const shadowkv::PageTask& task = plan.tasks[i];
      shadowkv::run_task(in, plan, task, scratch, partials);
      const int64_t row = task.sequence * heads + task.head;
      if (left[row].fetch_sub(1, std::memory_order_acq_rel) == 1) merge(row);
    }
  });
}

std::tuple<Tensor, Tensor> paged_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& pages, const Tensor& counts) {
  const at::ScalarType dtype = q.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "q is ", dtype, ", not Float or BFloat16");
  check(q, "q", 3, dtype);
  check(k, "k", 4, dtype);
  check(v, "v", 4, dtype);
  check(pages, "pages", 2, at::kLong);
  check(counts, "counts", 2, at::kLong);
  // Views that start at different bytes of one arena may differ in how many pages follow.
  TORCH_CHECK(
      k.sizes().slice(1) == v.sizes().slice(1), "k has shape ", k.sizes(), ", v has shape ", v.sizes());
  TORCH_CHECK(k.size(3) == q.size(2), "k has shape ", k.sizes(), ", q has shape ", q.sizes());
  TORCH_CHECK(
      k.size(1) > 0 && q.size(1) % k.size(1) == 0, q.size(1), " query heads are no multiple of ", k.size(1),
      " kv heads");
  TORCH_CHECK(k.stride(3) == 1 && v.stride(3) == 1, "k has strides ", k.strides(), ", v ", v.strides(),
              "; the last must be 1");
  TORCH_CHECK(pages.size(0) == q.size(0), "pages has shape ", pages.sizes(), ", q has shape ", q.sizes());
  TORCH_CHECK(pages.sizes() == counts.sizes(), "pages has shape ", pages.sizes(), ", counts ", counts.sizes());
  const Tensor queries = q.contiguous(), page_ids = pages.contiguous(), rows = counts.contiguous();
  check_pages(page_ids, rows, std::min(k.size(0), v.size(0)), k.size(2));
  const shadowkv::PagedPlan plan(
      page_ids.const_data_ptr<int64_t>(), rows.const_data_ptr<int64_t>(), q.size(0), page_ids.size(1), k.size(1));
  Tensor out = at::empty_like(queries);
  Tensor lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat));
  if (dtype == at::kFloat)
    attend<float>(queries, k, v, plan, out, lse);
  else
    attend<shadowkv::BFloat16>(queries, k, v, plan, out, lse);
  return {out, lse};
}

// A fragment, so that the ops of other devices can come from separate libraries.
TORCH_LIBRARY_FRAGMENT(shadowkv, m) {
  m.def("paged_attention(Tensor q, Tensor k, Tensor v, Tensor pages, Tensor counts) -> (Tensor, Tensor)");
  m.def("cpu_isa() -> str", [] { return std::string(shadowkv::instruction_set_name()); });
}

TORCH_LIBRARY_IMPL(shadowkv, CPU, m) {
  m.impl("paged_attention", paged_attention);
}

}  // namespace
