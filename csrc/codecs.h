// Formats of keys and values by the numbers that the ops' arguments name them by. Their Python sides, with the same
// numbers, are in shadowkv/kvcache/codecs/; those from 1000 on are for tests.
#pragma once

#include <cstdint>

namespace shadowkv::codec {

constexpr int64_t kDense = 0;        // rows as they are
constexpr int64_t kRotated4 = 1;     // rows after a rotation, in 4 bits a dimension
constexpr int64_t kRotated3 = 2;     // in 3
constexpr int64_t kRotated2 = 3;     // in 2
constexpr int64_t kLloyd8 = 4;       // the same as levels of a table
constexpr int64_t kLloyd4 = 5;
constexpr int64_t kLloyd3 = 6;
constexpr int64_t kLloyd2 = 7;
constexpr int64_t kLatentDense = 16; // low-rank keys, floats
constexpr int64_t kLatentInt8 = 17;  // bytes
constexpr int64_t kLatentInt4 = 18;  // the strongest bytes, of the others two to one

} // namespace shadowkv::codec
