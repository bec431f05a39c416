// The page size, shared by the C++ and CUDA kernels. shadowkv/ops/page.py defines it for Python;
// tests/ops/test_constants.py compares the two.
#pragma once

namespace shadowkv {

constexpr int kPage = 64; // tokens

} // namespace shadowkv
