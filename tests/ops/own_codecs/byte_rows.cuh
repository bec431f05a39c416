// Value codecs of tests: bytes, 128 more than whole steps, of rotated rows with one scale, or of rows as they are with one
// for every 32 dimensions. Lane g's bytes lie together, of dimensions 16 i + 8 half + g in the order of 2 i + half.
#pragma once

#include "kernels/attend_selected/value_codecs.cuh"

namespace shadowkv {

template <int64_t kId_, bool kRotated_>
struct Bytes {
  static constexpr int64_t kId = kId_;
  static constexpr bool kCoded = true, kRotated = kRotated_;
  __host__ __device__ static constexpr bool takes(int dim) { return dim % 64 == 0; }
  __host__ __device__ static constexpr int row_bytes(int dim) { return dim; }
  __host__ __device__ static constexpr int scales(int dim) { return kRotated ? 1 : dim / 32; }

  template <int kDim>
  struct Codes {
    uint32_t words[kDim / 32];

    template <class Row>
    __device__ __forceinline__ void load(const Row& row, int g) {
#pragma unroll
      for (int i = 0; i < kDim / 64; ++i) row.template read<8>(words + 2 * i, g * (kDim / 8) + 8 * i);
    }
  };

  template <int kDim>
  struct Pair {
    Codes<kDim> one, other;

    __device__ __forceinline__ void decode(int i, uint32_t& low, uint32_t& high) const {
      const uint32_t a = one.words[i / 2] >> i % 2 * 16, b = other.words[i / 2] >> i % 2 * 16;
      const auto code = [](uint32_t x) { return float(int(x & 255) - 128); };
      low = pack_bf16(code(a), code(b)), high = pack_bf16(code(a >> 8), code(b >> 8));
    }

    __device__ static constexpr float factor(int i) { return 1; }
    __device__ static constexpr float offset(int i) { return 0; }
  };
};

using RotatedBytes = Bytes<1011, true>;
using BlockBytes = Bytes<1012, false>;

} // namespace shadowkv
