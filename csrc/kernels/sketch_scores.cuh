// Chunk scores by a 2-bit key sketch. Memory-bound, 34 bytes a token and head at head dim 128: a warp copies whole
// 128-byte lines to shared memory two pairs of pages ahead (reads of 32 bytes from the second-level cache reached 3 of
// 4.5 TB/s), and the fragments' layout puts all tokens of a chunk into one lane. Marking the codes as first to leave
// that cache made it slower.
#pragma once

#include <cfloat>
#include <type_traits>

#include "kernels/mma.cuh"

namespace shadowkv {

constexpr int kMostWarps = 8;     // heads of a block
constexpr int kMostRunPages = 32; // a lane holds the name of one page

struct SketchScores {
  const float* q; // [B, H G, d], in the sketch's space
  const uint8_t* codes;
  const __half* scale;
  const uint8_t* excluded;
  uint32_t codes_stride, scale_stride, excluded_stride; // from one page name to the next, in bytes
  const int64_t* pages;                                 // [B, P]
  int64_t pages_stride;                                 // of a row, in names
  const int64_t* num_chunks;                            // [B]
  float* logits;                                        // [B, H, G, P C]
  float* lse;                                           // [B, H, G, T]
  int batch, heads, group, dim, num_pages, chunks_of_page, run_pages, runs;
};

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <int kWords>
__device__ __forceinline__ void load_words(uint32_t (&w)[kWords], const uint8_t* p) {
  if constexpr (kWords == 1) {
    w[0] = *reinterpret_cast<const uint32_t*>(p);
  } else if constexpr (kWords == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(p);
    w[0] = x.x, w[1] = x.y;
  } else {
    const uint4 x = *reinterpret_cast<const uint4*>(p);
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
  }
}

// Two pages of one head in a warp's shared memory: their codes, then their scales. Tokens 8 g + i of all g are read
// together; so that they lie in different banks, token 8 g + i is at the place of token 8 g + (i ^ g % kSpread).
template <int kWords>
struct Stage {
  static constexpr int kRow = 16 * kWords, kPageBytes = kPage * kRow, kScaleBytes = kPage * 2;
  static constexpr int kBytes = 2 * (kPageBytes + kScaleBytes);
  static constexpr int kSpread = 8 / kWords;
  // Stages of a warp: what two blocks of a multiprocessor have room for (one, with 4 words).
  static constexpr int kCount = kWords == 4 ? 2 : 3;

  // `from`: 16 bytes a lane after the page's first.
  static __device__ __forceinline__ void copy_codes(uint32_t stage, int r, const uint8_t* from, int lane) {
#pragma unroll
    for (int m = 0; m < 2 * kWords; ++m) {
      const int piece = lane + 32 * m, token = piece / kWords;
      const int to = (token ^ token / 8 % kSpread) * kRow + piece % kWords * 16;
      copy16_async(stage + r * kPageBytes + to, from + 512 * m);
    }
  }

  // 8 lanes copy the scales of page r = 0, the next 8 those of the other.
  static __device__ __forceinline__ void copy_scales(uint32_t stage, const uint8_t* from, int lane) {
    if (lane < 16) copy16_async(stage + 2 * kPageBytes + lane * 16, from);
  }
};

// One of the query heads of a kv head, in whole numbers: word w of plane j holds, in lane (g, t), the dimensions
// j d/4 + 4 (kWords t + w) + 0..3 of `head`, those that face bits 2j and 2j + 1 of word w of the codes in the lane.
template <int kWords>
struct Query {
  uint32_t words[4][kWords];
  int sum;
  float unit;

