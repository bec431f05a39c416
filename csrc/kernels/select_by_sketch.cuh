// Selection by a 2-bit key sketch in two levels and three launches: a block a row and kv head finds the runs with the
// best signs, warps all over the GPU score the tokens of those by int8 tensor cores, and a block a row and head chooses
// the best chunks. Rows are seldom a whole number per multiprocessor, nor are the parts of rows that warps score: with a
// block for all of a row and head, in one launch, 288 of them took 114 us where 256 took 75. So as many blocks score as
// are resident, each warp a slice of some row's kept runs after another: it copies 4 runs at a time to shared memory, a
// lane each token, two copies ahead and on into its next slice, and ldmatrix makes fragments of them. Runs and chunks are
// sampled where they are found, from values that are in shared memory then.
#pragma once

#include <algorithm>

#include "kernels/constants.cuh"
#include "kernels/early_launch.cuh"
#include "kernels/mma.cuh"
#include "kernels/radix_select.cuh"
#include "kernels/weighted_sampling.cuh"
#include "sketch_rules.h"

namespace shadowkv {

constexpr int kBatch = 4;       // runs that a warp scores at once
constexpr int kStages = 2;      // batches that a warp copies ahead
constexpr int kScoreWarps = 8;  // of a block that scores
constexpr int kScoreBlocks = 3; // of a multiprocessor
constexpr int kSliceRuns = 32;  // that a warp scores at a time, a lane holds the name of each; where there are few,
constexpr int kShortSlice = 8;  // so many
static_assert(kSliceRuns % (kStages * kBatch) == 0 && kShortSlice % (kStages * kBatch) == 0, "slices of whole rounds");

// What all of a row's scores have in common: how many runs are kept, and the line that makes scores exponents.
struct RowState {
  int count;
  float slope, edge;
  int unused;
};

// What a row leaves in memory for the next launch: scores of the kept runs' chunks, 8 bytes each of these runs, the
// logarithm (to base 2) of how many each stands for, and a RowState.
struct Region {
  int keep, values, kept, weights;
  Region(int64_t pages, int64_t chunk, int64_t k) {
    keep = kept_runs(int(kPageRuns * pages), k * chunk);
    values = int((2 * keep * (kRun / chunk) + 15) / 16 * 16), kept = (8 * keep + 15) / 16 * 16;
    weights = (4 * keep + 15) / 16 * 16;
  }
  __host__ __device__ int64_t bytes() const { return int64_t(values) + kept + weights + 16; }
};

struct SelectBySketch {
  const uint8_t* whole; // [B, H, G, 8, S], of sketch_queries
  const float* unit;    // [B, H, G]
  const int* sum;       // [B, H, G]
  const uint4* coarse;  // [B, H, P], 8 halves each
  const uint8_t *signs, *rest, *scale;
  uint32_t signs_stride, rest_stride, scale_stride; // from one page name to the next, in bytes
  const int64_t* pages;                             // [B, P]
  int64_t pages_stride;                             // of a row, in names
  const int64_t* num_pages;                         // [B]
  const int64_t* budget;                            // [B]
  const int64_t *sampled, *seeds;                   // [B], or null where nothing is sampled
  const float* length;                              // [B, H, G]
  float run_sharpness, chunk_sharpness;             // times lengths, in exponents to base 2
  uint32_t first_head;                              // of this layer, among all layers' heads
  uint8_t* workspace; // [B, H, region]
  int64_t* selected;  // [B, H, k]
  float* log_weight;  // [B, H, k], or null where nothing is sampled
  Region region;      // of a row
  int heads, group, num_pages_most, log_chunk, k;
  unsigned rows; // B H
  int slice;     // runs that a warp scores at a time

