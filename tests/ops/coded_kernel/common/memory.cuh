// What the kernel of attention over coded tokens needs of memory.cuh, for threads that take turns (cuda_runtime.h
// beside this). Copies are there at once.
#pragma once

#include <cuda_runtime.h>

namespace shadowkv {

alignas(128) constinit thread_local unsigned char coded_memory[1 << 16] = {};

inline uint32_t shared_address(const void* p) {
  return uint32_t(static_cast<const unsigned char*>(p) - coded_memory);
}
template <int kBytes>
void copy16_async_at(uint32_t to, const void* from) {
  std::memcpy(coded_memory + to + kBytes, static_cast<const char*>(from) + kBytes, 16);
}
inline void copy8_async(uint32_t to, const void* from) { std::memcpy(coded_memory + to, from, 8); }
inline void copy4_async(uint32_t to, const void* from) { std::memcpy(coded_memory + to, from, 4); }
inline void close_copy_group() {}
template <int>
void wait_copy_groups() {}

// Of mean keys, which no test has here.
void load_matrices(uint32_t (&x)[4], uint32_t row);

} // namespace shadowkv
