// Ids of the formats of keys and values in the ops' arguments, of those that kernels support. All ids are in
// shadowkv/ops/codec.py: rows have 0 to 15 and from 32 on, latents 16 to 31. Ids from 1000 on belong to codecs from
// outside the package.
#pragma once

#include <cstdint>

namespace shadowkv::codec {

constexpr int64_t kDense = 0;        // rows as they are
constexpr int64_t kRotated4 = 1;     // rows after the codec's rotation, in 4 bits a dimension
constexpr int64_t kRotated3 = 2;     // in 3
constexpr int64_t kRotated2 = 3;     // in 2
constexpr int64_t kLloyd8 = 4;       // the same as levels of a table
constexpr int64_t kLloyd4 = 5;
constexpr int64_t kLloyd3 = 6;
constexpr int64_t kLloyd2 = 7;
constexpr int64_t kPolarInt4 = 8;    // 4 bits, halves of a row in nibbles
constexpr int64_t kTq3 = 9;          // blocks of 32 dimensions in 3 bits and a scale
constexpr int64_t kFp8 = 12;         // 8-bit floats (e4m3), a scale per kv head
constexpr int64_t kKvarn4 = 14;      // keys in 4 bits, steps of a page's channels
constexpr int64_t kKvarn2 = 15;      // values in 2 bits, steps of tokens
constexpr int64_t kLatentDense = 16; // low-rank keys, floats
constexpr int64_t kLatentInt8 = 17;  // bytes
constexpr int64_t kLatentInt4 = 18;  // the strongest in bytes, the others two per byte

} // namespace shadowkv::codec
