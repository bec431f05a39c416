// What the kernel of attention over coded tokens needs of merge_splits.cuh.
#pragma once

#include "mma.cuh"

namespace shadowkv {

template <typename Out>
struct SplitOutputs {
  Out *out, *lse, *partial_out, *partial_lse;
};

inline void let_next_launch_begin() {}

} // namespace shadowkv
