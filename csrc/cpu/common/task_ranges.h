// Tasks that threads draw from one counter, as cores differ in their other load.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace shadowkv {

// Tasks `first` to `last`; none where these are equal.
struct TaskRange {
  int64_t first, last;

  int64_t size() const { return last - first; }
};

class TaskRanges {
 public:
  // The next of so many tasks: one part of those that are left, at least one task. Parts become smaller, so that
  // threads end at about the same time, and what follows a task in memory is nearly always read by the same thread.
  TaskRange draw(int64_t tasks, int64_t parts) {
    int64_t first = next.load(std::memory_order_relaxed), count;
    do {
      if (first >= tasks) return {tasks, tasks};
      count = std::max<int64_t>(1, (tasks - first) / parts);
    } while (!next.compare_exchange_weak(first, first + count, std::memory_order_relaxed));
    return {first, first + count};
  }

  // Of tasks that read memory in order, for so many threads.
  static int64_t parts_for(int64_t threads) { return 2 * threads; }

 private:
  std::atomic<int64_t> next{0};
};

}  // namespace shadowkv
