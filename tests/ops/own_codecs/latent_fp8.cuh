// A key codec of tests: latents as fp8 (e4m3), a number that no codec of the cache has.
#pragma once

#include "kernels/attend_selected/key_codecs.cuh"

#include <cuda_fp8.h>

namespace shadowkv {

struct LatentFp8 {
  static constexpr int64_t kId = 1010;
  static constexpr Stored kStored = Stored::kBytes;
  static constexpr int kBits = 8, kLeast = 8;
  static constexpr bool kRebuilt = true, kHalf = true;

  __device__ static __forceinline__ void decode(const char* row, int step, int t, int, uint32_t (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto both = reinterpret_cast<const __nv_fp8x2_storage_t*>(row + step * 32 + t * 8)[i];
      const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(both, __NV_E4M3);
      x[i] = bits(halves);
    }
  }
};

} // namespace shadowkv
