// Attention of one query per sequence over selected chunks, from the form they are stored in, in one kernel: latents
// become keys (K = A B + mean), keys are rotated, scored and weighed, and coded values are decoded, all between
// the fragments of one tensor-core product and the next. Memory sees each latent and each code once per kv head.
//
// A block takes tiles of one sequence and kv head, each warp its own tiles with its own softmax. The basis slice of the
// head lies in shared memory. A warp takes 32 tokens at a time where registers allow: with 16 the reads of the basis
// from shared memory, one per fragment and tile, would take longer than the products. A position's cos and sin are the
// product of those of two tables: of the multiple of eight below it, in the second-level cache, and of the rest.
#pragma once

#include "value_codes.cuh"

namespace shadowkv {

enum class KeyForm { kLatentsInt8, kLatentsBf16, kRows };

constexpr int kRowBits = 16; // of a value that is no code
constexpr int kAttendWarps = 4;
constexpr int kAttendQueries = 8; // query heads of a block: columns of a product

// Page strides count bytes between consecutive page names, the others elements.
struct AttendInputs {
  const __nv_bfloat16* q;    // [batch, heads * group, dim]
  const int64_t* selected;   // [batch, heads, chunks], -1s last
  const char* keys;          // pages of [64, rank] latents or [heads, 64, dim] rows
  const char* values;        // pages of [heads, 64, dim] codes or rows, or a buffer: see below
  const char* scale;         // pages of [heads, 64] half, for codes, named by key_pages
  const int64_t* key_pages;  // [batch, entries]
  const int64_t* value_pages;
  // Null, or the values are the chunks of a buffer [slots, heads, buffer_entries], value_page bytes each, and instead of
  // pages value_pages names its entry of every selected chunk.
  const int64_t* value_slots; // [batch]
  const __nv_bfloat16* basis; // [slots, rank, heads, dim]
  const void* mean;           // [slots, heads, dim] float or bf16, or null
  const int64_t* slots;       // [batch]
  const uint2* far_turns;     // [positions / 8, dim / 4], cos and sin of two dimensions as half2, of positions 8 n
  const uint2* near_turns;    // [8, dim / 4], of positions 0 to 7
  const float* rotation;      // [dim, dim], for codes
  const float* log_weight;    // [batch, heads, chunks], natural, of the tokens of a chunk; or null for zeros
  int64_t key_page, value_page, scale_page, key_pages_row, value_pages_row, basis_slot, mean_slot;
  float score_scale; // of q k in the exponent to base 2
  int batch, heads, group, chunks, log_chunk, rank, splits, buffer_entries;
  bool mean_is_float;
};

struct AttendOutputs {
  __nv_bfloat16* out; // [batch, heads * group, dim]
  float* lse;         // [batch, heads * group]
  // [batch, heads, splits, group, dim + 4]: weighed sum, largest score, sum of weights; unused with one split.
  float* partial;
};

// What one instance of the kernel is made for. kBits is 4, 3 or 2 of codes, or kRowBits; kRank is the largest rank, or
// the only one if kExactRank.
template <KeyForm kKeys_, int kBits_, int kDim_, int kRank_, bool kExactRank_, int kTiles_, int kBlocks_>
struct AttendShape {
  static constexpr KeyForm kKeys = kKeys_;
  static constexpr int kBits = kBits_, kDim = kDim_, kRank = kRank_, kTiles = kTiles_, kBlocks = kBlocks_;
  static constexpr bool kExactRank = kExactRank_, kLow = kKeys != KeyForm::kRows;
  static constexpr bool kCodes = kBits < kRowBits;
  static constexpr int kTokens = 16 * kTiles;
  static constexpr int kPairs = kDim / 16;                      // n8 tiles of dimensions that rotate with another one
  static constexpr int kBasisRow = (kDim == 96 ? 128 : kDim) * 2; // bytes; the swizzle needs whole 128-byte lines
  static constexpr int kPlainRow = kDim * 2 + 16;               // odd in units of 16 bytes: no bank conflicts
  static constexpr int kMergeRow = kDim + 4;                    // floats
  static constexpr int kTurnRow = kDim * 2 + 32;                // bytes of cos and sin of one position, and a gap

