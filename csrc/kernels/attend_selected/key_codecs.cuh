// Formats of keys, each a class that parameterises the kernel:
//   kId       its id
//   kStored   dtype of its bytes in PyTorch
//   kBits     most bits of a number of a row
//   kHalf     whether rows (of latents, and the basis) are multiplied as half, or as bf16
//   kRebuilt  whether rows are latents, which a product with a basis turns into keys. These have in addition
//   kLeast    least bits of a latent
//   decode    latents 32 step + 8 t to 32 step + 8 t + 7 of a row in shared memory, in pairs; the first `strong`
//             of the row are in 8 bits, if the others have fewer
#pragma once

#include "codecs.h"
#include "kernels/common/mma.cuh"

namespace shadowkv {

enum class Stored { kBf16, kInt8, kBytes };

// Rows after RoPE.
struct DenseKeys {
  static constexpr int64_t kId = codec::kDense;
  static constexpr Stored kStored = Stored::kBf16;
  static constexpr int kBits = 16;
  static constexpr bool kRebuilt = false, kHalf = false;
};

// Rows after RoPE as e4m3, in units of a scale per kv head and state.
struct Fp8Keys {
  static constexpr int64_t kId = codec::kFp8;
  static constexpr Stored kStored = Stored::kBytes;
  static constexpr int kBits = 8;
  static constexpr bool kRebuilt = false, kHalf = true;
};

// The same without their mean: key = RoPE(mean) + row.
struct CentredFp8Keys : Fp8Keys {};

struct LatentBf16 {
  static constexpr int64_t kId = codec::kLatentDense;
  static constexpr Stored kStored = Stored::kBf16;
  static constexpr int kBits = 16;
  static constexpr bool kRebuilt = true, kHalf = false;
  static constexpr int kLeast = kBits;

  __device__ static __forceinline__ void decode(const char* row, int step, int t, int, uint32_t (&x)[4]) {
    const uint4 y = *reinterpret_cast<const uint4*>(row + step * 64 + t * 16);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  }
};

struct LatentInt8 {
  static constexpr int64_t kId = codec::kLatentInt8;
  static constexpr Stored kStored = Stored::kInt8;
  static constexpr int kBits = 8;
  static constexpr bool kRebuilt = true, kHalf = true;
  static constexpr int kLeast = kBits;

  __device__ static __forceinline__ void decode(const char* row, int step, int t, int, uint32_t (&x)[4]) {
    const uint2 y = *reinterpret_cast<const uint2*>(row + step * 32 + t * 8);
    to_halves({y.x ^ 0x80808080u, y.y ^ 0x80808080u}, x);
  }

  // Eight int8 as half; `biased` holds them plus 128.
  __device__ static __forceinline__ void to_halves(uint2 biased, uint32_t (&x)[4]) {
    x[0] = to_half<0>(biased.x), x[1] = to_half<1>(biased.x);
    x[2] = to_half<0>(biased.y), x[3] = to_half<1>(biased.y);
  }

  // Two of four int8 as half, exactly; `biased` holds them plus 128. 0x6400 | u is 1024 + u.
  template <int kPlace>
  __device__ static __forceinline__ uint32_t to_half(uint32_t biased) {
    const uint32_t x = mask_and_set<0x00ff00ffu, 0x64006400u>(__byte_perm(biased, 0, kPlace == 0 ? 0x4140 : 0x4342));
    return bits(__hsub2(half2_of(x), half2_of(0x64806480u)));
  }
};

// The strong ones in one byte each, plus 128; the others two per byte, the lower rank in its lower half, plus 8.
struct LatentInt4 {
  static constexpr int64_t kId = codec::kLatentInt4;
  static constexpr Stored kStored = Stored::kBytes;
  static constexpr int kBits = 8, kLeast = 4;
  static constexpr bool kRebuilt = true, kHalf = true;

  // 1024 + u for the lower four bits of a byte, 1024 + 16 u for the others: times 1 and 1 / 16, minus 1032 and 72.
  __device__ static __forceinline__ void decode(const char* row, int step, int t, int strong, uint32_t (&x)[4]) {
    if (step * 32 < strong)
      return LatentInt8::to_halves(*reinterpret_cast<const uint2*>(row + step * 32 + t * 8), x);
    const uint32_t y = *reinterpret_cast<const uint32_t*>(row + strong / 2 + step * 16 + t * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t both = mask_and_set<0x00f0000fu, 0x64006400u>(__byte_perm(y, 0, i * 0x0101 | 0x4040));
      x[i] = bits(__hfma2(half2_of(both), half2_of(0x2c003c00u), half2_of(0xd480e408u)));
    }
  }
};

} // namespace shadowkv
