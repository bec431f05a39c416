// Scores of runs of 8 tokens by the signs of a 2-bit key sketch, with binary tensor cores. The sum of a query's whole
// numbers over a token's positive dimensions is the sum of 4 popcounts of its sign word with the query's bit planes,
// each times a power of 2: nothing is unpacked, and the remaining work per score is a chain of 4 multiply-adds. At head
// dim 128 this is memory-bound: 17 bytes per token and head, which a warp copies in whole lines to shared memory ahead.
// At head dim 64 it is instruction-bound: issuing such a multiplication takes the time of four other instructions.
// Equal shares of all pages for only the resident blocks were slower than 16 pages for each.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>

#include "kernels/common/early_launch.cuh"
#include "kernels/common/memory.cuh"
#include "kernels/common/mma.cuh"
#include "sketch_rules.h"

namespace shadowkv {

constexpr int kMostWarps = 8;     // heads of a block
constexpr int kMaxBlockPages = 32; // a lane holds the id of one page

// Queries from sketch_queries.
struct SignScores {
  const uint32_t* planes; // [B, H G, 4, W]
  const float* unit;      // [B, H G]; the whole numbers count 16 of these
  const int* sum;         // [B, H G]
  const uint8_t *signs, *scale;
  uint32_t signs_stride, scale_stride; // from one page id to the next, in bytes
  const int64_t* pages;                // [B, P]
  int64_t pages_stride;                // of a row, in page ids
  const int64_t* num_pages;            // [B]
  __half* scores;                      // [B, H, 8 P]
  int batch, heads, group, columns, block_pages;
};

// Bit counts become floats without a conversion: as bits of a float, a small whole number n is n 2**-149. Scores are
// multiplied by kFactor to stay among normal numbers.
constexpr float kFactor = 0x1p-49f;

// The factor from a count to its share of twice the sum over positive dimensions. The last plane is the sign.
__device__ constexpr float plane_weight(int plane) {
  return (plane == kQueryPlanes - 1 ? -1 : 1) * float(2 << plane) * 0x1p100f; // 2**100 2**-149 = kFactor
}

// Four pages of one head in a warp's shared memory: their signs, then their scales. The eight 16-byte pieces that
// ldmatrix reads at a time, the same for each run of tokens, are in different banks: piece i is at the place of piece
// i ^ swizzle(run).
template <int kWords>
struct SignStage {
  static constexpr int kPages = 4;
  static constexpr int kToken = 4 * kWords, kRun = 8 * kToken, kPageBytes = kPage * kToken, kScaleBytes = kPage;
  static constexpr int kBytes = kPages * (kPageBytes + kScaleBytes);
  static constexpr int kCount = kWords >= 8 ? 2 : 3; // stages of a warp

  static __device__ __forceinline__ int swizzle(int run) { return kWords == 2 ? run / 2 : run; }

  // `from`: 16 bytes per lane from the page's first byte on.
  static __device__ __forceinline__ void copy_signs(uint32_t stage, int page, const uint8_t* from, int lane) {
#pragma unroll
    for (int m = 0; m < kPageBytes / 512; ++m) {
      const int piece = lane + 32 * m, to = piece ^ swizzle(piece * 16 / kRun);
      copy16_async(stage + page * kPageBytes + to * 16, from + 512 * m);
    }
  }