  // A row of latents in shared memory: an odd multiple of what the four lanes of a quad read, against bank conflicts.
  __host__ __device__ static constexpr int key_row(int rank) {
    if (!kLow) return kPlainRow;
    return (rank % 64 == 32 ? rank : rank + 32) * (kKeys == KeyForm::kLatentsInt8 ? 1 : 2);
  }
  // Shared memory: basis, mean, turns, query fragments; per warp a tile of keys, of values and where its rows are.
  __host__ __device__ static constexpr int table_bytes(int rank) {
    return (kLow ? rank * kBasisRow + kDim * 2 + 8 * kTurnRow : 0) + kPairs * 256;
  }
  __host__ __device__ static constexpr int warp_bytes(int rank) {
    return kTokens * (key_row(rank) + (kCodes ? 0 : kPlainRow) + 24);
  }
  static constexpr int kMergeBytes = (kAttendWarps + 1) * kAttendQueries * kMergeRow * 4 + 256;
  __host__ __device__ static constexpr int shared_bytes(int rank) {
    const int all = table_bytes(rank) + kAttendWarps * warp_bytes(rank);
    return all > kMergeBytes ? all : kMergeBytes;
  }
};

// Over the eight lanes of one place in the quads, which hold the rows of a fragment.
__device__ __forceinline__ float rows_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

__device__ __forceinline__ float rows_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 4);
  x += __shfl_xor_sync(~0u, x, 8);
  return x + __shfl_xor_sync(~0u, x, 16);
}

// Two bf16 as floats.
__device__ __forceinline__ float2 unpack_bf16(uint32_t x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}

__device__ __forceinline__ uint32_t bits(__half2 x) { return *reinterpret_cast<const uint32_t*>(&x); }


// Two of four int8 as half, exactly; `biased` holds them plus 128. 0x6400 | u is 1024 + u.
template <int kPlace>
__device__ __forceinline__ uint32_t int8_to_half(uint32_t biased) {
  const uint32_t x = mask_and_set<0x00ff00ffu, 0x64006400u>(__byte_perm(biased, 0, kPlace == 0 ? 0x4140 : 0x4342));
  return bits(__hsub2(half2_of(x), half2_of(0x64806480u)));
}

