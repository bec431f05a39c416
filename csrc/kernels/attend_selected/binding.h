// Attention over selected chunks for PyTorch, as an op for some pairs of codecs: checks its arguments and launches on
// the current stream.
#pragma once

#include "arguments.h"
#include "attend_selected.cuh"

namespace shadowkv {

// What a kernel is instantiated for.
template <class Key_, class Value_>
struct Codecs {
  using Key = Key_;
  using Value = Value_;
};

// Calls use.operator()<Shape>() with the shape that the kernel is instantiated for. Tokens per tile and blocks per
// multiprocessor are as many as fit in registers without spilling.
template <class Key, class Value, class Use>
void with_attend_shape(int64_t dim, int64_t rank, const Use& use) {
  constexpr int kRank = Key::kRebuilt ? 256 : 0, kBlocks = Key::kRebuilt ? 2 : 4;
  constexpr int kTiles = Key::kId == codec::kFp8 ? 2 : 1; // as many bytes in flight as of rows in bf16
  constexpr bool kWide = Value::kCoded && Value::scales(128) == 1;
  if constexpr (Key::kRebuilt && Value::takes(128))
    if (dim == 128 && rank == 160)
      return use.template operator()<AttendShape<Key, Value, 128, 160, true, kWide ? 2 : 1, Value::kCoded ? 2 : 3>>();
  const auto with = [&]<int kDim>() {
    if constexpr (Value::takes(kDim))
      return use.template operator()<
          AttendShape<Key, Value, kDim, kRank, false, kTiles, kDim == 256 ? kBlocks / 2 : kBlocks>>();
    STD_TORCH_CHECK(false, "values in codec ", Value::kId, " have no head dim ", dim);
  };
  switch (dim) {
    case 64: return with.template operator()<64>();
    case 96: return with.template operator()<96>();
    case 128: return with.template operator()<128>();
    case 256: return with.template operator()<256>();
    default: STD_TORCH_CHECK(false, "head dim ", dim, " is not 64, 96, 128 or 256");
  }
}

// Calls use.operator()<Codecs>() with the pair that has these ids.
template <class... Known, class Use>
void with_codecs(int64_t key_codec, int64_t value_codec, const Use& use) {
  const bool has_kernel =
      ((Known::Key::kId == key_codec && Known::Value::kId == value_codec &&
        (use.template operator()<Known>(), true)) || ...);
  STD_TORCH_CHECK(
      has_kernel, "no kernel for keys in codec ", key_codec, " with values in codec ", value_codec);
}

template <class Shape>
void launch_attend(const AttendInputs& in, const AttendOutputs& to, cudaStream_t stream) {
  const auto kernel = attend_selected_kernel<Shape>;
  const int bytes = Shape::shared_bytes(in.rank);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  STD_TORCH_CHECK(
      error == cudaSuccess, "attend_selected needs ", bytes, " bytes of shared memory: ", cudaGetErrorString(error));
  const int blocks = (in.group + kAttendQueries - 1) / kAttendQueries; // of a split
  kernel<<<dim3(in.splits * blocks, in.heads, in.batch), kAttendWarps * 32, bytes, stream>>>(in, to);
  check_launch("attend_selected");
  if (in.splits == 1) return;
  merge_selected_kernel<Shape::kDim, Shape::kRotated>
      <<<dim3(in.batch * in.heads, blocks), kAttendWarps * 32, 0, stream>>>(to, in.rotation, in.group, in.splits);
  check_launch("attend_selected's merge");
}

// An op of these codecs. The number of splits is what the partial results have room for. Of rows there is no basis, and
// mean, first and angles only if they are stored without their mean; of values as they are there are no scale and
// rotation. Only fp8 has key_scale, and scale_states for the scale of its values: one of each state and kv head. With
// value_slots the values are chunks of a buffer and value_pages its entries of the selected ones.
template <class... Known>
struct AttendSelected {
  // Bytes of shared memory that a block needs; raises if there is no kernel.
  static int64_t memory(int64_t key_codec, int64_t value_codec, int64_t dim, int64_t rank) {
    int64_t bytes = 0;
    with_codecs<Known...>(key_codec, value_codec, [&]<class P>() {
      if constexpr (P::Key::kRebuilt) check_rank(rank);
      using Key = std::conditional_t<P::Key::kId == codec::kFp8, CentredFp8Keys, typename P::Key>; // needs the most
      with_attend_shape<Key, typename P::Value>(
          dim, rank, [&]<class Shape>() { bytes = Shape::shared_bytes(int(rank)); });
    });
    return bytes;
  }

