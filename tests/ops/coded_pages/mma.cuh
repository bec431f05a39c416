// What csrc/kernels/attend_coded/codes.cuh needs of mma.cuh and of CUDA, on a CPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "page.h"

#define __device__
#define __forceinline__ inline

struct uint2 {
  uint32_t x, y;
};

struct uint4 {
  uint32_t x, y, z, w;
};

using __half = uint16_t;

inline uint32_t __umulhi(uint32_t x, uint32_t y) { return uint64_t(x) * y >> 32; }

namespace shadowkv {

alignas(128) inline char shared_memory[1 << 13]; // addresses count from its begin

inline uint32_t shared_address(const void* p) { return uint32_t(static_cast<const char*>(p) - shared_memory); }
template <int kBytes>
void copy16_async_at(uint32_t to, const void* from) {
  memcpy(shared_memory + to + kBytes, static_cast<const char*>(from) + kBytes, 16);
}
inline void copy4_async(uint32_t to, const void* from) { memcpy(shared_memory + to, from, 4); }
inline void copy8_async(uint32_t to, const void* from) { memcpy(shared_memory + to, from, 8); }

// As PTX describes prmt.b32.
inline uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t pool = uint64_t(y) << 32 | x;
  uint32_t z = 0;
  for (int i = 0; i < 4; ++i) {
    const int nibble = selector >> 4 * i & 15;
    uint32_t byte = pool >> 8 * (nibble & 7) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    z |= byte << 8 * i;
  }
  return z;
}

} // namespace shadowkv
