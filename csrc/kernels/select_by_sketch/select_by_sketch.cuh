// Selection by a 2-bit key sketch in two levels and three launches: one block per row and kv head finds the runs with
// the best sign scores, warps all over the GPU score the tokens of those by int8 tensor cores, and one block per row
// and head chooses the best chunks. Rows are seldom a whole number per multiprocessor, nor are the parts of rows that
// warps score: with one block per row and head, in a single launch, 288 of them took 114 us while 256 took 75. So only
// as many blocks score as are resident, with each warp taking one slice of some row's kept runs after another: it
// copies 4 runs at a time to shared memory, one token per lane, two copies ahead and across slices, and ldmatrix turns
// them into fragments. Runs and chunks are sampled where they are found, from values that are in shared memory then.
#pragma once

#include <algorithm>

#include "score_runs.cuh"
#include "selections.cuh"

namespace shadowkv {

// A row's block has 16 warps if multiprocessors can hold all of these blocks at once, otherwise 8.
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

template <int kBytes, int kQueries>
cudaError_t launch_select_by_sketch(SelectBySketch p, cudaStream_t stream) {
  int device = 0, processors = 0, limit = 0;
  if (const auto error = cudaGetDevice(&device)) return error;
  if (const auto error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return error;
  if (const auto error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return error;
  limit -= int(sizeof(RadixShared)) + 16;
  constexpr int kWarps = kScoreWarps<kBytes>;
  const int blocks = kScoreBlocks<kBytes, kQueries> * processors;
  p.slice = int64_t(p.rows) * p.region.keep / kSliceRuns >= 2 * kWarps * blocks ? kSliceRuns : kShortSlice;
  const int64_t slices = int64_t(p.rows) * ((p.region.keep + p.slice - 1) / p.slice);
  const dim3 score_blocks(unsigned(std::min<int64_t>((slices + kWarps - 1) / kWarps, blocks)));
  const int before_bytes = int((p.rows / p.heads + 1) * sizeof(uint32_t));
  const SelectPhase find{p, LargestMemory(p.num_pages_most, p.sampled, limit)};
  const SelectPhase choose{p, LargestMemory(p.region.values / 16, p.sampled, limit)};
  const bool few = is_few(p.rows, processors);
  if (const auto error = few ? launch_find<512>(find, stream) : launch_find<256>(find, stream)) return error;
  const auto score =
      p.log_chunk ? score_runs_kernel<kBytes, kQueries, false> : score_runs_kernel<kBytes, kQueries, true>;
  if (const auto error = launch_early(score, score_blocks, dim3(32 * kWarps), before_bytes, stream, p))
    return error;
  return few ? launch_choose<512>(choose, stream) : launch_choose<256>(choose, stream);
}

template <int kBytes>
cudaError_t launch_select_by_sketch(const SelectBySketch& p, cudaStream_t stream) {
  return p.group > 8   ? launch_select_by_sketch<kBytes, 16>(p, stream)
         : p.group > 4 ? launch_select_by_sketch<kBytes, 8>(p, stream)
                       : launch_select_by_sketch<kBytes, 4>(p, stream);
}

// By bytes of a token in a plane: 8, 16, 32 or 64.
inline cudaError_t launch_select_by_sketch(const SelectBySketch& p, int64_t bytes, cudaStream_t stream) {
  return bytes == 8    ? launch_select_by_sketch<8>(p, stream)
         : bytes == 16 ? launch_select_by_sketch<16>(p, stream)
         : bytes == 32 ? launch_select_by_sketch<32>(p, stream)
                       : launch_select_by_sketch<64>(p, stream);
}

} // namespace shadowkv
