// Decode attention over pages, read in place: split-KV with an online softmax (FlashDecoding), on raw pointers.
//
// The caller makes a Plan, runs every task of it in any order on any threads, then merges every (sequence, kv head).
// Tasks depend on the pages alone, so that results are bitwise equal for any number of threads.

#pragma once

#include <cstdint>
#include <vector>

#include "attention_tile.h"
#include "cpu/common/numbers.h"

namespace shadowkv {

// Strides count elements. Pages may overlap: only their valid rows are read.
template <typename T>
struct PagedInputs {
  const T* q;  // [batch, heads * group, dim], contiguous
  const T* k;
  const T* v;
  int64_t k_page, k_head, k_row;
  int64_t v_page, v_head, v_row;
  int64_t batch, heads, group, dim;
};

// Valid rows at the start of a page.
struct PageEntry {
  int64_t page;
  int64_t rows;
};

// Neighbouring entries of one sequence, for one kv head.
struct PageTask {
  int64_t sequence, head;
  int64_t first, last;  // entries
  int64_t partial;      // index of its result
};

struct PagedPlan {
  std::vector<PageEntry> entries;
  std::vector<PageTask> tasks;
  std::vector<int64_t> first_partial;  // [batch * heads + 1]

  // pages, counts: [batch, width]; counts of 0 are skipped.
  PagedPlan(const int64_t* pages, const int64_t* counts, int64_t batch, int64_t width, int64_t heads);
};

// Unnormalised results of all tasks. Maxima and scores are in units of log 2.
struct PagedPartials {
  std::vector<float> out;   // [partials, group, dim]
  std::vector<float> peak;  // [partials, group]
  std::vector<float> sum;   // [partials, group]

  PagedPartials(const PagedPlan& plan, int64_t group, int64_t dim);
};

// Working memory of one thread.
struct PagedScratch {
  std::vector<float> q;       // [group, dim]
  std::vector<float> scores;  // [group, TILE]
  std::vector<float> scale;   // [group]

  PagedScratch(int64_t group, int64_t dim);
};

template <typename T>
void run_task(
    const PagedInputs<T>& in, const PagedPlan& plan, const PageTask& task, PagedScratch& scratch, PagedPartials& partials);

// out [heads * group, dim] and lse [heads * group] of one kv head of one sequence; 0 and -inf if it has no tasks.
template <typename T>
void merge_tasks(
    const PagedInputs<T>& in, const PagedPlan& plan, const PagedPartials& partials, int64_t sequence, int64_t head,
    T* out, float* lse);

}  // namespace shadowkv
