// Decode attention over all sealed tokens in their coded form: split-KV with an online softmax, in two kernels.
//
// At the memory's speed a multiprocessor of an H200 gets 40 codes of 4 bits a clock, and has one and a half integer
// operations for each. So levels are bytes, looked up four at a time by byte permutations, and all products are of
// integers: queries and weights are 16-bit fixed point, two columns of bytes, whose products are exact. Nothing is
// transposed on the way from memory to the tensor cores. Products with keys may take dimensions in any order. Those
// with values sum over tokens, and a register has four dimensions of one token: they count as four tokens of which the
// weights leave one, a product for each.
//
// A block takes a share of the pages of one sequence and kv head for four query heads, each of its warps a page at a
// time. A warp has room for one page of keys and one of values in shared memory. Its next page's keys travel while its
// values are used, its next values while those keys are.
#pragma once

#include <type_traits>

#include "attend_coded/codes.cuh"
#include "attend_coded/mean.cuh"
#include "attend_coded/queries.cuh"
#include "merge_splits.cuh"

namespace shadowkv {

// Warps of a block and blocks of a multiprocessor. Blocks with centred keys share a table, and are larger.
template <bool kCentred>
constexpr int kCodedWarps = kCentred ? 8 : 4;
template <bool kCentred>
constexpr int kCodedBlocks = kCentred ? 2 : 5;

// Keys or values. Strides in bytes between consecutive page names.
struct CodedPages {
  const uint8_t* codes; // pages of [heads, 64, bytes]
  const __half* scales; // pages of [heads, 64]
  const int64_t* pages; // [batch, entries]
  const int64_t* scale_pages;
  uint32_t page, scale_page;
  int64_t pages_row, scale_pages_row;
  LevelBytes levels;
  float step;

