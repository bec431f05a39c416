// What csrc/kernels/attend_coded/codes.cuh needs of memory.cuh and of CUDA, on a CPU.
#pragma once

#include <cstdint>
#include <cstring>

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

} // namespace shadowkv
