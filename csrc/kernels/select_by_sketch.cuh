// Selection by a 2-bit key sketch in two levels, one block a row and kv head: the runs with the best signs, the scores
// of their tokens by int8 tensor cores, the best chunks of those. A warp copies 4 runs at a time to shared memory, a
// lane each token, two copies ahead, and ldmatrix makes fragments of them. Of 79 us for 504 rows of 7680 runs about 55
// are copies and scores, and copies alone take no less; more of them ahead, larger blocks and blocks that begin one
// after the other made it slower.
#pragma once

#include "kernels/early_launch.cuh"
#include "kernels/mma.cuh"
#include "kernels/radix_select.cuh"

namespace shadowkv {

constexpr int kRun = 8;        // tokens of a run
constexpr int kPageRuns = kPage / kRun;
constexpr int kBatch = 4;      // runs that a warp scores at once
constexpr int kStages = 2;     // batches that a warp copies ahead
constexpr int kKeptShare = 8;  // one of so many runs is kept,
constexpr int kKeptFactor = 4; // and so many times the tokens of the budget at least

// The heads of a sequence share pages, and with them translations of addresses. In turn, its blocks begin one after the
// other, each on another multiprocessor. Together, a multiprocessor gets neighbouring heads, as far as blocks are dealt
// out one to each multiprocessor, then one more to each.
enum class BlockOrder { kInTurn, kTogether };
constexpr BlockOrder kBlockOrder = BlockOrder::kInTurn;

// Bytes that a row needs: values of runs or chunks, the kept runs, and two bit sets.
struct Region {
  int values, kept, bits;
  Region(int64_t pages, int64_t chunk, int64_t k) {
    const int64_t runs = kPageRuns * pages, wanted = (k * chunk * kKeptFactor + kRun - 1) / kRun;
    const int64_t share = (runs + kKeptShare - 1) / kKeptShare;
    const int64_t keep = wanted > runs ? runs : wanted > share ? wanted : share, chunks = keep * (kRun / chunk);
    const int64_t most = ((runs > chunks ? runs : chunks) + 31) / 32 * 32;
    values = int(2 * most), kept = int((8 * keep + 15) / 16 * 16), bits = int(2 * most / 8);
  }
  int64_t bytes() const { return (int64_t(values) + kept + bits + 15) / 16 * 16; }
};

struct SelectBySketch {
  const uint8_t* whole; // [B, H, G, 8, S], of sketch_queries
  const float* unit;    // [B, H, G]
  const int* sum;       // [B, H, G]
  const uint4* coarse;  // [B, H, P], 8 halves each
  const uint8_t *signs, *rest, *scale, *excluded;
  uint32_t signs_stride, rest_stride, scale_stride, excluded_stride; // from one page name to the next, in bytes
  const int64_t* pages;                                              // [B, P]
  int64_t pages_stride;                                              // of a row, in names
  const int64_t* num_pages;                                          // [B]
  const int64_t* budget;                                             // [B]
  uint8_t* workspace; // [B, H, region] where a row's region does not fit in shared memory, otherwise null
  int64_t* selected;  // [B, H, k]
  Region region;      // of a row
  int64_t row_bytes;
  int heads, group, num_pages_most, log_chunk, k;
  unsigned rows; // B H
};

// Four runs of one head in a warp's shared memory.
template <int kBytes>
struct Stage {
  static constexpr int kPlane = kBatch * kRun * kBytes;
  static constexpr int kRest = kPlane, kScale = 2 * kPlane, kFlags = kScale + kBatch * kRun * 2;
  static constexpr int kSize = kFlags + kBatch * 8;
};

__device__ __forceinline__ void copy8_async(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy4_async(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// As load_streamed16, of what the launch before may have written while this one had begun.
__device__ __forceinline__ uint4 load_fresh16(const void* p) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// a where the mask has ones, b elsewhere: one instruction.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t choose_bits(uint32_t a, uint32_t b) {
  uint32_t x;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(x) : "n"(kMask), "r"(a), "r"(b));
  return x;
}

__device__ __forceinline__ uint32_t load_shared4(uint32_t from) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from));
  return x;
}

