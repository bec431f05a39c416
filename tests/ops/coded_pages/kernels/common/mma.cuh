// What csrc/kernels/attend_coded/codes.cuh needs of mma.cuh, on a CPU.
#pragma once

#include "permute.h"