  __device__ int pages_of(unsigned sequence) const {
    return int(max(int64_t(0), min(num_pages[sequence], int64_t(num_pages_most))));
  }
  __device__ int budget_of(unsigned sequence) const {
    return int(max(int64_t(0), min(budget[sequence], int64_t(k))));
  }
  // Chunks to sample of each of a sequence's rows.
  __device__ int sampled_of(unsigned sequence) const {
    const int top_k = budget_of(sequence);
    return sampled && top_k ? int(max(int64_t(0), min(sampled[sequence], int64_t(k - top_k)))) : 0;
  }
  // Runs that are kept of each of a sequence's rows, unless their scores are -inf.
  __device__ int kept_of(unsigned sequence) const {
    const int runs = kPageRuns * pages_of(sequence), wanted = budget_of(sequence) + sampled_of(sequence);
    return wanted ? kept_runs(runs, int64_t(wanted) << log_chunk) : 0;
  }
  // Those of them that are sampled.
  __device__ int sampled_runs_of(unsigned sequence) const {
    const int keep = kept_of(sequence);
    return sampled_of(sequence) && keep < kPageRuns * pages_of(sequence) ? keep / kSampledShare : 0;
  }
  // Random bits of a row's sampling.
  __device__ uint32_t state_of(unsigned row) const {
    return mix_bits(uint32_t(seeds[row / heads]) * 0x9e3779b1u + first_head + row % heads);
  }

  __device__ uint16_t* values(unsigned row) const {
    return reinterpret_cast<uint16_t*>(workspace + row * region.bytes());
  }
  __device__ uint2* kept(unsigned row) const { // page names and runs
    return reinterpret_cast<uint2*>(workspace + row * region.bytes() + region.values);
  }
  __device__ float* weights(unsigned row) const {
    return reinterpret_cast<float*>(workspace + row * region.bytes() + region.values + region.kept);
  }
  __device__ RowState& state(unsigned row) const {
    return *reinterpret_cast<RowState*>(workspace + (row + 1) * region.bytes() - sizeof(RowState));
  }
};

// Four runs of one head in a warp's shared memory.
template <int kBytes>
struct Stage {
  static constexpr int kPlane = kBatch * kRun * kBytes;
  static constexpr int kRest = kPlane, kScale = 2 * kPlane, kSize = kScale + kBatch * kRun;
};

__device__ __forceinline__ uint32_t load_shared4(uint32_t from) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from));
  return x;
}

__device__ __forceinline__ uint32_t load_shared1(uint32_t from) {
  uint32_t x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(from));
  return x;
}

