// Keys of a warp's tile: from their stored form to scores.
#pragma once

#include "shape.cuh"

namespace shadowkv {

// Fills the table of the products of a block's queries q with the mean m. A token's score is by the angle a of its
// position, summed over pairs of dimensions x and y, (q_x m_x + q_y m_y) cos a + (q_y m_x - q_x m_y) sin a. The second
// factor of a product: lanes have these two terms of pairs 8 j + 2t, + 1, for query g.
template <class Shape>
__device__ __forceinline__ void fill_mean_products(
    const AttendInputs& in, const AttendTables<Shape>& to, int64_t state) {
  constexpr int kDim = Shape::kDim;
  const int head = blockIdx.y, batch = blockIdx.z;
  const BlockQueries block(in);
  const float* const mean = static_cast<const float*>(in.mean) + state * in.mean_state + head * kDim;
  for (int i = threadIdx.x; i < Shape::kPairs * 32; i += kAttendWarps * 32) {
    const int query = i % 32 / 4, eight = i / 32;
    float2 along = {}, across = {};
    if (query < block.count) {
      const __nv_bfloat16* from = in.q + ((int64_t(batch) * in.heads + head) * in.group + block.first + query) * kDim;
      float2 q[2], m[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int dim = in.rope.dim_of<kDim>(eight, half) + i % 4 * 2;
        q[half] = unpack_bf16(__ldg(reinterpret_cast<const uint32_t*>(from + dim)));
        m[half] = *reinterpret_cast<const float2*>(mean + dim);
      }
      const float scale = in.score_scale * in.rope.factor(eight) / in.rope.still; // rotated ones have the magnitude
      along = make_float2((q[0].x * m[0].x + q[1].x * m[1].x) * scale, (q[0].y * m[0].y + q[1].y * m[1].y) * scale);
      across = make_float2((q[1].x * m[0].x - q[0].x * m[1].x) * scale, (q[1].y * m[0].y - q[0].y * m[1].y) * scale);
    }
    reinterpret_cast<uint2*>(to.mean)[i] = make_uint2(pack_f16(along.x, along.y), pack_f16(across.x, across.y));
  }
}

// Fills the tables of a block for one sequence and head. Copies complete with the thread's other copies.
template <class Shape>
__device__ __forceinline__ void fill_tables(
    const AttendInputs& in, const AttendTables<Shape>& to, int rank, int64_t state) {
  constexpr int kDim = Shape::kDim, kPairs = Shape::kPairs;
  const int head = blockIdx.y, batch = blockIdx.z;
  const BlockQueries block(in);
  if constexpr (Shape::kLow) {
    const __nv_bfloat16* from = in.basis + state * in.basis_state + head * kDim;
    constexpr int kUnits = kDim / 8;
#pragma unroll 5
    for (int i = threadIdx.x; i < rank * kUnits; i += kAttendWarps * 32) {
      const int row = i / kUnits, unit = i % kUnits;
      const int place = unit ^ (row / 8 % 4 * 2 + row % 2); // matches how the eight rows of a matrix are read below
      char* const into = to.basis + row * Shape::kBasisRow + place * 16;
      const __nv_bfloat16* const at =
          from + int64_t(row) * in.heads * kDim + in.rope.dim_of<kDim>(unit % kPairs, unit / kPairs);
      if constexpr (Shape::Key::kHalf) {
        // Half, to which int8 converts faster than to bf16. Entries under 6e-5 lose bits; for keys around one, none do.
        uint4 x = __ldg(reinterpret_cast<const uint4*>(at));
        for (uint32_t* y : {&x.x, &x.y, &x.z, &x.w}) *y = bits(__float22half2_rn(unpack_bf16(*y)));
        *reinterpret_cast<uint4*>(into) = x;
      } else {
        copy16_async(shared_address(into), at);
      }
    }
    // The mean and the queries lie as lanes need them: two dimensions and the two that RoPE pairs them with.
    if (threadIdx.x < kDim / 4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t at = state * in.mean_state + head * kDim +
            in.rope.dim_of<kDim>(threadIdx.x / 4, half) + threadIdx.x % 4 * 2;
        float2 x = make_float2(0, 0);
        if (in.mean != nullptr && in.mean_is_float)
          x = *reinterpret_cast<const float2*>(static_cast<const float*>(in.mean) + at);
        else if (in.mean != nullptr)
          x = unpack_bf16(
              *reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(in.mean) + at));
        reinterpret_cast<__half2*>(to.mean)[2 * threadIdx.x + half] = __float22half2_rn(x);
      }
    }
  }
  if constexpr (Shape::kAngles) {
    for (int i = threadIdx.x; i < kDim; i += kAttendWarps * 32) {
      constexpr int kRowUnits = kDim / 8;
      copy16_async(
          shared_address(to.near_angles + i / kRowUnits * Shape::kAngleRow + i % kRowUnits * 16),
          reinterpret_cast<const char*>(in.near_angles) + i * 16);
    }
  }
  if constexpr (Shape::kCentred) fill_mean_products(in, to, state);
