// Byte permutations, for headers that tests compile for a CPU.
#pragma once

#include <cstdint>

namespace shadowkv {

// As PTX describes prmt.b32.
inline uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t pool = uint64_t(y) << 32 | x;
  uint32_t z = 0;
  for (int i = 0; i < 4; ++i) {
    const int nibble = selector >> 4 * i & 15;
    uint32_t byte = pool >> 8 * (nibble & 7) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    z |= byte << 8 * i;
  }
  return z;
}

} // namespace shadowkv
