// What a block prepares in shared memory before its pages: the basis and mean of two heads, the angles of a page's
// tokens, the codebook, and where latents of each width are.
#pragma once

#include "kernels/common/mma.cuh"
#include "shape.cuh"

namespace shadowkv {

// Where and how a lane finds its four latents of a step.
struct LatentPlace {
  uint32_t word;   // bytes from the row's first
  uint32_t shifts; // bits into it, and from bit 8 on bits of a latent
  uint32_t mask;   // of a latent, in both halves
  uint32_t zero;   // two halves: 1024 plus the stored value of zero

  template <int kSteps>
  __device__ static LatentPlace at(const uint8_t* widths, int step, int t) {
    uint32_t words = 0, width = 0;
#pragma unroll // so that all are loaded at once
    for (int i = 0; i < kSteps; ++i) {
      const uint32_t x = widths[kSameWidth * i];
      if (i < step) words += x / 2; // words of 16 latents
      if (i == step) width = x;
    }
    const uint32_t bit = 4 * width * t, mask = (1u << width) - 1;
    const uint32_t zero = 0x6400 + (1u << width >> 1);
    return {4 * (words + bit / 32), bit % 32 | width << 8, mask | mask << 16, zero | zero << 16};
  }
};

// Which row of a step's second factor is rank i of 16. Lane t has ranks 4 t to 4 t + 3; the first and third are
// neighbours in a register, as are the second and last.
__device__ __forceinline__ int row_of_rank(int i) { return 2 * (i / 4) + i % 4 / 2 + i % 2 * 8; }

// Byte of a dimension of a row of a half of the basis: 32 dimensions and those RoPE pairs them with, as swizzled.
__device__ __forceinline__ int column_byte(int dim, int row) {
  return (dim / kMixedHalf * 4 + dim % 32 / 8 ^ row % 8) * 16 + dim % 8 * 2;
}

// The half of a head's basis that has a dimension.
template <class Shape>
__device__ __forceinline__ char* basis_half(char* basis, int head, int dim) {
  return basis + (head * 2 + dim % kMixedHalf / 32) * Shape::kHalfBytes;
}

// Steps times whole numbers, as half: entries under 6e-5 lose bits; for keys around one, none do.
template <class Shape>
__device__ __forceinline__ void fill_basis(const MixedInputs& in, int64_t state, int first_head, char* basis, int thread) {
  constexpr int kUnits = 2 * kMixedDim / 8, kAtOnce = Shape::kFillThreads / kUnits; // eight dimensions each; ranks
  const int unit = thread % kUnits, head = unit / (kUnits / 2), dim = unit % (kUnits / 2) * 8;
  const int8_t* const from = in.basis + state * in.basis_state + (first_head + head) * kMixedDim + dim;
  const float* const steps = in.step + state * in.step_state;
  char* const to = basis_half<Shape>(basis, head, dim);
  constexpr int kPasses = (Shape::kRank + kAtOnce - 1) / kAtOnce;
  uint2 loaded[kPasses]; // all at once, as a block waits for them
  float step[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int rank = min(thread / kUnits + i * kAtOnce, Shape::kRank - 1);
    loaded[i] = *reinterpret_cast<const uint2*>(from + int64_t(rank) * in.heads * kMixedDim), step[i] = steps[rank];
  }
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int rank = min(thread / kUnits + i * kAtOnce, Shape::kRank - 1);
    const auto number = [&](uint32_t word, int byte) { return float(int8_t(word >> 8 * byte)) * step[i]; };
    const int row = rank / 16 * 16 + row_of_rank(rank % 16);
    *reinterpret_cast<uint4*>(to + row * 128 + column_byte(dim, row)) = {
        pack_f16(number(loaded[i].x, 0), number(loaded[i].x, 1)),
        pack_f16(number(loaded[i].x, 2), number(loaded[i].x, 3)),
        pack_f16(number(loaded[i].y, 0), number(loaded[i].y, 1)),
        pack_f16(number(loaded[i].y, 2), number(loaded[i].y, 3))};
  }
}