#pragma unroll
  for (int i = threadIdx.x; i < kPairs * 32; i += kAttendWarps * 32) {
    const int query = i % 32 / 4, eight = i / 32;
    const __nv_bfloat16* from =
        in.q + ((int64_t(batch) * in.heads + head) * in.group + block.first + query) * kDim + i % 4 * 2;
    uint32_t x[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int dim = Shape::kLow ? in.rope.dim_of<kDim>(eight, half)
          : Shape::kFp8Keys      ? 16 * eight + i % 4 * 2 + half * 2 // four in a row for a lane: see below
                                 : 8 * eight + half * kDim / 2;
      if (query < block.count) x[half] = __ldg(reinterpret_cast<const uint32_t*>(from + dim));
      if constexpr (Shape::kLow || Shape::kFp8Keys) {
        const float2 both = unpack_bf16(x[half]);
        const float factor = Shape::kLow ? in.rope.factor(eight) : 1.f;
        x[half] = bits(__floats2half2_rn(both.x * factor, both.y * factor));
      }
    }
    to.queries[i] = make_uint2(x[0], x[1]);
  }
}

// Scores are s (tokens g, g + 8; queries 2t, 2t + 1) for every 16 tokens. `load` scores the rows of a tile, or turns
// its latents into fragments, from which `score` rebuilds keys.
template <class Shape, bool kRebuilt = Shape::kLow>
struct WarpKeys {
  static constexpr int kRow = Shape::key_row(0);

  __device__ __forceinline__ void load(
      float (&s)[Shape::kTiles][4], const AttendInputs&, const AttendTables<Shape>& tables,
      const AttendTile<Shape>& tile, int) {
    if constexpr (Shape::kFp8Keys) score_fp8(s, tables, tile);
    else score_bf16(s, tables, tile);
  }

  // Turns scores of centred keys into base-2 exponents, and adds those of the mean.
  __device__ __forceinline__ void add_mean(
      float (&s)[Shape::kTiles][4], float scale, const AttendInputs& in, const AttendTables<Shape>& tables,
      const AttendTile<Shape>& tile) const {
    constexpr int kTiles = Shape::kTiles;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint2* far[kTiles][2]; // cos and sin of the tokens' positions, in two factors
    const char* near[kTiles][2];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int at = tile.positions[8 * i + g];
      far[i / 2][i % 2] = in.far_angles + int64_t(at / 8) * (Shape::kDim / 4) + t;
      near[i / 2][i % 2] = tables.near_angles + at % 8 * Shape::kAngleRow + t * 8;
#pragma unroll
      for (int query = 0; query < 2; ++query) s[i / 2][i % 2 * 2 + query] *= scale;
    }
#pragma unroll 2
    for (int j = 0; j < Shape::kPairs; ++j) {
      const uint2 mean = reinterpret_cast<const uint2*>(tables.mean)[j * 32 + lane];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        uint32_t angles[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint2 one = __ldg(far[m][half] + 4 * j);
          const uint2 other = *reinterpret_cast<const uint2*>(near[m][half] + 32 * j);
          __half2 cosine = half2_of(one.x), sine = half2_of(one.y);
          rotate_by_angle(cosine, sine, half2_of(other.x), half2_of(other.y));
          angles[half] = bits(cosine), angles[2 + half] = bits(sine);
        }
        mma_f16(s[m], angles, {mean.x, mean.y});
      }
    }
  }

  __device__ __forceinline__ void score(float (&)[Shape::kTiles][4], const AttendTables<Shape>&, int) const {}

 private:
  __device__ static __forceinline__ void score_bf16(
      float (&s)[Shape::kTiles][4], const AttendTables<Shape>& tables, const AttendTile<Shape>& tile) {
    constexpr int kPairs = Shape::kPairs;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const uint2 q = tables.queries[j * 32 + lane];
#pragma unroll
      for (int m = 0; m < Shape::kTiles; ++m) {
        uint32_t k[4];
        load_matrices(k, shared_address(tile.keys + (16 * m + lane % 16) * kRow + (j + lane / 16 * kPairs) * 16));
        mma_bf16(s[m], k, {q.x, q.y});
      }
    }
  }

  // A lane gets four bytes in a row where it gets two numbers of 16 bits: dimensions 16 j + 4t to 16 j + 4t + 3 of
  // tokens g (k0, and k2 of j + 1) and g + 8 (k1, k3). A product may have its dimensions in any order: 2t, 2t + 1 are
  // the first two of the four, 2t + 8, 2t + 9 the others, as they are of queries.
  __device__ static __forceinline__ void score_fp8(
      float (&s)[Shape::kTiles][4], const AttendTables<Shape>& tables, const AttendTile<Shape>& tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < Shape::kPairs; j += 2) {
#pragma unroll
      for (int m = 0; m < Shape::kTiles; ++m) {
        uint32_t k[4];
        load_matrices(k, shared_address(tile.keys + (16 * m + lane % 16) * kRow + (j + lane / 16) * 16));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint2 q = tables.queries[(j + i) * 32 + lane];
          const uint32_t one = k[2 * i], other = k[2 * i + 1];
          mma_f16(
              s[m], {half2_of_e4m3(one), half2_of_e4m3(other), half2_of_e4m3(one >> 16), half2_of_e4m3(other >> 16)},
              {q.x, q.y});
        }
      }
    }
  }
};