// The bits of the half next to x: the largest or the lowest finite one of what is beyond.
__device__ __forceinline__ uint16_t finite_half(float x) {
  uint16_t y;
  asm("cvt.rn.satfinite.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

// Does nothing, but the compiler cannot make x and y again from what they were made of.
__device__ __forceinline__ void keep_in_registers(uint32_t& x, uint32_t& y) { asm volatile("" : "+r"(x), "+r"(y)); }

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

// Bytes of shared memory, `most` at the most, to select from 8 `groups` values: two bit sets or sums of groups and, where
// there is room, the values, to look at them again.
struct LargestMemory {
  int bits, values;
  LargestMemory(int64_t groups, bool sampled, int64_t most)
      : bits(int(((groups + 3) / 4 * (sampled ? 16 : 8) + 15) / 16 * 16)),
        values(bits + 16 * groups <= most ? int(16 * groups) : 0) {}
  int bytes() const { return bits + values; }
};

constexpr int kFewBlocks = 3, kManyBlocks = 5; // that a multiprocessor holds, of 512 threads or of 256

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

template <int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == 512 ? kFewBlocks : kManyBlocks)
    find_runs_kernel(const SelectPhase phase) {
  const SelectBySketch& p = phase.of;
  extern __shared__ uint4 room[];
  __shared__ RadixShared shared;
  wait_for_launch_before();
  let_next_launch_begin();
  const unsigned row = blockIdx.x, sequence = row / p.heads;
  const int pages = p.pages_of(sequence), wanted = p.kept_of(sequence), sampled = p.sampled_runs_of(sequence);
  RowState state = {0, 1, 0, 0}; // scores as they are
  if (wanted > 0) {
    const uint4* values =
        count_values(shared, phase.memory, room, p.coarse + int64_t(row) * p.num_pages_most, pages);
    const int64_t* names = p.pages + sequence * p.pages_stride;
    uint2* kept = p.kept(row);
    float* weights = p.weights(row);
    uint32_t* bits = reinterpret_cast<uint32_t*>(room);
    const auto keep = [&](uint32_t place, uint32_t run, float weight) {
      kept[place] = {uint32_t(names[run / kPageRuns]), run}, weights[place] = weight;
    };
    float length = 0; // of a query, on average
    if (p.sampled) {
      for (int i = 0; i < p.group; ++i) length += p.length[row * p.group + i];
      length /= p.group, state.slope = p.chunk_sharpness * length;
    }
    if (sampled) {
      const Chosen chosen = select_by_chance(
          shared, values, pages, wanted - sampled, wanted, p.run_sharpness * length, mix_bits(p.state_of(row)), bits,
          keep);
      state.count = chosen.count, state.edge = fmaxf(chosen.edge, -kLargestHalf);
    } else {
      state.count = select_largest(shared, values, pages, wanted, bits, [&](uint32_t place, uint32_t run) {
        keep(place, run, 0);
      });
    }
  }
  if (threadIdx.x == 0) p.state(row) = state;
}

// A slice of the kept runs of a row, as a lane knows it.
struct Slice {
  uint2 named; // the page name and run of the lane's run
  float slope, more; // what makes its tokens' scores exponents
  unsigned row, head, first;
  int left; // runs from the first on, at most those of a slice: 0 or less of one that there is not
};

// Leaves in `before` how many slices of a head there are before each sequence, and of all. For one warp.
__device__ __forceinline__ void count_slices(const SelectBySketch& p, unsigned sequences, uint32_t* before) {
  const int lane = threadIdx.x % 32;
  uint32_t sum = 0;
  for (unsigned first = 0; first < sequences; first += 32) {
    const unsigned sequence = first + lane;
    const uint32_t slices = sequence < sequences ? (p.kept_of(sequence) + p.slice - 1) / p.slice : 0;
    const uint32_t inclusive = scan_warp(slices);
    if (sequence < sequences) before[sequence] = sum + inclusive - slices;
    sum += __shfl_sync(~0u, inclusive, 31);
  }
  if (lane == 0) before[sequences] = sum;
}

// The slices of all rows one after the other, those of all heads at one place together.
struct SliceLine {
  const uint32_t* before; // as count_slices leaves it
  unsigned sequences, all;

  __device__ __forceinline__ Slice find(const SelectBySketch& p, unsigned number) const {
    const int lane = threadIdx.x % 32;
    Slice x{};
    if (number >= all) return x;
    const unsigned place = number / p.heads;
    int sequence = -1; // the last that begins with it or before
    for (unsigned first = 0; first < sequences; first += 32)
      sequence += __popc(__ballot_sync(~0u, first + lane < sequences && before[first + lane] <= place));
    x.head = number % p.heads, x.row = sequence * p.heads + x.head, x.first = (place - before[sequence]) * p.slice;
    const unsigned at = min(x.first + lane, unsigned(p.region.keep - 1));
    const RowState state = p.state(x.row);
    x.named = p.kept(x.row)[at];
    x.slope = state.slope, x.more = fmaf(-state.slope, state.edge, p.weights(x.row)[at]);
    x.left = min(state.count - int(x.first), p.slice);
    return x;
  }
};

// Four runs as a lane has them in registers: token g of each, and the scale of token g of run t.
template <int kBytes>
struct RunCodes {
  static constexpr int kHalves = (kBytes + 15) / 16; // words of a token
  uint32_t sign[kHalves][kBatch], low[kHalves][kBatch], scale; // its code
};

// Where a lane writes in its warp's stages, and where it reads.
template <int kBytes>
struct RunStages {
  using Stage = Stage<kBytes>;
  int run, token; // that the lane copies, of a batch
  uint32_t to_codes, to_scale, codes_here, scale_here;

  __device__ __forceinline__ explicit RunStages(const uint8_t* memory) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const uint32_t stages = shared_address(memory) + warp * kStages * Stage::kSize;
    run = lane / kRun, token = lane % kRun;
    to_codes = stages + lane * (kBytes < 16 ? kBytes : 16);
    to_scale = stages + Stage::kScale + run * kRun;
    // Of 16 bytes or more, ldmatrix takes addresses where the lane copied to.
    codes_here = kBytes == 8 ? stages + g * 8 + t % 2 * 4 : to_codes;
    scale_here = stages + Stage::kScale + t * kRun + g;
  }

  // A batch of runs to a stage: lane 8 r + i copies token i of run r, lane 8 r its scales.
  __device__ __forceinline__ void
  copy(const SelectBySketch& p, uint2 named, unsigned head, int left, int first, int slot) const {
    const int at = first + run;
    const uint32_t name = __shfl_sync(~0u, named.x, at);
    const uint32_t of_page = head * kPageRuns + __shfl_sync(~0u, named.y, at) % kPageRuns;
    if (at < left) {
      const uint32_t codes = (of_page * kRun + token) * kBytes;
      copy_token<kBytes>(to_codes + slot * Stage::kSize, p.signs + uint64_t(name) * p.signs_stride + codes);
      copy_token<kBytes>(
          to_codes + slot * Stage::kSize + Stage::kRest, p.rest + uint64_t(name) * p.rest_stride + codes);
      if (token == 0)
        copy8_async(to_scale + slot * Stage::kSize, p.scale + uint64_t(name) * p.scale_stride + of_page * kRun);
    }
    close_copy_group();
  }

  // Waits for the oldest batch and reads it; its stage may be filled again then.
  __device__ __forceinline__ void load(RunCodes<kBytes>& codes, int slot) const {
    wait_copy_groups<kStages - 1>();
    __syncwarp(); // all lanes' copies are there
    load_plane<kBytes>(codes.sign, codes_here + slot * Stage::kSize);
    load_plane<kBytes>(codes.low, codes_here + slot * Stage::kSize + Stage::kRest);
    codes.scale = load_shared1(scale_here + slot * Stage::kSize);
    __syncwarp(); // all lanes are done with the stage
  }
};

