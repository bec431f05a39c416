// Numbers in memory whose dtype is known at run time.

#pragma once

#include <cstdint>

#include "bfloat16.h"

namespace shadowkv {

enum class Dtype { float32, bfloat16, int8, uint8 };

struct Numbers {
  const void* data = nullptr;
  Dtype dtype = Dtype::float32;
};

inline float to_float(int8_t x) { return x; }

}  // namespace shadowkv
