// Single instructions that move data: loads from global memory, copies from there to shared memory, and accesses to that
// by address.
#pragma once

#include <cstdint>

namespace shadowkv {

// Loads of data that is read once, without allocation in the L1 cache.
__device__ __forceinline__ uint4 load_streamed16(const void* p) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

__device__ __forceinline__ uint2 load_streamed8(const void* p) {
  uint2 x;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
  return x;
}

// The same if all of a 128-byte line is needed, by any lanes: the L2 cache then fetches it at once. Rows of 192 bytes,
// 64 at a time: 4.5 TB/s on an H200, 3.8 without.
__device__ __forceinline__ uint4 load_line16(const void* p) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

__device__ __forceinline__ uint2 load_line8(const void* p) {
  uint2 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
  return x;
}

// The same for 4 bytes.
__device__ __forceinline__ uint32_t load_line4(const void* p) {
  uint32_t x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(x) : "l"(p));
  return x;
}

// Shared-memory addresses for the instructions below.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Starts a copy of 16 bytes from global to shared memory; if `exists` is false, writes zeros and reads nothing.
__device__ __forceinline__ void copy16_async(uint32_t to, const void* from, bool exists = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

// The same with an equal offset on both sides, which is part of the instruction.
template <int kBytes>
__device__ __forceinline__ void copy16_async_at(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %2], 16;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
}

// The same for 8 bytes.
__device__ __forceinline__ void copy8_async(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void copy4_async(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// The same; if `exists` is false, writes zeros and reads nothing.
__device__ __forceinline__ void copy4_async(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(exists ? 4 : 0) : "memory");
}

__device__ __forceinline__ void close_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kLeft of this thread's most recent copy groups are in flight.
template <int kLeft>
__device__ __forceinline__ void wait_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Four 8 x 8 matrices of bf16: lanes 8 i .. 8 i + 7 give the addresses of the rows of matrix i; x[i] gets (g, 2t..).
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row));
}

// The same for the transposed matrices: x[i] gets rows 2t, 2t + 1 of column g.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&x)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row));
}

// Loads from shared memory of as many bytes as the names say, and a store.
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

} // namespace shadowkv