  __device__ __forceinline__ const uint8_t* rows(uint32_t name, int head, int row) const {
    return codes + uint64_t(name) * page + head * (kPage * row);
  }
  __device__ __forceinline__ const __half* scales_of(uint32_t name, int head) const {
    return reinterpret_cast<const __half*>(reinterpret_cast<const uint8_t*>(scales) + uint64_t(name) * scale_page) +
           head * kPage;
  }
};

struct CodedInputs {
  const float* q; // [batch, heads * group, 128], dense, multiplied by the keys' rotation
  CodedPages keys, values;
  const int64_t* begin; // [batch]
  const int64_t* end;
  int batch, heads, group, entries, splits;
};

// A warp's weights of a page: bytes of query g / 2 in row g, the upper ones in even rows.
struct alignas(16) CodedWeights {
  uint8_t row[2 * kCodedQueries][kPage + 16];
};

// What a warp has in the end, by query.
struct CodedResults {
  float peak[kCodedQueries], sum[kCodedQueries];
  float out[kCodedQueries][kCodedDim + 8];
};

template <int kKeyBits, int kValueBits>
struct CodedWork {
  CodedPage<kKeyBits> keys;
  CodedPage<kValueBits> values;
  CodedWeights weights;
};

template <int kKeyBits, int kValueBits, bool kCentred>
struct CodedShared {
  union {
    CodedWork<kKeyBits, kValueBits> work;
    CodedResults results;
  } warp[kCodedWarps<kCentred>];
  CodedQueriesShared asked;
  std::conditional_t<kCentred, MeanShared, NoMeanShared> mean;
};

// Over the lanes with the same t.
__device__ __forceinline__ float max_over_rows(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = max_or_nan(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

__device__ __forceinline__ float sum_over_rows(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ void eight_floats(const uint4& x, float (&y)[8]) {
  const uint32_t pair[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = __half22float2(half2_of(pair[i]));
    y[2 * i] = two.x, y[2 * i + 1] = two.y;
  }
}

// Products 2 (256 upper + lower) + sum of query t and the eight tokens of g, exact. Row g of tile i is token 2 i, row
// g + 8 the next one.
template <int kBits>
__device__ __forceinline__ void coded_scores(
    const CodedPage<kBits>& keys, const LevelBytes& levels, const CodedQueriesShared& asked, int g, int t,
    float (&scores)[8]) {
  const uint4* quads = reinterpret_cast<const uint4*>(asked.quads) + 4 * g + t;
  const uint4 first = quads[0], second = quads[32];
  const uint32_t q[4][2] = {{first.x, first.y}, {first.z, first.w}, {second.x, second.y}, {second.z, second.w}};
  const int sum = asked.sum[t];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t word[Codes<kBits>::kWords], even[2][4], odd[2][4];
    keys.load_key(i, 0, g, t, word);
    Codes<kBits>::decode(word, levels, even);
    keys.load_key(i, 1, g, t, word);
    Codes<kBits>::decode(word, levels, odd);
    int32_t c[4] = {};
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const int unit = s / 2, quad = s % 2 * 2;
      mma_s8s8(c, {even[unit][quad], odd[unit][quad], even[unit][quad + 1], odd[unit][quad + 1]}, q[s]);
    }
    scores[2 * i] = float(512 * c[0] + (2 * c[1] + sum)), scores[2 * i + 1] = float(512 * c[2] + (2 * c[3] + sum));
  }
}

// Weighs a page: acc = acc * fade + unit * bytes x integer weights, of query t and the dimensions of lane g's values.
template <int kBits>
__device__ __forceinline__ void coded_values(
    const CodedPage<kBits>& values, const LevelBytes& levels, const uint4& weights, float fade, float unit, int g,
    int t, float (&acc)[4][4]) {
  const uint32_t weight[4] = {weights.x, weights.y, weights.z, weights.w}; // of four tokens each
  int32_t c[2][4][4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t quad[2][4];
    values.decode_values(i, g, t, levels, quad);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      // The byte of a token at place r, where the dimensions are that are r-th in their quads; zeros elsewhere.
      const uint32_t place = 0xfu << 4 * r, first = i % 2 * 2;
      const uint32_t b[2] = {
          permute(weight[i / 2], 0, (0x4444 & ~place) | first << 4 * r),
          permute(weight[i / 2], 0, (0x4444 & ~place) | (first + 1) << 4 * r)};
      mma_s8u8(c[0][r], {quad[0][0], quad[0][1], quad[1][0], quad[1][1]}, b);
      mma_s8u8(c[1][r], {quad[0][2], quad[0][3], quad[1][2], quad[1][3]}, b);
    }
  }
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int32_t whole = 256 * c[n / 2][r][n % 2 * 2] + c[n / 2][r][n % 2 * 2 + 1];
      acc[n][r] = acc[n][r] * fade + float(whole) * unit;
    }
}

// Queries' bytes as the words that coded_scores reads, in the keys' order of dimensions.
template <int kWarps, int kBits>
__device__ __forceinline__ void arrange_queries(const CodedPage<kBits>& keys, CodedQueriesShared& asked) {
  for (int i = threadIdx.x; i < 2 * 32 * 4; i += kWarps * 32) {
    const int unit = i / 128, row = i % 128 / 16, quad = i % 4;
    uint32_t x = 0;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte)
      x |= uint32_t(uint8_t(asked.byte[row][keys.key_dim(unit, quad, byte, i / 4 % 4)])) << 8 * byte;
    asked.quads[i] = x;
  }
}

// Which of a page's tokens are attended to, by the places of lane g's: 2 g + 16 i, + 1.
struct CodedSpan {
  uint32_t start, span;
  __device__ __forceinline__ bool has(int i) const { return start + (i / 2 * 16 + i % 2) < span; }
};

// Writes a lane's eight weights x in fixed point, the largest of the warp's as 65535, where lane t reads those of g = t
// and g = t + 4. Returns what they add up to.
__device__ __forceinline__ uint32_t
quantise_weights(const float (&x)[8], float largest, int g, int t, CodedWeights& weights) {
  // Integers up to 65535 are the last bits of floats from 2^23 on.
  const float inverse = largest > 1e-30f ? __fdividef(65535.0f, largest) : 0.0f;
  uint32_t whole[8], all = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    whole[i] = __float_as_uint(fmaf(x[i], inverse, 8388608.0f));
    all += whole[i] - __float_as_uint(8388608.0f);
  }
  uint32_t pair[4]; // lower and then upper bytes of two tokens
