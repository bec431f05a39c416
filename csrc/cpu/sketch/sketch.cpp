#include "sketch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "constants.h"

namespace shadowkv {

namespace {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr int BINS = 2048;

// The first 11 bits of a number, ordered like the numbers.
int bin_of(Float16 x) {
  const uint16_t bits = x.bits == 0x8000 ? 0 : x.bits;
  return (bits & 0x8000 ? static_cast<uint16_t>(~bits) : bits | 0x8000) >> 5;
}

float decode_scale(uint8_t code) { return to_float(Float16{static_cast<uint16_t>(code << kScaleShift)}); }

bool is_nothing(Float16 x) { return x.bits == 0xfc00; }

// Which numbers are selected, and with what chance, in multiples of 2^-bits.
struct Chosen {
  std::vector<uint8_t> some;
  std::vector<int64_t> chance;
  int bits = 0;

  bool in_top(int64_t i) const { return chance[i] == int64_t{1} << bits; }
  float log_chance(int64_t i) const { return std::log2(std::ldexp(static_cast<float>(chance[i]), -bits)); }
};

// The largest `count` that are not -inf, each with a chance of 1.
Chosen largest(const std::vector<float>& values, int64_t count) {
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  count = std::min<int64_t>(count, order.size());
  const auto greater = [&](int32_t a, int32_t b) { return values[a] > values[b]; };
  std::nth_element(order.begin(), order.begin() + count, order.end(), greater);
  Chosen chosen{std::vector<uint8_t>(values.size()), std::vector<int64_t>(values.size(), 1)};
  for (int64_t i = 0; i < count; ++i) chosen.some[order[i]] = values[order[i]] != NOTHING;
  return chosen;
}

// Selection of the largest and of a sample of the others: `systematic_sample` of the PyTorch reference.
Chosen systematic_sample(
    const std::vector<Float16>& values, int64_t top_k, int64_t to_select, float factor, uint32_t random) {
  const int64_t n = static_cast<int64_t>(values.size());
  Chosen chosen{std::vector<uint8_t>(n), std::vector<int64_t>(n)};
  while (chosen.bits < kMostChanceBits && std::max<int64_t>(to_select, 1) < int64_t{1} << (30 - chosen.bits))
    ++chosen.bits;
  const int64_t certain = int64_t{1} << chosen.bits;

  int32_t counts[BINS] = {};
  for (const Float16 x : values) ++counts[bin_of(x)];
  int edge_bin = BINS;  // bins from this one on hold `top_k` numbers at most
  for (int64_t left = top_k; edge_bin > 0 && left >= counts[edge_bin - 1];) left -= counts[--edge_bin];

  int64_t num_top = 0;
  float edge = -kLargestHalf;
  for (int64_t i = 0; i < n; ++i) {
    if (is_nothing(values[i])) continue;
    if (bin_of(values[i]) >= edge_bin) {
      chosen.chance[i] = certain;
      ++num_top;
    } else {
      edge = std::max(edge, to_float(values[i]));
    }
  }
  std::vector<float> weight(n);
  float total = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (chosen.chance[i] || is_nothing(values[i])) continue;
    weight[i] = std::exp2(factor * (to_float(values[i]) - edge));
    total += weight[i];
  }
  const float scale = total > 0 ? kCaution * static_cast<float>((to_select - num_top) << chosen.bits) / total : 0;
  int64_t before = static_cast<int64_t>(static_cast<uint64_t>(random) >> (32 - chosen.bits));
  for (int64_t i = 0; i < n; ++i) {
    // NaN, from a query that is not finite, counts as 0: max returns its first argument.
    if (!chosen.chance[i])
      chosen.chance[i] = static_cast<int64_t>(std::min(std::max(0.0f, weight[i] * scale), static_cast<float>(certain)));
    const int64_t after = before + chosen.chance[i];
    chosen.some[i] = after >> chosen.bits != before >> chosen.bits;
    before = after;
  }
  return chosen;
}

}  // namespace

