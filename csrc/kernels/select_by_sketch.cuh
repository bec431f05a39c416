// Selection by a 2-bit key sketch in two levels and three launches: a block a row and kv head finds the runs with the
// best signs, warps all over the GPU score the tokens of those by int8 tensor cores, and a block a row and head chooses
// the best chunks. Rows are seldom a whole number per multiprocessor: in one launch, with a block for all of a row and
// head, 288 of them took 114 us where 256 took 75. A warp that scores copies 4 runs at a time to shared memory, a lane
// each token, two copies ahead, and ldmatrix makes fragments of them.
#pragma once

#include "kernels/early_launch.cuh"
#include "kernels/mma.cuh"
#include "kernels/radix_select.cuh"

namespace shadowkv {

constexpr int kRun = 8;         // tokens of a run
constexpr int kPageRuns = kPage / kRun;
constexpr int kBatch = 4;       // runs that a warp scores at once
constexpr int kStages = 2;      // batches that a warp copies ahead
constexpr int kScoreWarps = 8;  // of a block that scores
constexpr int kWarpRuns = 32;   // that a warp scores, a lane holds the name of each
constexpr int kKeptShare = 12;  // one of so many runs is kept,
constexpr int kKeptFactor = 4;  // and so many times the tokens of the budget at least

// What a row leaves in memory for the next launch: scores of the kept runs' chunks, 8 bytes each of these runs, and
// how many there are.
struct Region {
  int keep, values, kept;
  Region(int64_t pages, int64_t chunk, int64_t k) {
    const int64_t runs = kPageRuns * pages, wanted = (k * chunk * kKeptFactor + kRun - 1) / kRun;
    const int64_t share = (runs + kKeptShare - 1) / kKeptShare;
    keep = int(wanted > runs ? runs : wanted > share ? wanted : share);
    values = int((2 * keep * (kRun / chunk) + 15) / 16 * 16), kept = (8 * keep + 15) / 16 * 16;
  }
  __host__ __device__ int64_t bytes() const { return int64_t(values) + kept + 16; }
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
  uint8_t* workspace; // [B, H, region]
  int64_t* selected;  // [B, H, k]
  Region region;      // of a row
  int heads, group, num_pages_most, log_chunk, k;
  unsigned rows; // B H

  __device__ uint16_t* values(unsigned row) const {
    return reinterpret_cast<uint16_t*>(workspace + row * region.bytes());
  }
  __device__ uint2* kept(unsigned row) const { // page names and runs
    return reinterpret_cast<uint2*>(workspace + row * region.bytes() + region.values);
  }
  __device__ int& count(unsigned row) const {
    return *reinterpret_cast<int*>(workspace + row * region.bytes() + region.values + region.kept);
  }
};

// Four runs of one head in a warp's shared memory.
template <int kBytes>
struct Stage {
  static constexpr int kPlane = kBatch * kRun * kBytes;
  static constexpr int kRest = kPlane, kScale = 2 * kPlane, kFlags = kScale + kBatch * kRun * 2;
  static constexpr int kSize = kFlags + kBatch * 8;
};

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

// Bytes of shared memory, `most` at the most, for the largest of 8 `groups` values: two bit sets and, where there is
// room, the values, to look at them again.
struct LargestMemory {
  int bits, values;
  LargestMemory(int64_t groups, int64_t most)
      : bits(int(((groups + 3) / 4 * 8 + 15) / 16 * 16)), values(bits + 16 * groups <= most ? int(16 * groups) : 0) {}
  int bytes() const { return bits + values; }
};

struct SelectPhase {
  SelectBySketch of;
  LargestMemory memory;
};

// Counts 8 `groups` values and copies them to shared memory behind the bit sets, where that has room; returns where
// they can be read again.
__device__ __forceinline__ const uint4*
count_values(RadixShared& shared, const LargestMemory& memory, uint4* room, const uint4* values, int groups) {
  for (int i = threadIdx.x; i < kFirstBins; i += blockDim.x) shared.first[i] = 0;
  if (threadIdx.x < 32) shared.second[threadIdx.x] = 0;
  __syncthreads();
  uint4* copies = room + memory.bits / 16;
#pragma unroll 1
  for (int i = threadIdx.x; i < groups; i += 4 * blockDim.x) {
    uint4 x[4]; // all under way at once
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (i + j * int(blockDim.x) < groups) x[j] = values[i + j * blockDim.x];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j * int(blockDim.x) >= groups) break;
      if (memory.values) copies[i + j * blockDim.x] = x[j];
      count_first(shared, x[j]);
    }
  }
  return memory.values ? copies : values;
}

