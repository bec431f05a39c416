// Attention of one query per sequence over selected chunks, from the form they are stored in, in one kernel: latents
// become keys (K = A B + mean), keys are RoPE-rotated, scored and weighed, and coded values are decoded, all between
// the fragments of one tensor-core product and the next. Memory sees each latent and each code once per kv head.
//
// A block takes tiles of one sequence and kv head; each warp has its own tiles and its own softmax. The basis slice of
// the head is in shared memory. A warp takes 32 tokens at a time if registers allow: with 16, the reads of the basis
// from shared memory, one per fragment and tile, would take longer than the products. A position's cos and sin are the
// product of those from two tables: for the multiple of eight below it, in the L2 cache, and for the rest.
#pragma once

#include "keys.cuh"
#include "load.cuh"
#include "merge.cuh"

namespace shadowkv {

template <class Shape>
__global__ __launch_bounds__(kAttendWarps * 32, Shape::kBlocks) void attend_selected_kernel(
    const AttendInputs in, const AttendOutputs to) {
  constexpr int kTiles = Shape::kTiles, kTokens = Shape::kTokens, kScales = Shape::kScales;
  extern __shared__ __align__(128) char shared[];
  const int head = blockIdx.y, batch = blockIdx.z, g = threadIdx.x % 32 / 4;
  const int rank = Shape::kExactRank ? Shape::kRank : in.rank;
  const AttendTables<Shape> tables(shared, rank);
  const AttendTile<Shape> tile(shared, rank);

  // The first tile's page ids are in flight while the tables are filled.
  TileWalk<Shape> walk(in, tile);
  const int64_t state = Shape::kAngles ? in.states[batch] : 0;
  const int first = Shape::kAngles ? int(in.first[batch]) : 0;
  const float score_scale = in.score_scale * (Shape::kFp8Keys ? in.key_scales.of(batch, head) : 1.f);
  const float value_scale = Shape::kFp8Values ? in.value_scales.of(batch, head) : 1.f;
  walk.advance();
  fill_tables(in, tables, rank, state);
  uint32_t valid = walk.start(first);
  walk.advance();
  wait_copy_groups<0>();
  __syncthreads();

  AttendSums<Shape> sums;
  while (valid) {
    walk.store_scales();
    wait_copy_groups<0>();
    __syncwarp();

    float s[kTiles][4] = {}; // scores: (tokens g, g + 8; queries 2t, 2t + 1)
    WarpKeys<Shape> keys;
    keys.load(s, in, tables, tile, rank);
    if constexpr (Shape::kCentred) keys.add_mean(s, score_scale, in, tables, tile);
    WarpValues<Shape> values;
    values.load(in, tile);
    close_copy_group();
    float log_weight[kTiles][2] = {}; // of tokens g, g + 8; in flight while the keys are computed
    if (in.log_weight) {
      const float* const of_unit = in.log_weight + (int64_t(batch) * in.heads + head) * in.chunks;
      const int token = (walk.tile - 2 * walk.stride) * kTokens + g; // the walk is two tiles ahead
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i)
        log_weight[i / 2][i % 2] = __ldg(of_unit + min(token + 8 * i >> in.log_chunk, in.chunks - 1));
    }
    const uint32_t valid_now = valid;
    float scale[kScales][kTiles][2] = {};
#pragma unroll
    for (int c = 0; Shape::kCodes && c < kScales; ++c) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) scale[c][i / 2][i % 2] = tile.scales[c * kTokens + 8 * i + g];
    }
    __syncwarp();
    valid = walk.start(first);
    walk.advance();

    keys.score(s, tables, rank);
    uint32_t p[kScales][kTiles][2];
    sums.weigh(p, s, valid_now, Shape::kCentred ? 1.f : score_scale, log_weight, scale);
    values.add(sums, p, tile);
  }
  join_warps(in, to, sums, value_scale, shared);
}

} // namespace shadowkv
