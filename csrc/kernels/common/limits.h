// Limits of kernels that their bindings check, apart from tensors: tests compile them for a CPU.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <cstdint>

namespace shadowkv {

constexpr int64_t kMostBlocks = 65535;                 // of a grid along its y and its z axis
constexpr int64_t kReach = (int64_t(1) << 32) * 32;    // bytes that 32-bit offsets in units of 32 bytes reach

// Raises unless a grid can have a block for each of so many things along its y or its z axis.
inline void check_blocks(int64_t count, const char* things) {
  STD_TORCH_CHECK(count <= kMostBlocks, count, " ", things, " are more than ", kMostBlocks);
}

// Raises unless a place is a multiple of so many bytes, a power of 2. It is an address, or the bits of several addresses
// and distances in bytes joined by |.
inline void check_aligned(int64_t place, const char* name, int64_t bytes) {
  STD_TORCH_CHECK(place % bytes == 0, name, " is aligned to ", place & -place, " bytes, not to ", bytes);
}

// Raises unless 32-bit offsets in units of 32 bytes reach all of so many pages, which are so many bytes apart.
inline void check_reach(int64_t pages, int64_t bytes_apart, const char* name) {
  STD_TORCH_CHECK(
      pages * bytes_apart <= kReach, name, " spans ", pages * bytes_apart, " bytes of a layer, more than ", kReach,
      " (128 GiB)");
}

// Raises unless there are kernels for planes of a key sketch (sketch_rules.h) with so many bytes per token.
inline void check_plane_bytes(int64_t bytes, const char* name) {
  STD_TORCH_CHECK(
      bytes == 8 || bytes == 16 || bytes == 32 || bytes == 64, name, " has rows of ", bytes,
      " bytes, not 8, 16, 32 or 64");
}

} // namespace shadowkv