// Turns x by one angle and y with it: (x, y) to (x cos - y sin, y cos + x sin), of two dimensions each.
__device__ __forceinline__ void turn(__half2& x, __half2& y, __half2 cosine, __half2 sine) {
  const __half2 old = x;
  x = __hfma2(x, cosine, __hneg2(__hmul2(y, sine)));
  y = __hfma2(y, cosine, __hmul2(old, sine));
}

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
#pragma unroll 4
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
  using Pair = CodePair<kDim, Shape::kBits>;
  constexpr bool kLow = Shape::kLow, kCodes = Shape::kCodes, kInt8 = Shape::kKeys == KeyForm::kLatentsInt8;
  extern __shared__ __align__(128) char shared[];
  const int split = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = Shape::kExactRank ? Shape::kRank : in.rank;

  char* const basis = shared;
  __half2* const mean = reinterpret_cast<__half2*>(shared + (kLow ? rank * Shape::kBasisRow : 0));
  char* const near_turns = reinterpret_cast<char*>(mean + kDim / 2);
  uint2* const queries = reinterpret_cast<uint2*>(shared + Shape::table_bytes(rank) - kPairs * 256);
  const int key_row = Shape::key_row(rank);
  char* const my_keys = shared + Shape::table_bytes(rank) + warp * Shape::warp_bytes(rank);
  char* const my_values = my_keys + kTokens * key_row;
  const char** const key_rows = reinterpret_cast<const char**>(my_values + (kCodes ? 0 : kTokens * Shape::kPlainRow));
  const char** const value_rows = key_rows + kTokens;
  int* const positions = reinterpret_cast<int*>(value_rows + kTokens);
  float* const scales = reinterpret_cast<float*>(positions + kTokens);

  // The walk over this warp's tiles; lane i looks after token i. Chunk numbers are read three tiles ahead, page names
  // two, keys and scales one.
  const int64_t* const selected = in.selected + (int64_t(batch) * in.heads + head) * in.chunks;
  const int64_t* const key_pages = in.key_pages + batch * in.key_pages_row;
  const bool buffered = in.value_slots != nullptr;
  const int64_t* const value_pages = in.value_pages + batch * in.value_pages_row + (buffered ? head * in.chunks : 0);
  const int stride = in.splits * kAttendWarps;
  const int within = lane & ((1 << in.log_chunk) - 1);
  int tile = split * kAttendWarps + warp;
  const auto index_in = [&](int tile) { return uint32_t(tile * kTokens + lane) >> in.log_chunk; };
  const auto chunk_at = [&](int tile) {
    const int index = index_in(tile);
    return lane < kTokens && index < in.chunks ? int(selected[index]) : -1;
  };
  int chunk, position, key_page, value_page; // of the lane's token in a tile ahead; pages are -1 if there is none
  const auto find_pages = [&] { // of `chunk`, which is of `tile`
    position = (chunk << in.log_chunk) + within;
    key_page = value_page = -1;
    if (chunk >= 0) {
      key_page = int(key_pages[uint32_t(position) / kPage]);
      value_page = int(value_pages[buffered ? index_in(tile) : uint32_t(position) / kPage]);
      if (buffered) value_page += (int(in.value_slots[batch]) * in.heads + head) * in.buffer_entries;
    }
  };
  __half scale = __half(0.f); // of the lane's token in the next tile
  // Makes the tile of key_page, ... the next one: says where its rows are, starts the copy of its keys.
  const auto start_tile = [&]() -> uint32_t {
    const uint32_t valid = __ballot_sync(~0u, key_page >= 0);
    if (lane < kTokens) {
      // No token has some row's key, which is masked, and some row's codes, of scale zero.
      const int row = position & (kPage - 1);
      constexpr int kKeyBytes = kInt8 ? 1 : 2, kValueBytes = kDim * Shape::kBits / 8;
      const bool there = key_page >= 0;
      key_rows[lane] =
          there ? in.keys + key_page * in.key_page + (kLow ? row * rank : (head * kPage + row) * kDim) * kKeyBytes
                : in.keys;
      const int value_row = buffered ? within : head * kPage + row;
      value_rows[lane] = there ? in.values + value_page * in.value_page + value_row * kValueBytes
                         : kCodes ? in.values
                                  : nullptr;
      positions[lane] = there ? position : 0;
      if constexpr (kCodes) {
        scale = __half(0.f);
        if (there)
          scale = *reinterpret_cast<const __half*>(in.scale + key_page * in.scale_page + (head * kPage + row) * 2);
      }
    }
    __syncwarp();
    if (valid) {
      constexpr int kUnits = (kLow ? Shape::kRank * (kInt8 ? 1 : 2) : kDim * 2) / 32;
      const int bytes = rank * (kInt8 ? 1 : 2);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int token = 16 * i + lane / 2; // two lanes share a 32-byte sector
        const char* from = key_rows[token] + lane % 2 * 16;
        const uint32_t into = shared_address(my_keys + token * key_row) + lane % 2 * 16;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
          if (!kLow || Shape::kExactRank || unit * 32 < bytes) copy16_async(into + unit * 32, from + unit * 32);
      }
    }
    close_copy_group();
    return valid;
  };

  // The first tile's page names are on their way while the tables are filled.
  chunk = chunk_at(tile);
  const int64_t slot = kLow ? in.slots[batch] : 0;
  find_pages();
  tile += stride;
  chunk = chunk_at(tile);
  if constexpr (kLow) {
    const __nv_bfloat16* from = in.basis + slot * in.basis_slot + head * kDim;
    constexpr int kUnits = kDim / 8;
#pragma unroll 5
    for (int i = threadIdx.x; i < rank * kUnits; i += kAttendWarps * 32) {
      const int row = i / kUnits, unit = i % kUnits;
      const int place = unit ^ (row / 8 % 4 * 2 + row % 2); // as the eight rows of a matrix are read below
      char* const into = basis + row * Shape::kBasisRow + place * 16;
      const __nv_bfloat16* const at = from + int64_t(row) * in.heads * kDim + unit * 8;
      if constexpr (kInt8) {
        // Half, to which int8 converts faster than to bf16. Entries under 6e-5 lose bits, of keys around one none.
        uint4 x = __ldg(reinterpret_cast<const uint4*>(at));
        for (uint32_t* y : {&x.x, &x.y, &x.z, &x.w}) *y = bits(__float22half2_rn(unpack_bf16(*y)));
        *reinterpret_cast<uint4*>(into) = x;
      } else {
        copy16_async(shared_address(into), at);
      }
    }
    for (int i = threadIdx.x; i < kDim; i += kAttendWarps * 32) {
      constexpr int kRowUnits = kDim / 8;
      copy16_async(
          shared_address(near_turns + i / kRowUnits * Shape::kTurnRow + i % kRowUnits * 16),
          reinterpret_cast<const char*>(in.near_turns) + i * 16);
    }
    // The mean and the queries lie as lanes need them: two dimensions and the two that they rotate with.
    if (threadIdx.x < kDim / 4) {
      const int64_t at = slot * in.mean_slot + head * kDim + 2 * threadIdx.x;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 x = make_float2(0, 0);
        if (in.mean != nullptr && in.mean_is_float)
          x = *reinterpret_cast<const float2*>(static_cast<const float*>(in.mean) + at + half * kDim / 2);
        else if (in.mean != nullptr)
          x = unpack_bf16(*reinterpret_cast<const uint32_t*>(
              static_cast<const __nv_bfloat16*>(in.mean) + at + half * kDim / 2));
        mean[2 * threadIdx.x + half] = __float22half2_rn(x);
      }
    }
  }