// Queries as fragments: lane 4 g + t has those of query g, or of g % 4, of which the first four meet runs 0 and 1 and
// the others runs 2 and 3. Queries that there are none of are copies of the last.
template <int kBytes, bool kWide>
struct QueryFragments {
  static constexpr int kHalves = RunCodes<kBytes>::kHalves, kPlanes = kBytes == 8 ? 4 : 8; // bits of a token in a lane
  static constexpr int kTiles = kWide ? 2 : 1;
  // Codes of weight 4 in sums of their own; floats that begin with these bits are kMagic + a whole number.
  static constexpr int kMagicBits = 0x4b400000;
  static constexpr float kMagic = 12582912;
  uint32_t b[kHalves][kPlanes][kWide ? 1 : 2];
  float unit[2];
  int start[2]; // 4 times the sum of codes less their mean begins with this

  __device__ __forceinline__ QueryFragments(const SelectBySketch& p, unsigned row) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const auto query = [&](int column) { return row * p.group + min(kWide ? column : column % 4, p.group - 1); };
    const uint8_t* whole = p.whole + query(g) * 8 * kBytes + (kBytes == 8 ? (t & 2) * 2 * kBytes + t % 2 * 4 : 4 * t);
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int j = 0; j < kPlanes; ++j) {
        const uint32_t x = *reinterpret_cast<const uint32_t*>(whole + j * kBytes + 16 * half);
        b[half][j][0] = kWide || g < 4 ? x : 0;
        if (!kWide) {
          b[half][j][kWide ? 0 : 1] = g < 4 ? 0 : x;
          if (kBytes == 16) keep_in_registers(b[half][j][0], b[half][j][kWide ? 0 : 1]);
        }
      }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      unit[e] = 0.25f * p.unit[query(2 * t + e)], start[e] = kMagicBits - 6 * p.sum[query(2 * t + e)];
    }
  }

  // Adds the products with codes of weight 1 to `ones`, those with codes of weight 4 to `fours`.
  __device__ __forceinline__ void
  multiply(const RunCodes<kBytes>& x, int32_t (&ones)[kTiles][4], int32_t (&fours)[kTiles][4]) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      uint32_t codes[2][kBatch]; // of even bits and of odd bits
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        codes[0][r] = select_bits<0xaaaaaaaa>(x.sign[half][r] << 1, x.low[half][r]);
        codes[1][r] = select_bits<0xaaaaaaaa>(x.sign[half][r], x.low[half][r] >> 1);
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
          mma_u8s8(j & 2 ? fours[0] : ones[0], {plane(0, j), plane(1, j), plane(2, j), plane(3, j)}, b[half][j]);
      }
    }
  }

  // The best product of token g of run t with a query, before the token's scale.
  __device__ __forceinline__ float best_product(const RunCodes<kBytes>& codes) const {
    int32_t ones[kTiles][4] = {}, fours[kTiles][4];
#pragma unroll
    for (int e = 0; e < 4 * kTiles; ++e) fours[e / 4][e % 4] = start[e % 2];
    multiply(codes, ones, fours);
    float best[2 * kTiles]; // of tokens g of two runs, of a tile
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) {
      float score[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        score[e] = (__int_as_float(4 * ones[r / 2][r % 2 * 2 + e] + fours[r / 2][r % 2 * 2 + e]) - kMagic) * unit[e];
      best[r] = fmaxf(score[0], score[1]);
    }
    const int t = threadIdx.x % 4;
    // The maximum over a quad's lanes, of another run in each of them.
    const auto exchange = [](bool odd, float x, float y, int mask) {
      return fmaxf(odd ? y : x, __shfl_xor_sync(~0u, odd ? x : y, mask));
    };
    const float score = exchange(t & 1, best[0], best[1], 1);
    if constexpr (kWide) return exchange(t & 2, score, exchange(t & 1, best[2], best[3], 1), 2);
    return score;
  }
};

