// Launches that begin while the previous one is running (programmatic dependent launches), on GPUs that have them. For
// correctness, such a kernel waits before it writes anything or reads what the previous launch wrote, and lets the next
// one begin only after its own wait. So when a kernel begins, all launches except the previous one are complete.
#pragma once

#include <cuda_runtime.h>

namespace shadowkv {

__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once all blocks of this launch have begun.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Launches a kernel that calls wait_for_launch_before, with `bytes` of dynamic shared memory. It may begin early if the
// code that runs was compiled with the wait, which is the code for compute capability 9.0 (csrc/build_cuda.py). Later
// GPUs run code compiled from PTX for 8.0.
template <typename... Params>
cudaError_t launch_early(
    void (*kernel)(Params...), dim3 grid, dim3 block, int bytes, cudaStream_t stream, const Params&... params) {
  if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
  int device = 0, major = 0, minor = 0;
  if (const auto error = cudaGetDevice(&device)) return error;
  if (const auto error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return error;
  if (const auto error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)) return error;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = major == 9 && minor == 0;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

} // namespace shadowkv