__global__ void __launch_bounds__(1024) find_runs_kernel(const SelectPhase phase) {
  const SelectBySketch& p = phase.of;
  extern __shared__ uint4 room[];
  __shared__ RadixShared shared;
  wait_for_launch_before();
  let_next_launch_begin();
  const unsigned row = blockIdx.x, sequence = row / p.heads;
  const int pages = int(max(int64_t(0), min(p.num_pages[sequence], int64_t(p.num_pages_most))));
  const int budget = int(max(int64_t(0), min(p.budget[sequence], int64_t(p.k))));
  int count = 0;
  if (budget > 0 && pages > 0) {
    const uint4* values =
        count_values(shared, phase.memory, room, p.coarse + int64_t(row) * p.num_pages_most, pages);
    const int64_t* names = p.pages + sequence * p.pages_stride;
    uint2* kept = p.kept(row);
    const int runs = kPageRuns * pages, share = (runs + kKeptShare - 1) / kKeptShare;
    const int wanted = ((int64_t(budget) << p.log_chunk) * kKeptFactor + kRun - 1) / kRun;
    count = select_largest(
        shared, values, pages, min(runs, max(share, wanted)), reinterpret_cast<uint32_t*>(room),
        [&](uint32_t place, uint32_t run) { kept[place] = {uint32_t(names[run / kPageRuns]), run}; });
  }
  if (threadIdx.x == 0) p.count(row) = count;
}

// kBytes: of a token in a plane, 8, 16 or 32. kWide: more than 4 query heads. kSingle: chunks of one token.
template <int kBytes, bool kWide, bool kSingle>
__global__ void __launch_bounds__(32 * kScoreWarps, kBytes == 32 ? 2 : 4) score_runs_kernel(const SelectBySketch p) {
  using Stage = Stage<kBytes>;
  constexpr int kHalves = (kBytes + 15) / 16, kPlanes = kBytes == 8 ? 4 : 8; // a lane's words and bits of a token
  // Codes of weight 4 in sums of their own; floats that begin with these bits are kMagic + a whole number.
  constexpr int kMagicBits = 0x4b400000;
  constexpr float kMagic = 12582912;
  __shared__ __align__(128) uint8_t memory[kScoreWarps * kStages * Stage::kSize];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const unsigned row = blockIdx.y, head = row % p.heads;
  const int log_chunk = kSingle ? 0 : p.log_chunk, log_run = 3 - log_chunk; // tokens of a chunk, chunks of a run

  // Queries as fragments: lane 4 g + t has those of query g, or of g % 4, of which the first four meet runs 0 and 1 and
  // the others runs 2 and 3. Queries that there are none of are copies of the last. They were there before the launch
  // that found the runs.
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
  wait_for_launch_before();
  let_next_launch_begin();

  const int first_run = (blockIdx.x * kScoreWarps + warp) * kWarpRuns;
  const int left = min(p.count(row) - first_run, kWarpRuns);
  if (left <= 0) return;
  const uint2 own = lane < left ? p.kept(row)[first_run + lane] : uint2{};
  uint16_t* values = p.values(row) + (first_run << log_run);

  // A batch of runs to a stage: lane 8 r + i copies token i of run r; lanes 8 r and 8 r + 1 its scales, lane 8 r + 2 its
  // flags, or the 8 flags that they are among.
  const uint32_t stages = shared_address(memory) + warp * kStages * Stage::kSize;
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
    const uint32_t name = __shfl_sync(~0u, own.x, at % kWarpRuns);
    const uint32_t run = __shfl_sync(~0u, own.y, at % kWarpRuns) % kPageRuns;
    if (at < left) {
      const uint32_t codes = from_codes + run * (kRun * kBytes);
      copy_token<kBytes>(to_codes + slot * Stage::kSize, p.signs + uint64_t(name) * p.signs_stride + codes);
      copy_token<kBytes>(
          to_codes + slot * Stage::kSize + Stage::kRest, p.rest + uint64_t(name) * p.rest_stride + codes);
      if (token < 3)
        copy8_async(
            to_other + slot * Stage::kSize, from_other + uint64_t(name) * other_stride + (run * other_step & ~7));
    }
    close_copy_group();
  };
