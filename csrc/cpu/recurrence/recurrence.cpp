#include "recurrence.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cpu/attention/attention_tile.h"
#include "cpu/common/instruction_set.h"

namespace shadowkv {

#define SHADOWKV_KERNEL "cpu/recurrence/recurrent_rows.inc.h"
#include "cpu/common/instruction_sets.inc.h"

namespace {

template <typename T>
void read_row(const T* x, int64_t size, float* out) {
  for (int64_t i = 0; i < size; ++i) out[i] = to_float(x[i]);
}

template <typename T>
void write_row(const float* x, int64_t size, T* out) {
  for (int64_t i = 0; i < size; ++i) from_float(x[i], out[i]);
}

float product(const std::vector<float>& x, const std::vector<float>& y) {
  float sums[8] = {};
  for (size_t i = 0; i < x.size(); ++i) sums[i % 8] += x[i] * y[i];
  float sum = 0.0f;
  for (const float one : sums) sum += one;
  return sum;
}

void scale(std::vector<float>& x, float by) {
  for (float& one : x) one *= by;
}

}  // namespace

std::vector<int64_t> chains_of(const std::vector<Span>& spans) {
  std::vector<int64_t> firsts;
  for (size_t i = 0; i < spans.size(); ++i)
    if (i == 0 || spans[i].read != spans[i - 1].write || spans[i].write == spans[i].read)
      firsts.push_back(static_cast<int64_t>(i));
  firsts.push_back(static_cast<int64_t>(spans.size()));
  return firsts;
}

template <typename T, typename S>
void run_delta_rule(const DeltaInputs<T>& in, const Span& span, int64_t head, S* states, DeltaScratch& scratch) {
  const int64_t key_head = in.key_head(head), size = in.key_dim * in.value_dim, place = head * size;
  const S* read = states + span.read * in.state_row + place;
  S* written = states + span.write * in.state_row + place;
  const float* before = scratch.state.data();
  float* after = scratch.state.data();
  if constexpr (std::is_same_v<S, float>) {
    before = read;
    after = written;
  } else {
    read_row(read, size, after);
  }
  for (int64_t token = span.first; token < span.last; ++token) {
    read_row(in.q + token * in.q_token + key_head * in.q_head, in.key_dim, scratch.q.data());
    read_row(in.k + token * in.k_token + key_head * in.k_head, in.key_dim, scratch.k.data());
    read_row(in.v + token * in.v_token + head * in.v_head, in.value_dim, scratch.v.data());
    if (!in.skip) {
      const float key_dim = static_cast<float>(in.key_dim);
      scale(scratch.q, 1.0f / std::sqrt((product(scratch.q, scratch.q) + in.eps) * key_dim));
      scale(scratch.k, 1.0f / std::sqrt(product(scratch.k, scratch.k) + in.eps));
    }
    const int64_t gate = token * in.heads + head;
    const DeltaToken one = {
        scratch.q.data(), scratch.k.data(), scratch.v.data(), std::exp(in.log_decay[gate]), in.beta[gate],
        product(scratch.q, scratch.k), in.skip ? in.skip[head] : 0.0f};
    SHADOWKV_BEST(step_state)(one, !in.skip, before, after, in.key_dim, in.value_dim, scratch.out.data());
    write_row(scratch.out.data(), in.value_dim, in.out + gate * in.value_dim);
    before = after;
  }
  if constexpr (!std::is_same_v<S, float>) write_row(after, size, written);
}

template <typename T>
void run_convolution(
    const ConvolutionInputs<T>& in, const Span& span, int64_t channel, float* states, ConvolutionScratch& scratch) {
  const int64_t width = in.width, held = width - 1, count = std::min(CHANNELS_PER_TASK, in.channels - channel);
  const auto input = [&](int64_t position) {  // of a token of the span; negative ones are before it
    return scratch.inputs.data() + (position + width) % width * CHANNELS_PER_TASK;
  };
  const float* before = states + span.read * in.state_row + channel * held;
  float* after = states + span.write * in.state_row + channel * held;
  for (int64_t j = 0; j < width; ++j) {
    float* weight = scratch.weight.data() + j * CHANNELS_PER_TASK;
    for (int64_t i = 0; i < count; ++i) weight[i] = to_float(in.weight[(channel + i) * width + j]);
  }
  if (in.bias) read_row(in.bias + channel, count, scratch.bias.data());
  for (int64_t j = 0; j < held; ++j) {
    float* row = input(j - held);
    for (int64_t i = 0; i < count; ++i) row[i] = before[i * held + j];
  }
  const int64_t length = span.last - span.first;
  for (int64_t position = 0; position < length; ++position) {
    const int64_t token = span.first + position;
    read_row(in.x + token * in.x_token + channel, count, input(position));
    SHADOWKV_BEST(convolve_channels)(
        scratch.weight.data(), scratch.bias.data(), scratch.inputs.data(), width, (position + 1) % width,
        scratch.out.data());
    write_row(scratch.out.data(), count, in.out + token * in.channels + channel);
  }
  for (int64_t j = 0; j < held; ++j) {
    const float* row = input(length - held + j);
    for (int64_t i = 0; i < count; ++i) after[i * held + j] = row[i];
  }
}

template void run_delta_rule(const DeltaInputs<float>&, const Span&, int64_t, float*, DeltaScratch&);
template void run_delta_rule(const DeltaInputs<float>&, const Span&, int64_t, BFloat16*, DeltaScratch&);
template void run_delta_rule(const DeltaInputs<BFloat16>&, const Span&, int64_t, float*, DeltaScratch&);
template void run_delta_rule(const DeltaInputs<BFloat16>&, const Span&, int64_t, BFloat16*, DeltaScratch&);
template void run_convolution<float>(
    const ConvolutionInputs<float>&, const Span&, int64_t, float*, ConvolutionScratch&);
template void run_convolution<BFloat16>(
    const ConvolutionInputs<BFloat16>&, const Span&, int64_t, float*, ConvolutionScratch&);

}  // namespace shadowkv