#pragma unroll
  for (int i = threadIdx.x; i < kPairs * 32; i += kAttendWarps * 32) {
    const int query = i % 32 / 4, at = i / 32 * 8 + i % 4 * 2;
    const __nv_bfloat16* from = in.q + ((int64_t(batch) * in.heads + head) * in.group + query) * kDim + at;
    uint32_t x[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (query < in.group) x[half] = __ldg(reinterpret_cast<const uint32_t*>(from + half * kDim / 2));
      if constexpr (kLow) x[half] = bits(__float22half2_rn(unpack_bf16(x[half])));
    }
    queries[i] = make_uint2(x[0], x[1]);
  }
  uint32_t valid = start_tile();
  find_pages();
  tile += stride;
  chunk = chunk_at(tile);
  wait_copy_groups<0>();
  __syncthreads();

  float o[kDim / 16][4] = {}; // (dimensions 16 i + g, + 8; queries 2t, 2t + 1)
  // Of queries 2t, 2t + 1: largest score, sum of weights, sum of weights x scale.
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, coded[2] = {};

  while (valid) {
    if (kCodes && lane < kTokens) scales[lane] = __half2float(scale);
    wait_copy_groups<0>();
    __syncwarp();

    float s[kTiles][4] = {}; // scores: (tokens g, g + 8; queries 2t, 2t + 1)
    uint32_t a[kLow ? kTiles : 1][kLow ? 2 * kSteps : 1][4];
    const uint2* far[kTiles][2]; // cos and sin of the tokens' positions, in two factors
    const char* near[kTiles][2];
    uint2 far_turn[kTiles][2];
    if constexpr (kLow) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = 16 * m + 8 * half + g;
          const int at = positions[token];
          far[m][half] = in.far_turns + int64_t(at / 8) * (kDim / 4) + t;
          far_turn[m][half] = __ldg(far[m][half]);
          near[m][half] = near_turns + at % 8 * Shape::kTurnRow + t * 8;
          const char* from = my_keys + token * key_row + t * (kInt8 ? 8 : 16);
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            if (!Shape::kExactRank && step * 32 >= rank) continue;
            // The ranks of a product may come in any order: a quad's lanes take 8 of each 32, four per product.
            if constexpr (kInt8) {
              const uint2 x = *reinterpret_cast<const uint2*>(from + step * 32);
              a[m][2 * step][half] = int8_to_half<0>(x.x ^ 0x80808080u);
              a[m][2 * step][2 + half] = int8_to_half<1>(x.x ^ 0x80808080u);
              a[m][2 * step + 1][half] = int8_to_half<0>(x.y ^ 0x80808080u);
              a[m][2 * step + 1][2 + half] = int8_to_half<1>(x.y ^ 0x80808080u);
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
                     my_keys + (16 * m + lane % 16) * Shape::kPlainRow + (j + lane / 16 * kPairs) * 16));
          mma_bf16(s[m], k, {q.x, q.y});
        }
      }
    }

    // Values of this tile are under way while its keys are made: codes in registers, rows in shared memory.
    LaneCodes<kDim, Shape::kBits> codes[kCodes ? 4 * kTiles : 1];
    if constexpr (kCodes) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i)
        codes[i].load(value_rows[16 * (i / 4) + i / 2 % 2 * 8 + 2 * t + i % 2], g);
    } else {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int token = 16 * i + lane / 2;
        const char* from = value_rows[token];
        const bool there = from != nullptr; // zeros else: a weight of zero does not undo NaN
        from = (there ? from : in.values) + lane % 2 * 16;
        const uint32_t into = shared_address(my_values + token * Shape::kPlainRow) + lane % 2 * 16;
#pragma unroll
        for (int unit = 0; unit < kDim / 16; ++unit) copy16_async(into + unit * 32, from + unit * 32, there);
      }
    }
    close_copy_group();
    float log_weight[kTiles][2] = {}; // of tokens g, g + 8; on their way while the keys are made
    if (in.log_weight) {
      const float* const of_unit = in.log_weight + (int64_t(batch) * in.heads + head) * in.chunks;
      const int token = (tile - 2 * stride) * kTokens + g; // `tile` is two ahead
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i)
        log_weight[i / 2][i % 2] = __ldg(of_unit + min(token + 8 * i >> in.log_chunk, in.chunks - 1));
    }
    const uint32_t valid_now = valid;
    float token_scale[kTiles][2];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) token_scale[i / 2][i % 2] = kCodes ? scales[8 * i + g] : 1.f;
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
        uint2 next_far_turn[kTiles][2];
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i)
          next_far_turn[i / 2][i % 2] = __ldg(far[i / 2][i % 2] + 4 * min(j + 1, kPairs - 1));
        float k[kTiles][2][4] = {}; // (tokens g, g + 8; dimensions 8 j + 2t, + 1 and those they rotate with)
