// Decode attention over pages, read in place: split-KV with an online softmax (FlashDecoding), in two kernels.
//
// A block takes a share of the pages of one sequence and kv head; each of its four warps takes 16 tokens of every page.
// Keys and values go from global memory directly into tensor-core fragments: the products may take the dimensions of a
// head in any order, so a fragment is whatever 16-byte loads of whole sectors return, and shared memory is only needed
// at the end. Rows may be of any kind in paged_rows.cuh.
//
// Consecutive rows of queries can belong to one sequence: its tokens are read once for all of them, as if the queries
// of its rows were further query heads.
#pragma once

#include "constants.h"
#include "kernels/common/early_launch.cuh"
#include "kernels/common/merge_splits.cuh"
#include "kernels/common/mma.cuh"
#include "paged_rows.cuh"

#include <cfloat>

namespace shadowkv {

constexpr int kPagedQueries = 8; // columns of a product; a block has one or two products' queries
constexpr int kPagedWarps = kPage / kPagedTile;

// Strides count elements, page strides elements between consecutive page ids.
template <typename Rows>
struct PagedInputs {
  const __nv_bfloat16* q;          // [rows, heads * group, dim], contiguous
  const typename Rows::Element* k; // pages of [heads, 64, dim]
  const typename Rows::Element* v;
  const int64_t* pages;  // [rows, entries]
  const int64_t* starts; // [sequences + 1], first row of each sequence; null if each sequence has one row
  int64_t k_page, v_page, pages_row;
  int sequences, most_rows, heads, group, entries, splits; // most_rows: of a sequence
  Rows rows;

  // The blocks that share the queries of a sequence and kv head, with as many queries each.
  __host__ __device__ int query_blocks(int queries) const { return (most_rows * group + queries - 1) / queries; }
};

// The queries of a block: some of those of all rows of a sequence, for one kv head.
struct PagedBlock {
  int first_row, rows; // of the sequence
  int first, queries;

  template <int kQueries, typename Rows>
  static __device__ __forceinline__ PagedBlock of(const PagedInputs<Rows>& in) {
    const int first_row = in.starts ? int(in.starts[blockIdx.z]) : blockIdx.z;
    const int rows = in.starts ? int(in.starts[blockIdx.z + 1]) - first_row : 1;
    const int first = blockIdx.x % in.query_blocks(kQueries) * kQueries;
    return {first_row, rows, first, min(kQueries, rows * in.group - first)};
  }

  // The row that has all tokens of the others.
  __device__ __forceinline__ int last_row() const { return first_row + rows - 1; }
  __device__ __forceinline__ int row_of(int query, int group) const {
    return first_row + min((first + query) / group, rows - 1);
  }
  // Where a query and its results are, counted in heads of all rows.
  __device__ __forceinline__ int64_t place_of(int query, int heads, int group) const {
    return (int64_t(row_of(query, group)) * heads + blockIdx.y) * group + (first + query) % group;
  }
};

using PagedOutputs = SplitOutputs<__nv_bfloat16>; // rows: rows * heads * group

// Maximum over the four lanes of a quad.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// A warp's walk over the tiles of its pages that hold tokens: the 16 tokens from `first` on of every step-th page. A
// lane keeps the id of one page in 32, and what determines which of its tokens are attended to.
template <typename Rows>
struct PagedTiles {
  typename Rows::Tokens of;
  const int64_t* pages;
  int next, step, entries, first;
  uint32_t left = 0;
  int64_t page_id, value_page_id;
  int kept;
  int64_t page, value_page; // of keys and of values
  int tokens;      // up to the end of the page's, of which at most 16 belong to the tile; 0 after the last tile
  int skipped = 0; // leading tokens that are not attended to; below 0 for none
  int tile; // only if rows have their own ends: what is kept for the tile

