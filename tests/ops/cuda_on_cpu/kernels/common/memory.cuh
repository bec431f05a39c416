// In place of instructions of GPUs: what kernels of plain C++ need of them.
#pragma once

#include <cuda_runtime.h>

namespace shadowkv {

inline uint4 load_streamed16(const void* p) {
  uint4 x;
  std::memcpy(&x, p, 16);
  return x;
}

} // namespace shadowkv