// 16 bits at `low` and below, 8 bits at `high` above: one register, which the compiler would make two of.
__device__ __forceinline__ uint32_t load_shared_pair(uint32_t low, uint32_t high) {
  uint32_t x;
  asm volatile(
      "{\n.reg .u32 low, high;\nld.shared.u16 low, [%1];\nld.shared.u8 high, [%2];\n"
      "prmt.b32 %0, low, high, 0x5410;\n}"
      : "=r"(x)
      : "r"(low), "r"(high));
  return x;
}

// Tokens of a plane are 16 bytes apart; of 32 bytes, the second halves follow all the first.
template <int kBytes>
__device__ __forceinline__ void copy_token(uint32_t to, const uint8_t* from) {
  if constexpr (kBytes == 8) {
    copy8_async(to, from);
  } else {
#pragma unroll
    for (int half = 0; half < kBytes / 16; ++half) copy16_async(to + half * kBatch * kRun * 16, from + 16 * half);
  }
}

// x[half][r]: 4 bytes of token g of run r, from this lane's place in a plane. With 8 bytes a token, lanes t and t + 2
// have the same bytes, the later ones shifted: the lower 4 bits of theirs are those that the others have above.
template <int kBytes>
__device__ __forceinline__ void load_plane(uint32_t (&x)[(kBytes + 15) / 16][kBatch], uint32_t from) {
  if constexpr (kBytes == 8) {
#pragma unroll
    for (int run = 0; run < kBatch; ++run) x[0][run] = load_shared4(from + 64 * run) >> (threadIdx.x & 2) * 2;
  } else {
#pragma unroll
    for (int half = 0; half < kBytes / 16; ++half) load_matrices(x[half], from + half * kBatch * kRun * 16);
  }
}