template <class Shape>
struct WarpKeys<Shape, true> {
  using Key = typename Shape::Key;
  static constexpr int kTiles = Shape::kTiles, kPairs = Shape::kPairs;
  static constexpr int kSteps = Shape::kRank / 32; // of the rank, two k16 products each
  uint32_t a[kTiles][2 * kSteps][4];
  const uint2* far[kTiles][2]; // cos and sin of the tokens' positions, in two factors
  const char* near[kTiles][2];
  uint2 far_angle[kTiles][2];

  __device__ __forceinline__ void load(
      float (&)[kTiles][4], const AttendInputs& in, const AttendTables<Shape>& tables, const AttendTile<Shape>& tile,
      int rank) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = 16 * m + 8 * half + g;
        const int at = tile.positions[token];
        far[m][half] = in.far_angles + int64_t(at / 8) * (Shape::kDim / 4) + t;
        far_angle[m][half] = __ldg(far[m][half]);
        near[m][half] = tables.near_angles + at % 8 * Shape::kAngleRow + t * 8;
        const char* row = tile.keys + token * tile.key_row;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (!Shape::kExactRank && step * 32 >= rank) continue;
          // The ranks of a product may be in any order: each of a quad's lanes takes 8 of every 32, four per product.
          uint32_t x[4];
          Key::decode(row, step, t, in.strong, x);
          a[m][2 * step][half] = x[0], a[m][2 * step][2 + half] = x[1];
          a[m][2 * step + 1][half] = x[2], a[m][2 * step + 1][2 + half] = x[3];
        }
      }
    }
  }

  __device__ __forceinline__ void score(float (&s)[kTiles][4], const AttendTables<Shape>& tables, int rank) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    const int row = lane % 8; // of a matrix: ranks 8 (row / 2) + row % 2, + 2 in odd matrices
    const uint32_t my_basis =
        shared_address(tables.basis) + (row / 2 * 8 + row % 2 + lane / 8 % 2 * 2) * Shape::kBasisRow;
#pragma unroll 2
    for (int j = 0; j < kPairs; ++j) {
      const uint32_t column = my_basis + ((j + lane / 16 * kPairs) ^ row) * 16;
      uint2 next_far_angle[kTiles][2];
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i)
        next_far_angle[i / 2][i % 2] = __ldg(far[i / 2][i % 2] + 4 * min(j + 1, kPairs - 1));
      float k[kTiles][2][4] = {}; // (tokens g, g + 8; dimensions 8 j + 2t, + 1 and those RoPE pairs them with)
#pragma unroll
      for (int step = 0; step < 2 * kSteps; ++step) {
        if (!Shape::kExactRank && step * 16 >= rank) continue;
        uint32_t b[4];
        load_matrices_transposed(b, column + (step / 2 * 32 + step % 2 * 4) * Shape::kBasisRow);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          if constexpr (Key::kHalf) {
            mma_f16(k[m][0], a[m][step], {b[0], b[1]});
            mma_f16(k[m][1], a[m][step], {b[2], b[3]});
          } else {
            mma_bf16(k[m][0], a[m][step], {b[0], b[1]});
            mma_bf16(k[m][1], a[m][step], {b[2], b[3]});
          }
        }
      }
      const uint2 middle = *reinterpret_cast<const uint2*>(tables.mean + (4 * j + t) * 8);
      const uint2 q = tables.queries[j * 32 + lane];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        uint32_t rows[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Half from here on: its 11 bits lose less in RoPE than rounding keys to bf16 does.
          __half2 x = __floats2half2_rn(k[m][0][2 * half], k[m][0][2 * half + 1]);
          __half2 y = __floats2half2_rn(k[m][1][2 * half], k[m][1][2 * half + 1]);
          x = __hadd2(x, half2_of(middle.x)), y = __hadd2(y, half2_of(middle.y));
          const uint2 near_angle = *reinterpret_cast<const uint2*>(near[m][half] + 32 * j);
          __half2 cosine = half2_of(far_angle[m][half].x), sine = half2_of(far_angle[m][half].y);
          rotate_by_angle(cosine, sine, half2_of(near_angle.x), half2_of(near_angle.y));
          rotate_by_angle(x, y, cosine, sine);
          rows[half] = bits(x), rows[2 + half] = bits(y);
        }
        mma_f16(s[m], rows, {q.x, q.y});
      }
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) far_angle[i / 2][i % 2] = next_far_angle[i / 2][i % 2];
    }
  }
};

} // namespace shadowkv
