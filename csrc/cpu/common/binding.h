// What the CPU bindings share: checks, and distribution of tasks over threads.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>

#include "task_ranges.h"

namespace shadowkv {

// Raises unless x is a CPU tensor with that many dimensions and that dtype.
inline void check(const at::Tensor& x, const char* name, int64_t dims, at::ScalarType dtype) {
  TORCH_CHECK(x.device().is_cpu(), name, " is on ", x.device(), ", not on the CPU");
  TORCH_CHECK(x.dim() == dims, name, " has shape ", x.sizes(), ", not ", dims, " dimensions");
  TORCH_CHECK(x.scalar_type() == dtype, name, " is ", x.scalar_type(), ", not ", dtype);
}

// Rows of states are dense, and may have gaps between them.
inline void check_states(const at::Tensor& states, at::IntArrayRef shape, at::ScalarType dtype) {
  check(states, "states", static_cast<int64_t>(shape.size()) + 1, dtype);
  TORCH_CHECK(states.sizes().slice(1) == shape, "states has shape ", states.sizes(), ", rows need ", shape);
  TORCH_CHECK(
      states.size(0) == 0 || states.select(0, 0).is_contiguous(), "states has strides ", states.strides(),
      "; its rows must be contiguous");
}

// Calls `work` in every thread with ranges of tasks, `first` to `last`, that read memory in order.
template <typename Work>
void share_ranges(int64_t tasks, const Work& work) {
  TaskRanges ranges;
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks);
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (TaskRange range; (range = ranges.draw(tasks, TaskRanges::parts_for(threads))).size() > 0;)
      work(range.first, range.last);
  });
}

// Runs `work` in every thread with a function that returns one task after the other: numbers below `tasks`, then larger
// ones. Threads draw from one counter, as sequences differ in length and cores in their other load.
template <typename Work>
void share_tasks(int64_t tasks, const Work& work) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), tasks), 1, [&](int64_t, int64_t) {
    work([&] { return next.fetch_add(1, std::memory_order_relaxed); });
  });
}

}  // namespace shadowkv
