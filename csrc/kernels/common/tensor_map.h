// How bindings of kernels for Hopper describe tensors to its copy engine.
#pragma once

#include "checks.h"
#include "row_blocks.cuh"

#include <cstdint>

namespace shadowkv {

// The driver's function, without linking against the driver: this library also loads where there is no driver.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    STD_TORCH_CHECK(
        error == cudaSuccess && result == cudaDriverEntryPointSuccess,
        "the CUDA driver has no cuTensorMapEncodeTiled, which is in those for CUDA 12 and later");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

// The map of x [tokens, heads, dim], in boxes of 128 tokens of one head and 64 dimensions.
inline CUtensorMap boxes_of(const Tensor& x, const char* name) {
  const cuuint64_t sizes[] = {cuuint64_t(x.size(2)), cuuint64_t(x.size(1)), cuuint64_t(x.size(0))};
  cuuint64_t strides[2]; // in bytes, of heads and tokens; the stride of a dimension of size 1 has no meaning
  for (int axis = 0; axis < 2; ++axis) {
    const int64_t step = x.size(1 - axis) == 1 ? x.size(2) : x.stride(1 - axis);
    STD_TORCH_CHECK(
        step > 0 && step % 8 == 0, name, " has stride ", step, " in dimension ", 1 - axis,
        ", not a positive multiple of 8");
    strides[axis] = cuuint64_t(step) * 2;
  }
  STD_TORCH_CHECK(
      reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0, name, " does not start at a multiple of 16 bytes");
  const cuuint32_t box[] = {kBoxDims, 1, kBlock}, steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(
      &map, x.scalar_type() == Dtype::Half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
      x.data_ptr(), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      x.size(2) == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE); // which fills with zeros
  STD_TORCH_CHECK(result == CUDA_SUCCESS, name, " cannot be described to the copy engine: CUresult ", int(result));
  return map;
}

} // namespace shadowkv
