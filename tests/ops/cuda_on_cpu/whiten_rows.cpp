#include <cuda_runtime.h>

namespace shadowkv {
alignas(16) constinit thread_local float whiten_shared[227 * 256] = {}; // as much as a Hopper has
}

#include "kernels/whiten_rows/whiten_rows.cuh"

extern "C" int whiten_shared_bytes(int rank) {
  shadowkv::WhitenRows call{};
  call.rank = rank;
  return call.shared_bytes();
}

// False where threads wait for others that have ended.
extern "C" bool whiten_rows(
    const float* rows, const float* products, float* out, int matrices, int rank, int n, float shift) {
  using namespace shadowkv;
  const WhitenRows call = {rows, products, out, matrices, rank, n, shift};
  const dim3 grid = {unsigned(n + kWhitenTile - 1) / kWhitenTile, unsigned(matrices)};
  // What a kernel reads it has to have written.
  return on_cpu::run(
      grid, kWhitenWarps * kWhitenTile, [] { std::fill(std::begin(whiten_shared), std::end(whiten_shared), NAN); },
      [&] { whiten_rows_kernel(call); });
}
