// Floating-point numbers that kernels in C++ and CUDA share. Scores are exponents to base 2, what leaves a kernel is natural.
#pragma once

#include <numbers>

namespace shadowkv {

constexpr float kLog2E = std::numbers::log2e_v<float>; // exponents to base 2 of natural ones
constexpr float kLn2 = std::numbers::ln2_v<float>;     // and back
constexpr float kLargestHalf = 65504;                  // the largest finite one

} // namespace shadowkv