  __device__ __forceinline__ void advance() {
    while (left == 0 && next < entries) {
      const int entry = next + threadIdx.x % 32 * step;
      page_id = entry < entries ? pages[entry] : 0;
      if constexpr (Rows::kOwnValuePages) value_page_id = entry < entries ? of.value_pages[entry] : 0;
      kept = entry < entries ? of.tile(entry, first) : of.kNone;
      left = __ballot_sync(~0u, of.any(kept));
      next += 32 * step;
    }
    const int lane = __ffs(left) - 1;
    page = __shfl_sync(~0u, page_id, lane & 31);
    if constexpr (Rows::kOwnValuePages) value_page = __shfl_sync(~0u, value_page_id, lane & 31);
    else value_page = page;
    if (left == 0) {
      tokens = 0;
    } else {
      tile = __shfl_sync(~0u, kept, lane & 31);
      tokens = of.end(tile);
      if constexpr (Rows::kSkipping) skipped = of.begin(tile);
    }
    left &= left - 1;
  }

  // How many of `tokens` a query of the block attends to. Rows of a sequence differ only in the newest tokens.
  __device__ __forceinline__ int tokens_of(int query, const PagedBlock& block, int group) const {
    if constexpr (Rows::kOwnEnds)
      if (of.shared(tile) < min(tokens, kPagedTile))
        return of.of_row(block.row_of(query, group), of.entry(tile), first);
    return tokens;
  }
};

// The row that is read for token i of a tile. Rows that are not attended to may hold NaN and are never read; one that
// is attended to is read instead, so that masking only has to handle scores and weights.
template <typename Rows>
__device__ __forceinline__ int row_read(int i, int tokens, int skipped) {
  i = min(i, tokens - 1);
  return Rows::kSkipping ? max(i, skipped) : i;
}

// A lane's part of the keys or values of a tile.
template <typename Rows, int kDim>
struct PagedKeys {
  static constexpr int kUnits = kDim / 32; // of 8 dimensions, per lane and token
  typename Rows::Unit unit[2][kUnits];

  // Lane (g, t) takes tokens g and g + 8, units t, t + 4, … of each.
  __device__ __forceinline__ void load(const Rows::Element* tile, int tokens, int skipped, int g, int t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto* row = tile + row_read<Rows>(g + 8 * half, tokens, skipped) * kDim + 8 * t;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) unit[half][i] = Rows::load8(row + 32 * i);
    }
  }
};

// kSpan: dimensions that are held at a time.
template <typename Rows, int kDim, int kSpan>
struct PagedValues {
  static constexpr int kWhole = kSpan / 64;                       // runs of 64 dimensions: 8 per lane
  static constexpr bool kHalf = kSpan % 64 != 0;                  // and one of 32: 4 per lane
  static constexpr int kPairs = kSpan / 16;                          // pairs of dimensions of a lane
  static constexpr int kInWord = 2 / sizeof(typename Rows::Element); // pairs per word
  uint32_t word[4][kPairs / kInWord];

  // Lane (g, t) takes dimensions 8 g + 64 i of tokens 2t, 2t + 1, 2t + 8, 2t + 9.
  __device__ __forceinline__ void load(const Rows::Element* tile, int tokens, int skipped, int g, int t) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const auto* row = tile + row_read<Rows>(2 * t + n % 2 + n / 2 * 8, tokens, skipped) * kDim;
#pragma unroll
      for (int i = 0; i < kWhole; ++i) {
        const auto x = Rows::load8(row + 64 * i + 8 * g);
        if constexpr (kInWord == 1)
          word[n][4 * i] = x.x, word[n][4 * i + 1] = x.y, word[n][4 * i + 2] = x.z, word[n][4 * i + 3] = x.w;
        else word[n][2 * i] = x.x, word[n][2 * i + 1] = x.y;
      }
      if constexpr (kHalf) {
        const auto* rest = row + 64 * kWhole + 4 * g;
        if constexpr (kInWord == 1) {
          const uint2 x = load_line8(rest);
          word[n][4 * kWhole] = x.x, word[n][4 * kWhole + 1] = x.y;
        } else {
          word[n][2 * kWhole] = load_line4(rest);
        }
      }
    }
  }

  // Pair j of the span as a fragment. A register holds the same dimension of two tokens: row g the lower dimension of
  // the pair, row g + 8 the higher one.
  __device__ __forceinline__ void fragment(int j, uint32_t (&a)[4]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t x = word[2 * n][j / kInWord], y = word[2 * n + 1][j / kInWord];
      if constexpr (kInWord == 1) {
        a[2 * n] = __byte_perm(x, y, 0x5410), a[2 * n + 1] = __byte_perm(x, y, 0x7632);
      } else {
        const uint32_t both = __byte_perm(x, y, j % 2 == 0 ? 0x5140 : 0x7362);
        a[2 * n] = half2_of_e4m3(both), a[2 * n + 1] = half2_of_e4m3(both >> 16);
      }
    }
  }

  // First dimension of a lane's pair j, counted over all spans.
  static __device__ __forceinline__ int dim(int j, int g) {
    const int start = j / kPairs * kSpan;
    j %= kPairs;
    return start + (j < 4 * kWhole ? j / 4 * 64 + 8 * g + j % 4 * 2 : kWhole * 64 + 4 * g + j % 4 * 2);
  }
};