  __device__ __forceinline__ Query(const float* head, bool there, int dim, int t) {
    float4 x[4][kWords];
    float top = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int at = 4 * (kWords * t + w);
        float4& y = x[j][w];
        y = there && at < dim / 4 ? *reinterpret_cast<const float4*>(head + j * (dim / 4) + at) : float4{};
        top = fmaxf(fmaxf(fmaxf(top, fabsf(y.x)), fabsf(y.y)), fmaxf(fabsf(y.z), fabsf(y.w)));
      }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    unit = fmaxf(top * (1.f / 127.f), 1e-30f);
    const float inverse = __frcp_rn(unit);
    sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const float4& y = x[j][w];
        const int whole[4] = {__float2int_rn(y.x * inverse), __float2int_rn(y.y * inverse),
                              __float2int_rn(y.z * inverse), __float2int_rn(y.w * inverse)};
        sum += whole[0] + whole[1] + whole[2] + whole[3];
        words[j][w] = (whole[0] & 255) | (whole[1] & 255) << 8 | (whole[2] & 255) << 16 | uint32_t(whole[3]) << 24;
      }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
  }
};

// A bit for each of kCount chunks, from as many bytes of 0 or 1.
template <int kCount>
struct Flags {
  using Few = std::conditional_t<kCount == 1, uint8_t, uint16_t>;
  using Many = std::conditional_t<kCount == 4, uint32_t, uint64_t>;
  using Bytes = std::conditional_t<kCount <= 2, Few, Many>;
  Bytes bytes;

  Flags() = default;
  __device__ __forceinline__ explicit Flags(const uint8_t* p) : bytes(__ldg(reinterpret_cast<const Bytes*>(p))) {}
  __device__ __forceinline__ bool set(int i) const { return bytes >> (8 * i) & 1; }
};

template <int kCount>
__device__ __forceinline__ void store(float* p, const float (&x)[kCount]) {
  if constexpr (kCount == 1) {
    *p = x[0];
  } else if constexpr (kCount == 2) {
    *reinterpret_cast<float2*>(p) = {x[0], x[1]};
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) *reinterpret_cast<float4*>(p + i) = {x[i], x[i + 1], x[i + 2], x[i + 3]};
  }
}

// A running log-sum-exp, base 2. The lowest maximum is finite: -inf - -inf would be NaN.
struct Total {
  float top = -FLT_MAX, sum = 0;

  template <int kCount>
  __device__ __forceinline__ void add(const float (&x)[kCount]) {
    float next = top;
#pragma unroll
    for (int i = 0; i < kCount; ++i) next = fmaxf(next, x[i]);
    sum *= exp2_approx(top - next);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += exp2_approx(x[i] - next);
    top = next;
  }

  __device__ __forceinline__ void add_lane(int mask) {
    const float other_top = __shfl_xor_sync(~0u, top, mask), other_sum = __shfl_xor_sync(~0u, sum, mask);
    const float next = fmaxf(top, other_top);
    sum = sum * exp2_approx(top - next) + other_sum * exp2_approx(other_top - next);
    top = next;
  }

  __device__ __forceinline__ float log2() const { return sum > 0 ? top + log2_approx(sum) : -INFINITY; }
};

