// In place of products of tensor cores and arithmetic on fragments: what kernels of plain C++ need of that is among halves.
#pragma once

#include <cuda_fp16.h>
