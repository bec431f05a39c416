// Values of a consumer's tile, and their sums.
#pragma once

#include "shape.cuh"

namespace shadowkv {

// A row of codes in shared memory, whose 16-byte units may have changed places.
struct StagedRow {
  uint32_t address;
  int moved; // XORed with a byte's index to find its place

  template <int kBytes>
  __device__ __forceinline__ void read(uint32_t* to, int at) const {
    const uint32_t from = address + (at ^ moved);
    if constexpr (kBytes == 16) {
      const uint4 x = load_shared16(from);
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else if constexpr (kBytes == 8) {
      const uint2 x = load_shared8(from);
      to[0] = x.x, to[1] = x.y;
    } else {
      to[0] = kBytes == 4 ? load_shared4(from) : kBytes == 2 ? load_shared2(from) : load_shared1(from);
    }
  }
};

// A warp's share of a tile's values: codes of tokens 2t, 2t + 1 and of those 8 further on, scales of tokens g, g + 8.
template <class Shape>
struct TileValues {
  typename Shape::Value::template Pair<Shape::kDim> codes[2];
  float scale[2]; // negative for no token

  __device__ __forceinline__ void load(uint32_t rows, uint32_t places) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    typename Shape::Value::template Codes<Shape::kDim> lane_codes[4];
    const uint32_t first = rows + row_at<Shape>(2 * t);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t next = Shape::kSwapped ? first ^ Shape::kCodeRow : first + Shape::kCodeRow;
      lane_codes[j].load(
          StagedRow{(j % 2 ? next : first) + j / 2 * 8 * Shape::kCodeRow, moved_at<Shape>(2 * t)}, g);
    }
    codes[0] = {lane_codes[0], lane_codes[1]}, codes[1] = {lane_codes[2], lane_codes[3]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 place = load_shared8(places + half * 128 + 8); // two steps, position
      scale[half] = place.y & 1 ? __high2float(half2_of(place.x)) : __low2float(half2_of(place.x));
      if (int(place.y) < 0) scale[half] = -1;
    }
  }
};

// A warp's results for a unit, by sets of its queries.
template <class Shape>
struct Attended {
  static constexpr int kSets = Shape::kSets;
  // (dimensions 16 i + g, + 8; queries 2t, 2t + 1); with few queries, from t = 2 on, dimensions dim / 2 further on.
  float o[kSets][Shape::kSums][4] = {};
  // For queries 2t, 2t + 1: the score that weights are relative to.
  float top[kSets][2];
  // Where a warpgroup's threads keep the sums of weights and of weights x scale of these queries: in shared memory, as
  // registers are scarce.
  const uint32_t totals;

