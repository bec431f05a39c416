// Attention of one query per sequence over selected chunks, from the form they are stored in, in one kernel: latents
// become keys (K = A B + mean), keys are rotated, scored and weighed, and the values of 4 bits are decoded, all between
// the fragments of one tensor-core product and the next. Memory sees each latent and each code once per kv head.
//
// A block takes tiles of one sequence and kv head, each warp its own tiles with its own softmax. The basis slice of the
// head lies in shared memory. A warp takes 32 tokens at a time where registers allow: with 16 the reads of the basis
// from shared memory, one per fragment and tile, would take longer than the products.
#pragma once

#include "mma.cuh"

namespace shadowkv {

enum class KeyForm { kLatentsInt8, kLatentsBf16, kRows };
enum class ValueForm { kCodes4, kRows };

constexpr int kAttendWarps = 4;
constexpr int kAttendQueries = 8; // query heads of a block: columns of a product

// Page strides count bytes between consecutive page names, the others elements.
struct AttendInputs {
  const __nv_bfloat16* q;    // [batch, heads * group, dim]
  const int64_t* selected;   // [batch, heads, chunks], -1s last
  const char* keys;          // pages of [64, rank] latents or [heads, 64, dim] rows
  const char* values;        // pages of [heads, 64, dim / 2] codes or [heads, 64, dim] rows
  const char* scale;         // pages of [heads, 64] half, for codes
  const int64_t* key_pages;  // [batch, entries]
  const int64_t* value_pages;
  const __nv_bfloat16* basis; // [slots, rank, heads, dim]
  const void* mean;           // [slots, heads, dim] float or bf16, or null
  const int64_t* slots;       // [batch]
  const uint64_t* turns;      // [dim / 2], rotations per position x 2^64
  const float* rotation;      // [dim, dim], for codes
  int64_t key_page, value_page, scale_page, key_pages_row, value_pages_row, basis_slot, mean_slot;
  float score_scale; // of q k in the exponent to base 2
  int batch, heads, group, chunks, log_chunk, rank, splits;
  bool mean_is_float;
};

struct AttendOutputs {
  __nv_bfloat16* out; // [batch, heads * group, dim]
  float* lse;         // [batch, heads * group]
  float* partial;     // [batch, heads, splits, group, dim + 2]: weighed sum, maximum score, sum; unused with one split
};

// What one instance of the kernel is made for. kRank is the largest rank, or the only one if kExactRank.
template <KeyForm kKeys_, ValueForm kValues_, int kDim_, int kRank_, bool kExactRank_, int kTiles_, int kBlocks_>
struct AttendShape {
  static constexpr KeyForm kKeys = kKeys_;
  static constexpr ValueForm kValues = kValues_;
  static constexpr int kDim = kDim_, kRank = kRank_, kTiles = kTiles_, kBlocks = kBlocks_;
  static constexpr bool kExactRank = kExactRank_, kLow = kKeys != KeyForm::kRows;
  static constexpr bool kCodes = kValues == ValueForm::kCodes4;
  static constexpr int kTokens = 16 * kTiles;
  static constexpr int kPairs = kDim / 16;                      // n8 tiles of dimensions that rotate with another one
  static constexpr int kBasisRow = (kDim == 96 ? 128 : kDim) * 2; // bytes; the swizzle needs whole 128-byte lines
  static constexpr int kPlainRow = kDim * 2 + 16;               // odd in units of 16 bytes: no bank conflicts
  static constexpr int kMergeRow = kDim + 4;                    // floats