// kBytes: of a token in a plane, 8, 16 or 32. kWide: more than 4 query heads. kSingle: chunks of one token. kShared: a
// row fits in shared memory.
template <int kBytes, bool kWide, bool kSingle, bool kShared>
__global__ void __launch_bounds__(kBytes == 32 ? 512 : 1024) select_by_sketch_kernel(const SelectBySketch p) {
  using Stage = Stage<kBytes>;
  constexpr int kHalves = (kBytes + 15) / 16, kPlanes = kBytes == 8 ? 4 : 8; // a lane's words and bits of a token
  // Codes of weight 4 in sums of their own; floats that begin with these bits are kMagic + a whole number.
  constexpr int kMagicBits = 0x4b400000;
  constexpr float kMagic = 12582912;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ RadixShared shared;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, warps = blockDim.x / 32;
  const int g = lane / 4, t = lane % 4;
  constexpr bool kInTurn = kBlockOrder == BlockOrder::kInTurn;
  const unsigned row = kInTurn ? blockIdx.x : blockIdx.x * gridDim.y + blockIdx.y;
  if (!kInTurn && row >= p.rows) return;
  const unsigned sequence = row / p.heads, head = row % p.heads;
  const int log_chunk = kSingle ? 0 : p.log_chunk, log_run = 3 - log_chunk; // tokens of a chunk, chunks of a run

  wait_for_launch_before();
  uint8_t* own = kShared ? memory : p.workspace + row * p.row_bytes;
  uint16_t* values = reinterpret_cast<uint16_t*>(own);
  uint2* kept = reinterpret_cast<uint2*>(own + p.region.values); // page names and runs
  uint32_t* bits = reinterpret_cast<uint32_t*>(own + p.region.values + p.region.kept);
  const uint4* fours_of_values = reinterpret_cast<const uint4*>(values);

  const int pages = int(max(int64_t(0), min(p.num_pages[sequence], int64_t(p.num_pages_most))));
  const int budget = int(max(int64_t(0), min(p.budget[sequence], int64_t(p.k))));
  int count = 0;
  if (budget > 0 && pages > 0) {
    for (int i = thread; i < kFirstBins; i += blockDim.x) shared.first[i] = 0;
    if (thread < 32) shared.second[thread] = 0;
    __syncthreads();
    const uint4* coarse = p.coarse + int64_t(row) * p.num_pages_most;
#pragma unroll 1
    for (int i = thread; i < pages; i += 4 * blockDim.x) {
      uint4 x[4]; // all under way at once
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i + j * int(blockDim.x) < pages) x[j] = load_fresh16(coarse + i + j * blockDim.x);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (i + j * int(blockDim.x) >= pages) break;
        if (kShared) reinterpret_cast<uint4*>(values)[i + j * blockDim.x] = x[j];
        count_first(shared, x[j]);
      }
    }
    const int64_t* names = p.pages + sequence * p.pages_stride;
    const int runs = kPageRuns * pages, share = (runs + kKeptShare - 1) / kKeptShare;
    const int wanted = ((int64_t(budget) << log_chunk) * kKeptFactor + kRun - 1) / kRun;
    count = select_largest(
        shared, kShared ? fours_of_values : coarse, pages, min(runs, max(share, wanted)), bits,
        [&](uint32_t place, uint32_t run) {
          const int64_t* name = names + run / kPageRuns;
          kept[place].y = run;
          if (kShared) copy4_async(shared_address(&kept[place].x), name); // its lower half
          else kept[place].x = uint32_t(*name);
        });
    wait_copies();
    __syncthreads();
  }

  if (count > 0) {
    // A batch of runs to a stage: lane 8 r + i copies token i of run r; lanes 8 r and 8 r + 1 its scales, lane 8 r + 2
    // its flags, or the 8 flags that they are among.
    const uint32_t stages = shared_address(memory) + (kShared ? int(p.row_bytes) : 0) + warp * kStages * Stage::kSize;
    const int token = lane % kRun;
    const bool is_flags = token == 2;
    const uint32_t to_codes = stages + lane * (kBytes < 16 ? kBytes : 16);
    const uint32_t to_other =
        stages + (is_flags ? Stage::kFlags + lane / kRun * 8 : Stage::kScale + lane / kRun * 16 + token * 8);
    const uint32_t from_codes = (head * kPage + token) * kBytes;
    const uint8_t* from_other =
        is_flags ? p.excluded + (head * kPage >> log_chunk) : p.scale + head * kPage * 2 + token * 8;
    const uint32_t other_stride = is_flags ? p.excluded_stride : p.scale_stride;
    const uint32_t other_step = is_flags ? 1 << log_run : 2 * kRun;
    const auto copy = [&](int first, int slot) {
      const int at = first + lane / kRun;
      if (at < count) {
        const uint2 x = kept[at];
        const uint32_t run = x.y % kPageRuns, codes = from_codes + run * (kRun * kBytes);
        copy_token<kBytes>(to_codes + slot * Stage::kSize, p.signs + uint64_t(x.x) * p.signs_stride + codes);
        copy_token<kBytes>(
            to_codes + slot * Stage::kSize + Stage::kRest, p.rest + uint64_t(x.x) * p.rest_stride + codes);
        if (token < 3)
          copy8_async(
              to_other + slot * Stage::kSize, from_other + uint64_t(x.x) * other_stride + (run * other_step & ~7));
      }
      close_copy_group();
    };
#pragma unroll
    for (int slot = 0; slot < kStages; ++slot) copy((warp + slot * warps) * kBatch, slot);

    // Queries as fragments: lane 4 g + t has those of query g, or of g % 4, of which the first four meet runs 0 and 1
    // and the others runs 2 and 3. Queries that there are none of are copies of the last.
    uint32_t b[kHalves][kPlanes][kWide ? 1 : 2];
    const auto query = [&](int column) { return row * p.group + min(kWide ? column : column % 4, p.group - 1); };
    const uint8_t* whole = p.whole + query(g) * 8 * kBytes + (kBytes == 8 ? (t & 2) * 2 * kBytes + t % 2 * 4 : 4 * t);
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int j = 0; j < kPlanes; ++j) {
        const uint32_t x = *reinterpret_cast<const uint32_t*>(whole + j * kBytes + 16 * half);
        b[half][j][0] = kWide || g < 4 ? x : 0;
        if (!kWide) b[half][j][kWide ? 0 : 1] = g < 4 ? 0 : x;
      }
    float unit[2];
    int start[2]; // 4 times the sum of codes less their mean begins with this
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      unit[e] = 0.25f * p.unit[query(2 * t + e)], start[e] = kMagicBits - 6 * p.sum[query(2 * t + e)];
    }

    const uint32_t codes_here =
        kBytes == 8 ? stages + g * 8 + t % 2 * 4 : to_codes; // ldmatrix takes addresses where the lane copied to
    const uint32_t scale_here = stages + Stage::kScale + t * 16 + g * 2;
    const uint32_t flags_here = stages + Stage::kFlags + t * 8 + (g >> log_chunk); // of the first of runs copied along
    const auto score_batch = [&](int first, int slot) {
      wait_copy_groups<kStages - 1>();
      __syncwarp(); // all lanes' copies are there
      uint32_t sign[kHalves][kBatch], low[kHalves][kBatch];
      load_plane<kBytes>(sign, codes_here + slot * Stage::kSize);
      load_plane<kBytes>(low, codes_here + slot * Stage::kSize + Stage::kRest);
      // In the end, a lane has token g of run t.
      const int at = first + t;
      const uint32_t run = !kSingle && at < count ? kept[at].y : 0;
      const uint32_t scale_and_flag = load_shared_pair(
          scale_here + slot * Stage::kSize,
          flags_here + slot * Stage::kSize + ((run & ((1 << log_chunk) - 1)) << log_run));
      __syncwarp(); // all lanes are done with the stage
      copy(first + kStages * warps * kBatch, slot);

      constexpr int kTiles = kWide ? 2 : 1;
      int32_t ones[kTiles][4] = {}, fours[kTiles][4];
#pragma unroll
      for (int e = 0; e < 4 * kTiles; ++e) fours[e / 4][e % 4] = start[e % 2];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        uint32_t codes[2][kBatch]; // of even bits and of odd bits
#pragma unroll
        for (int r = 0; r < kBatch; ++r) {
          codes[0][r] = choose_bits<0xaaaaaaaa>(sign[half][r] << 1, low[half][r]);
          codes[1][r] = choose_bits<0xaaaaaaaa>(sign[half][r], low[half][r] >> 1);
        }
        const auto plane = [&](int r, int j) {
          return codes[j & 1][r] >> (j & 4) & (j & 2 ? 0x0c0c0c0cu : 0x03030303u);
        };
        if constexpr (kWide) {
#pragma unroll
          for (int j = 0; j < kPlanes / 2; ++j) {
            const int first = kPlanes == 8 ? j : 2 * j, second = kPlanes == 8 ? j + 4 : 2 * j + 1; // of one weight
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
              mma_u8s8(
                  first & 2 ? fours[tile] : ones[tile],
                  {plane(2 * tile, first), plane(2 * tile + 1, first), plane(2 * tile, second),
                   plane(2 * tile + 1, second)},
                  {b[half][first][0], b[half][second][0]});
          }
        } else {
#pragma unroll
          for (int j = 0; j < kPlanes; ++j)
            mma_u8s8(
                j & 2 ? fours[0] : ones[0], {plane(0, j), plane(1, j), plane(2, j), plane(3, j)}, b[half][j]);
        }
      }
      float best[2 * kTiles]; // of tokens g of two runs, of a tile