  __device__ __forceinline__ explicit Attended(uint32_t totals_) : totals(totals_) {
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      top[set][0] = top[set][1] = -INFINITY;
      store_shared16(my_totals(set), {});
    }
  }
  __device__ __forceinline__ uint32_t my_totals(int set) const {
    return totals + (set * 128 + this_thread() % 128) * 16;
  }

  // Scores s (tokens g, g + 8; queries 2t, 2t + 1), -inf for no token.
  __device__ __forceinline__ void add(const float (&s)[kSets][4], const TileValues<Shape>& values) {
    constexpr int kSums = Shape::kSums;
    const int g = threadIdx.x % 32 / 4;
    uint32_t p[kSets][2]; // weights as the second factor: (tokens 2t, 2t + 1; query g)
#pragma unroll
    for (int set = 0; set < kSets; ++set) weigh(p[set], set, s[set], values.scale);
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      uint32_t v[4];
      if constexpr (Shape::kFew) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          values.codes[half].decode(j, v[0], v[1]);
          values.codes[half].decode(j + kSums, v[2], v[3]);
          mma_bf16(o[0][j], v, {g < 4 ? p[0][half] : 0, g < 4 ? 0 : p[0][half]});
        }
      } else {
        values.codes[0].decode(j, v[0], v[1]);
        values.codes[1].decode(j, v[2], v[3]);
#pragma unroll
        for (int set = 0; set < kSets; ++set) mma_bf16(o[set][j], v, p[set]);
      }
    }
  }

  // Turns a set's scores into weights times their tokens' scales, relative to a score that may change here.
  __device__ __forceinline__ void weigh(uint32_t (&p)[2], int set, const float (&s)[4], const float (&scale)[2]) {
    // Weights may exceed one, up to 2^8, before their reference moves, which is rare.
    const float highest[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
    float4 total = __builtin_bit_cast(float4, load_shared16(my_totals(set)));
    if (__any_sync(~0u, highest[0] > top[set][0] + 8 || highest[1] > top[set][1] + 8)) {
      float shrink[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float next_top = fmaxf(top[set][j], rows_max(highest[j]));
        shrink[j] = exp2_fast(top[set][j] - next_top), top[set][j] = next_top;
      }
      total.x *= shrink[0], total.y *= shrink[1], total.z *= shrink[0], total.w *= shrink[1];
#pragma unroll
      for (int j = 0; j < Shape::kSums; ++j) {
#pragma unroll
        for (int l = 0; l < 4; ++l) o[set][j][l] *= shrink[l % 2];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float x = exp2_fast(s[2 * half] - top[set][0]), y = exp2_fast(s[2 * half + 1] - top[set][1]);
      total.x += x, total.y += y;
      const uint32_t both = pack_bf16(x * scale[half], y * scale[half]);
      total.z += unpack_bf16(both).x, total.w += unpack_bf16(both).y;
      p[half] = transpose_matrix(both);
    }
    store_shared16(my_totals(set), __builtin_bit_cast(uint4, total));
  }

  // Computes one partial result from the sums of a consumer's four warps, in `sums` in shared memory (which may start
  // with the totals); uses a separate barrier.
  __device__ __forceinline__ void write(float* partial, int group, float* sums, int barrier) {
    constexpr int kDim = Shape::kDim, kQueries = Shape::kQueries, kMergeRow = Shape::kMergeRow;
    using Pair = typename Shape::Value::template Pair<kDim>;
    static_assert(Shape::kSums % 2 == 0); // so that dimensions 16 i on and those of another lane's have the same factor
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    float coded[kSets][2];
    float2* const states = reinterpret_cast<float2*>(sums + 2 * kQueries * kMergeRow);
    const int query = 2 * t % Shape::kColumns; // of each set
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const float4 total = __builtin_bit_cast(float4, load_shared16(my_totals(set)));
      const float sum[2] = {rows_sum(total.x), rows_sum(total.y)};
      coded[set][0] = rows_sum(total.z), coded[set][1] = rows_sum(total.w);
      if (g < 2 && 2 * t < Shape::kColumns)
        states[warp * kQueries + 8 * set + query + g] =
            g == 0 ? make_float2(top[set][0], sum[0]) : make_float2(top[set][1], sum[1]);
    }
    sync_threads(barrier, 128);
    float share[kSets][2];
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float highest = -INFINITY;
#pragma unroll
        for (int w = 0; w < 4; ++w) highest = fmaxf(highest, states[w * kQueries + 8 * set + query + j].x);
        share[set][j] = highest > -INFINITY ? exp2_fast(top[set][j] - highest) : 0.f;
      }
    }
    float* const mine = sums + (warp % 2 * kQueries + query) * kMergeRow + 2 * t / Shape::kColumns * kDim / 2 + g;
#pragma unroll
    for (int turn_of = 0; turn_of < 2; ++turn_of) {
      if (warp / 2 == turn_of) {
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
#pragma unroll
          for (int i = 0; i < Shape::kSums; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              float& x = mine[(8 * set + j % 2) * kMergeRow + 16 * i + j / 2 * 8];
              const float own = fmaf(coded[set][j % 2], Pair::offset(i), o[set][i][j] * Pair::factor(i));
              x = own * share[set][j % 2] + (turn_of ? x : 0.f);
            }
          }
        }
      }
      sync_threads(barrier, 128);
    }
    for (int i = thread; i < group * (kDim / 4); i += 128) {
      const int query = i / (kDim / 4), at = i % (kDim / 4) * 4;
      const float4 x = *reinterpret_cast<const float4*>(sums + query * kMergeRow + at);
      const float4 y = *reinterpret_cast<const float4*>(sums + (kQueries + query) * kMergeRow + at);
      *reinterpret_cast<float4*>(partial + query * kMergeRow + at) =
          make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
      if (at == 0) {
        float highest = -INFINITY, total = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) highest = fmaxf(highest, states[w * kQueries + query].x);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 state = states[w * kQueries + query];
          if (state.x > -INFINITY) total += state.y * exp2_fast(state.x - highest);
        }
        *reinterpret_cast<float2*>(partial + query * kMergeRow + kDim) = make_float2(highest, total);
      }
    }
    sync_threads(barrier, 128);
  }
};

} // namespace shadowkv
