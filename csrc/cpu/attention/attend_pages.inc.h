// The kernel of paged attention, included once per instruction set (instruction_sets.inc.h).

#include "attention_tile.inc.h"

template <typename T>
static void attend_pages(
    const PagedInputs<T>& in, const PageEntry* first, const PageEntry* last, int64_t head, const float* q,
    float* scores, float* scale, float* peak, float* sum, float* out) {
  const int64_t dim = in.dim;
  for (const PageEntry* entry = first; entry != last; ++entry) {
    for (int64_t start = 0; start < entry->rows; start += TILE) {
      const int64_t rows = entry->rows - start < TILE ? entry->rows - start : TILE;
      const T* k = in.k + entry->page * in.k_page + head * in.k_head + start * in.k_row;
      const T* v = in.v + entry->page * in.v_page + head * in.v_head + start * in.v_row;
      const T* next = nullptr;
      if (start + TILE < entry->rows)
        next = k + TILE * in.k_row;
      else if (entry + 1 != last)
        next = in.k + entry[1].page * in.k_page + head * in.k_head;
      // Keys and values of a tile are read from memory once; further blocks of queries find them in the core's caches.
      in_blocks(in.group, [&](auto count, int64_t n) {
        attend_tile<decltype(count)::value>(
            q + n * dim, k, in.k_row, v, in.v_row, rows, dim, nullptr, nullptr, n == 0, scores + n * TILE, scale + n,
            peak + n, sum + n, out + n * dim, n == 0 ? next : nullptr);
      });
    }
  }
}

template void attend_pages<float>(
    const PagedInputs<float>&, const PageEntry*, const PageEntry*, int64_t, const float*, float*, float*, float*,
    float*, float*);
template void attend_pages<BFloat16>(
    const PagedInputs<BFloat16>&, const PageEntry*, const PageEntry*, int64_t, const float*, float*, float*, float*,
    float*, float*);
