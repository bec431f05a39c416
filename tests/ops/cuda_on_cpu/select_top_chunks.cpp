#include <cuda_runtime.h>

namespace shadowkv {
alignas(16) constinit thread_local uint32_t row_memory[57 * 1024] = {}; // as much as a Hopper has
}

#include "kernels/select_top_chunks/select_top_chunks.cuh"

// False where threads wait for others that have ended.
extern "C" bool select_top_chunks(
    const float* logits, const float* lse, const int64_t* budget, uint32_t* workspace, int64_t* selected, int batch,
    int heads, int group, int chunks, int parts, int k, int vector, int threads) {
  using namespace shadowkv;
  const SelectTopChunks call = {logits, lse, budget, workspace, selected, heads, group, chunks, parts, k};
  const auto kernel = vector == 1    ? (threads == 512 ? select_top_chunks_kernel<1, 0, 512> : select_top_chunks_kernel<1, 0, 256>)
                      : group == 4 ? (threads == 512 ? select_top_chunks_kernel<4, 4, 512> : select_top_chunks_kernel<4, 4, 256>)
                                   : (threads == 512 ? select_top_chunks_kernel<4, 0, 512> : select_top_chunks_kernel<4, 0, 256>);
  return on_cpu::run(
      {unsigned(batch * heads)}, threads,
      // What a kernel reads it has to have written.
      [] { std::fill(std::begin(row_memory), std::end(row_memory), 0x7fc00001); }, [&] { kernel(call); });
}
