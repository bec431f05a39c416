// Search of a key sketch on CPU tensors for PyTorch: checks arguments and distributes the work over its threads.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "cpu/common/binding.h"
#include "sketch.h"

namespace {

using at::Tensor;
using shadowkv::check;

constexpr int64_t PAGES_PER_TASK = 64;  // about 20 microseconds of work

// Sketched queries, the planes of the sketch, and where the pages of every sequence are.
struct SketchArguments {
  Tensor whole, unit, signs, rest, scale, pages, num_pages;
  int64_t batch, heads, group, bytes, columns;

  SketchArguments(
      const Tensor& whole, const Tensor& unit, const Tensor& signs, const Tensor& rest, const Tensor& scale,
      const Tensor& pages, const Tensor& num_pages)
      : whole(whole.contiguous()), unit(unit.contiguous()), signs(signs), rest(rest), scale(scale),
        pages(pages.contiguous()), num_pages(num_pages.contiguous()) {
    check(whole, "whole", 4, at::kChar);
    check(unit, "unit", 2, at::kFloat);
    check(signs, "signs", 4, at::kByte);
    check(rest, "rest", 4, at::kByte);
    check(scale, "scale", 3, at::kByte);
    check(pages, "pages", 2, at::kLong);
    check(num_pages, "num_pages", 1, at::kLong);
    batch = whole.size(0), heads = signs.size(1), bytes = signs.size(3), columns = pages.size(1);
    TORCH_CHECK(
        heads > 0 && whole.size(1) % heads == 0, whole.size(1), " query heads are no multiple of ", heads, " kv heads");
    group = whole.size(1) / heads;
    TORCH_CHECK(
        whole.size(2) == 8 && whole.size(3) == bytes && signs.size(2) == shadowkv::kPage &&
            bytes <= shadowkv::MAX_PLANE_BYTES,
        "whole has shape ", whole.sizes(), ", signs has shape ", signs.sizes());
    TORCH_CHECK(unit.sizes() == whole.sizes().slice(0, 2), "unit has shape ", unit.sizes(), ", whole ", whole.sizes());
    TORCH_CHECK(
        signs.sizes().slice(1) == rest.sizes().slice(1), "signs has shape ", signs.sizes(), ", rest ", rest.sizes());
    TORCH_CHECK(
        scale.sizes().slice(1) == signs.sizes().slice(1, 2), "scale has shape ", scale.sizes(), ", signs ",
        signs.sizes());
    TORCH_CHECK(signs.stride(3) == 1 && rest.stride(3) == 1 && scale.stride(2) == 1, "the last stride is not 1");
    TORCH_CHECK(pages.size(0) == batch && num_pages.size(0) == batch, "pages has shape ", pages.sizes(),
                ", num_pages ", num_pages.sizes(), ", whole ", whole.sizes());
    const int64_t most = std::min({signs.size(0), rest.size(0), scale.size(0)});
    for (int64_t row = 0; row < batch; ++row) {
      TORCH_CHECK_INDEX(
          count(row) >= 0 && count(row) <= columns, "num_pages ", count(row), " is not in [0, ", columns, "]");
      for (int64_t i = 0; i < count(row); ++i) {
        const int64_t page = page_numbers(row)[i];
        TORCH_CHECK_INDEX(page >= 0 && page < most, "page ", page, " is not in [0, ", most, ")");
      }
    }
  }

  int64_t count(int64_t row) const { return num_pages.const_data_ptr<int64_t>()[row]; }
  const int64_t* page_numbers(int64_t row) const { return pages.const_data_ptr<int64_t>() + row * columns; }

  shadowkv::SketchScorer scorer(int64_t row, int64_t head, bool in_sixteenths) const {
    const int64_t first = (row * heads + head) * group;
    return {
        whole.const_data_ptr<int8_t>() + first * 8 * bytes, unit.const_data_ptr<float>() + first, group, bytes,
        in_sixteenths};
  }