  // A row of latents in shared memory: an odd multiple of what the four lanes of a quad read, against bank conflicts.
  __host__ __device__ static constexpr int key_row(int rank) {
    if (!kLow) return kPlainRow;
    return (rank % 64 == 32 ? rank : rank + 32) * (kKeys == KeyForm::kLatentsInt8 ? 1 : 2);
  }
  // Shared memory: basis, mean, turns, query fragments; per warp a tile of keys, of values and its places.
  __host__ __device__ static constexpr int table_bytes(int rank) {
    return (kLow ? rank * kBasisRow + kDim * 8 : 0) + kPairs * 256;
  }
  __host__ __device__ static constexpr int warp_bytes(int rank) {
    return kTokens * (key_row(rank) + (kCodes ? 0 : kPlainRow) + 16);
  }
  static constexpr int kMergeBytes = (kAttendWarps + 1) * kAttendQueries * kMergeRow * 4 + 512;
  __host__ __device__ static constexpr int shared_bytes(int rank) {
    const int all = table_bytes(rank) + kAttendWarps * warp_bytes(rank);
    return all > kMergeBytes ? all : kMergeBytes;
  }
};

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// a - b of two bf16 each, as the fused form that sm_80 has too.
__device__ __forceinline__ uint32_t subtract_bf16(uint32_t a, uint32_t b) {
  uint32_t x;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(b), "r"(0xbf80bf80u), "r"(a));
  return x;
}

// Two of the four int8 in x as bf16, exactly. 0x4300 | u is 128 + u for u < 128, and 0x4300 | 128 is 256: a byte is its
// lower seven bits less its sign bit's 128, and both terms are one AND away.
template <int kPlace>
__device__ __forceinline__ uint32_t int8_to_bf16(uint32_t x) {
  const uint32_t spread = __byte_perm(x, 0x43434343u, kPlace == 0 ? 0x4140 : 0x4342);
  return subtract_bf16(spread & 0xff7fff7fu, spread & 0xff80ff80u);
}

// cos and sin of a position's angle. The angle in turns is a 64-bit fixed-point product, exact at any position; its
// upper half as a signed number is the angle within half a turn of zero, where the fast functions are accurate.
__device__ __forceinline__ void rotation_at(uint32_t position, uint64_t turns, float& cosine, float& sine) {
  const uint32_t turn = __umulhi(position, uint32_t(turns)) + position * uint32_t(turns >> 32);
  __sincosf(float(int32_t(turn)) * 1.4629180792671596e-9f, &sine, &cosine); // 2 pi / 2^32
}

// Codes of one token that a lane owns: byte i has dimension 16 i + g low and 16 i + 8 + g high.
template <int kDim>
struct LaneCodes {
  uint32_t word[(kDim / 16 + 3) / 4];

  __device__ __forceinline__ void load(const char* p) {
    if constexpr (kDim == 256) {
      const uint4 x = load_streamed16(p);
      word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
    } else if constexpr (kDim == 128) {
      const uint2 x = load_streamed8(p);
      word[0] = x.x, word[1] = x.y;
    } else if constexpr (kDim == 64) {
      word[0] = __ldg(reinterpret_cast<const uint32_t*>(p));
    } else {
      const uint16_t* x = reinterpret_cast<const uint16_t*>(p);
      word[0] = __ldg(x) | uint32_t(__ldg(x + 1)) << 16, word[1] = __ldg(x + 2);
    }
  }
};

