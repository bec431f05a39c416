// Decode attention over all compressed tokens in their coded form: split-KV with an online softmax, in two kernels.
//
// At memory bandwidth, a multiprocessor of an H200 receives 40 4-bit codes per clock and has one and a half integer
// operations for each. So levels are bytes, looked up four at a time by byte permutations, and all products are integer
// products: queries and weights are 16-bit fixed point, two columns of bytes, whose products are exact. Nothing is
// transposed on the way from memory to the tensor cores. Products with keys may take dimensions in any order. Products
// with values sum over tokens, and a register holds four dimensions of one token: they are treated as four tokens, of
// which the weights select one, with a product for each.
//
// A block takes a share of the pages of one sequence and kv head for four query heads; each of its warps takes a page
// at a time. A warp has room for one page of keys and one of values in shared memory. The next page's keys are in
// flight while its values are used, and the next values while those keys are used.
//
// Formats are pairs of structs, a page of keys and one of values as laid out in shared memory (levels.cuh,
// step_products.cuh, block_products.cuh). Both have
//   kStoredRow, kScales, Scale  bytes of a token's codes, number of scales stored with them, and type of a scale
//   copy      starts a warp's copy of a page
// Keys also have
//   Asked     queries of a block in the form they need, prepared by ask() at the start
//   Products  what a lane keeps of a page when its bytes are no longer needed: multiply() computes it, and score()
//             turns it into scores of query t and the tokens of g
// Values also have
//   Weights   a warp's weights of a page
//   add       turns a page's scores into weights, and adds to the sums
//   value_dim dimension of a lane's sum, and result(), its value
#pragma once

#include <type_traits>

#include "constants.h"
#include "kernels/common/merge_splits.cuh"
#include "mean.cuh"
#include "sums.cuh"

namespace shadowkv {

// Warps per block and blocks per multiprocessor. Blocks with centred keys share a table and are larger.
template <bool kCentred>
constexpr int kCodedWarps = kCentred ? 8 : 4;
template <bool kCentred>
constexpr int kCodedBlocks = kCentred ? 2 : 5;

// Keys or values. Strides are in bytes between consecutive page ids.
struct CodedPages {
  const uint8_t* codes;  // pages of [heads, 64, bytes]
  const uint8_t* scales; // pages of [heads, 64, scales]
  const int64_t* pages;  // [batch, entries]
  const int64_t* scale_pages;
  uint32_t page, scale_page;
  int64_t pages_row, scale_pages_row;
  LevelBytes levels;
  float step;
};

struct CodedInputs {
  const float* q; // [batch, heads * group, 128], dense, multiplied by the keys' codec's rotation
  CodedPages keys, values;
  const int64_t* begin; // [batch]
  const int64_t* end;
  int batch, heads, group, entries, splits;
};

// A warp's final results, by query.
struct CodedResults {
  float peak[kCodedQueries], sum[kCodedQueries];
  float out[kCodedQueries][kCodedDim + 8];
};

template <class Keys, class Values>
struct CodedWork {
  Keys keys;
  Values values;
  typename Values::Weights weights;
};

template <class Keys, class Values, bool kCentred>
struct CodedShared {
  union {
    CodedWork<Keys, Values> work;
    CodedResults results;
  } warp[kCodedWarps<kCentred>];
  typename Keys::Asked asked;
  const int64_t* tables[4]; // of the sequence: keys, their scales, values, their scales
  std::conditional_t<kCentred, MeanShared, NoMeanShared> mean;
};

// Starts a warp's copy of a head's page.
template <class Page>
__device__ __forceinline__ void copy_coded_page(
    Page& to, const CodedPages& from, uint32_t page_id, uint32_t scale_id, int head, int lane) {
  const uint32_t head_rows = head * (kPage * Page::kStoredRow);
  const uint8_t* const rows = from.codes + (uint64_t(page_id) * from.page + head_rows);
  const uint32_t head_scales = head * (kPage * Page::kScales * int(sizeof(typename Page::Scale)));
  const uint8_t* const scales = from.scales + (uint64_t(scale_id) * from.scale_page + head_scales);
  to.copy(rows, reinterpret_cast<const typename Page::Scale*>(scales), lane);
}

// Writes a lane's final results: `results` may overlap what the warp no longer reads.
template <class Values>
__device__ __forceinline__ void leave_sums(CodedSums& sums, CodedResults& results, float step, int g, int t) {
  const float sum = sum_over_rows(sums.sum), ones = sum_over_rows(sums.ones);
  if (g == 0) results.peak[t] = sums.peak, results.sum[t] = sum;
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r)
      results.out[t][Values::value_dim(n, r, g)] = Values::result(sums.acc[n][r], ones, step);
}

// Merges the warps' results for a block's queries: as the outputs, or as a split's share of them.
template <int kWarps, class Shared>
__device__ __forceinline__ void join_coded_warps(
    const Shared& shared, const SplitOutputs<float>& to, int64_t first_row, int queries, int split, int splits) {
  const int dim = threadIdx.x % kCodedDim;
  for (int query = threadIdx.x / kCodedDim; query < queries; query += kWarps * 32 / kCodedDim) {
    float top = -INFINITY, total = 0.0f, y = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = max_or_nan(top, shared.warp[w].results.peak[query]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      // Without tokens a sum is 0, otherwise at least 1, or NaN, which must propagate.
      const CodedResults& of_warp = shared.warp[w].results;
      const float weight = of_warp.sum[query] == 0.0f ? 0.0f : exp2_fast(of_warp.peak[query] - top);
      total += weight * of_warp.sum[query], y += weight * of_warp.out[query][dim];
    }
    y = total == 0.0f ? 0.0f : y / total;
    const float log_sum = top + log2f(total);
    const int64_t row = first_row + query, partial = row * splits + split;
    if (splits == 1) {
      to.out[row * kCodedDim + dim] = y;
      if (dim == 0) to.lse[row] = log_sum * kLn2;
    } else {
      to.partial_out[partial * kCodedDim + dim] = y;
      if (dim == 0) to.partial_lse[partial] = log_sum;
    }
  }
}