  // 8 lanes copy the scales of each page. `from`: 8 bytes per lane from the page's first byte on.
  static __device__ __forceinline__ void copy_scales(uint32_t stage, const uint8_t* from, int lane) {
    copy8_async(stage + kPages * kPageBytes + lane * 8, from);
  }
};

// Eight scales as halves.
__device__ __forceinline__ uint4 decode_scales(uint2 codes) {
  const auto two = [](uint32_t four, uint32_t selector) { return __byte_perm(four, 0, selector) << kScaleShift; };
  return {two(codes.x, 0x4140), two(codes.x, 0x4342), two(codes.y, 0x4140), two(codes.y, 0x4342)};
}

// c[16 x 8] = number of bits that are set in both the row of a[16 x 128] and the column of b[128 x 8]. Words:
// a0: (g, t) a1: (g + 8, t); b: (t, g); c0, c1: (g, 2t..) c2, c3: (g + 8, 2t..).
__device__ __forceinline__ void count_bits(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

// The same for 256 bits, added to `before`; a2: (g, t + 4) a3: (g + 8, t + 4); b1: (t + 4, g).
__device__ __forceinline__ void count_bits(
    int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int32_t (&before)[4]) {
  asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(before[0]), "r"(before[1]), "r"(before[2]),
        "r"(before[3]));
}

// A warp's copies of its head's signs and scales for a block's pages, to stages that it uses in turn.
template <int kWords>
struct SignCopies {
  using Stage = SignStage<kWords>;
  int lane, steps;              // steps: four pages each, as many as hold tokens
  uint32_t page_ids;            // a lane's is that of one page: granules of 256 bytes, with 31 bits up to 512 GiB
  const uint8_t* stages;        // the warp's
  const uint8_t *signs, *scale; // the first bytes that the lane would copy from a page of id 0
  uint32_t signs_stride, scale_stride;

  // `pages`: ids of the block's, of which `valid` hold tokens.
  __device__ __forceinline__ SignCopies(
      const SignScores& p, int head, const int64_t* pages, int valid, const uint8_t* stages_)
      : lane(threadIdx.x),
        steps((valid + Stage::kPages - 1) / Stage::kPages),
        page_ids(steps ? uint32_t(pages[min(lane, valid - 1)]) : 0),
        stages(stages_),
        signs(p.signs + head * Stage::kPageBytes + lane * 16),
        scale(p.scale + head * Stage::kScaleBytes + lane % 8 * 8),
        signs_stride(p.signs_stride),
        scale_stride(p.scale_stride) {}

  __device__ __forceinline__ const uint8_t* stage(int slot) const { return stages + slot * Stage::kBytes; }

  // Starts the copies of a step; after the last step there are none, but still a group.
  __device__ __forceinline__ void begin(int step, int slot) const {
    if (step < steps) {
      const uint32_t to = shared_address(stage(slot));
#pragma unroll
      for (int i = 0; i < Stage::kPages; ++i) {
        const uint32_t page_id = __shfl_sync(~0u, page_ids, Stage::kPages * step + i);
        Stage::copy_signs(to, i, signs + uint64_t(page_id) * signs_stride, lane);
      }
      const uint32_t page_id = __shfl_sync(~0u, page_ids, Stage::kPages * step + lane / 8);
      Stage::copy_scales(to, scale + uint64_t(page_id) * scale_stride, lane);
    }
    close_copy_group();
  }
};

// A lane's part of the queries of a kv head. Row g of a multiplication is a token of the g-th 8 of a page and row g + 8
// another of these, so that a lane ends up with all their scores. Columns 2t and 2t + 1 of multiplication m are planes
// 2m and 2m + 1 of query t of the group, or of query t + 4 s in set s of kSets; missing queries are replaced by the
// last query. With 2 words per token, a row has two tokens, and the query is multiplied with one at a time.
template <int kWords, int kSets>
struct SignQueries {
  using Stage = SignStage<kWords>;
  static constexpr int kFaces = kWords == 2 ? 2 : kWords / 4; // words of a plane in a lane
  static constexpr int kSpans = kWords > 8 ? kWords / 8 : 1;  // of up to 256 bits, each one multiplication
  uint32_t b[kSets][kQueryPlanes / 2][kFaces];
  float minus_sum[kSets], unit[kSets]; // of query t of a set
  int place;                           // in a page, of the first piece whose address the lane gives to ldmatrix