// Of a unit's eight dimensions, rows 0 to 7 hold the first four of each query and rows 8 to 15 the others: there are
// two products with the two halves of a key's unit, and half of the rows of each counts. A lane loads query g of every
// eight; queries that the block does not have are 0.
template <typename Rows, int kDim, int kProducts>
__device__ __forceinline__ void load_paged_queries(
    uint32_t (&q)[kProducts][kDim / 32][4], const PagedInputs<Rows>& in, const PagedBlock& block, int g, int t) {
#pragma unroll
  for (int p = 0; p < kProducts; ++p, g += kPagedQueries) {
    const auto* from = in.q + block.place_of(g, in.heads, in.group) * kDim;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      const uint4 x = g < block.queries ? *reinterpret_cast<const uint4*>(from + 8 * (t + 4 * i)) : uint4{};
      q[p][i][0] = Rows::query(x.x), q[p][i][1] = Rows::query(x.z);
      q[p][i][2] = Rows::query(x.y), q[p][i][3] = Rows::query(x.w);
    }
  }
}

// The scores of a tile, queries x tokens, for each product's queries: the sums of low[.][.][0, 1] and high[.][.][2, 3].
template <typename Rows, int kDim, int kProducts>
__device__ __forceinline__ void score_tile(
    const PagedKeys<Rows, kDim>& keys, const uint32_t (&q)[kProducts][kDim / 32][4], float (&low)[kProducts][2][4],
    float (&high)[kProducts][2][4]) {
#pragma unroll
  for (int i = 0; i < keys.kUnits; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 x = Rows::widen(keys.unit[half][i]);
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
        Rows::multiply(low[p][half], q[p][i], {x.x, x.y});
        Rows::multiply(high[p][half], q[p][i], {x.z, x.w});
      }
    }
}

// A lane's results for query g so far: the largest score, the sum over the lane's own tokens. Tiles can be without
// tokens for a query whose row ends before another. So the first peak is finite: differences of -inf would be NaN.
struct PagedPeak {
  float peak = -FLT_MAX, sum = 0.0f;

  // Turns a tile's scores into weights, and returns the factor by which sums so far shrink.
  __device__ __forceinline__ float weigh(float (&x)[4]) {
    const float new_peak = fmaxf(peak, quad_max(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]))));
    const float shrink = exp2_fast(peak - new_peak);
    peak = new_peak;
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = exp2_fast(x[n] - peak);
    sum = sum * shrink + ((x[0] + x[1]) + (x[2] + x[3]));
    return shrink;
  }
};

// A lane's scores of query g times `scale`, from the result of score_tile: of tokens 2t, 2t + 1, 2t + 8, 2t + 9, those
// from `skipped` on and before `tokens`; -inf for the others.
template <typename Rows>
__device__ __forceinline__ void mask_scores(
    float (&x)[4], const float (&low)[2][4], const float (&high)[2][4], float scale, int tokens, int skipped, int t) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int i = 2 * t + n % 2 + n / 2 * 8;
    const bool attended = i < tokens && (!Rows::kSkipping || i >= skipped);
    x[n] = attended ? (low[n / 2][n % 2] + high[n / 2][n % 2 + 2]) * scale : -INFINITY;
  }
}

