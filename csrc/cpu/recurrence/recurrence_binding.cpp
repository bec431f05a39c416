// Ops with recurrent states on CPU tensors for PyTorch: checks arguments and distributes the work over its threads.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <type_traits>
#include <vector>

#include "cpu/common/binding.h"
#include "recurrence.h"

namespace {

using at::Tensor;
using shadowkv::check;
using shadowkv::check_states;

// The spans of packed tokens; of one token each where there are no lengths.
std::vector<shadowkv::Span> spans_of(
    at::OptionalIntArrayRef lengths, const Tensor& read, const Tensor& write, int64_t tokens, const Tensor& states) {
  check(read, "read", 1, at::kLong);
  check(write, "write", 1, at::kLong);
  const int64_t count = lengths.has_value() ? static_cast<int64_t>(lengths->size()) : tokens, rows = states.size(0);
  TORCH_CHECK(
      read.size(0) == count && write.size(0) == count, count, " spans have ", read.size(0), " rows to read and ",
      write.size(0), " to write");
  const Tensor from = read.contiguous(), to = write.contiguous();
  std::vector<shadowkv::Span> spans;
  int64_t first = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t length = lengths.has_value() ? (*lengths)[i] : 1;
    TORCH_CHECK(length > 0, "a span has ", length, " tokens, not at least one");
    spans.push_back({first, first + length, from.const_data_ptr<int64_t>()[i], to.const_data_ptr<int64_t>()[i]});
    for (const int64_t row : {spans.back().read, spans.back().write})
      TORCH_CHECK_INDEX(row >= 0 && row < rows, "row ", row, " is not in [0, ", rows, ")");
    first += length;
  }
  TORCH_CHECK(first == tokens, "spans have ", first, " tokens, not ", tokens);
  return spans;
}

void check_numbers(const Tensor& x, const char* name) {
  TORCH_CHECK(
      x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, name, " is ", x.scalar_type(),
      ", not Float or BFloat16");
}

template <typename T, typename S>
void run_rule(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay, const Tensor& beta, const float* skip,
    double eps, const std::vector<shadowkv::Span>& spans, Tensor& states, Tensor& out) {
  const shadowkv::DeltaInputs<T> in = {
      static_cast<const T*>(q.const_data_ptr()),
      static_cast<const T*>(k.const_data_ptr()),
      static_cast<const T*>(v.const_data_ptr()),
      q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
      log_decay.const_data_ptr<float>(), beta.const_data_ptr<float>(), v.size(1), q.size(1), false, q.size(2),
      v.size(2), skip, static_cast<float>(eps), states.stride(0), static_cast<T*>(out.mutable_data_ptr())};
  S* rows = static_cast<S*>(states.mutable_data_ptr());
  const std::vector<int64_t> firsts = shadowkv::chains_of(spans);
  const int64_t tasks = static_cast<int64_t>(firsts.size() - 1) * in.heads;
  shadowkv::share_tasks(tasks, [&](const auto& next) {
    shadowkv::DeltaScratch scratch(in.key_dim, in.value_dim, !std::is_same_v<S, float>);
    for (int64_t task; (task = next()) < tasks;)
      for (int64_t i = firsts[task / in.heads]; i < firsts[task / in.heads + 1]; ++i)
        shadowkv::run_delta_rule(in, spans[i], task % in.heads, rows, scratch);
  });
}

// The arguments of an op, by its own names.
struct Names {
  const char *q, *k, *v, *log_decay, *beta;
  const char *value_heads, *key_heads;
};

// Computes the delta rule, or with `skip` the state space model.
Tensor run_checked(
    const Names& names, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay, const Tensor& beta,
    const float* skip, Tensor& states, at::OptionalIntArrayRef lengths, const Tensor& read, const Tensor& write,
    double eps) {
  check_numbers(q, names.q);
  check(q, names.q, 3, q.scalar_type());
  check(k, names.k, 3, q.scalar_type());
  check(v, names.v, 3, q.scalar_type());
  check(log_decay, names.log_decay, 2, at::kFloat);
  check(beta, names.beta, 2, at::kFloat);
  TORCH_CHECK(
      q.sizes() == k.sizes(), names.q, " has shape ", q.sizes(), ", ", names.k, " has shape ", k.sizes());
  TORCH_CHECK(
      q.size(0) == v.size(0), names.q, " has shape ", q.sizes(), ", ", names.v, " has shape ", v.sizes());
  TORCH_CHECK(
      q.size(1) > 0 && v.size(1) % q.size(1) == 0, v.size(1), names.value_heads, " are no multiple of ", q.size(1),
      names.key_heads);
  for (const Tensor& x : {log_decay, beta})
    TORCH_CHECK(
        x.sizes() == v.sizes().slice(0, 2), names.log_decay, " and ", names.beta, " have shapes ", log_decay.sizes(),
        " and ", beta.sizes(), ", ", names.v, " has shape ", v.sizes());
  TORCH_CHECK(
      q.stride(2) == 1 && k.stride(2) == 1 && v.stride(2) == 1, names.q, " has strides ", q.strides(), ", ", names.k,
      " ", k.strides(), ", ", names.v, " ", v.strides(), "; the last must be 1");
  check_numbers(states, "states");
  check_states(states, {v.size(1), q.size(2), v.size(2)}, states.scalar_type());
  const auto spans = spans_of(lengths, read, write, q.size(0), states);
  const Tensor decays = log_decay.contiguous(), rates = beta.contiguous();
  Tensor out = at::empty(v.sizes(), v.options());
  const auto run = [&](auto number, auto state) {
    run_rule<decltype(number), decltype(state)>(q, k, v, decays, rates, skip, eps, spans, states, out);
  };
  const auto of_states = [&](auto number) {
    states.scalar_type() == at::kFloat ? run(number, float()) : run(number, shadowkv::BFloat16());
  };
  q.scalar_type() == at::kFloat ? of_states(float()) : of_states(shadowkv::BFloat16());
  return out;
}