// The mean as half, dimensions 8 i + 2 t and the next of each half of 64 in the order of i, then those that RoPE
// pairs them with.
__device__ __forceinline__ void
fill_mean(const MixedInputs& in, int64_t state, int first_head, uint4* mean, int thread) {
  const int head = thread / kMixedDim, dim = thread % kMixedDim, f = dim % kMixedHalf;
  const float x = __bfloat162float(in.mean[state * in.mean_state + (first_head + head) * kMixedDim + dim]);
  const int row = (head * 2 + f / 32) * 4 + f / 2 % 4, column = dim / kMixedHalf * 8 + f % 32 / 8 * 2 + f % 2;
  reinterpret_cast<__half*>(mean)[row * 16 + column] = __float2half(x);
}

// The frequency of dimensions f and f + 64: revolutions per position times 2^32.
__device__ __forceinline__ uint32_t frequency_of(const MixedInputs& in, int f) {
  return __ldg(in.frequencies + ((f / 16 * 4 + f / 2 % 4) * 2 + f / 8 % 2) * 2 + f % 2);
}

// An angle is a product of integers, of which whole revolutions overflow: exact to 2^-33 of one a position.
__device__ __forceinline__ float angle_of(uint32_t frequency, int position) {
  return float(int(frequency * position)) * 0x1.921fb6p-30f; // 2 pi / 2^32
}

// A thread of a consumer has tokens 16 warp + g and that + 8, and of each half of 64 frequencies 8 i + 2 t and the next.
__device__ __forceinline__ void fill_angles(const MixedInputs& in, uint4* angles, int thread) {
  const int half = thread / 128, reader = thread % 128, lane = reader % 32;
  uint32_t cosine[8], sine[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int token = reader / 32 * 16 + lane / 4 + i % 2 * 8, f = half * 32 + i / 2 * 8 + lane % 4 * 2;
    const float x = angle_of(frequency_of(in, f), token), y = angle_of(frequency_of(in, f + 1), token);
    cosine[i] = pack_f16(__cosf(x), __cosf(y)), sine[i] = pack_f16(__sinf(x), __sinf(y));
  }
  uint4* const to = angles + half * 4 * 128 + reader;
  to[0] = {cosine[0], cosine[1], cosine[2], cosine[3]}, to[128] = {cosine[4], cosine[5], cosine[6], cosine[7]};
  to[256] = {sine[0], sine[1], sine[2], sine[3]}, to[384] = {sine[4], sine[5], sine[6], sine[7]};
}

// A thread has one entry. Its warp's lanes write different copies, as entries are in the same banks.
__device__ __forceinline__ void fill_codebook(const float* codebook, char* to, int thread) {
  const float4 x = reinterpret_cast<const float4*>(codebook)[thread];
  const uint2 entry = {pack_f16(x.x, x.y), pack_f16(x.z, x.w)};
#pragma unroll
  for (int i = 0; i < kCopies; ++i)
    *reinterpret_cast<uint2*>(to + (thread * kCopies + (thread + i) % kCopies) * 8) = entry;
}

// Run by the consumers' threads, which wait for each other.
template <class Shape>
__device__ __forceinline__ void
fill_memory(const MixedInputs& in, const MixedShare& share, const MixedMemory<Shape>& memory, int thread) {
  const int64_t state = in.key_states[share.sequence];
  LatentPlace place = {};
  if (thread < Shape::kSteps * 4)
    place = LatentPlace::at<Shape::kSteps>(in.widths + state * in.widths_state, thread / 4, thread % 4);
  fill_basis<Shape>(in, state, share.head, memory.basis(), thread);
  static_assert(2 * kMixedDim == 256 && kEntries == 256 && Shape::kFillThreads >= 256);
  if (thread < 256) {
    fill_mean(in, state, share.head, memory.mean(), thread);
    fill_angles(in, memory.angles(), thread);
    fill_codebook(in.codebook + in.value_states[share.sequence] * in.codebook_state, memory.codebook(), thread);
  }
  if (thread < Shape::kSteps * 4) memory.places()[thread] = {place.word, place.shifts, place.mask, place.zero};
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // products read the basis through the async proxy
  sync_threads(1, Shape::kFillThreads);
}

} // namespace shadowkv
