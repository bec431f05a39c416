#include "decode_layers.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "cpu/common/instruction_set.h"

namespace shadowkv {

#define SHADOWKV_KERNEL "cpu/decode_layers/layer_rows.inc.h"
#include "cpu/common/instruction_sets.inc.h"

namespace {

// Weights per task: a few microseconds of work for one token.
constexpr int64_t WEIGHTS_PER_TASK = 32768;

// Looks at a counter before a thread that waits lets others have its core.
constexpr int SPINS = 4000;

void pause() {
#ifdef __x86_64__
  _mm_pause();
#endif
}

int64_t tasks_of_rows(int64_t rows, int64_t per_task) { return (rows + per_task - 1) / per_task; }

int64_t count_products(const Projection& by) {
  int64_t count = 0;
  for (const RowBlock& part : by.row_blocks)
    count += tasks_of_rows(part.rows, rows_per_task(WEIGHTS_PER_TASK, by.columns));
  return count;
}

}  // namespace

DecodeLayers::DecodeLayers(
    const LayerSizes& sizes, const std::vector<Layer>& layers, const Rope& rope, const NewTokens& tokens,
    const PagedPlan& plan, const LayerBuffers& buffers, bool after_attention, bool to_attention, int64_t threads)
    : sizes(sizes),
      layers(layers),
      rope(rope),
      tokens(tokens),
      plan(plan),
      buffers(buffers),
      threads(threads),
      first(after_attention ? OUT_INPUT : INPUT),
      last(to_attention ? (layers.size() - 1) * STAGES + OUT_INPUT : layers.size() * STAGES + 1),
      progress(last),
      left(sizes.batch * sizes.heads),
      partials(plan, sizes.group, sizes.dim),
      hidden_input(sizes.batch, sizes.hidden),
      out_input(sizes.batch, sizes.queries()),
      delta_net_out_input(sizes.batch, sizes.delta_net.values()),
      down_input(sizes.batch, sizes.intermediate),
      inputs(sizes.batch * std::max(sizes.qkv(), sizes.delta_net.rows())),
      delta(sizes.batch * sizes.hidden),
      gate_up(2 * sizes.batch * sizes.intermediate),
      chains(chains_of(tokens.states)),
      convolved(sizes.batch * sizes.delta_net.channels),
      log_decay(sizes.batch * sizes.delta_net.heads),
      beta(sizes.batch * sizes.delta_net.heads) {
  for (size_t row = 0; row < left.size(); ++row) left[row] = plan.first_partial[row + 1] - plan.first_partial[row];
}

void DecodeLayers::run() {
  const DeltaNetSizes& delta_net = sizes.delta_net;
  const bool converts = std::any_of(layers.begin(), layers.end(), [](const Layer& layer) {
    return layer.delta_net && layer.delta_net->narrow_matrices != nullptr;
  });
  Scratch scratch = {
      MatmulScratch(sizes.batch), PagedScratch(sizes.group, sizes.dim), ConvolutionScratch(delta_net.width),
      DeltaScratch(delta_net.key_dim, delta_net.value_dim, converts)};
  for (int64_t stage = first; stage < last; ++stage) {
    const int64_t tasks = count_tasks(stage);
    const int64_t parts = is_product(stage) ? TaskRanges::parts_for(threads) : tasks;
    Progress& at = progress[stage];
    for (TaskRange range; (range = at.next.draw(tasks, parts)).size() > 0;) {
      for (int64_t task = range.first; task < range.last; ++task) run_task(stage, task, scratch);
      at.done.fetch_add(range.size(), std::memory_order_release);
    }
    for (int spins = 0; at.done.load(std::memory_order_acquire) < tasks;)
      if (++spins < SPINS)
        pause();
      else
        std::this_thread::yield();
  }
}

bool DecodeLayers::is_product(int64_t stage) {
  const int64_t kind = stage % STAGES;
  return kind == INPUTS || kind == OUT || kind == GATE_UP || kind == DOWN;
}

int64_t DecodeLayers::count_tasks(int64_t stage) const {
  if (stage == static_cast<int64_t>(layers.size()) * STAGES) return sizes.batch;
  const Layer& layer = layers[stage / STAGES];
  switch (stage % STAGES) {
    case INPUTS: return count_products(layer.inputs);
    case HEADS: return layer.delta_net ? (chains.size() - 1) * sizes.delta_net.parts() : sizes.batch;
    case MIXER: return layer.delta_net ? (chains.size() - 1) * sizes.delta_net.heads : plan.tasks.size();
    case OUT: return count_products(layer.out);
    case GATE_UP: return count_products(layer.gate_up);
    case DOWN: return count_products(layer.down);
    default: return sizes.batch;  // a row each
  }
}

void DecodeLayers::run_task(int64_t stage, int64_t task, Scratch& scratch) {
  const int64_t number = stage / STAGES;
  const bool ended = number == static_cast<int64_t>(layers.size());
  float* x = buffers.x + task * sizes.hidden;  // of tasks that are rows
  if (stage % STAGES == INPUT) {
    if (number > 0) add_delta(layers[number - 1].down.bias, layers[number - 1].post_mlp_norm, task);
    if (ended) return;
    SHADOWKV_BEST(norm_row)(x, layers[number].attention_norm, sizes.eps, sizes.hidden, hidden_input.row(task));
    return hidden_input.finish_row(task);
  }
  const Layer& layer = layers[number];
  switch (stage % STAGES) {
    case INPUTS: return multiply(layer.inputs, hidden_input, task, scratch.matmul, inputs);
    case HEADS:
      if (layer.delta_net) return convolve(*layer.delta_net, task, scratch.convolution);
      return place_heads(layer.inputs.bias, *layer.attention, task);
    case MIXER:
      if (layer.delta_net) return apply_delta_rule(*layer.delta_net, task, scratch.rule);
      return attend(*layer.attention, task, scratch.attention);
    case OUT_INPUT: {
      if (layer.delta_net) return delta_net_out_input.finish_row(task);
      const int64_t columns = out_input.columns;
      std::copy_n(buffers.attended + task * columns, columns, out_input.row(task));
      if (sizes.gated) SHADOWKV_BEST(gate_row)(out_input.row(task), buffers.gate + task * columns, columns);
      return out_input.finish_row(task);
    }
    case OUT: return multiply(layer.out, out_input_of(layer), task, scratch.matmul, delta);
    case MLP_INPUT:
      add_delta(layer.out.bias, layer.post_attention_norm, task);
      SHADOWKV_BEST(norm_row)(x, layer.mlp_norm, sizes.eps, sizes.hidden, hidden_input.row(task));
      return hidden_input.finish_row(task);
    case GATE_UP: return multiply(layer.gate_up, hidden_input, task, scratch.matmul, gate_up);
    case ACTIVATION: {
      const float* gate = gate_up.data() + 2 * task * sizes.intermediate;
      SHADOWKV_BEST(activate_row)(gate, gate + sizes.intermediate, sizes.intermediate, down_input.row(task));
      return down_input.finish_row(task);
    }
    case DOWN: return multiply(layer.down, down_input, task, scratch.matmul, delta);
  }
}

// Adds a token's row of delta, with that bias and normalised by that norm, to the residual stream.
void DecodeLayers::add_delta(const float* bias, const float* norm, int64_t token) {
  float* row = delta.data() + token * sizes.hidden;
  SHADOWKV_BEST(add_row)(row, bias, sizes.hidden);
  if (norm != nullptr) SHADOWKV_BEST(norm_row)(row, norm, sizes.eps, sizes.hidden, row);
  SHADOWKV_BEST(add_row)(buffers.x + token * sizes.hidden, row, sizes.hidden);
}

// Queries after RoPE, their gates, and a token's keys and values in its page.
void DecodeLayers::place_heads(const float* bias, const Attention& layer, int64_t token) {
  const int64_t queries = sizes.heads * sizes.group, dim = sizes.dim, query_rows = sizes.gated ? 2 * dim : dim;
  float* row = inputs.data() + token * sizes.qkv();
  SHADOWKV_BEST(add_row)(row, bias, sizes.qkv());
  const int64_t angle = tokens.positions[token] * rope.pairs;
  const auto place = [&](float* head, const float* norm, float* to) {
    if (norm != nullptr) SHADOWKV_BEST(norm_row)(head, norm, sizes.eps, dim, head);
    SHADOWKV_BEST(rotate_row)(head, rope.cos + angle, rope.sin + angle, rope.pairs, rope.interleaved);
    std::copy_n(head, dim, to);
  };
  for (int64_t head = 0; head < queries; ++head) {
    const int64_t at = (token * queries + head) * dim;
    float* query = row + head * query_rows;
    place(query, layer.query_norm, buffers.q + at);
    if (sizes.gated) std::copy_n(query + dim, dim, buffers.gate + at);
  }
  float *keys = row + queries * query_rows, *values = keys + sizes.heads * dim;
  for (int64_t head = 0; head < sizes.heads; ++head) {
    const int64_t at = tokens.pages[token] * sizes.page + head * sizes.head + tokens.offsets[token] * sizes.row;
    place(keys + head * dim, layer.key_norm, layer.k + at);
    std::copy_n(values + head * dim, dim, layer.v + at);
  }
}

// Some channels of a chain's tokens.
void DecodeLayers::convolve(const DeltaNet& delta_net, int64_t task, ConvolutionScratch& scratch) {
  const DeltaNetSizes& size = sizes.delta_net;
  const ConvolutionInputs<float> in = {
      inputs.data(), size.rows(),     delta_net.convolution, nullptr, size.channels,
      size.width,    size.inputs_row, convolved.data()};
  for (int64_t i = chains[task / size.parts()]; i < chains[task / size.parts() + 1]; ++i)
    run_convolution(in, tokens.states[i], task % size.parts() * CHANNELS_PER_TASK, delta_net.inputs, scratch);
}

// A value head of a chain's tokens: the delta rule, the norm and the output gate.
void DecodeLayers::apply_delta_rule(const DeltaNet& delta_net, int64_t task, DeltaScratch& scratch) {
  const DeltaNetSizes& size = sizes.delta_net;
  const int64_t head = task % size.heads, dim = size.value_dim;
  const float *q = convolved.data(), *k = q + size.keys(), *v = k + size.keys();
  const DeltaInputs<float> in = {
      q, k, v, size.channels, size.key_dim, size.channels, size.key_dim, size.channels, dim, log_decay.data(),
      beta.data(), size.heads, size.key_heads, size.tiled, size.key_dim, dim, nullptr, size.unit_eps,
      size.matrices_row, delta_net_out_input.floats.data()};
  for (int64_t i = chains[task / size.heads]; i < chains[task / size.heads + 1]; ++i) {
    const float* z = inputs.data() + i * size.rows() + size.channels;
    const float* gates = z + size.values();
    const float rate = gates[size.heads + head] + delta_net.rate_bias[head];
    beta[i * size.heads + head] = 1.0f / (1.0f + std::exp(-gates[head]));
    const float softplus = std::max(rate, 0.0f) + std::log1p(std::exp(-std::abs(rate)));
    log_decay[i * size.heads + head] = -std::exp(delta_net.log_rate[head]) * softplus;
    if (delta_net.matrices != nullptr)
      run_delta_rule(in, tokens.states[i], head, delta_net.matrices, scratch);
    else
      run_delta_rule(in, tokens.states[i], head, delta_net.narrow_matrices, scratch);
    float* out = delta_net_out_input.row(i) + head * dim;
    SHADOWKV_BEST(norm_row)(out, delta_net.norm, sizes.eps, dim, out);
    SHADOWKV_BEST(activate_row)(z + head * dim, out, dim, out);
  }
}

void DecodeLayers::attend(const Attention& layer, int64_t number, PagedScratch& scratch) {
  const PageTask& task = plan.tasks[number];
  const int64_t size = sizes.group * sizes.dim;
  const PagedInputs<float> in = {
      buffers.q,  layer.k,    layer.v,   sizes.page,  sizes.head,  sizes.row,  sizes.page,
      sizes.head, sizes.row,  sizes.batch, sizes.heads, sizes.group, sizes.dim};
  std::fill_n(partials.out.begin() + task.partial * size, size, 0.0f);
  std::fill_n(partials.sum.begin() + task.partial * sizes.group, sizes.group, 0.0f);
  std::fill_n(
      partials.peak.begin() + task.partial * sizes.group, sizes.group, -std::numeric_limits<float>::infinity());
  shadowkv::run_task(in, plan, task, scratch, partials);
  const int64_t row = task.sequence * sizes.heads + task.head;
  if (left[row].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  merge_tasks(
      in, plan, partials, task.sequence, task.head, buffers.attended + row * size, buffers.lse + row * sizes.group);
  left[row] = plan.first_partial[row + 1] - plan.first_partial[row];  // for the next layer
}

void DecodeLayers::multiply(
    const Projection& by, Input& x, int64_t task, MatmulScratch& scratch, std::vector<float>& out) const {
  const int64_t per_task = rows_per_task(WEIGHTS_PER_TASK, by.columns);
  float* to = out.data();
  for (const RowBlock& part : by.row_blocks) {
    const int64_t tasks = tasks_of_rows(part.rows, per_task);
    if (task < tasks) {
      const int64_t start = task * per_task, stop = std::min(start + per_task, part.rows);
      if (part.blocks)
        return multiply_rows(*part.blocks, x.activations, start, stop, scratch, to, by.rows);
      return SHADOWKV_BEST(multiply_plain)(
          part.floats, part.row_size, by.columns, x.floats.data(), sizes.batch, start, stop, to, by.rows);
    }
    task -= tasks;
    to += part.rows;
  }
}

}  // namespace shadowkv
