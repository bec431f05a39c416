// Attention over selected tokens from latents on Hopper for PyTorch, as an op for some value codecs: checks its
// arguments and launches on the current stream.
#pragma once

#include "attend_latents_sm90.cuh"
#include "kernels/attend_selected/arguments.h"

#include <algorithm>
#include <string>
#include <utility>

namespace shadowkv {

// A page array whose pages the kernel finds by offsets in units of 32 bytes, and whose rows it reads so many bytes at a
// time.
inline void check_spaced_pages(const Tensor& x, const char* name, int64_t unit) {
  check_dense_from(x, name, 1);
  check_aligned(address(x), name, unit);
  STD_TORCH_CHECK(bytes_apart(x) % 32 == 0, name, " has pages ", bytes_apart(x), " bytes apart, no multiple of 32");
  check_reach(x.size(0), bytes_apart(x), name);
}

// For these ranks, each with its own instance of the kernel.
template <class Ranks, class... Values>
struct AttendLatents;

template <int... kRanks, class... Values>
struct AttendLatents<std::integer_sequence<int, kRanks...>, Values...> {
  static void run(
      const Tensor& q, const Tensor& selected, int64_t key_codec, const Tensor& latents, const Tensor& basis,
      const std::optional<Tensor>& mean, const Tensor& states, const Tensor& first, const Tensor& key_pages,
      const Tensor& frequencies, int64_t rope_dim, double magnitude, int64_t value_codec, const Tensor& codes,
      const Tensor& scale, const Tensor& rotation, const Tensor& value_pages,
      const std::optional<Tensor>& log_weight, const std::optional<Tensor>& most, double score_scale, int64_t blocks,
      Tensor& out, Tensor& lse, Tensor& partial) {
    STD_TORCH_CHECK(
        key_codec == codec::kLatentInt4, "attend_latents_sm90 has keys in codec ", codec::kLatentInt4, ", not ",
        key_codec);
    const int64_t dim = q.size(2), heads = selected.size(1), chunk = latents.size(2), rank = basis.size(1);
    LatentInputs in = {};
    set_queries(in, q, selected, key_pages, log_weight, score_scale, out, lse, chunk);
    set_basis(in, dim, rank, basis, mean, states, first, rope_dim, magnitude);
    STD_TORCH_CHECK(dim == 64 || dim == 128, "head dim ", dim, " is not 64 or 128");
    check(latents, "latents", Dtype::Byte, {-1, kPage / chunk, chunk, (rank + kStrong) / 2});
    check_dense(frequencies, "frequencies", Dtype::Int, {dim / 32, 4, 2, 2});
    check(codes, "codes", Dtype::Byte, {-1, heads, kPage / chunk, chunk, -1});
    check_dense(scale, "scale", Dtype::Half, {-1, heads, kPage, 1}, 1);
    check_dense(rotation, "rotation", Dtype::Float, {dim, dim});
    check_dense(value_pages, "value pages", Dtype::Long, {in.batch, -1}, 1);
    check_dense(partial, "partial", Dtype::Float, {-1, -1, in.group, dim + 4});
    if (most) {
      check_dense(*most, "most", Dtype::Long, {in.batch});
      in.most = static_cast<const int64_t*>(most->data_ptr());
    }
    check_spaced_pages(latents, "latents", 16);
    check_spaced_pages(codes, "codes", 16);
    check_spaced_pages(scale, "scale", 4);
    in.latents = static_cast<const char*>(latents.data_ptr());
    in.codes = static_cast<const char*>(codes.data_ptr());
    in.scale = static_cast<const char*>(scale.data_ptr());
    in.value_pages = static_cast<const int64_t*>(value_pages.data_ptr());
    in.rotation = static_cast<const float*>(rotation.data_ptr());
    in.frequencies = static_cast<const uint32_t*>(frequencies.data_ptr());
    in.latent_page = uint32_t(latents.stride(0) / 32);
    in.code_page = uint32_t(codes.stride(0) / 32);
    in.scale_page = uint32_t(scale.stride(0) / 16);
    in.value_pages_row = value_pages.stride(0);
    if (in.batch == 0) return;
    const int64_t tiles = ((in.chunks << in.log_chunk) + kLatentTile - 1) / kLatentTile, units = in.batch * heads;
    STD_TORCH_CHECK(blocks > 0 && blocks <= units * tiles, blocks, " blocks for ", units * tiles, " tiles");
    STD_TORCH_CHECK(units * tiles * blocks < int64_t(1) << 32, units * tiles, " tiles are too many for ", blocks, " blocks");
    const int consumers = in.group <= 4 ? kLatentConsumers<4> : kLatentConsumers<16>;
    STD_TORCH_CHECK(
        partial.size(0) * partial.size(1) >= (units + blocks) * consumers, "no room for what ", blocks,
        " blocks leave of ", units, " units");
    const LatentOutputs to = {
        static_cast<__nv_bfloat16*>(out.data_ptr()), static_cast<float*>(lse.data_ptr()),
        static_cast<float*>(partial.data_ptr())};
    const torch::stable::accelerator::DeviceGuard guard(q.get_device());
    const LatentCall call = {in, to, int(blocks)};
    const auto launched = [&]<class Value>() {
      if (Value::kId != value_codec) return false;
      check(codes, "codes", Dtype::Byte, {-1, heads, kPage / chunk, chunk, Value::row_bytes(int(dim))});
      const auto launch = dim == 64 ? launch_dim<Value, 64> : launch_dim<Value, 128>;
      launch(rank, call, current_stream(q));
      return true;
    };
    const bool has_kernel = (launched.template operator()<Values>() || ...);
    std::string known;
    ((known += (known.empty() ? "" : ", ") + std::to_string(Values::kId)), ...);
    STD_TORCH_CHECK(has_kernel, "attend_latents_sm90 has values in codecs ", known, ", not ", value_codec);
  }