#pragma unroll
  for (int slot = 0; slot < kStages; ++slot) copy(slot * kBatch, slot);

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
    const uint32_t run = kSingle ? 0 : __shfl_sync(~0u, own.y, at % kWarpRuns);
    const uint32_t scale_and_flag = load_shared_pair(
        scale_here + slot * Stage::kSize,
        flags_here + slot * Stage::kSize + ((run & ((1 << log_chunk) - 1)) << log_run));
    __syncwarp(); // all lanes are done with the stage
    copy(first + kStages * kBatch, slot);

    constexpr int kTiles = kWide ? 2 : 1;
    int32_t ones[kTiles][4] = {}, fours[kTiles][4];
#pragma unroll
    for (int e = 0; e < 4 * kTiles; ++e) fours[e / 4][e % 4] = start[e % 2];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      uint32_t codes[2][kBatch]; // of even bits and of odd bits
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        codes[0][r] = select_bits<0xaaaaaaaa>(sign[half][r] << 1, low[half][r]);
        codes[1][r] = select_bits<0xaaaaaaaa>(sign[half][r], low[half][r] >> 1);
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
    if (at < left && (g & ((1 << log_chunk) - 1)) == 0)
      values[at * kRun + g >> log_chunk] =
          scale_and_flag >> 16 ? kNever : __half_as_ushort(__float2half_rn(fmaxf(score, -65504.f)));
  };
#pragma unroll 1
  for (int first = 0; first < left; first += kStages * kBatch) {
#pragma unroll
    for (int slot = 0; slot < kStages; ++slot)
      if (first + slot * kBatch < left) score_batch(first + slot * kBatch, slot);
  }
}

__global__ void __launch_bounds__(1024) choose_chunks_kernel(const SelectPhase phase) {
  const SelectBySketch& p = phase.of;
  extern __shared__ uint4 room[];
  __shared__ RadixShared shared;
  wait_for_launch_before();
  let_next_launch_begin();
  const unsigned row = blockIdx.x, sequence = row / p.heads;
  const int log_run = 3 - p.log_chunk, chunks = p.count(row) << log_run, groups = (chunks + 7) / 8;
  int64_t* selected = p.selected + int64_t(row) * p.k;
  int count = 0;
  if (chunks > 0) {
    uint16_t* scores = p.values(row);
    if (chunks + int(threadIdx.x) < 8 * groups) scores[chunks + threadIdx.x] = kNever;
    const uint4* values = count_values(shared, phase.memory, room, reinterpret_cast<const uint4*>(scores), groups);
    const uint2* kept = p.kept(row);
    const int budget = int(max(int64_t(0), min(p.budget[sequence], int64_t(p.k))));
    count = select_largest(
        shared, values, groups, budget, reinterpret_cast<uint32_t*>(room), [&](uint32_t place, uint32_t i) {
          selected[place] = (int64_t(kept[i >> log_run].y) << log_run) + (i & ((1 << log_run) - 1));
        });
  }
  for (int i = count + int(threadIdx.x); i < p.k; i += blockDim.x) selected[i] = -1;
}

// Multiprocessors hold 4, 2 or 1 blocks so that all rows run at once where they can.
inline int select_threads(int64_t rows, int processors) {
  return rows > 2 * processors ? 256 : rows > processors ? 512 : 1024;
}

template <int kBytes, bool kWide>
cudaError_t launch_select_by_sketch(const SelectBySketch& p, cudaStream_t stream) {
  int device = 0, processors = 0;
  if (const auto error = cudaGetDevice(&device)) return error;
  if (const auto error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return error;
  const dim3 threads(select_threads(p.rows, processors)), score_threads(32 * kScoreWarps);
  const int block_runs = kScoreWarps * kWarpRuns;
  const dim3 score_blocks((p.region.keep + block_runs - 1) / block_runs, p.rows);
  int most = 0;
  if (const auto error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return error;
  most -= int(sizeof(RadixShared)) + 16;
  const SelectPhase find{p, LargestMemory(p.num_pages_most, most)};
  const SelectPhase choose{p, LargestMemory(p.region.values / 16, most)};
  if (const auto error = launch_early(find_runs_kernel, dim3(p.rows), threads, find.memory.bytes(), stream, find))
    return error;
  const auto score = p.log_chunk ? score_runs_kernel<kBytes, kWide, false> : score_runs_kernel<kBytes, kWide, true>;
  if (const auto error = launch_early(score, score_blocks, score_threads, 0, stream, p)) return error;
  return launch_early(choose_chunks_kernel, dim3(p.rows), threads, choose.memory.bytes(), stream, choose);
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
