// How many keys the kernels of attention take at a time.

#pragma once

#include <cstdint>

namespace shadowkv {

constexpr int64_t TILE = 64;  // rows whose scores are held at once

}  // namespace shadowkv