#pragma unroll
  for (int i = 0; i < 4; ++i) pair[i] = permute(whole[2 * i], whole[2 * i + 1], 0x5140);
  const uint2 upper = {permute(pair[0], pair[1], 0x7632), permute(pair[2], pair[3], 0x7632)};
  const uint2 lower = {permute(pair[0], pair[1], 0x5410), permute(pair[2], pair[3], 0x5410)};
  *reinterpret_cast<uint2*>(&weights.row[2 * t][g % 4 * 16 + g / 4 * 8]) = upper;
  *reinterpret_cast<uint2*>(&weights.row[2 * t + 1][g % 4 * 16 + g / 4 * 8]) = lower;
  return all;
}

// What a lane has of query t so far.
struct CodedSums {
  float peak = -INFINITY, sum = 0.0f, ones = 0.0f; // sums over the lane's own tokens
  float acc[4][4] = {};                            // quads of lane g x places in them

  // Takes the peak of a page's scores in, and returns what sums so far shrink by.
  __device__ __forceinline__ float raise_peak(float top) {
    // Every page has a token, so the new peak is finite, or NaN, which has to show.
    const float new_peak = max_or_nan(peak, max_over_rows(top)), fade = exp2_fast(peak - new_peak);
    peak = new_peak;
    return fade;
  }

  // Makes a page's scores x weights, in multiples of the values' scales; returns the largest.
  __device__ __forceinline__ float weigh(float (&x)[8], const float (&scale)[8], const CodedSpan& span, float fade) {
    float largest = 0.0f, total = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = exp2_fast(x[i] - peak);
      total += x[i];
      x[i] = span.has(i) ? x[i] * scale[i] : 0.0f;
      largest = max_or_nan(largest, x[i]);
    }
    sum = sum * fade + total;
    return max_over_rows(largest);
  }

  // `results` may be in place of what the warp no longer reads.
  template <int kBits>
  __device__ __forceinline__ void
  leave(CodedResults& results, const CodedPage<kBits>& values, float step, int g, int t) {
    sum = sum_over_rows(sum), ones = sum_over_rows(ones);
    if (g == 0) results.peak[t] = peak, results.sum[t] = sum;
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) results.out[t][values.value_dim(n, r, g)] = (2.0f * acc[n][r] + ones) * step;
  }
};

// Joins the warps' results of a block's queries: as the outputs, or as a split's share in them.
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
      // Without tokens a sum is 0, otherwise at least 1, or NaN, which has to show.
      const CodedResults& found = shared.warp[w].results;
      const float weight = found.sum[query] == 0.0f ? 0.0f : exp2_fast(found.peak[query] - top);
      total += weight * found.sum[query], y += weight * found.out[query][dim];
    }
    y = total == 0.0f ? 0.0f : y / total;
    const float log_sum = top + log2f(total);
    const int64_t row = first_row + query, partial = row * splits + split;
    if (splits == 1) {
      to.out[row * kCodedDim + dim] = y;
      if (dim == 0) to.lse[row] = log_sum * 0.69314718055994531f;
    } else {
      to.partial_out[partial * kCodedDim + dim] = y;
      if (dim == 0) to.partial_lse[partial] = log_sum;
    }
  }
}

// Scores of a page in units of log 2, on top of what the mean key has given to x; -inf of tokens that are not attended
// to. Returns the largest of the lane's.
template <bool kCentred>
__device__ __forceinline__ float
finish_scores(float (&x)[8], const float (&products)[8], const float (&scale)[8], float unit, const CodedSpan& span) {
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float score = products[i] * (unit * scale[i]);
    if constexpr (kCentred) x[i] += score;
    else x[i] = score;
    x[i] = span.has(i) ? x[i] : -INFINITY;
    top = max_or_nan(top, x[i]);
  }
  return top;
}