// Scores of a page in units of log 2, added to the mean key's contribution in x; -inf for tokens that are not attended
// to. Returns the lane's largest score.
template <bool kCentred, class Keys>
__device__ __forceinline__ float finish_scores(
    float (&x)[8], const typename Keys::Products& products, const typename Keys::Asked& asked, int t,
    const CodedSpan& span) {
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float score = products.score(asked, t, i);
    if constexpr (kCentred) x[i] += score;
    else x[i] = score;
    x[i] = span.has(i) ? x[i] : -INFINITY;
    top = max_or_nan(top, x[i]);
  }
  return top;
}

// The page tables of a sequence's keys, their scales, values and their scales. A warp reads this once per page: keeping
// it in registers caused spills.
__device__ __forceinline__ void note_tables(const CodedInputs& in, int64_t sequence, const int64_t* (&tables)[4]) {
  const int table = threadIdx.x;
  if (table < 4) {
    const CodedPages& side = table < 2 ? in.keys : in.values;
    tables[table] =
        table % 2 == 0 ? side.pages + sequence * side.pages_row : side.scale_pages + sequence * side.scale_pages_row;
  }
  __syncthreads();
}

// Grid: splits * query blocks, heads, batch. Query blocks of a split are neighbours, so that the others find in the L2
// cache what the first one reads. Dynamic shared memory: a CodedShared.
template <class Keys, class Values, bool kCentred>
__global__ void __launch_bounds__(kCodedWarps<kCentred> * 32, kCodedBlocks<kCentred>)
    attend_coded_kernel(const CodedInputs in, const MeanInputs mean_in, const SplitOutputs<float> to) {
  constexpr int kWarps = kCodedWarps<kCentred>;
  let_next_launch_begin(); // the merge, which waits for the results
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int query_blocks = (in.group + kCodedQueries - 1) / kCodedQueries;
  const int split = blockIdx.x / query_blocks, head = blockIdx.y;
  const int64_t sequence = blockIdx.z;
  const int first_query = blockIdx.x % query_blocks * kCodedQueries;
  const int queries = min(kCodedQueries, in.group - first_query);
  const int64_t first_row = (sequence * in.heads + head) * in.group + first_query;
  extern __shared__ __align__(128) unsigned char coded_memory[];
  auto& shared = *reinterpret_cast<CodedShared<Keys, Values, kCentred>*>(coded_memory);
  typename Keys::Asked& asked = shared.asked;
  auto& mean = shared.mean;
  // Separate variables: derived from one reference to all, their addresses took registers that spilled.
  auto& keys = shared.warp[warp].work.keys;
  auto& values = shared.warp[warp].work.values;
  auto& weights = shared.warp[warp].work.weights;

  // Warps of all splits take pages in turn: all get equally many, however little of its row a sequence uses.
  const int low = int(in.begin[sequence]), high = int(in.end[sequence]);
  const int last = high > low ? min(in.entries, (high + kPage - 1) / kPage) : 0, stride = in.splits * kWarps;
  int page = low / kPage + split * kWarps + warp;
  note_tables(in, sequence, shared.tables);
  // Lane 4 i + n reads the id of a page in table n. Ids are below 2^32.
  const auto ids_of = [&](int of) { return of < last ? uint32_t(shared.tables[t][of]) : 0; };
  uint32_t page_ids = ids_of(page);
  // One copy group each, empty past the last page.
  const auto copy = [&](auto& to, const CodedPages& from, int place, bool exists) {
    if (exists) {
      const uint32_t page_id = __shfl_sync(~0u, page_ids, place), scale_id = __shfl_sync(~0u, page_ids, place + 1);
      copy_coded_page(to, from, page_id, scale_id, head, lane);
    }
    close_copy_group();
  };
  copy(keys, in.keys, 0, page < last), copy(values, in.values, 2, page < last);
  page_ids = ids_of(page + stride);

  const float log2e_scale = kLog2E * rsqrtf(float(kCodedDim));
  if constexpr (kCentred) mean.fill(mean_in, sequence, head, first_row, queries);
  Keys::template ask<kWarps>(in.q + first_row * kCodedDim, queries, in.keys.step * log2e_scale, asked);

  CodedSums sums;
  TermsInTurn terms;
  for (; page < last; page += stride) {
    float x[8];
    if constexpr (kCentred)
      terms.take(mean, mean_in, sequence, page + g % 2 * stride, g, t, x);
    wait_copy_groups<1>(), __syncwarp(); // the keys have arrived
    typename Keys::Products products;
    keys.multiply(in.keys.levels, asked, lane, products);
    const bool more = page + stride < last;
    __syncwarp(); // all lanes have read them
    copy(keys, in.keys, 0, more);

    const CodedSpan span = {uint32_t(page * kPage + 2 * g - low), uint32_t(high - low)};
    const float fade = sums.raise_peak(finish_scores<kCentred, Keys>(x, products, asked, t, span));
    wait_copy_groups<1>(), __syncwarp(); // the values have arrived
    values.add(in.values.levels, x, span, fade, lane, weights, sums);
    __syncwarp(); // all lanes have read values and weights
    copy(values, in.values, 2, more);
    page_ids = ids_of(page + 2 * stride);
  }

  leave_sums<Values>(sums, shared.warp[warp].results, in.values.step, g, t);
  __syncthreads();
  join_coded_warps<kWarps>(shared, to, first_row, queries, split, in.splits);
}

} // namespace shadowkv