#pragma unroll
      for (int r = 0; r < 2 * kTiles; ++r) {
        float score[2];
#pragma unroll
        for (int e = 0; e < 2; ++e)
          score[e] = (__int_as_float(4 * ones[r / 2][r % 2 * 2 + e] + fours[r / 2][r % 2 * 2 + e]) - kMagic) * unit[e];
        best[r] = fmaxf(score[0], score[1]);
      }
      // The maximum over a quad's lanes, of another run in each of them.
      const auto exchange = [](bool odd, float x, float y, int mask) {
        return fmaxf(odd ? y : x, __shfl_xor_sync(~0u, odd ? x : y, mask));
      };
      float score = exchange(t & 1, best[0], best[1], 1);
      if constexpr (kWide) score = exchange(t & 2, score, exchange(t & 1, best[2], best[3], 1), 2);
      score = fmaf(score, __half2float(__ushort_as_half(uint16_t(scale_and_flag))), 0.f); // never -0
#pragma unroll
      for (int i = 0; i < 3; ++i)
        if (i < log_chunk) score = fmaxf(score, __shfl_xor_sync(~0u, score, 4 << i));
      if (at < count && (g & ((1 << log_chunk) - 1)) == 0) {
        const uint32_t half = scale_and_flag >> 16 ? kNever : __half_as_ushort(__float2half_rn(fmaxf(score, -65504.f)));
        values[at * kRun + g >> log_chunk] = half;
        atomicAdd(&shared.first[(half & 0x8000 ? half ^ 0xffff : half ^ 0x8000) >> 5], 1);
      }
    };