// Grid: splits * query blocks, heads, batch. A block's query blocks are neighbours, so that what the first one reads
// the others find in the second-level cache. A CodedShared of dynamic shared memory.
template <int kKeyBits, int kValueBits, bool kCentred>
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
  auto& shared = *reinterpret_cast<CodedShared<kKeyBits, kValueBits, kCentred>*>(coded_memory);
  CodedQueriesShared& asked = shared.asked;
  auto& mean = shared.mean;
  // By themselves: made from one reference to all, their addresses took registers that spilled.
  auto& keys = shared.warp[warp].work.keys;
  auto& values = shared.warp[warp].work.values;
  auto& weights = shared.warp[warp].work.weights;

  // Warps of all splits take pages in turn: all are equally long, however little of its row a sequence uses.
  const int low = int(in.begin[sequence]), high = int(in.end[sequence]);
  const int last = high > low ? min(in.entries, (high + kPage - 1) / kPage) : 0, turn = in.splits * kWarps;
  int page = low / kPage + split * kWarps + warp;
  // Lane 4 i + n reads the name of a page in table n: keys, their scales, values, theirs. Names are below 2^32.
  const CodedPages& side = t < 2 ? in.keys : in.values;
  const int64_t* table =
      t % 2 == 0 ? side.pages + sequence * side.pages_row : side.scale_pages + sequence * side.scale_pages_row;
  uint32_t names = page < last ? uint32_t(table[page]) : 0;
  // A copy group each, empty ones behind the last page.
  const auto copy = [&](auto& to, const CodedPages& from, int place, bool wanted) {
    if (wanted) {
      const uint8_t* const rows = from.rows(__shfl_sync(~0u, names, place), head, to.kRow);
      to.copy(rows, from.scales_of(__shfl_sync(~0u, names, place + 1), head), lane);
    }
    close_copy_group();
  };
  copy(keys, in.keys, 0, page < last), copy(values, in.values, 2, page < last);
  names = page + turn < last ? uint32_t(table[page + turn]) : 0;

  const float log2e_scale = 1.4426950408889634f * rsqrtf(float(kCodedDim));
  quantise_queries(in.q + first_row * kCodedDim, queries, in.keys.step * log2e_scale, asked);
  if constexpr (kCentred) mean.fill(mean_in, sequence, head, first_row, queries);
  __syncthreads();
  arrange_queries<kWarps>(keys, asked);
  __syncthreads();

  CodedSums sums;
  float later[8]; // the mean key's terms, which are found for two pages at a time
  bool known = false;
  for (; page < last; page += turn) {
    float x[8], scale[8];
    if constexpr (kCentred) {
      if (known) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = later[i];
      } else {
        mean.terms(mean_in, mean_in.first[sequence] + int64_t(page + g % 2 * turn) * kPage, g, t, x, later);
      }
      known = !known;
    }
    wait_copy_groups<1>(), __syncwarp(); // the keys are here
    float products[8];
    coded_scores<kKeyBits>(keys, in.keys.levels, asked, g, t, products);
    eight_floats(keys.scales_of(g), scale);
    const bool more = page + turn < last;
    __syncwarp(); // all have read them
    copy(keys, in.keys, 0, more);

    const CodedSpan span = {uint32_t(page * kPage + 2 * g - low), uint32_t(high - low)};
    const float fade = sums.raise_peak(finish_scores<kCentred>(x, products, scale, asked.unit[t], span));
    wait_copy_groups<1>(), __syncwarp(); // the values are here
    eight_floats(values.scales_of(g), scale);
    const float largest = sums.weigh(x, scale, span, fade), unit = largest * (1.0f / 65535.0f);
    sums.ones = sums.ones * fade + float(quantise_weights(x, largest, g, t, weights)) * unit;
    __syncwarp();
    const uint4 mine = *reinterpret_cast<const uint4*>(&weights.row[g][16 * t]);
    coded_values<kValueBits>(values, in.values.levels, mine, fade, unit, g, t, sums.acc);
    __syncwarp(); // all have read values and weights
    copy(values, in.values, 2, more);
    names = page + 2 * turn < last ? uint32_t(table[page + 2 * turn]) : 0;
  }

  sums.leave(shared.warp[warp].results, values, in.values.step, g, t);
  __syncthreads();
  join_coded_warps<kWarps>(shared, to, first_row, queries, split, in.splits);
}

} // namespace shadowkv