// Turns a lane's scores (mask_scores) into packed weights, and returns the factors by which sums of queries 2t and
// 2t + 1 shrink.
template <typename Rows>
__device__ __forceinline__ float2 weigh_tile(
    uint32_t (&weights)[2], PagedPeak& of_query, const float (&low)[2][4], const float (&high)[2][4], float scale,
    int tokens, int skipped, int t) {
  float x[4];
  mask_scores<Rows>(x, low, high, scale, tokens, skipped, t);
  const float shrink = of_query.weigh(x);
  weights[0] = Rows::pack(x[0], x[1]), weights[1] = Rows::pack(x[2], x[3]);
  return {__shfl_sync(~0u, shrink, 8 * t), __shfl_sync(~0u, shrink, 8 * t + 4)};
}

// What a block's warps exchange.
template <int kDim, int kQueries>
struct PagedShared {
  float peaks[kPagedWarps][kQueries], sums[kPagedWarps][kQueries];
  float2 accs[kPagedWarps][kQueries][kDim / 2];
  PagedBlock block; // in the loop over tiles, its numbers would take registers
  int split;

  // A warp's result for a product's queries, from `first` on: acc of dimensions (g, g + 8) x queries (2t, 2t + 1), with
  // pairs as in Values.
  template <typename Values>
  __device__ __forceinline__ void
  leave(const PagedPeak& of_query, const float (&acc)[kDim / 16][4], int first, int warp, int g, int t) {
    const float sum = quad_sum(of_query.sum);
    if (t == 0) peaks[warp][first + g] = of_query.peak, sums[warp][first + g] = sum;
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
      accs[warp][first + 2 * t][Values::dim(j, g) / 2] = {acc[j][0], acc[j][2]};
      accs[warp][first + 2 * t + 1][Values::dim(j, g) / 2] = {acc[j][1], acc[j][3]};
    }
  }
};

// Merges the warps' results for a block's queries: as the outputs, or as a split's share of them.
template <typename Rows, int kDim, int kQueries>
__device__ __forceinline__ void join_paged_warps(
    const PagedShared<kDim, kQueries>& shared, const PagedInputs<Rows>& in, const PagedOutputs& to) {
  const PagedBlock& block = shared.block;
  for (int i = threadIdx.x; i < block.queries * (kDim / 2); i += kPagedWarps * 32) {
    const int query = i / (kDim / 2), pair = i % (kDim / 2);
    float top = -INFINITY, total = 0.0f;
    float2 y = {};
#pragma unroll
    for (int w = 0; w < kPagedWarps; ++w) top = fmaxf(top, shared.peaks[w][query]);
#pragma unroll
    for (int w = 0; w < kPagedWarps; ++w) {
      // Without tokens a sum is 0, otherwise at least 1, or NaN, which must propagate.
      const float weight = shared.sums[w][query] == 0.0f ? 0.0f : exp2_fast(shared.peaks[w][query] - top);
      total += weight * shared.sums[w][query];
      y.x += weight * shared.accs[w][query][pair].x, y.y += weight * shared.accs[w][query][pair].y;
    }
    const float share = total == 0.0f ? 0.0f : in.rows.value_scale(block.last_row(), blockIdx.y) / total;
    const float log_sum = top + log2f(total);
    const int64_t row = block.place_of(query, in.heads, in.group);
    if (in.splits == 1) {
      reinterpret_cast<uint32_t*>(to.out)[row * (kDim / 2) + pair] = pack_bf16(y.x * share, y.y * share);
      if (pair == 0) to.lse[row] = log_sum * kLn2;
    } else {
      const int64_t partial = row * in.splits + shared.split;
      reinterpret_cast<float2*>(to.partial_out)[partial * (kDim / 2) + pair] = {y.x * share, y.y * share};
      if (pair == 0) to.partial_lse[partial] = log_sum;
    }
  }
}