// kBytes: of a token in a plane, 8, 16 or 32. kWide: more than 4 query heads. kSingle: chunks of one token.
template <int kBytes, bool kWide, bool kSingle>
__global__ void __launch_bounds__(32 * kScoreWarps, kBytes == 32 ? 2 : kScoreBlocks)
    score_runs_kernel(const SelectBySketch p) {
  __shared__ __align__(128) uint8_t memory[kScoreWarps * kStages * Stage<kBytes>::kSize];
  extern __shared__ uint32_t before[]; // as count_slices leaves it
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int log_chunk = kSingle ? 0 : p.log_chunk, log_run = 3 - log_chunk; // tokens of a chunk, chunks of a run
  const unsigned sequences = p.rows / p.heads;
  // What is read here was there before the launch that finds the runs.
  if (warp == 0) count_slices(p, sequences, before);
  __syncthreads();
  const SliceLine line = {before, sequences, before[sequences] * p.heads};
  wait_for_launch_before();
  let_next_launch_begin();

  // Warps of a block begin with one slice of several heads, which are of much the same pages.
  unsigned number = blockIdx.x * kScoreWarps + warp;
  Slice own = line.find(p, number);
  const RunStages<kBytes> stages(memory);
#pragma unroll
  for (int slot = 0; slot < kStages; ++slot) stages.copy(p, own.named, own.head, own.left, slot * kBatch, slot);
#pragma unroll 1
  for (; number < line.all; number += kScoreWarps * gridDim.x) {
    const Slice next = line.find(p, number + kScoreWarps * gridDim.x);
    const QueryFragments<kBytes, kWide> queries(p, own.row);
    uint16_t* values = p.values(own.row) + (own.first << log_run) + (t * kRun + g >> log_chunk);
    const auto score_batch = [&](int first, int slot) {
      RunCodes<kBytes> codes;
      stages.load(codes, slot);
      const int ahead = first + kStages * kBatch;
      const bool here = ahead < p.slice;
      stages.copy(
          p, {here ? own.named.x : next.named.x, here ? own.named.y : next.named.y}, here ? own.head : next.head,
          here ? own.left : next.left, here ? ahead : ahead - p.slice, slot);
      if (first >= own.left) return;

      float score = queries.best_product(codes);
      score = fmaf(score, __half2float(__ushort_as_half(uint16_t(codes.scale << kScaleShift))), 0.f); // never -0
#pragma unroll
      for (int i = 0; i < 3; ++i)
        if (i < log_chunk) score = fmaxf(score, __shfl_xor_sync(~0u, score, 4 << i));
      score = fmaf(own.slope, score, __shfl_sync(~0u, own.more, first + t));
      if (first + t < own.left && (g & ((1 << log_chunk) - 1)) == 0)
        values[first * kRun >> log_chunk] = codes.scale == kExcluded ? kNever : finite_half(score);
    };
#pragma unroll 1
    for (int first = 0; first < p.slice; first += kStages * kBatch)
#pragma unroll
      for (int slot = 0; slot < kStages; ++slot) score_batch(first + slot * kBatch, slot);
    own = next;
  }
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == 512 ? kFewBlocks : kManyBlocks)
    choose_chunks_kernel(const SelectPhase phase) {
  const SelectBySketch& p = phase.of;
  extern __shared__ uint4 room[];
  __shared__ RadixShared shared;
  wait_for_launch_before();
  let_next_launch_begin();
  const unsigned row = blockIdx.x, sequence = row / p.heads;
  const int log_run = 3 - p.log_chunk, chunks = p.state(row).count << log_run, groups = (chunks + 7) / 8;
  const int sampled = p.sampled_of(sequence);
  const uint32_t random = sampled ? p.state_of(row) : 0;
  int64_t* selected = p.selected + int64_t(row) * p.k;
  float* log_weight = p.log_weight + int64_t(row) * p.k;
  int count = 0;
  if (chunks > 0) {
    uint16_t* scores = p.values(row);
    if (chunks + int(threadIdx.x) < 8 * groups) scores[chunks + threadIdx.x] = kNever;
    const uint4* values = count_values(shared, phase.memory, room, reinterpret_cast<const uint4*>(scores), groups);
    const uint2* kept = p.kept(row);
    const float* weights = p.weights(row);
    uint32_t* bits = reinterpret_cast<uint32_t*>(room);
    const auto use = [&](uint32_t place, uint32_t i, float weight) {
      selected[place] = (int64_t(__ldg(&kept[i >> log_run].y)) << log_run) + (i & ((1 << log_run) - 1));
      if (p.sampled) log_weight[place] = (__ldg(weights + (i >> log_run)) + weight) * kLn2;
    };
    const int wanted = p.budget_of(sequence);
    if (sampled)
      count = select_by_chance(
          shared, values, groups, wanted, wanted + sampled, 1, mix_bits(random + 0x85ebca77u), bits, use).count;
    else
      count = select_largest(shared, values, groups, wanted, bits, [&](uint32_t place, uint32_t i) {
        use(place, i, 0);
      });
  }
  for (int i = count + int(threadIdx.x); i < p.k; i += blockDim.x) selected[i] = -1;
}

