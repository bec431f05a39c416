// Shared memory accesses by address, and copies into it.
#pragma once

#include "kernels/common/hopper.cuh"

namespace shadowkv {

// The thread's number, re-read so that the compiler keeps neither it nor what follows from it: registers are scarce.
__device__ __forceinline__ int this_thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address));
  return x;
}

__device__ __forceinline__ uint32_t load_shared4(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address));
  return x;
}

__device__ __forceinline__ void store_shared16(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ __forceinline__ uint2 load_shared8(uint32_t address) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address));
  return x;
}

__device__ __forceinline__ uint32_t load_shared2(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(x) : "r"(address));
  return x;
}

__device__ __forceinline__ uint32_t load_shared1(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address));
  return x;
}

__device__ __forceinline__ void copy4_async(uint32_t to, const void* from, bool wanted) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(wanted ? 4 : 0) : "memory");
}

} // namespace shadowkv