#pragma unroll
        for (int step = 0; step < 2 * kSteps; ++step) {
          if (!Shape::kExactRank && step * 16 >= rank) continue;
          uint32_t b[4];
          load_matrices_transposed(b, column + (step / 2 * 32 + step % 2 * 4) * Shape::kBasisRow);
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
            if constexpr (kInt8) { // of half
              mma_f16(k[m][0], a[m][step], {b[0], b[1]});
              mma_f16(k[m][1], a[m][step], {b[2], b[3]});
            } else {
              mma_bf16(k[m][0], a[m][step], {b[0], b[1]});
              mma_bf16(k[m][1], a[m][step], {b[2], b[3]});
            }
          }
        }
        const uint2 middle = *reinterpret_cast<const uint2*>(mean + (4 * j + t) * 2);
        const uint2 q = queries[j * 32 + lane];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          uint32_t rows[4];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            // Half from here on: its 11 bits lose less in the rotation than rounding keys to bf16 does.
            __half2 x = __floats2half2_rn(k[m][0][2 * half], k[m][0][2 * half + 1]);
            __half2 y = __floats2half2_rn(k[m][1][2 * half], k[m][1][2 * half + 1]);
            x = __hadd2(x, half2_of(middle.x)), y = __hadd2(y, half2_of(middle.y));
            const uint2 near_turn = *reinterpret_cast<const uint2*>(near[m][half] + 32 * j);
            __half2 cosine = half2_of(far_turn[m][half].x), sine = half2_of(far_turn[m][half].y);
            turn(cosine, sine, half2_of(near_turn.x), half2_of(near_turn.y));
            turn(x, y, cosine, sine);
            rows[half] = bits(x), rows[2 + half] = bits(y);
          }
          mma_f16(s[m], rows, {q.x, q.y});
        }
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) far_turn[i / 2][i % 2] = next_far_turn[i / 2][i % 2];
      }
    }

    float next_top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[m][i] = valid_now >> (16 * m + i / 2 * 8 + g) & 1
            ? fmaf(s[m][i], in.score_scale, log_weight[m][i / 2] * 1.4426950408889634f)
            : -INFINITY;
        next_top[i % 2] = fmaxf(next_top[i % 2], s[m][i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) next_top[i] = fmaxf(top[i], rows_max(next_top[i]));
    if (__any_sync(~0u, next_top[0] > top[0] || next_top[1] > top[1])) {
      float shrink[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        shrink[i] = exp2_fast(top[i] - next_top[i]);
        sum[i] *= shrink[i], coded[i] *= shrink[i], top[i] = next_top[i];
      }
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o[i][j] *= shrink[j % 2];
      }
    }
    uint32_t p[kTiles][2]; // weights as the second factor: (tokens 2t, 2t + 1; query g)
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = exp2_fast(s[m][2 * half] - top[0]);
        float y = exp2_fast(s[m][2 * half + 1] - top[1]);
        sum[0] += x, sum[1] += y;
        if constexpr (kCodes) x *= token_scale[m][half], y *= token_scale[m][half];
        const uint32_t both = pack_bf16(x, y);
        if constexpr (kCodes) coded[0] += unpack_bf16(both).x, coded[1] += unpack_bf16(both).y;
        p[m][half] = transpose_matrix(both);
      }
    }

    if constexpr (kCodes) {
      Pair pairs[2 * kTiles];
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) pairs[i] = {codes[2 * i], codes[2 * i + 1]};
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          uint32_t v[4];
#pragma unroll
          for (int half = 0; half < 2; ++half) pairs[2 * m + half].decode(i, v[2 * half], v[2 * half + 1]);
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
#pragma unroll
  for (int i = 0; i < 2; ++i) sum[i] = rows_sum(sum[i]), coded[i] = rows_sum(coded[i]);
  wait_copy_groups<0>();
  __syncthreads();
  float* const merged = reinterpret_cast<float*>(shared);
  float* const parts = merged + kAttendQueries * Shape::kMergeRow;
  float2* const states = reinterpret_cast<float2*>(parts + kAttendWarps * kAttendQueries * Shape::kMergeRow);
  float* const mine = parts + warp * kAttendQueries * Shape::kMergeRow + 2 * t * Shape::kMergeRow + g;
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& x = mine[j % 2 * Shape::kMergeRow + 16 * i + j / 2 * 8];
      if constexpr (kCodes)
        x = fmaf(coded[j % 2], Pair::offset(i), o[i][j] * Pair::factor(i));
      else
        x = o[i][j];
    }
  }
  if (g < 2)
    states[warp * kAttendQueries + 2 * t + g] = g == 0 ? make_float2(top[0], sum[0]) : make_float2(top[1], sum[1]);
  __syncthreads();
  const bool whole = in.splits == 1;
  const int64_t unit = int64_t(batch) * in.heads + head;
  for (int i = threadIdx.x; i < kAttendQueries * (kDim / 4); i += kAttendWarps * 32) {
    const int query = i / (kDim / 4), at = i % (kDim / 4) * 4;
    float2 state[kAttendWarps];
    float highest = -INFINITY, total = 0;
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) {
      state[w] = states[w * kAttendQueries + query];
      highest = fmaxf(highest, state[w].x);
    }
    float x[4] = {};
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) {
      const float share = highest > -INFINITY ? exp2_fast(state[w].x - highest) : 0.f;
      const float4 part =
          *reinterpret_cast<const float4*>(parts + (w * kAttendQueries + query) * Shape::kMergeRow + at);
      total += state[w].y * share;
      x[0] += part.x * share, x[1] += part.y * share, x[2] += part.z * share, x[3] += part.w * share;
    }
    if (whole) {
      const float scale = query < in.group && total > 0 ? 1 / total : 0.f;
      *reinterpret_cast<float4*>(merged + query * Shape::kMergeRow + at) =
          make_float4(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale);
      if (at == 0 && query < in.group) to.lse[unit * in.group + query] = (highest + log2f(total)) * 0.6931471805599453f;
    } else if (query < in.group) {
      float* partial = to.partial + ((unit * in.splits + split) * in.group + query) * (kDim + 4);
      *reinterpret_cast<float4*>(partial + at) = make_float4(x[0], x[1], x[2], x[3]);
      if (at == 0) *reinterpret_cast<float2*>(partial + kDim) = make_float2(highest, total);
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
    const float* partial = to.partial + (unit * splits * group + query) * (kDim + 4);
    const int64_t next = group * (kDim + 4);
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