  static void run(
      const Tensor& q, const Tensor& selected, int64_t key_codec, const Tensor& keys,
      const std::optional<Tensor>& basis, const std::optional<Tensor>& mean, const std::optional<Tensor>& states,
      const std::optional<Tensor>& first, const std::optional<Tensor>& far_angles,
      const std::optional<Tensor>& near_angles, int64_t rope_dim, double magnitude,
      const std::optional<Tensor>& key_scale, const Tensor& key_pages, int64_t value_codec, const Tensor& values,
      const std::optional<Tensor>& scale, const std::optional<Tensor>& scale_states,
      const std::optional<Tensor>& rotation, const Tensor& value_pages, const std::optional<Tensor>& value_slots,
      const std::optional<Tensor>& log_weight, double score_scale, Tensor& out, Tensor& lse, Tensor& partial) {
    const auto attend = [&]<class Key, class Value>() {
      const int64_t dim = q.size(2), chunk = keys.size(-2);
      const int64_t splits = partial.size(2);
      AttendInputs in = {};
      set_queries(in, q, selected, key_pages, log_weight, score_scale, out, lse, chunk);
      check_pages(keys, "keys");
      in.keys = static_cast<const char*>(keys.data_ptr());
      in.key_page = keys.stride(0) * int64_t(keys.element_size());
      in.key_bytes = int(keys.size(-1) * int64_t(keys.element_size()));
      in.splits = int(splits);
      STD_TORCH_CHECK(splits > 0, "no room for ", splits, " splits");
      check_blocks(in.batch, "sequences");
      check_blocks(in.heads, "kv heads");
      if (splits > 1)
        check_dense(partial, "partial", Dtype::Float, {in.batch, in.heads, splits, in.group, dim + 4});
      if constexpr (Key::kRebuilt) {
        STD_TORCH_CHECK(
            basis && states && first && far_angles && near_angles, "latents need a basis, states and angles");
        set_latents<Key>(
            in, dim, keys, *basis, mean, *states, *first, *far_angles, *near_angles, rope_dim, magnitude);
      } else {
        check(keys, "keys", kStored<Key>, {-1, in.heads, kPage / chunk, chunk, dim});
        if constexpr (Key::kId == codec::kFp8) in.key_scales = head_scales(in, "keys", key_scale, states);
        if constexpr (std::is_same_v<Key, CentredFp8Keys>) {
          STD_TORCH_CHECK(first && far_angles && near_angles, "keys without their mean need positions and angles");
          set_positions(in, dim, *states, *first, rope_dim, magnitude);
          set_angles(in, dim, *far_angles, *near_angles);
          set_mean(in, dim, *mean);
          STD_TORCH_CHECK(in.mean_is_float, "the mean of coded keys is not float32");
        }
      }
      const int64_t chunks = value_slots ? values.size(2) : kPage / chunk;
      set_codec_of_values<Value>(in, dim, values, chunks, chunk, scale, scale_states, rotation);
      set_places_of_values(in, values, value_pages, value_slots);
      if (in.batch == 0) return;
      const torch::stable::accelerator::DeviceGuard guard(q.get_device());
      const AttendOutputs to = {
          static_cast<__nv_bfloat16*>(out.data_ptr()), static_cast<float*>(lse.data_ptr()),
          static_cast<float*>(partial.data_ptr())};
      with_attend_shape<Key, Value>(
          dim, in.rank, [&]<class Shape>() { launch_attend<Shape>(in, to, current_stream(q)); });
    };
    with_codecs<Known...>(key_codec, value_codec, [&]<class P>() {
      if constexpr (P::Key::kId == codec::kFp8)
        if (mean) return attend.template operator()<CentredFp8Keys, typename P::Value>();
      attend.template operator()<typename P::Key, typename P::Value>();
    });
  }

 private:
  static void check_rank(int64_t rank) {
    STD_TORCH_CHECK(rank > 0 && rank % 32 == 0 && rank <= 256, "rank ", rank, " is not a multiple of 32 up to 256");
  }

  template <class Key>
  static constexpr Dtype kStored = Key::kStored == Stored::kBf16   ? Dtype::BFloat16
                                   : Key::kStored == Stored::kInt8 ? Dtype::Char
                                                                   : Dtype::Byte;

  static HeadScales head_scales(
      const AttendInputs& in, const char* axis, const std::optional<Tensor>& scale,
      const std::optional<Tensor>& states) {
    STD_TORCH_CHECK(scale && states, "fp8 ", axis, " need scales and states");
    check_dense(*scale, "scale of fp8 rows", Dtype::Float, {-1, in.heads, 1}, 1);
    check_dense(*states, "states", Dtype::Long, {in.batch});
    return {
        static_cast<const float*>(scale->data_ptr()), static_cast<const int64_t*>(states->data_ptr()),
        scale->stride(0)};
  }

  // Sets the fields of keys that are rebuilt from latents.
  template <class Key>
  static void set_latents(
      AttendInputs& in, int64_t dim, const Tensor& latents, const Tensor& basis, const std::optional<Tensor>& mean,
      const Tensor& states, const Tensor& first, const Tensor& far_angles, const Tensor& near_angles,
      int64_t rope_dim, double magnitude) {
    const int64_t rank = basis.size(1), chunk = latents.size(-2);
    check_rank(rank);
    set_basis(in, dim, rank, basis, mean, states, first, rope_dim, magnitude);
    set_angles(in, dim, far_angles, near_angles);
    const int64_t width = latents.size(-1), bits = width * int64_t(latents.element_size()) * 8;
    // The number in 8 bits, where the others have fewer; a multiple of 32, like the rank.
    if constexpr (Key::kLeast < Key::kBits) in.strong = int((bits - rank * Key::kLeast) / (Key::kBits - Key::kLeast));
    check(latents, "latents", kStored<Key>, {-1, kPage / chunk, chunk, -1});
    STD_TORCH_CHECK(
        in.strong >= 0 && in.strong <= rank && in.strong % 32 == 0 &&
            bits == (rank - in.strong) * Key::kLeast + in.strong * Key::kBits,
        "latents of rank ", rank, " have no rows of ", width, " elements");
    in.rank = int(rank);
  }