 private:
  template <class Shape>
  static void launch_shape(const LatentCall& call, cudaStream_t stream) {
    const LatentInputs& in = call.in;
    cudaError_t error = launch_early(
        attend_latents_kernel<Shape>, call.blocks, Shape::kThreads, Shape::kSharedBytes, stream, call);
    STD_TORCH_CHECK(error == cudaSuccess, "attend_latents_sm90: ", cudaGetErrorString(error));
    error = launch_early(
        merge_latents_kernel<Shape::kDim, Shape::kConsumers>, (in.batch * in.heads * in.group + 7) / 8,
        Shape::kDim * 2, 0, stream, call);
    STD_TORCH_CHECK(error == cudaSuccess, "attend_latents_sm90's merge: ", cudaGetErrorString(error));
  }

  template <class Value, int kDim>
  static void launch_dim(int64_t rank, const LatentCall& call, cudaStream_t stream) {
    const auto launched = [&]<int kRank>() {
      if (rank != kRank) return false;
      const auto launch = call.in.group <= 4 ? launch_shape<LatentShape<Value, kDim, kRank, 4>>
                          : call.in.group <= 8 ? launch_shape<LatentShape<Value, kDim, kRank, 8>>
                                               : launch_shape<LatentShape<Value, kDim, kRank, 16>>;
      launch(call, stream);
      return true;
    };
    STD_TORCH_CHECK((launched.template operator()<kRanks>() || ...), "attend_latents_sm90 is not made for rank ", rank);
  }
};

} // namespace shadowkv

// Registers Op, AttendLatents for some ranks and values, with PyTorch as shadowkv_cuda::NAME.
#define SHADOWKV_ATTEND_LATENTS(NAME, Op)                                                                          \
  STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {                                                                \
    m.def(#NAME                                                                                                    \
          "(Tensor q, Tensor selected, int key_codec, Tensor latents, Tensor basis, Tensor? mean, Tensor states, " \
          "Tensor first, Tensor key_pages, Tensor frequencies, int rope_dim, float magnitude, int value_codec, "   \
          "Tensor codes, Tensor scale, Tensor rotation, Tensor value_pages, Tensor? log_weight, "                  \
          "Tensor? most, float score_scale, int blocks, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) partial) -> ()"); \
  }                                                                                                                \
  STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) { m.impl(#NAME, TORCH_BOX(&Op::run)); }