Tensor gated_delta_rule(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay, const Tensor& beta, Tensor& states,
    at::OptionalIntArrayRef lengths, const Tensor& read, const Tensor& write, double eps) {
  const Names names = {"q", "k", "v", "log_decay", "beta", " value heads", " key heads"};
  return run_checked(names, q, k, v, log_decay, beta, nullptr, states, lengths, read, write, eps);
}

Tensor ssd(
    const Tensor& x, const Tensor& dt, const Tensor& log_decay, const Tensor& b, const Tensor& c, const Tensor& d,
    Tensor& states, const Tensor& read, const Tensor& write) {
  check(d, "d", 1, at::kFloat);
  TORCH_CHECK(d.size(0) == x.size(1), "d has shape ", d.sizes(), ", x has shape ", x.sizes());
  const Names names = {"c", "b", "x", "log_decay", "dt", " heads", " groups"};
  const Tensor skip = d.contiguous();
  return run_checked(
      names, c, b, x, log_decay, dt, skip.const_data_ptr<float>(), states, std::nullopt, read, write, 0.0);
}

template <typename T>
void convolve(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
    const std::vector<shadowkv::Span>& spans, Tensor& states, Tensor& out) {
  const shadowkv::ConvolutionInputs<T> in = {
      static_cast<const T*>(x.const_data_ptr()),
      x.stride(0),
      static_cast<const T*>(weight.const_data_ptr()),
      bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr,
      weight.size(0), weight.size(1), states.stride(0), static_cast<T*>(out.mutable_data_ptr())};
  float* rows = states.mutable_data_ptr<float>();
  const int64_t parts = (in.channels + shadowkv::CHANNELS_PER_TASK - 1) / shadowkv::CHANNELS_PER_TASK;
  const std::vector<int64_t> firsts = shadowkv::chains_of(spans);
  const int64_t tasks = static_cast<int64_t>(firsts.size() - 1) * parts;
  shadowkv::share_tasks(tasks, [&](const auto& next) {
    shadowkv::ConvolutionScratch scratch(in.width);
    for (int64_t task; (task = next()) < tasks;)
      for (int64_t i = firsts[task / parts]; i < firsts[task / parts + 1]; ++i)
        shadowkv::run_convolution(in, spans[i], task % parts * shadowkv::CHANNELS_PER_TASK, rows, scratch);
  });
}

Tensor causal_convolution(
    const Tensor& x, const Tensor& weight, Tensor& states, at::OptionalIntArrayRef lengths, const Tensor& read,
    const Tensor& write, const std::optional<Tensor>& bias) {
  check_numbers(x, "x");
  check(x, "x", 2, x.scalar_type());
  check(weight, "weight", 2, x.scalar_type());
  TORCH_CHECK(
      weight.size(0) == x.size(1) && weight.size(1) > 1, "weight has shape ", weight.sizes(), ", x has shape ",
      x.sizes());
  if (bias) {
    check(*bias, "bias", 1, x.scalar_type());
    TORCH_CHECK(
        bias->size(0) == x.size(1) && bias->is_contiguous(), "bias has shape ", bias->sizes(), " and strides ",
        bias->strides(), ", x has shape ", x.sizes());
  }
  TORCH_CHECK(x.stride(1) == 1, "x has strides ", x.strides(), "; the last must be 1");
  check_states(states, {weight.size(0), weight.size(1) - 1}, at::kFloat);
  const auto spans = spans_of(lengths, read, write, x.size(0), states);
  const Tensor weights = weight.contiguous();
  Tensor out = at::empty(x.sizes(), x.options());
  if (x.scalar_type() == at::kFloat)
    convolve<float>(x, weights, bias, spans, states, out);
  else
    convolve<shadowkv::BFloat16>(x, weights, bias, spans, states, out);
  return out;
}

TORCH_LIBRARY_FRAGMENT(shadowkv, m) {
  m.def(
      "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, Tensor(a!) states, "
      "int[]? lengths, Tensor read, Tensor write, float eps) -> Tensor");
  m.def(
      "ssd(Tensor x, Tensor dt, Tensor log_decay, Tensor b, Tensor c, Tensor d, Tensor(a!) states, Tensor read, "
      "Tensor write) -> Tensor");
  m.def(
      "causal_convolution(Tensor x, Tensor weight, Tensor(a!) states, int[]? lengths, Tensor read, Tensor write, "
      "Tensor? bias=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(shadowkv, CPU, m) {
  m.impl("gated_delta_rule", gated_delta_rule);
  m.impl("ssd", ssd);
  m.impl("causal_convolution", causal_convolution);
}

}  // namespace
