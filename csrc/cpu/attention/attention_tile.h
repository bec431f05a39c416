// How many keys the attention kernels process at a time.

#pragma once

#include <cstdint>

namespace shadowkv {

constexpr int64_t TILE = 64;  // rows whose scores are held at a time

}  // namespace shadowkv
