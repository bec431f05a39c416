// Checks that the CPU bindings share.

#pragma once

#include <ATen/core/Tensor.h>

namespace shadowkv {

// Raises unless x is a CPU tensor of so many dimensions and that dtype.
inline void check(const at::Tensor& x, const char* name, int64_t dims, at::ScalarType dtype) {
  TORCH_CHECK(x.device().is_cpu(), name, " is on ", x.device(), ", not on the CPU");
  TORCH_CHECK(x.dim() == dims, name, " has shape ", x.sizes(), ", not ", dims, " dimensions");
  TORCH_CHECK(x.scalar_type() == dtype, name, " is ", x.scalar_type(), ", not ", dtype);
}

}  // namespace shadowkv