#pragma unroll 1
    for (int first = warp * kBatch; first < count; first += kStages * warps * kBatch) {
#pragma unroll
      for (int slot = 0; slot < kStages; ++slot)
        if (first + slot * warps * kBatch < count) score_batch(first + slot * warps * kBatch, slot);
    }

    const int chunks = count << log_run, groups = (chunks + 7) / 8;
    if (chunks + thread < 8 * groups) values[chunks + thread] = kNever;
    int64_t* selected = p.selected + int64_t(row) * p.k;
    count = select_largest(shared, fours_of_values, groups, budget, bits, [&](uint32_t place, uint32_t i) {
      selected[place] = (kept[i >> log_run].y << log_run) + (i & ((1 << log_run) - 1));
    });
  }
  for (int i = count + thread; i < p.k; i += blockDim.x) p.selected[int64_t(row) * p.k + i] = -1;
}

inline dim3 select_blocks(unsigned rows, unsigned processors) {
  return kBlockOrder == BlockOrder::kInTurn ? dim3(rows) : dim3(processors, (rows + processors - 1) / processors);
}

// Multiprocessors hold 4, 2 or 1 blocks so that all rows run at once where they can.
inline int select_threads(int64_t rows, int processors) {
  return rows > 2 * processors ? 256 : rows > processors ? 512 : 1024;
}

template <int kBytes, bool kWide, bool kSingle, bool kShared>
cudaError_t launch_select_by_sketch(const SelectBySketch& p, cudaStream_t stream) {
  int device = 0, processors = 0;
  if (const auto error = cudaGetDevice(&device)) return error;
  if (const auto error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return error;
  int threads = select_threads(p.rows, processors);
  if (kBytes == 32 && threads > 512) threads = 512;
  const int bytes = int(threads / 32 * kStages * Stage<kBytes>::kSize + (kShared ? p.row_bytes : 0));
  const auto kernel = select_by_sketch_kernel<kBytes, kWide, kSingle, kShared>;
  return launch_early(kernel, select_blocks(p.rows, processors), dim3(threads), bytes, stream, p);
}

template <int kBytes, bool kWide>
cudaError_t launch_select_by_sketch(const SelectBySketch& p, cudaStream_t stream) {
  if (p.workspace)
    return p.log_chunk ? launch_select_by_sketch<kBytes, kWide, false, false>(p, stream)
                       : launch_select_by_sketch<kBytes, kWide, true, false>(p, stream);
  return p.log_chunk ? launch_select_by_sketch<kBytes, kWide, false, true>(p, stream)
                     : launch_select_by_sketch<kBytes, kWide, true, true>(p, stream);
}

template <int kBytes>
cudaError_t launch_select_by_sketch(const SelectBySketch& p, cudaStream_t stream) {
  return p.group > 4 ? launch_select_by_sketch<kBytes, true>(p, stream)
                     : launch_select_by_sketch<kBytes, false>(p, stream);
}

// By bytes of a token in a plane: 8, 16 or 32.
inline cudaError_t launch_select_by_sketch(const SelectBySketch& p, int64_t bytes, cudaStream_t stream) {
  return bytes == 8    ? launch_select_by_sketch<8>(p, stream)
         : bytes == 16 ? launch_select_by_sketch<16>(p, stream)
                       : launch_select_by_sketch<32>(p, stream);
}

} // namespace shadowkv