  __device__ __forceinline__ SignQueries(const SignScores& p, int first_query) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      const int query = first_query + min(4 * s + g / 2, p.group - 1);
      const uint32_t* column = p.planes + int64_t(query) * (kQueryPlanes * kWords);
#pragma unroll
      for (int m = 0; m < kQueryPlanes / 2; ++m)
#pragma unroll
        for (int f = 0; f < kFaces; ++f) {
          const uint32_t* plane = column + (2 * m + g % 2) * kWords;
          b[s][m][f] = kWords == 2 ? (t / 2 == f ? plane[t % 2] : 0) : plane[4 * f + t];
        }
      const int own = first_query + min(4 * s + t, p.group - 1);
      minus_sum[s] = float(-p.sum[own]) * kFactor, unit[s] = p.unit[own] * (16 / kFactor);
    }
    const int matrix = lane / 8, run = lane % 8;
    const int piece = kWords == 2 ? matrix : matrix / 2 + matrix % 2 * kWords;
    place = run * Stage::kRun + (piece ^ Stage::swizzle(run) % (Stage::kRun / 16)) * 16;
  }

  // Scores of the i-th pair of tokens of a run with the lane's query of set s. `words`: the run from load_matrices.
  __device__ __forceinline__ void
  score_two(float (&score)[2], const uint32_t (&words)[kSpans][4], int i, int s) const {
    score[0] = score[1] = minus_sum[s];
#pragma unroll
    for (int m = 0; m < kQueryPlanes / 2; ++m) {
      int32_t counts[4] = {};
      if constexpr (kWords >= 8)
#pragma unroll
        for (int span = 0; span < kSpans; ++span)
          count_bits(counts, words[span], b[s][m][2 * span], b[s][m][2 * span + 1], counts);
      else if constexpr (kWords == 4)
        count_bits(counts, words[0][i % 2 * 2], words[0][i % 2 * 2 + 1], b[s][m][0]);
      else
        count_bits(counts, words[0][i / 2 * 2], words[0][i / 2 * 2 + 1], b[s][m][i % 2]);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        score[e / 2] = fmaf(__int_as_float(counts[e]), plane_weight(2 * m + e % 2), score[e / 2]);
    }
  }

  // The best score of run g of page r of a stage with the lane's queries.
  __device__ __forceinline__ float best_of_run(const uint8_t* stage, int r, int g) const {
    const uint32_t from = shared_address(stage) + r * Stage::kPageBytes;
    const uint4 scales = decode_scales(*reinterpret_cast<const uint2*>(
        stage + Stage::kPages * Stage::kPageBytes + r * Stage::kScaleBytes + g * 8));
    const __half* factor = reinterpret_cast<const __half*>(&scales);
    float top[kSets];
#pragma unroll
    for (int s = 0; s < kSets; ++s) top[s] = -FLT_MAX;
    uint32_t words[kSpans][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) { // two tokens each
      if (kWords >= 8 || (kWords == 4 && i % 2 == 0) || i == 0)
#pragma unroll
        for (int span = 0; span < kSpans; ++span)
          load_matrices(words[span], from + (place ^ (i * 4 * kWords + span * 32)));
      const int token = kWords == 2 ? i / 2 * 4 + i % 2 : i, other = token + (kWords == 2 ? 2 : 4);
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
        float of_two[2];
        score_two(of_two, words, i, s);
        top[s] = fmaxf(top[s], of_two[0] * __half2float(factor[token]));
        top[s] = fmaxf(top[s], of_two[1] * __half2float(factor[other]));
      }
    }
    float best = top[0] * unit[0];
#pragma unroll
    for (int s = 1; s < kSets; ++s) best = fmaxf(best, top[s] * unit[s]);
    return best;
  }
};

// The maximum over the lanes of a quad, for scores of four pages, which `low` and `high` hold from the lowest bits on.
// A lane ends up with that of one page, 2 (t % 2) + t / 2, as a finite number.
__device__ __forceinline__ __half largest_of_quad(uint32_t low, uint32_t high, int t) {
  const uint32_t other = __shfl_xor_sync(~0u, t % 2 ? low : high, 1);
  __half2 both = __hmax2(half2_of(t % 2 ? high : low), half2_of(other));
  both = __hmax2(both, __shfl_xor_sync(~0u, both, 2));
  const __half largest = __ushort_as_half(0x7bff), of_page = t / 2 ? __high2half(both) : __low2half(both);
  return __hmax(__hmin(of_page, largest), __hneg(largest));
}

