// Checks that the CUDA bindings share. They are built on PyTorch's stable ABI: one build serves every torch from
// TORCH_TARGET_VERSION on, and every Python.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <optional>

#include "limits.h"

namespace shadowkv {

using Dtype = torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Raises unless x is on the current CUDA device and has that dtype and shape; -1 stands for any size.
inline void check(const Tensor& x, const char* name, Dtype dtype, std::initializer_list<int64_t> shape) {
  STD_TORCH_CHECK(x.is_cuda(), name, " is not on a CUDA device");
  STD_TORCH_CHECK(x.scalar_type() == dtype, name, " has dtype ", int(x.scalar_type()), ", not ", int(dtype));
  STD_TORCH_CHECK(x.dim() == int64_t(shape.size()), name, " has ", x.dim(), " dimensions, not ", shape.size());
  int64_t axis = 0;
  for (const int64_t size : shape) {
    STD_TORCH_CHECK(
        size < 0 || x.size(axis) == size, name, " has size ", x.size(axis), " in dimension ", axis, ", not ", size);
    ++axis;
  }
}

// Raises unless the dimensions from `first` on are contiguous.
inline void check_dense_from(const Tensor& x, const char* name, int64_t first) {
  if (x.numel() == 0) return; // strides of an empty tensor have no meaning
  int64_t step = 1;
  for (int64_t axis = x.dim() - 1; axis >= first; --axis) {
    STD_TORCH_CHECK(
        x.size(axis) == 1 || x.stride(axis) == step, name, " has stride ", x.stride(axis), " in dimension ", axis,
        ", not ", step);
    step *= x.size(axis);
  }
}

// Both checks.
inline void check_dense(
    const Tensor& x, const char* name, Dtype dtype, std::initializer_list<int64_t> shape, int64_t first = 0) {
  check(x, name, dtype, shape);
  check_dense_from(x, name, first);
}

inline int64_t address(const Tensor& x) { return int64_t(x.const_data_ptr()); }

// From one entry of the first dimension to the next.
inline int64_t bytes_apart(const Tensor& x) { return x.stride(0) * int64_t(x.element_size()); }

// A page field that kernels read 16 bytes at a time, whose stride in bytes fits in 32 bits.
inline void check_field(const Tensor& x, const char* name, Dtype dtype, std::initializer_list<int64_t> shape) {
  check_dense(x, name, dtype, shape, 1);
  const int64_t step = bytes_apart(x);
  STD_TORCH_CHECK(step < int64_t(1) << 32, name, " has pages ", step, " bytes apart, 2**32 or more");
  check_aligned(address(x) | step, name, 16);
}

inline cudaStream_t current_stream(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(const char* name) {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, name, " could not be launched: ", cudaGetErrorString(error));
}

// Term added to the scores of each selected chunk, or null.
inline const float* log_weights(const std::optional<Tensor>& x, const Tensor& selected) {
  if (!x) return nullptr;
  check(*x, "log_weight", Dtype::Float, {selected.size(0), selected.size(1), selected.size(2)});
  check_dense_from(*x, "log_weight", 0);
  return static_cast<const float*>(x->data_ptr());
}

} // namespace shadowkv