// A row's block has 16 warps where multiprocessors hold all of these blocks at once, or 8.
inline bool is_few(int64_t rows, int processors) { return rows <= kFewBlocks * processors; }

template <int kThreads>
cudaError_t launch_find(const SelectPhase& phase, cudaStream_t stream) {
  return launch_early(
      find_runs_kernel<kThreads>, dim3(phase.of.rows), dim3(kThreads), phase.memory.bytes(), stream, phase);
}

template <int kThreads>
cudaError_t launch_choose(const SelectPhase& phase, cudaStream_t stream) {
  return launch_early(
      choose_chunks_kernel<kThreads>, dim3(phase.of.rows), dim3(kThreads), phase.memory.bytes(), stream, phase);
}

template <int kBytes, bool kWide>
cudaError_t launch_select_by_sketch(SelectBySketch p, cudaStream_t stream) {
  int device = 0, processors = 0, most = 0;
  if (const auto error = cudaGetDevice(&device)) return error;
  if (const auto error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return error;
  if (const auto error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return error;
  most -= int(sizeof(RadixShared)) + 16;
  const int blocks = (kBytes == 32 ? 2 : kScoreBlocks) * processors;
  p.slice = int64_t(p.rows) * p.region.keep / kSliceRuns >= 2 * kScoreWarps * blocks ? kSliceRuns : kShortSlice;
  const int64_t slices = int64_t(p.rows) * ((p.region.keep + p.slice - 1) / p.slice);
  const dim3 score_blocks(unsigned(std::min<int64_t>((slices + kScoreWarps - 1) / kScoreWarps, blocks)));
  const int before_bytes = int((p.rows / p.heads + 1) * sizeof(uint32_t));
  const SelectPhase find{p, LargestMemory(p.num_pages_most, p.sampled, most)};
  const SelectPhase choose{p, LargestMemory(p.region.values / 16, p.sampled, most)};
  const bool few = is_few(p.rows, processors);
  if (const auto error = few ? launch_find<512>(find, stream) : launch_find<256>(find, stream)) return error;
  const auto score = p.log_chunk ? score_runs_kernel<kBytes, kWide, false> : score_runs_kernel<kBytes, kWide, true>;
  if (const auto error = launch_early(score, score_blocks, dim3(32 * kScoreWarps), before_bytes, stream, p))
    return error;
  return few ? launch_choose<512>(choose, stream) : launch_choose<256>(choose, stream);
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
