// Numbers that C++ and CUDA kernels share. Scores are base-2 exponents in kernels, whose results are natural.
#pragma once

#include <numbers>

namespace shadowkv {

// The page size. shadowkv/ops/page.py defines it for Python; tests/ops/test_constants.py compares the two.
constexpr int kPage = 64; // tokens

constexpr float kLog2E = std::numbers::log2e_v<float>; // from natural to base-2 exponents
constexpr float kLn2 = std::numbers::ln2_v<float>;     // and back
constexpr float kLargestHalf = 65504;                  // the largest finite half

} // namespace shadowkv