// Writes attention outputs from y [8][row] float in shared memory (rows from `group` on are zero), multiplied by the
// transposed rotation where there is one. Its products split both factors in two bf16: errors stay near float32's.
template <int kDim, bool kRotate>
__device__ __forceinline__ void write_outputs(
    const float* y, int row, const float* __restrict__ rotation, __nv_bfloat16* out, int group) {
  if constexpr (!kRotate) {
    for (int i = threadIdx.x; i < group * kDim / 2; i += blockDim.x) {
      const float* x = y + i / (kDim / 2) * row + i % (kDim / 2) * 2;
      reinterpret_cast<uint32_t*>(out)[i] = pack_bf16(x[0], x[1]);
    }
  } else {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const auto halves = [](float2 x, uint32_t& high, uint32_t& low) {
      high = pack_bf16(x.x, x.y);
      low = pack_bf16(x.x - __uint_as_float(high << 16), x.y - __uint_as_float(high & 0xffff0000u));
    };
    for (int tile = threadIdx.x / 32; tile < kDim / 16; tile += kAttendWarps) {
      float c[4] = {};
#pragma unroll 8
      for (int step = 0; step < kDim / 16; ++step) {
        uint32_t high[4], low[4], b_high[2], b_low[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* x = rotation + (16 * tile + g + 8 * (i % 2)) * kDim + 16 * step + 8 * (i / 2) + 2 * t;
          halves(__ldg(reinterpret_cast<const float2*>(x)), high[i], low[i]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
          halves(*reinterpret_cast<const float2*>(y + g * row + 16 * step + 8 * i + 2 * t), b_high[i], b_low[i]);
        mma_bf16(c, low, b_high);
        mma_bf16(c, high, b_low);
        mma_bf16(c, high, b_high);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (2 * t + i % 2 < group) out[(2 * t + i % 2) * kDim + 16 * tile + g + 8 * (i / 2)] = __float2bfloat16(c[i]);
    }
  }
}

template <class Shape>
__global__ __launch_bounds__(kAttendWarps * 32, Shape::kBlocks) void attend_selected_kernel(
    const AttendInputs in, const AttendOutputs to) {
  constexpr int kDim = Shape::kDim, kTiles = Shape::kTiles, kTokens = Shape::kTokens, kPairs = Shape::kPairs;
  constexpr int kSteps = Shape::kRank / 32; // of the rank, two k16 products each
  constexpr bool kLow = Shape::kLow, kCodes = Shape::kCodes, kInt8 = Shape::kKeys == KeyForm::kLatentsInt8;
  extern __shared__ __align__(128) char shared[];
  const int split = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = Shape::kExactRank ? Shape::kRank : in.rank;

  char* const basis = shared;
  float* const mean = reinterpret_cast<float*>(shared + (kLow ? rank * Shape::kBasisRow : 0));
  uint64_t* const turns = reinterpret_cast<uint64_t*>(mean + kDim);
  uint2* const queries = reinterpret_cast<uint2*>(shared + Shape::table_bytes(rank) - kPairs * 256);
  const int key_row = Shape::key_row(rank);
  char* const my_keys = shared + Shape::table_bytes(rank) + warp * Shape::warp_bytes(rank);
  char* const my_values = my_keys + kTokens * key_row;
  int2* const key_places = reinterpret_cast<int2*>(my_values + (kCodes ? 0 : kTokens * Shape::kPlainRow));
  int2* const value_places = key_places + kTokens;

  // The walk over this warp's tiles. Chunk numbers are read three tiles ahead, page names two, keys one.
  const int64_t* const selected = in.selected + (int64_t(batch) * in.heads + head) * in.chunks;
  const int64_t* const key_pages = in.key_pages + batch * in.key_pages_row;
  const int64_t* const value_pages = in.value_pages + batch * in.value_pages_row;
  const int stride = in.splits * kAttendWarps;
  int tile = split * kAttendWarps + warp;
  const auto chunk_at = [&](int tile) {
    const int index = (tile * kTokens + lane) >> in.log_chunk;
    return lane < kTokens && index < in.chunks ? int(selected[index]) : -1;
  };
  int chunk, position, key_page, value_page; // of token `lane` of a tile ahead; pages are -1 where there is no token
  const auto find_pages = [&] {
    position = (chunk << in.log_chunk) + (lane & ((1 << in.log_chunk) - 1));
    key_page = value_page = -1;
    if (chunk >= 0) {
      key_page = int(key_pages[position / kPage]);
      value_page = int(value_pages[position / kPage]);
    }
  };
  // Makes the tile of key_page, ... the next one: publishes its places, starts the copy of its keys.
  const auto start_tile = [&]() -> uint32_t {
    const uint32_t valid = __ballot_sync(~0u, key_page >= 0);
    if (lane < kTokens) {
      key_places[lane] = make_int2(key_page, position);
      value_places[lane] = make_int2(value_page, position & (kPage - 1));
    }
    __syncwarp();
    if (valid) {
      constexpr int kRowBytes = kLow ? 0 : kDim * 2;
      const int bytes = kLow ? rank * (kInt8 ? 1 : 2) : kRowBytes;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int token = 16 * i + lane / 2; // two lanes share a 32-byte sector
        const int2 place = key_places[token];
        const int row = place.y % kPage + (kLow ? 0 : head * kPage);
        const char* from = in.keys + (place.x < 0 ? 0 : place.x * in.key_page + row * bytes) + lane % 2 * 16;
        const uint32_t into = shared_address(my_keys + token * key_row) + lane % 2 * 16;
        constexpr int kUnits = (kLow ? Shape::kRank * (kInt8 ? 1 : 2) : kDim * 2) / 32;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
          if (!kLow || Shape::kExactRank || unit * 32 < bytes)
            copy16_async(into + unit * 32, place.x < 0 ? in.keys : from + unit * 32, place.x >= 0);
      }
    }
    close_copy_group();
    return valid;
  };

  chunk = chunk_at(tile);
  if constexpr (kLow) {
    const int64_t slot = in.slots[batch];
    const __nv_bfloat16* from = in.basis + slot * in.basis_slot + head * kDim;
    constexpr int kUnits = kDim / 8;
    for (int i = threadIdx.x; i < rank * kUnits; i += kAttendWarps * 32) {
      const int row = i / kUnits, unit = i % kUnits;
      const int place = unit ^ (row / 8 % 4 * 2 + row % 2); // as the eight rows of a matrix are read below
      copy16_async(
          shared_address(basis + row * Shape::kBasisRow + place * 16), from + int64_t(row) * in.heads * kDim + unit * 8);
    }
    for (int i = threadIdx.x; i < kDim; i += kAttendWarps * 32) {
      const int64_t at = slot * in.mean_slot + head * kDim + i;
      mean[i] = in.mean == nullptr ? 0.f
                : in.mean_is_float ? static_cast<const float*>(in.mean)[at]
                                   : __bfloat162float(static_cast<const __nv_bfloat16*>(in.mean)[at]);
      if (i < kDim / 2) turns[i] = in.turns[i];
    }
  }
  for (int i = threadIdx.x; i < kPairs * 32; i += kAttendWarps * 32) {
    const int query = i % 32 / 4, at = i / 32 * 8 + i % 4 * 2;
    const __nv_bfloat16* from = in.q + ((int64_t(batch) * in.heads + head) * in.group + query) * kDim + at;
    queries[i] = make_uint2(0, 0);
    if (query < in.group)
      queries[i] = make_uint2(
          *reinterpret_cast<const uint32_t*>(from), *reinterpret_cast<const uint32_t*>(from + kDim / 2));
  }
  find_pages();
  chunk = chunk_at(tile + stride);
  uint32_t valid = start_tile();
  find_pages();
  tile += 2 * stride;
  chunk = chunk_at(tile);
  wait_copy_groups<0>();
  __syncthreads();

  float o[kDim / 16][4] = {}; // (dimension 16 i + g and + 8, queries 2t, 2t + 1)
  float top = -INFINITY, sum = 0, coded = 0; // of query g: largest score, sum of weights, of weights x scale

  while (valid) {
    wait_copy_groups<0>();
    __syncwarp();

    // Scores s: (query g, tokens 8 n + 2t, + 1).
    float s[2 * kTiles][4] = {};
    uint32_t a[kLow ? kTiles : 1][kLow ? 2 * kSteps : 1][4];
    uint32_t positions[kTiles][2];
    if constexpr (kLow) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = 16 * m + 8 * half + g;
          positions[m][half] = key_places[token].y;
          const char* from = my_keys + token * key_row + t * (kInt8 ? 8 : 16);
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            if (!Shape::kExactRank && step * 32 >= rank) continue;
            // The ranks of a product may come in any order: a quad's lanes take 8 of each 32, four per product.
            if constexpr (kInt8) {
              const uint2 x = *reinterpret_cast<const uint2*>(from + step * 32);
              a[m][2 * step][half] = int8_to_bf16<0>(x.x);
              a[m][2 * step][2 + half] = int8_to_bf16<1>(x.x);
              a[m][2 * step + 1][half] = int8_to_bf16<0>(x.y);
              a[m][2 * step + 1][2 + half] = int8_to_bf16<1>(x.y);
            } else {
              const uint4 x = *reinterpret_cast<const uint4*>(from + step * 64);
              a[m][2 * step][half] = x.x, a[m][2 * step][2 + half] = x.y;
              a[m][2 * step + 1][half] = x.z, a[m][2 * step + 1][2 + half] = x.w;
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const uint2 q = queries[j * 32 + lane];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          uint32_t k[4];
          load_matrices(
              k, shared_address(
                     my_keys + (16 * m + lane % 8 + lane / 16 * 8) * Shape::kPlainRow +
                     (j + lane / 8 % 2 * kPairs) * 16));
          mma_bf16(s[2 * m], {q.x, 0, q.y, 0}, {k[0], k[1]});
          mma_bf16(s[2 * m + 1], {q.x, 0, q.y, 0}, {k[2], k[3]});
        }
      }
    }

    // Values of this tile are under way while its keys are made: codes in registers, rows in shared memory.
    LaneCodes<kDim> codes[kCodes ? 4 * kTiles : 1];
    __half scale[kCodes ? 4 * kTiles : 1];
    if constexpr (kCodes) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        const int2 place = value_places[16 * (i / 4) + i / 2 % 2 * 8 + 2 * t + i % 2];
        const int row = head * kPage + place.y;
        const int64_t page = max(place.x, 0); // codes of no token are any codes, of scale zero
        codes[i].load(in.values + page * in.value_page + row * (kDim / 2) + g * (kDim / 16));
        scale[i] = *reinterpret_cast<const __half*>(in.scale + page * in.scale_page + row * 2);
        if (place.x < 0) scale[i] = __half(0.f);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int token = 16 * i + lane / 2;
        const int2 place = value_places[token];
        const int64_t at = place.x < 0 ? 0 : place.x * in.value_page + (head * kPage + place.y) * (kDim * 2);
        const uint32_t into = shared_address(my_values + token * Shape::kPlainRow) + lane % 2 * 16;
#pragma unroll
        for (int unit = 0; unit < kDim / 16; ++unit)
          copy16_async(into + unit * 32, in.values + at + unit * 32 + lane % 2 * 16, place.x >= 0);
      }
    }
    close_copy_group();
    const uint32_t valid_now = valid;
    __syncwarp();
    valid = start_tile();
    find_pages();
    tile += stride;
    chunk = chunk_at(tile);

    if constexpr (kLow) {
      const int row = lane % 8; // of a matrix: ranks 8 (row / 2) + row % 2, + 2 in odd matrices
      const uint32_t my_basis =
          shared_address(basis) + (row / 2 * 8 + row % 2 + lane / 8 % 2 * 2) * Shape::kBasisRow;
#pragma unroll 2
      for (int j = 0; j < kPairs; ++j) {
        const uint32_t column = my_basis + ((j + lane / 16 * kPairs) ^ row) * 16;
        const float2 low = *reinterpret_cast<const float2*>(mean + 8 * j + 2 * t);
        const float2 high = *reinterpret_cast<const float2*>(mean + kDim / 2 + 8 * j + 2 * t);
        float k[kTiles][2][4]; // (tokens g, g + 8; dimensions 8 j + 2t, + 1 and those they rotate with)
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          k[m][0][0] = k[m][0][2] = low.x, k[m][0][1] = k[m][0][3] = low.y;
          k[m][1][0] = k[m][1][2] = high.x, k[m][1][1] = k[m][1][3] = high.y;
        }
#pragma unroll
        for (int step = 0; step < 2 * kSteps; ++step) {
          if (!Shape::kExactRank && step * 16 >= rank) continue;
          uint32_t b[4];
          load_matrices_transposed(b, column + (step / 2 * 32 + step % 2 * 4) * Shape::kBasisRow);
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
            mma_bf16(k[m][0], a[m][step], {b[0], b[1]});
            mma_bf16(k[m][1], a[m][step], {b[2], b[3]});
          }
        }
        const ulonglong2 turn = *reinterpret_cast<const ulonglong2*>(turns + 8 * j + 2 * t);
        const uint2 q = queries[j * 32 + lane];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float cosine[2], sine[2];
            rotation_at(positions[m][half], turn.x, cosine[0], sine[0]);
            rotation_at(positions[m][half], turn.y, cosine[1], sine[1]);
            const float *x = &k[m][0][2 * half], *y = &k[m][1][2 * half];
            mma_bf16(
                s[2 * m + half], {q.x, 0, q.y, 0},
                {pack_bf16(x[0] * cosine[0] - y[0] * sine[0], x[1] * cosine[1] - y[1] * sine[1]),
                 pack_bf16(y[0] * cosine[0] + x[0] * sine[0], y[1] * cosine[1] + x[1] * sine[1])});
          }
        }
      }
    }

    float next_top = top;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        s[n][i] = valid_now >> (8 * n + 2 * t + i) & 1 ? s[n][i] * in.score_scale : -INFINITY;
        next_top = fmaxf(next_top, s[n][i]);
      }
    }
    next_top = quad_max(next_top);
    if (__any_sync(~0u, next_top > top)) {
      const float shrink = exp2_fast(top - next_top);
      sum *= shrink, coded *= shrink;
      const float first = __shfl_sync(~0u, shrink, 8 * t), second = __shfl_sync(~0u, shrink, 8 * t + 4);
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) o[i][0] *= first, o[i][1] *= second, o[i][2] *= first, o[i][3] *= second;
      top = next_top;
    }
    uint32_t p[kTiles][2]; // weights as the second factor: (tokens 2t, 2t + 1; query g)
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
      float x = exp2_fast(s[n][0] - top), y = exp2_fast(s[n][1] - top);
      sum += x + y;
      if constexpr (kCodes) x *= __half2float(scale[2 * n]), y *= __half2float(scale[2 * n + 1]);
      p[n / 2][n % 2] = pack_bf16(x, y);
      if constexpr (kCodes)
        coded += __uint_as_float(p[n / 2][n % 2] << 16) + __uint_as_float(p[n / 2][n % 2] & 0xffff0000u);
    }

    if constexpr (kCodes) {
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          uint32_t v[4];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const LaneCodes<kDim>* pair = codes + 4 * m + 2 * half;
            const uint32_t both =
                __byte_perm(pair[0].word[i / 4], pair[1].word[i / 4], i % 4 | (4 + i % 4) << 8);
            // 0x4300 | code is 128 + code; 136 less is the code's centre but for a half, which is added at the end.
            v[2 * half] = subtract_bf16((both & 0x000f000fu) | 0x43004300u, 0x43084308u);
            v[2 * half + 1] = subtract_bf16((both >> 4 & 0x000f000fu) | 0x43004300u, 0x43084308u);
          }
          mma_bf16(o[i], v, p[m]);
        }
      }
    } else {
      wait_copy_groups<1>();
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          uint32_t v[4];
          load_matrices_transposed(
              v, shared_address(
                     my_values + (16 * m + lane % 8 + lane / 16 * 8) * Shape::kPlainRow +
                     (2 * i + lane / 8 % 2) * 16));
          mma_bf16(o[i], v, p[m]);
        }
      }
    }
  }

  // The four warps' results become one.
  sum = quad_sum(sum), coded = quad_sum(coded);
  wait_copy_groups<0>();
  __syncthreads();
  float* const merged = reinterpret_cast<float*>(shared);
  float* const parts = merged + kAttendQueries * Shape::kMergeRow;
  float4* const states = reinterpret_cast<float4*>(parts + kAttendWarps * kAttendQueries * Shape::kMergeRow);
  float* const mine = parts + warp * kAttendQueries * Shape::kMergeRow + 2 * t * Shape::kMergeRow + g;
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) mine[j % 2 * Shape::kMergeRow + 16 * i + j / 2 * 8] = o[i][j];
  }
  if (t == 0) states[warp * kAttendQueries + g] = make_float4(top, sum, coded * 0.5f, 0);
  __syncthreads();
  const bool whole = in.splits == 1;
  const int64_t unit = int64_t(batch) * in.heads + head;
  for (int i = threadIdx.x; i < kAttendQueries * kDim; i += kAttendWarps * 32) {
    const int query = i / kDim, at = i % kDim;
    float highest = -INFINITY, total = 0, x = 0;
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) highest = fmaxf(highest, states[w * kAttendQueries + query].x);
    if (highest > -INFINITY) {
#pragma unroll
      for (int w = 0; w < kAttendWarps; ++w) {
        const float4 state = states[w * kAttendQueries + query];
        const float share = exp2_fast(state.x - highest);
        total += state.y * share;
        x += (parts[(w * kAttendQueries + query) * Shape::kMergeRow + at] + state.z) * share;
      }
    }
    if (whole) {
      merged[query * Shape::kMergeRow + at] = query < in.group && total > 0 ? x / total : 0.f;
      if (at == 0 && query < in.group) to.lse[unit * in.group + query] = (highest + log2f(total)) * 0.6931471805599453f;
    } else if (query < in.group) {
      float* partial = to.partial + ((unit * in.splits + split) * in.group + query) * (kDim + 2);
      partial[at] = x;
      if (at == 0) partial[kDim] = highest, partial[kDim + 1] = total;
    }
  }
  if (!whole) return;
  __syncthreads();
  write_outputs<kDim, kCodes>(
      merged, Shape::kMergeRow, in.rotation, to.out + unit * in.group * kDim, in.group);
}