  shadowkv::SketchPlanes planes(int64_t head) const {
    return {
        signs.const_data_ptr<uint8_t>() + head * signs.stride(1),
        rest.const_data_ptr<uint8_t>() + head * rest.stride(1),
        scale.const_data_ptr<uint8_t>() + head * scale.stride(1),
        signs.stride(0), signs.stride(2), rest.stride(0), rest.stride(2), scale.stride(0)};
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> sketch_queries(
    const Tensor& q, const Tensor& maps, const Tensor& states) {
  check(q, "q", 3, at::kFloat);
  check(maps, "maps", 4, at::kBFloat16);
  check(states, "states", 1, at::kLong);
  const int64_t batch = q.size(0), query_heads = q.size(1), dim = q.size(2), heads = maps.size(1);
  const int64_t bytes = (dim + 63) / 64 * 8;
  TORCH_CHECK(
      dim % 8 == 0 && bytes <= shadowkv::MAX_PLANE_BYTES && maps.size(2) == dim && maps.size(3) == dim &&
          maps.stride(3) == 1 && maps.stride(2) == dim,
      "q has shape ", q.sizes(), ", maps ", maps.sizes(), ", strides ", maps.strides());
  TORCH_CHECK(
      states.size(0) == batch && heads > 0 && query_heads % heads == 0, "q has shape ", q.sizes(), ", maps ",
      maps.sizes(), ", states ", states.sizes());
  const Tensor queries = q.contiguous(), rows = states.contiguous();
  const int64_t* state = rows.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < batch; ++row)
    TORCH_CHECK_INDEX(
        state[row] >= 0 && state[row] < maps.size(0), "state ", state[row], " is not in [0, ", maps.size(0), ")");
  Tensor whole = at::empty({batch, query_heads, 8, bytes}, q.options().dtype(at::kChar));
  Tensor planes = at::empty({batch, query_heads, 4, bytes}, q.options().dtype(at::kByte));
  Tensor unit = at::empty({batch, query_heads}, q.options()), length = at::empty_like(unit);
  Tensor sum = at::empty({batch, query_heads}, q.options().dtype(at::kInt)), plane_sum = at::empty_like(sum);
  const auto* map = static_cast<const shadowkv::BFloat16*>(maps.const_data_ptr());
  for (int64_t i = 0; i < batch * query_heads; ++i) {
    const int64_t head = i % query_heads / (query_heads / heads);
    shadowkv::map_query(
        queries.const_data_ptr<float>() + i * dim,
        map + state[i / query_heads] * maps.stride(0) + head * maps.stride(1), dim, bytes,
        {whole.mutable_data_ptr<int8_t>() + i * 8 * bytes, planes.mutable_data_ptr<uint8_t>() + i * 4 * bytes,
         unit.mutable_data_ptr<float>() + i, length.mutable_data_ptr<float>() + i, sum.mutable_data_ptr<int32_t>() + i,
         plane_sum.mutable_data_ptr<int32_t>() + i});
  }
  return {whole, unit, sum, planes, plane_sum, length};
}

Tensor sign_scores(
    const Tensor& whole, const Tensor& unit, const Tensor& signs, const Tensor& scale, const Tensor& pages,
    const Tensor& num_pages) {
  const SketchArguments in(whole, unit, signs, signs, scale, pages, num_pages);
  const int64_t runs = shadowkv::kPageRuns * in.columns;
  Tensor scores =
      at::full({in.batch, in.heads, runs}, -std::numeric_limits<double>::infinity(), unit.options().dtype(at::kHalf));
  auto* out = static_cast<shadowkv::Float16*>(scores.mutable_data_ptr());
  const int64_t blocks = (in.columns + PAGES_PER_TASK - 1) / PAGES_PER_TASK, tasks = in.batch * in.heads * blocks;
  shadowkv::share_tasks(tasks, [&](const auto& next) {
    std::optional<shadowkv::SketchScorer> scorer;  // kept across the tasks of one row and head
    int64_t scored = -1;
    for (int64_t task; (task = next()) < tasks;) {
      const int64_t place = task / blocks, row = place / in.heads, head = place % in.heads;
      const int64_t first = task % blocks * PAGES_PER_TASK, count = std::min(PAGES_PER_TASK, in.count(row) - first);
      if (count <= 0) continue;
      if (place != scored) scorer.emplace(in.scorer(row, head, true)), scored = place;
      shadowkv::score_runs(
          *scorer, in.planes(head), in.page_numbers(row) + first, count,
          out + place * runs + first * shadowkv::kPageRuns);
    }
  });
  return scores;
}

// counts [4, B]: runs examined, how many of them are sampled, top-k chunks, sampled chunks.
// to_logit [B, H_q]: units of `whole` that make products logits. length [B, H]: a factor that makes coarse scores logits.
// random [2, B, H]: for the sampling of runs, and for that of chunks.
std::tuple<Tensor, Tensor> select_by_sketch(
    const Tensor& whole, const Tensor& to_logit, const Tensor& coarse, const Tensor& signs, const Tensor& rest,
    const Tensor& scale, const Tensor& pages, const Tensor& num_pages, const Tensor& counts, const Tensor& length,
    double run_sharpness, double chunk_sharpness, const Tensor& random, int64_t chunk, int64_t width) {
  const SketchArguments in(whole, to_logit, signs, rest, scale, pages, num_pages);
  const int64_t runs = shadowkv::kPageRuns * in.columns;
  check(coarse, "coarse", 3, at::kHalf);
  check(counts, "counts", 2, at::kLong);
  check(length, "length", 2, at::kFloat);
  check(random, "random", 3, at::kLong);
  TORCH_CHECK(
      coarse.size(0) == in.batch && coarse.size(1) == in.heads && coarse.size(2) == runs, "coarse has shape ",
      coarse.sizes(), ", not [", in.batch, ", ", in.heads, ", ", runs, "]");
  TORCH_CHECK(counts.size(0) == 4 && counts.size(1) == in.batch, "counts has shape ", counts.sizes(), ", not [4, ",
              in.batch, "]");
  TORCH_CHECK(
      length.size(0) == in.batch && length.size(1) == in.heads, "length has shape ", length.sizes(), ", not [",
      in.batch, ", ", in.heads, "]");
  TORCH_CHECK(
      random.size(0) == 2 && random.size(1) == in.batch && random.size(2) == in.heads, "random has shape ",
      random.sizes(), ", not [2, ", in.batch, ", ", in.heads, "]");
  TORCH_CHECK(chunk == 1 || chunk == 2 || chunk == 4 || chunk == 8, "chunks have 1, 2, 4 or 8 tokens, not ", chunk);
  const Tensor dense_coarse = coarse.contiguous(), dense_counts = counts.contiguous();
  const Tensor dense_length = length.contiguous(), dense_random = random.contiguous();
  Tensor selected = at::full({in.batch, in.heads, width}, -1, pages.options());
  Tensor log_weight = at::zeros({in.batch, in.heads, width}, to_logit.options());
  const int64_t* count = dense_counts.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < 4 * in.batch; ++i)
    TORCH_CHECK_INDEX(count[i] >= 0 && count[i] < int64_t{1} << 30, "count ", count[i], " is not in [0, 2**30)");
  const int64_t* number = dense_random.const_data_ptr<int64_t>();
  const float* lengths = dense_length.const_data_ptr<float>();
  const auto* scores = static_cast<const shadowkv::Float16*>(dense_coarse.const_data_ptr());
  int64_t* chosen = selected.mutable_data_ptr<int64_t>();
  float* weights = log_weight.mutable_data_ptr<float>();
  const int64_t places = in.batch * in.heads;
  shadowkv::share_tasks(places, [&](const auto& next) {
    for (int64_t place; (place = next()) < places;) {
      const int64_t row = place / in.heads, head = place % in.heads;
      if (count[row] == 0) continue;  // no runs are examined
      const shadowkv::SketchSelection selection = {
          scores + place * runs, in.page_numbers(row), in.count(row), count[row], count[in.batch + row],
          count[2 * in.batch + row], count[3 * in.batch + row], chunk, lengths[place],
          static_cast<float>(run_sharpness), static_cast<float>(chunk_sharpness),
          static_cast<uint32_t>(number[place]), static_cast<uint32_t>(number[places + place])};
      shadowkv::select_chunks(
          in.scorer(row, head, false), in.planes(head), selection, width, chosen + place * width,
          weights + place * width);
    }
  });
  return {selected, log_weight};
}

TORCH_LIBRARY_FRAGMENT(shadowkv, m) {
  m.def(
      "sketch_queries(Tensor q, Tensor maps, Tensor states) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "sign_scores(Tensor whole, Tensor unit, Tensor signs, Tensor scale, Tensor pages, Tensor num_pages) -> Tensor");
  m.def(
      "select_by_sketch(Tensor whole, Tensor to_logit, Tensor coarse, Tensor signs, Tensor rest, Tensor scale, "
      "Tensor pages, Tensor num_pages, Tensor counts, Tensor length, float run_sharpness, float chunk_sharpness, "
      "Tensor random, int chunk, int width) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(shadowkv, CPU, m) {
  m.impl("sketch_queries", sketch_queries);
  m.impl("sign_scores", sign_scores);
  m.impl("select_by_sketch", select_by_sketch);
}

}  // namespace
