// Floating-point numbers shared by the C++ and CUDA kernels. Scores are base-2 exponents; a kernel's results are
// natural.
#pragma once

#include <numbers>

namespace shadowkv {

constexpr float kLog2E = std::numbers::log2e_v<float>; // from natural to base-2 exponents
constexpr float kLn2 = std::numbers::ln2_v<float>;     // and back
constexpr float kLargestHalf = 65504;                  // the largest finite half

} // namespace shadowkv