// Joins the splits of one sequence and kv head.
template <int kDim, bool kRotate>
__global__ __launch_bounds__(kAttendWarps * 32) void merge_selected_kernel(
    const AttendOutputs to, const float* rotation, int group, int splits) {
  __shared__ float y[kAttendQueries][kDim + 4];
  const int64_t unit = blockIdx.x;
  for (int i = threadIdx.x; i < kAttendQueries * kDim; i += kAttendWarps * 32) {
    const int query = i / kDim, at = i % kDim;
    y[query][at] = 0;
    if (query >= group) continue;
    const float* partial = to.partial + (unit * splits * group + query) * (kDim + 2);
    const int64_t next = group * (kDim + 2);
    float highest = -INFINITY, total = 0, x = 0;
    for (int split = 0; split < splits; ++split) highest = fmaxf(highest, partial[split * next + kDim]);
    if (highest > -INFINITY) {
      for (int split = 0; split < splits; ++split) {
        const float share = exp2_fast(partial[split * next + kDim] - highest);
        total += partial[split * next + kDim + 1] * share;
        x += partial[split * next + at] * share;
      }
      y[query][at] = x / total;
    }
    if (at == 0) to.lse[unit * group + query] = (highest + log2f(total)) * 0.6931471805599453f;
  }
  __syncthreads();
  write_outputs<kDim, kRotate>(&y[0][0], kDim + 4, rotation, to.out + unit * group * kDim, group);
}

} // namespace shadowkv