// A warp serves one kv head, a block all heads (or 8 of them) of one run of pages of one row. A warp takes two pages at
// a time. The rows of a multiplication are tokens: in multiplication i, row g is token 8 g + i of a page and row g + 8
// is token 8 g + 4 + i, so that a lane ends with all 8 scores of tokens 8 g to 8 g + 7, for two columns. The columns
// are query heads. Up to 4 of them (not kWide) would leave half of the columns empty: then the upper half of the summed
// dimension is not another plane of the same tokens, but the same plane of the other page's, and columns 4 to 7 are the
// same heads, facing those.
//
// Codes of odd planes are not shifted down to the even ones: they have sums of their own, 4 times too large.
//
// kChunk: tokens of a chunk; 64 stands for all above 8, whose eights are merged over the lanes of neighbours.
template <int kWords, int kChunk, bool kWide>
__global__ void __launch_bounds__(32 * kMostWarps, kWords == 4 || kChunk > 8 ? 1 : 2)
    sketch_scores_kernel(const SketchScores p) {
  constexpr int kTokens = kChunk < 8 ? kChunk : 8;
  constexpr int kSubs = 8 / kTokens;     // chunks of 8 tokens
  constexpr int kSteps = kWide ? 2 : 1;  // of a pair of pages
  constexpr int kPlanes = kWide ? 2 : 4; // that face multiplications of their own
  constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
  // Sums start at the bits of 1.5 * 2**23, which makes them floats without a conversion: whole numbers above it.
  constexpr int32_t kMagicBits = 0x4b400000;
  constexpr float kMagic = 12582912.f;

  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const int head = blockIdx.z * blockDim.y + threadIdx.y;
  if (head >= p.heads) return;
  const int row = blockIdx.y, run = blockIdx.x;
  const int64_t first_query = int64_t(row * p.heads + head) * p.group;
  const int first_page = run * p.run_pages, pages_here = min(p.run_pages, p.num_pages - first_page);
  const int chunks_here = pages_here * p.chunks_of_page, total_chunks = p.num_pages * p.chunks_of_page;
  const int64_t beyond = p.num_chunks[row] - int64_t(first_page) * p.chunks_of_page;
  const int valid = int(max(int64_t(0), min(beyond, int64_t(chunks_here))));
  const int valid_pages = (valid + p.chunks_of_page - 1) / p.chunks_of_page;
  const int groups = (valid_pages + 1) / 2;
  float* logits = p.logits + first_query * total_chunks + int64_t(first_page) * p.chunks_of_page;

  for (int column = 0; column < p.group; ++column)
    for (int chunk = 2 * groups * p.chunks_of_page + lane; chunk < chunks_here; chunk += 32)
      logits[int64_t(column) * total_chunks + chunk] = -INFINITY;
  if (groups == 0) {
    if (lane < p.group) p.lse[(first_query + lane) * p.runs + run] = -INFINITY;
    return;
  }

  // Names are granules of 256 bytes, of which 31 bits make 512 GiB.
  const uint32_t names = lane < valid_pages ? uint32_t(p.pages[row * p.pages_stride + first_page + lane]) : 0;
  const auto page = [&](int i) { return uint64_t(__shfl_sync(~0u, names, min(i, valid_pages - 1))); };
  using Stage = Stage<kWords>;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint8_t* stages = shared + threadIdx.y * (Stage::kCount * Stage::kBytes);
  const uint8_t* codes = p.codes + head * Stage::kPageBytes + lane * 16;
  const uint8_t* scale = reinterpret_cast<const uint8_t*>(p.scale) + head * Stage::kScaleBytes + lane % 8 * 16;
  const auto copy = [&](int group, int slot) {
    if (group < groups) {
      const uint32_t stage = shared_address(stages + slot * Stage::kBytes);
#pragma unroll
      for (int r = 0; r < 2; ++r) Stage::copy_codes(stage, r, codes + page(2 * group + r) * p.codes_stride, lane);
      Stage::copy_scales(stage, scale + page(2 * group + lane / 8 % 2) * p.scale_stride, lane);
    }
    close_copy_group();
  };
#pragma unroll
  for (int i = 0; i + 1 < Stage::kCount; ++i) copy(i, i);

  // A lane's results are of the eight tokens 8 g.. of page `side` of a pair (both in turn, if kWide), two query heads.
  const int side = kWide ? 0 : t / 2, column = kWide ? 2 * t : 2 * (t % 2);
  const int place = g * p.chunks_of_page / 8;
  const bool leads = kChunk <= 8 || g * p.chunks_of_page % 8 == 0;
  const uint8_t* excluded = p.excluded + head * p.chunks_of_page + place;
  Flags<kSubs> flags[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    flags[step] = Flags<kSubs>(excluded + page(side + step) * p.excluded_stride);

  // What faces the codes, and for the lane's two heads: what to take off their sums, and what makes scores of base 2.
  uint32_t b[kPlanes][kWords][2];
  float offset[2], factor[2];
  {
    const int own = kWide ? g : g % 4;
    const Query<kWords> query(p.q + (first_query + own) * p.dim, own < p.group, p.dim, t);
#pragma unroll
    for (int j = 0; j < kPlanes; ++j)
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        b[j][w][0] = kWide || g < 4 ? query.words[j][w] : 0;
        b[j][w][1] = kWide ? query.words[(j + 2) % 4][w] : g < 4 ? 0 : query.words[j][w];
      }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int sum = __shfl_sync(~0u, query.sum, 4 * (column + e));
      offset[e] = kMagic / 4 + 1.5f * float(sum);
      factor[e] = __shfl_sync(~0u, query.unit, 4 * (column + e)) * rsqrtf(float(p.dim)) * kLog2e;
    }
  }
  Total totals[2];
  logits += int64_t(column) * total_chunks + side * p.chunks_of_page + place;
  int left = valid - side * p.chunks_of_page - place; // valid chunks from the lane's first on

  const int own_place = g * 8 * Stage::kRow + g % Stage::kSpread * Stage::kRow + 4 * kWords * t;
  int slot = 0;

