// Checks shared by the ops for attention over selected chunks.
#pragma once

#include "kernels/common/checks.h"
#include "kernels/common/mma.cuh"
#include "kernels/common/rope_order.cuh"

namespace shadowkv {

constexpr int kMostGroup = 16; // query heads of a kv head

// Sets what all inputs have.
template <class Inputs>
void set_queries(
    Inputs& in, const Tensor& q, const Tensor& selected, const Tensor& key_pages,
    const std::optional<Tensor>& log_weight, double score_scale, const Tensor& out, const Tensor& lse,
    int64_t chunk) {
  const int64_t batch = q.size(0), rows = q.size(1), dim = q.size(2), heads = selected.size(1);
  STD_TORCH_CHECK(
      chunk == 1 || chunk == 2 || chunk == 4 || chunk == 8 || chunk == 16, "chunks of ", chunk,
      " tokens: not 1, 2, 4, 8 or 16");
  STD_TORCH_CHECK(
      heads > 0 && rows % heads == 0 && rows / heads <= kMostGroup, rows, " query heads on ", heads,
      " kv heads: not 1 to ", kMostGroup, " each");
  check_dense(q, "q", Dtype::BFloat16, {batch, rows, dim});
  check_dense(selected, "selected", Dtype::Long, {batch, heads, -1});
  check_dense(key_pages, "key pages", Dtype::Long, {batch, -1}, 1);
  check_dense(out, "out", Dtype::BFloat16, {batch, rows, dim});
  check_dense(lse, "lse", Dtype::Float, {batch, rows});
  in.log_weight = log_weights(log_weight, selected);
  in.q = static_cast<const __nv_bfloat16*>(q.data_ptr());
  in.selected = static_cast<const int64_t*>(selected.data_ptr());
  in.key_pages = static_cast<const int64_t*>(key_pages.data_ptr());
  in.key_pages_row = key_pages.stride(0);
  in.score_scale = float(score_scale);
  in.batch = int(batch), in.heads = int(heads), in.group = int(rows / heads), in.chunks = int(selected.size(2));
  while (1 << in.log_chunk < chunk) ++in.log_chunk;
}

// A page array whose rows can be read by vector loads: dense inside, and aligned like its rows everywhere, up to 16
// bytes.
inline void check_pages(const Tensor& x, const char* name) {
  check_dense_from(x, name, 1);
  const int64_t row = x.size(-1) * int64_t(x.element_size()), unit = (row & -row) < 16 ? row & -row : 16;
  check_aligned(address(x) | bytes_apart(x), name, unit);
}

// Sets what keys that RoPE has yet to rotate have in addition.
template <class Inputs>
void set_positions(
    Inputs& in, int64_t dim, const Tensor& states, const Tensor& first, int64_t rope_dim, double magnitude) {
  STD_TORCH_CHECK(
      rope_dim > 0 && rope_dim <= dim && rope_dim % 16 == 0, "RoPE of ", rope_dim, " of ", dim,
      " dimensions, not of a multiple of 16");
  in.rope = {int(rope_dim / 16), float(1 / magnitude)};
  check_dense(states, "states", Dtype::Long, {in.batch});
  check_dense(first, "first", Dtype::Long, {in.batch});
  in.states = static_cast<const int64_t*>(states.data_ptr());
  in.first = static_cast<const int64_t*>(first.data_ptr());
}

template <class Inputs>
void set_mean(Inputs& in, int64_t dim, const Tensor& mean) {
  in.mean_is_float = mean.scalar_type() == Dtype::Float;
  check(mean, "mean", in.mean_is_float ? Dtype::Float : Dtype::BFloat16, {-1, in.heads, dim});
  check_pages(mean, "mean");
  in.mean = mean.data_ptr();
  in.mean_state = mean.stride(0);
}

// Sets what latents have in addition.
template <class Inputs>
void set_basis(
    Inputs& in, int64_t dim, int64_t rank, const Tensor& basis, const std::optional<Tensor>& mean, const Tensor& states,
    const Tensor& first, int64_t rope_dim, double magnitude) {
  set_positions(in, dim, states, first, rope_dim, magnitude);
  check(basis, "basis", Dtype::BFloat16, {-1, rank, in.heads, dim});
  check_pages(basis, "basis");
  if (mean) set_mean(in, dim, *mean);
  in.basis = static_cast<const __nv_bfloat16*>(basis.data_ptr());
  in.basis_state = basis.stride(0);
}

} // namespace shadowkv