  static void set_angles(AttendInputs& in, int64_t dim, const Tensor& far_angles, const Tensor& near_angles) {
    check_dense(far_angles, "far angles", Dtype::Half, {-1, dim / 4, 2, 2});
    check_dense(near_angles, "near angles", Dtype::Half, {8, dim / 4, 2, 2});
    in.far_angles = static_cast<const uint2*>(far_angles.data_ptr());
    in.near_angles = static_cast<const uint2*>(near_angles.data_ptr());
  }

  // Sets the fields that values have due to their codec; chunks: per head, in an entry of the first dimension.
  template <class Value>
  static void set_codec_of_values(
      AttendInputs& in, int64_t dim, const Tensor& values, int64_t chunks, int64_t chunk,
      const std::optional<Tensor>& scale, const std::optional<Tensor>& scale_states,
      const std::optional<Tensor>& rotation) {
    if constexpr (Value::kCoded) {
      STD_TORCH_CHECK(scale, "codes need a scale");
      check(values, "codes", Dtype::Byte, {-1, in.heads, chunks, chunk, Value::row_bytes(int(dim))});
      check_dense(*scale, "scale", Dtype::Half, {-1, in.heads, kPage, Value::scales(int(dim))}, 1);
      in.scale = static_cast<const char*>(scale->data_ptr());
      in.scale_page = scale->stride(0) * 2;
    } else if constexpr (Value::kId == codec::kFp8) {
      check(values, "values", Dtype::Byte, {-1, in.heads, chunks, chunk, dim});
      in.value_scales = head_scales(in, "values", scale, scale_states);
    } else {
      check(values, "values", Dtype::BFloat16, {-1, in.heads, chunks, chunk, dim});
    }
    if constexpr (Value::kRotated) {
      STD_TORCH_CHECK(rotation, "rotated codes need a rotation");
      check_dense(*rotation, "rotation", Dtype::Float, {dim, dim});
      in.rotation = static_cast<const float*>(rotation->data_ptr());
    }
  }

  // Sets where the values are.
  static void set_places_of_values(
      AttendInputs& in, const Tensor& values, const Tensor& value_pages, const std::optional<Tensor>& value_slots) {
    check_pages(values, "values");
    if (value_slots) {
      check_dense(*value_slots, "value slots", Dtype::Long, {in.batch});
      check_dense(value_pages, "value entries", Dtype::Long, {in.batch, in.heads, in.chunks});
      check_dense_from(values, "values", 0);
      STD_TORCH_CHECK(
          values.size(0) * in.heads * values.size(2) < int64_t(1) << 31, "the buffer has 2^31 entries");
      in.value_slots = static_cast<const int64_t*>(value_slots->data_ptr());
      in.buffer_entries = int(values.size(2));
    } else {
      check_dense(value_pages, "value pages", Dtype::Long, {in.batch, -1}, 1);
    }
    in.values = static_cast<const char*>(values.data_ptr());
    in.value_pages = static_cast<const int64_t*>(value_pages.data_ptr());
    in.value_page = values.stride(value_slots ? 2 : 0) * int64_t(values.element_size());
    in.value_pages_row = value_pages.stride(0);
  }
};

} // namespace shadowkv

// Registers Op, an AttendSelected, with PyTorch as shadowkv_cuda::NAME, and its memory() as NAME_memory.
#define SHADOWKV_ATTEND_SELECTED(NAME, Op)                                                                          \
  STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {                                                                 \
    m.def(#NAME                                                                                                     \
          "(Tensor q, Tensor selected, int key_codec, Tensor keys, Tensor? basis, Tensor? mean, Tensor? states, "   \
          "Tensor? first, Tensor? far_angles, Tensor? near_angles, int rope_dim, float magnitude, "                 \
          "Tensor? key_scale, Tensor key_pages, int value_codec, Tensor values, Tensor? scale, "                    \
          "Tensor? scale_states, Tensor? rotation, Tensor value_pages, Tensor? value_slots, Tensor? log_weight, "   \
          "float score_scale, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) partial) -> ()");                          \
    m.def(#NAME "_memory(int key_codec, int value_codec, int dim, int rank) -> int");                               \
  }                                                                                                                 \
  STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) { m.impl(#NAME, TORCH_BOX(&Op::run)); }                         \
  STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CompositeExplicitAutograd, m) {                                          \
    m.impl(#NAME "_memory", TORCH_BOX(&Op::memory));                                                                \
  }