#pragma unroll 1
  for (int group = 0; group < groups; ++group) {
    wait_copy_groups<Stage::kCount - 2>();
    __syncwarp(); // all lanes' copies are there, and all lanes are done with the stage that is filled next
    copy(group + Stage::kCount - 1, slot == 0 ? Stage::kCount - 1 : slot - 1);
    const uint8_t* stage = stages + slot * Stage::kBytes;
    slot = slot + 1 == Stage::kCount ? 0 : slot + 1;
    Flags<kSubs> current[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      current[step] = flags[step];
      flags[step] = Flags<kSubs>(excluded + page(2 * group + 2 + side + step) * p.excluded_stride);
    }

#pragma unroll 1 // both at once would take too many registers
    for (int step = 0; step < kSteps; ++step) {
      float score[2][8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t words[2 / kSteps][2][kWords]; // of page and token i, i + 4
#pragma unroll
        for (int r = 0; r < 2 / kSteps; ++r)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            load_words(
                words[r][half], stage + (r + step) * Stage::kPageBytes + (own_place ^ (i + 4 * half) * Stage::kRow));
        int32_t sums[2][4];
#pragma unroll
        for (int e = 0; e < 8; ++e) sums[e / 4][e % 4] = kMagicBits;
#pragma unroll
        for (int j = 0; j < kPlanes; ++j) {
#pragma unroll
          for (int w = 0; w < kWords; ++w) {
            const auto plane = [&](int r, int half, int j) {
              return words[r][half][w] >> (j & 2) * 2 & (j & 1 ? 0x0c0c0c0cu : 0x03030303u);
            };
            if constexpr (kWide)
              mma_u8s8(sums[j], {plane(0, 0, j), plane(0, 1, j), plane(0, 0, j + 2), plane(0, 1, j + 2)}, b[j][w]);
            else
              mma_u8s8(sums[j & 1], {plane(0, 0, j), plane(0, 1, j), plane(1, 0, j), plane(1, 1, j)}, b[j][w]);
          }
        }
        // Exact: halves of whole numbers below 2**23.
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float odd = fmaf(__int_as_float(sums[1][e]), 0.25f, -offset[e % 2]);
          score[e % 2][i + e / 2 * 4] = odd + (__int_as_float(sums[0][e]) - kMagic);
        }
      }

      const uint4 scales = *reinterpret_cast<const uint4*>(
          stage + 2 * Stage::kPageBytes + (side + step) * Stage::kScaleBytes + g * 16);
      const __half2* halves = reinterpret_cast<const __half2*>(&scales);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = __half22float2(halves[i]);
#pragma unroll
        for (int e = 0; e < 2; ++e) score[e][2 * i] *= pair.x, score[e][2 * i + 1] *= pair.y;
      }
      const Flags<kSubs> not_these = step ? current[kSteps - 1] : current[0];
      const bool stored = leads && 2 * group + side + step < pages_here;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float logit[kSubs];