// A warp serves one kv head, a block all heads (or 8 of them, or as many as fit) of some neighbouring pages of one row.
template <int kWords, int kSets>
__global__ void __launch_bounds__(32 * kMostWarps, kWords >= 8 || (kWords == 2 && kSets == 4) ? 1 : 2)
    sign_scores_kernel(const SignScores p) {
  using Stage = SignStage<kWords>;
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const int head = blockIdx.z * blockDim.y + threadIdx.y;
  if (head >= p.heads) return;
  const int row = blockIdx.y, first_page = blockIdx.x * p.block_pages;
  const int pages_here = min(p.block_pages, p.columns - first_page);
  const int valid = int(max(int64_t(0), min(p.num_pages[row] - first_page, int64_t(pages_here))));

  extern __shared__ __align__(128) uint8_t stages[];
  const SignCopies<kWords> copies(
      p, head, p.pages + row * p.pages_stride + first_page, valid,
      stages + threadIdx.y * (Stage::kCount * Stage::kBytes));
#pragma unroll
  for (int i = 0; i + 1 < Stage::kCount; ++i) copies.begin(i, i);

  // What is copied was written before the launch that computes the queries.
  wait_for_launch_before();
  let_next_launch_begin();
  __half* scores = p.scores + (int64_t(row * p.heads + head) * p.columns + first_page) * 8;
  if (valid + lane < pages_here)
    reinterpret_cast<uint4*>(scores)[valid + lane] = {0xfc00fc00, 0xfc00fc00, 0xfc00fc00, 0xfc00fc00}; // -inf
  if (copies.steps == 0) return;

  const SignQueries<kWords, kSets> queries(p, (row * p.heads + head) * p.group);
  int slot = 0;
#pragma unroll 1
  for (int step = 0; step < copies.steps; ++step) {
    wait_copy_groups<Stage::kCount - 2>();
    __syncwarp(); // all lanes' copies have arrived, and all lanes are done with the stage to be filled next
    copies.begin(step + Stage::kCount - 1, slot == 0 ? Stage::kCount - 1 : slot - 1);
    const uint8_t* stage = copies.stage(slot);
    slot = slot + 1 == Stage::kCount ? 0 : slot + 1;

    uint32_t low = 0, high = 0; // scores of four pages, the first the lowest
#pragma unroll(kSets == 1 ? 2 : 1) // more at once would take too many registers
    for (int r = 0; r < Stage::kPages; ++r) {
      const float best = queries.best_of_run(stage, r, g);
      low = __funnelshift_r(low, high, 16);
      high = high >> 16 | uint32_t(__half_as_ushort(__float2half(best))) << 16;
    }
    const __half largest = largest_of_quad(low, high, t);
    const int own_page = Stage::kPages * step + 2 * (t % 2) + t / 2;
    if (own_page < valid) scores[own_page * 8 + g] = largest;
  }
}

template <int kWords, int kSets>
cudaError_t launch_sign_scores(const SignScores& p, cudaStream_t stream) {
  int device = 0, memory = 0;
  if (const auto error = cudaGetDevice(&device)) return error;
  if (const auto error = cudaDeviceGetAttribute(&memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return error;
  constexpr int kWarpBytes = SignStage<kWords>::kCount * SignStage<kWords>::kBytes;
  const int heads_of_block = memory / kWarpBytes < kMostWarps ? memory / kWarpBytes : kMostWarps;
  const int blocks = (p.heads + heads_of_block - 1) / heads_of_block, warps = (p.heads + blocks - 1) / blocks;
  const dim3 grid((p.columns + p.block_pages - 1) / p.block_pages, p.batch, blocks);
  return launch_early(sign_scores_kernel<kWords, kSets>, grid, dim3(32, warps), warps * kWarpBytes, stream, p);
}

template <int kWords>
cudaError_t launch_sign_scores(const SignScores& p, cudaStream_t stream) {
  switch ((p.group + 3) / 4) {
    case 1: return launch_sign_scores<kWords, 1>(p, stream);
    case 2: return launch_sign_scores<kWords, 2>(p, stream);
    case 3: return launch_sign_scores<kWords, 3>(p, stream);
    default: return launch_sign_scores<kWords, 4>(p, stream);
  }
}

// By bytes of a key's signs: 8, 16, 32 or 64.
inline cudaError_t launch_sign_scores(const SignScores& p, int64_t bytes, cudaStream_t stream) {
  if (bytes == 8) return launch_sign_scores<2>(p, stream);
  if (bytes == 16) return launch_sign_scores<4>(p, stream);
  if (bytes == 32) return launch_sign_scores<8>(p, stream);
  return launch_sign_scores<16>(p, stream);
}

} // namespace shadowkv
