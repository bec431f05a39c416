// What kernels for Hopper share: barriers that count arrivals and bytes (mbarrier), copies of boxes of a tensor into
// shared memory (TMA), and what warpgroup products (wgmma) need around them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace shadowkv {

__device__ __forceinline__ void init_barrier(uint32_t at, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t at) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(at) : "memory");
}

// The same for a subset of threads, without a branch: products need converged warps.
__device__ __forceinline__ void arrive_if(bool arrives, uint32_t at) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 state;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
          at),
      "r"(int(arrives))
      : "memory");
}

// Arrives, and makes the phase wait for that many bytes of copies too.
__device__ __forceinline__ void arrive_expecting(uint32_t at, int bytes) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}" ::"r"(at), "r"(bytes)
               : "memory");
}

// Arrives once this thread's copies of 16 or fewer bytes have completed.
__device__ __forceinline__ void arrive_with_copies(uint32_t at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory");
}

__device__ __forceinline__ void wait_phase(uint32_t at, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::
          "r"(at), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void sync_threads(int id, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// Arrives for the threads that sync there, without waiting.
__device__ __forceinline__ void arrive_threads(int id, int count) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// Starts the copy of a box at (x, y, z), innermost first; its bytes arrive at the barrier. Elements outside the tensor
// become zeros.
__device__ __forceinline__ void copy_box(const CUtensorMap& map, uint32_t to, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// A product's descriptor of a factor whose rows of 128 bytes are contiguous, with 16-byte units swizzled by the row
// modulo 8, at an address that is a multiple of 1024 bytes. This is the lower half; the upper half says that groups of
// eight rows are 1024 bytes apart.
__device__ __forceinline__ uint32_t swizzled_rows(uint32_t address) { return (address & 0x3ffff) >> 4; }

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

} // namespace shadowkv