SketchScorer::SketchScorer(
    const int8_t* whole, const float* unit, int64_t queries, int64_t bytes, bool in_sixteenths)
    : groups_((queries + LANES - 1) / LANES), bytes_(bytes) {
  for (int64_t first = 0; first < queries; first += LANES) {
    Queries& group = groups_[first / LANES];
    group.count = std::min(LANES, queries - first);
    std::vector<Sums> numbers(bytes * 8);
    for (int64_t lane = 0; lane < group.count; ++lane) {
      group.unit[lane] = in_sixteenths ? 16 * unit[first + lane] : unit[first + lane];
      group.sum[lane] = 0;
      for (int64_t bit = 0; bit < 8; ++bit) {
        for (int64_t byte = 0; byte < bytes; ++byte) {
          const int x = whole[((first + lane) * 8 + bit) * bytes + byte];
          const int number = in_sixteenths ? std::min((x + 8) >> 4, 7) : x;
          numbers[byte * 8 + bit][lane] = static_cast<int16_t>(number);
          group.sum[lane] += number;
        }
      }
    }
    group.table.resize(bytes * 256);
    for (int64_t byte = 0; byte < bytes; ++byte) {
      Sums* row = group.table.data() + 256 * byte;
      for (unsigned value = 1; value < 256; ++value)
        row[value] = row[value & (value - 1)] + numbers[byte * 8 + __builtin_ctz(value)];
    }
  }
}

SketchScorer::Sums SketchScorer::Queries::look_up(const uint8_t* plane, int64_t bytes) const {
  Sums sums{};
  for (int64_t byte = 0; byte < bytes; ++byte) sums += table[256 * byte + plane[byte]];
  return sums;
}

float SketchScorer::with_signs(const uint8_t* signs) const {
  float best = NOTHING;
  for (const Queries& group : groups_) {
    const Sums high = group.look_up(signs, bytes_);
    for (int64_t lane = 0; lane < group.count; ++lane)
      best = std::max(best, group.unit[lane] * static_cast<float>(2 * high[lane] - group.sum[lane]));
  }
  return best;
}

float SketchScorer::with_both(const uint8_t* signs, const uint8_t* rest) const {
  float best = NOTHING;
  for (const Queries& group : groups_) {
    const Sums high = group.look_up(signs, bytes_), low = group.look_up(rest, bytes_);
    for (int64_t lane = 0; lane < group.count; ++lane) {
      const float product = static_cast<float>(2 * high[lane] + low[lane]) - 1.5f * static_cast<float>(group.sum[lane]);
      best = std::max(best, group.unit[lane] * product);
    }
  }
  return best;
}

void map_query(const float* q, const BFloat16* map, int64_t dim, int64_t bytes, const MappedQuery& out) {
  constexpr float SMALLEST_STEP = 1e-30f;
  constexpr int ROWS = 8, PLANES = 4;
  float x[8 * MAX_PLANE_BYTES] = {};
  float squares = 0.0f, peak = 0.0f;
  for (int64_t i = 0; i < dim; ++i) {
    squares += q[i] * q[i];
    for (int64_t j = 0; j < dim; ++j) x[j] += q[i] * to_float(map[i * dim + j]);
  }
  bool finite = true;
  for (int64_t j = 0; j < dim; ++j) {
    finite = finite && std::isfinite(x[j]);
    peak = std::max(peak, std::abs(x[j]));
  }
  const float step = std::max(peak * (1.0f / 127), SMALLEST_STEP), inverse = 1.0f / step, length = std::sqrt(squares);
  std::fill_n(out.whole, ROWS * bytes, 0);
  std::fill_n(out.planes, PLANES * bytes, 0);
  int32_t sum = 0, plane_sum = 0;
  for (int64_t j = 0; finite && j < dim; ++j) {
    const int64_t row = j / (dim / ROWS), byte = j % (dim / ROWS);
    const int number = static_cast<int>(std::nearbyint(x[j] * inverse));
    const int rounded = std::min((number + 8) >> 4, 7);  // in sixteenths, halves up
    out.whole[row * bytes + byte] = static_cast<int8_t>(number);
    for (int plane = 0; plane < PLANES; ++plane) out.planes[plane * bytes + byte] |= (rounded >> plane & 1) << row;
    sum += number;
    plane_sum += rounded;
  }
  *out.sum = sum;
  *out.plane_sum = plane_sum;
  *out.length = length / std::sqrt(static_cast<float>(dim));
  *out.unit = !finite ? std::numeric_limits<float>::quiet_NaN() : length > 0.0f ? step / length : 0.0f;
}