#pragma unroll
        for (int s = 0; s < kSubs; ++s) {
          if constexpr (kChunk == 1) {
            logit[s] = score[e][s] * factor[e];
          } else {
            const float* x = score[e] + s * kTokens;
            float top = x[0], sum = 0;
#pragma unroll
            for (int i = 1; i < kTokens; ++i) top = fmaxf(top, x[i]);
            top *= factor[e];
#pragma unroll
            for (int i = 0; i < kTokens; ++i) sum += exp2_approx(fmaf(x[i], factor[e], -top));
            logit[s] = top + log2_approx(sum);
          }
        }
        if constexpr (kChunk > 8) {
#pragma unroll 1
          for (int mask = 4; mask * p.chunks_of_page < 32; mask *= 2) {
            const float other = __shfl_xor_sync(~0u, logit[0], mask);
            const float top = fmaxf(logit[0], other);
            logit[0] = top + log2_approx(exp2_approx(logit[0] - top) + exp2_approx(other - top));
          }
        }
#pragma unroll
        for (int s = 0; s < kSubs; ++s)
          if (!leads || s >= left - step * p.chunks_of_page || not_these.set(s)) logit[s] = -INFINITY;
        totals[e].add(logit);
        if (stored && column + e < p.group) {
#pragma unroll
          for (int s = 0; s < kSubs; ++s) logit[s] *= kLn2;
          store(logits + step * p.chunks_of_page + e * total_chunks, logit);
        }
      }
    }
    logits += 2 * p.chunks_of_page;
    left -= 2 * p.chunks_of_page;
  }

#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int mask = kWide ? 4 : 2; mask < 32; mask *= 2) totals[e].add_lane(mask);
    if (g == 0 && (kWide || t < 2) && column + e < p.group)
      p.lse[(first_query + column + e) * p.runs + run] = totals[e].log2() * kLn2;
  }
}

template <int kWords, int kChunk, bool kWide>
cudaError_t launch_sketch_scores(const SketchScores& p, cudaStream_t stream) {
  const int warps = p.heads < kMostWarps ? p.heads : kMostWarps;
  const dim3 grid(p.runs, p.batch, (p.heads + warps - 1) / warps), block(32, warps);
  const int bytes = warps * Stage<kWords>::kCount * Stage<kWords>::kBytes;
  const auto kernel = sketch_scores_kernel<kWords, kChunk, kWide>;
  if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
  kernel<<<grid, block, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <int kWords, bool kWide>
cudaError_t launch_sketch_scores(const SketchScores& p, cudaStream_t stream) {
  switch (p.chunks_of_page) {
    case 64: return launch_sketch_scores<kWords, 1, kWide>(p, stream);
    case 32: return launch_sketch_scores<kWords, 2, kWide>(p, stream);
    case 16: return launch_sketch_scores<kWords, 4, kWide>(p, stream);
    case 8: return launch_sketch_scores<kWords, 8, kWide>(p, stream);
    default: return launch_sketch_scores<kWords, 64, kWide>(p, stream);
  }
}

// By bytes of a key's codes: 16, 32 or 64.
inline cudaError_t launch_sketch_scores(const SketchScores& p, int64_t bytes, cudaStream_t stream) {
  const bool wide = p.group > 4;
  if (bytes == 16) return wide ? launch_sketch_scores<1, true>(p, stream) : launch_sketch_scores<1, false>(p, stream);
  if (bytes == 32) return wide ? launch_sketch_scores<2, true>(p, stream) : launch_sketch_scores<2, false>(p, stream);
  return wide ? launch_sketch_scores<4, true>(p, stream) : launch_sketch_scores<4, false>(p, stream);
}

} // namespace shadowkv
