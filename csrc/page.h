// The size of a page, which kernels in C++ and CUDA share. shadowkv/ops/page.py has it for Python;
// tests/ops/test_constants.py compares the two.
#pragma once

namespace shadowkv {

constexpr int kPage = 64; // tokens

} // namespace shadowkv