// Grid: splits * query blocks, heads, sequences. Query blocks of a split are neighbours, so that the others find in the
// L2 cache what the first one reads.
//
// kAhead: the next tile's keys are in flight while this tile's values are used, and its values while the next keys are
// used. That takes registers for both at once, so heads of 256 do without, and load their values in two spans.
//
// kProducts: products of each fragment of keys or values, with eight queries each.
template <typename Rows, int kDim, int kBlocks, bool kAhead, int kProducts>
__global__ void __launch_bounds__(kPagedWarps * 32, kBlocks)
    paged_attention_kernel(const PagedInputs<Rows> in, const PagedOutputs to) {
  using Keys = PagedKeys<Rows, kDim>;
  using Values = PagedValues<Rows, kDim, kAhead ? kDim : kDim / 2>;
  constexpr int kPairs = kDim / 16, kQueries = kProducts * kPagedQueries;
  let_next_launch_begin(); // the merge, which waits for the results
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int split = blockIdx.x / in.query_blocks(kQueries), head = blockIdx.y;
  const auto block = PagedBlock::of<kQueries>(in);
  if (block.queries <= 0) return; // the sequence has fewer rows than others
  __shared__ PagedShared<kDim, kQueries> shared;
  if (threadIdx.x == 0) shared.block = block, shared.split = split;
  if constexpr (Rows::kOwnEnds) __syncthreads();

  // A split takes every splits-th page: all splits of a sequence have equal length, however little of its row is used.
  PagedTiles<Rows> tiles = {
      in.rows.tokens(block.last_row(), block.first_row), in.pages + block.last_row() * in.pages_row, split, in.splits,
      in.entries, warp * kPagedTile};
  tiles.advance();

  uint32_t q[kProducts][Keys::kUnits][4];
  load_paged_queries<Rows, kDim>(q, in, block, g, t);
  const int64_t offset = (int64_t(head) * kPage + warp * kPagedTile) * kDim;
  const auto *const k = in.k + offset, *const v = in.v + offset;
  // Scores are in units of log 2.
  const float scale = kLog2E * rsqrtf(float(kDim)) * in.rows.key_scale(block.last_row(), head);
  PagedPeak of_query[kProducts];
  float acc[kProducts][kPairs][4] = {}; // dimensions (g, g + 8) x queries (2t, 2t + 1)

  Keys keys;
  Values values;
  if (tiles.tokens > 0) {
    keys.load(k + tiles.page * in.k_page, tiles.tokens, tiles.skipped, g, t);
    if constexpr (kAhead) values.load(v + tiles.value_page * in.v_page, tiles.tokens, tiles.skipped, g, t);
  }
  while (tiles.tokens > 0) {
    int own[kProducts];
#pragma unroll
    for (int p = 0; p < kProducts; ++p) own[p] = tiles.tokens_of(p * kPagedQueries + g, shared.block, in.group);
    float low[kProducts][2][4] = {}, high[kProducts][2][4] = {};
    score_tile(keys, q, low, high);
    const int tokens = tiles.tokens, skipped = tiles.skipped;
    const auto* value_tile = v + tiles.value_page * in.v_page;
    tiles.advance();
    if constexpr (kAhead)
      if (tiles.tokens > 0) keys.load(k + tiles.page * in.k_page, tiles.tokens, tiles.skipped, g, t);

    float2 shrink[kProducts];
    uint32_t weights[kProducts][2];
#pragma unroll
    for (int p = 0; p < kProducts; ++p)
      shrink[p] = weigh_tile<Rows>(weights[p], of_query[p], low[p], high[p], scale, own[p], skipped, t);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int pair = j % Values::kPairs;
      if constexpr (!kAhead)
        if (pair == 0) values.load(value_tile + Values::dim(j, 0), tokens, skipped, g, t);
      uint32_t value[4];
      values.fragment(pair, value);
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
        acc[p][j][0] *= shrink[p].x, acc[p][j][1] *= shrink[p].y;
        acc[p][j][2] *= shrink[p].x, acc[p][j][3] *= shrink[p].y;
        Rows::multiply(acc[p][j], value, weights[p]);
      }
    }
    if (tiles.tokens > 0) {
      if constexpr (kAhead) values.load(v + tiles.value_page * in.v_page, tiles.tokens, tiles.skipped, g, t);
      else keys.load(k + tiles.page * in.k_page, tiles.tokens, tiles.skipped, g, t);
    }
  }

#pragma unroll
  for (int p = 0; p < kProducts; ++p)
    shared.template leave<Values>(of_query[p], acc[p], p * kPagedQueries, warp, g, t);
  __syncthreads();
  join_paged_warps(shared, in, to);
}

} // namespace shadowkv