void score_runs(
    const SketchScorer& scorer, const SketchPlanes& planes, const int64_t* pages, int64_t count, Float16* best) {
  for (int64_t page = 0; page < count; ++page) {
    const uint8_t* signs = planes.signs + pages[page] * planes.signs_page;
    const uint8_t* scale = planes.scale + pages[page] * planes.scale_page;
    for (int64_t run = 0; run < kPage; run += kRun) {
      float highest = NOTHING;
      for (int64_t token = run; token < run + kRun; ++token)
        highest = std::max(highest, scorer.with_signs(signs + token * planes.signs_row) * decode_scale(scale[token]));
      *best++ = to_float16(std::clamp(highest, -kLargestHalf, kLargestHalf));
    }
  }
}

void select_chunks(
    const SketchScorer& scorer, const SketchPlanes& planes, const SketchSelection& in, int64_t width,
    int64_t* selected, float* log_weight) {
  const int64_t runs = in.num_pages * kPageRuns, per_run = kRun / in.chunk;
  const std::vector<Float16> coarse(in.coarse, in.coarse + runs);
  float edge = 0;
  Chosen kept;
  if (in.sampled_runs) {
    const float factor = in.run_sharpness / kLn2 * in.length;
    kept = systematic_sample(coarse, in.keep - in.sampled_runs, in.keep, factor, in.run_random);
    edge = NOTHING;
    for (int64_t run = 0; run < runs; ++run)
      if (!kept.in_top(run)) edge = std::max(edge, in.length * to_float(coarse[run]));
  } else {
    std::vector<float> scores(runs);
    // NaN counts as nothing: it has no order.
    for (int64_t run = 0; run < runs; ++run) scores[run] = std::max(NOTHING, to_float(coarse[run]));
    kept = largest(scores, in.keep);
  }

  std::vector<int64_t> numbers;
  std::vector<float> logits, weights;  // weights: logarithms to base 2
  for (int64_t run = 0; run < runs; ++run) {
    if (!kept.some[run]) continue;
    const int64_t page = in.pages[run * kRun / kPage], first = run * kRun % kPage;
    const uint8_t* signs = planes.signs + page * planes.signs_page + first * planes.signs_row;
    const uint8_t* rest = planes.rest + page * planes.rest_page + first * planes.rest_row;
    const uint8_t* scale = planes.scale + page * planes.scale_page + first;
    const float weight = -kept.log_chance(run);
    for (int64_t chunk = 0; chunk < per_run; ++chunk) {
      float highest = NOTHING;
      for (int64_t token = chunk * in.chunk; token < (chunk + 1) * in.chunk; ++token) {
        if (scale[token] == kExcluded) continue;
        const float product = scorer.with_both(signs + token * planes.signs_row, rest + token * planes.rest_row);
        highest = std::max(highest, product * decode_scale(scale[token]));
      }
      numbers.push_back(run * per_run + chunk);
      logits.push_back(highest);
      weights.push_back(weight);
    }
  }

  Chosen chosen;
  if (in.sampled) {
    std::vector<Float16> values(logits.size());
    for (size_t i = 0; i < logits.size(); ++i)
      values[i] = to_float16(std::min(in.chunk_sharpness / kLn2 * (logits[i] - edge) + weights[i], kLargestHalf));
    chosen = systematic_sample(values, in.budget, in.budget + in.sampled, 1.0f, in.chunk_random);
  } else {
    chosen = largest(logits, in.budget);
  }
  int64_t count = 0;
  for (size_t i = 0; i < numbers.size() && count < width; ++i) {
    if (!chosen.some[i]) continue;
    selected[count] = numbers[i];
    log_weight[count++] = kLn2 * (weights[i] - chosen.log_chance(i));
  }
}

}  // namespace shadowkv
