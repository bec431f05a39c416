#include "decode_layers.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <algorithm>
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
    const PagedPlan& plan, const LayerBuffers& buffers, bool behind_attention, bool to_attention, int64_t threads)
    : sizes(sizes),
      layers(layers),
      rope(rope),
      tokens(tokens),
      plan(plan),
      buffers(buffers),
      threads(threads),
      first(behind_attention ? OUT_INPUT : INPUT),
      last(to_attention ? (layers.size() - 1) * STAGES + OUT_INPUT : layers.size() * STAGES + 1),
      progress(last),
      left(sizes.batch * sizes.heads),
      partials(plan, sizes.group, sizes.dim),
      hidden_input(sizes.batch, sizes.hidden),
      out_input(sizes.batch, sizes.heads * sizes.group * sizes.dim),
      down_input(sizes.batch, sizes.intermediate),
      qkv(sizes.batch * sizes.heads * (sizes.group + 2) * sizes.dim),
      delta(sizes.batch * sizes.hidden),
      gate_up(2 * sizes.batch * sizes.intermediate) {
  for (size_t row = 0; row < left.size(); ++row) left[row] = plan.first_partial[row + 1] - plan.first_partial[row];
}

void DecodeLayers::run() {
  Scratch scratch = {MatmulScratch(sizes.batch), PagedScratch(sizes.group, sizes.dim)};
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
  return kind == QKV || kind == OUT || kind == GATE_UP || kind == DOWN;
}

int64_t DecodeLayers::count_tasks(int64_t stage) const {
  if (stage == static_cast<int64_t>(layers.size()) * STAGES) return sizes.batch;
  const Layer& layer = layers[stage / STAGES];
  switch (stage % STAGES) {
    case QKV: return count_products(layer.qkv);
    case ATTENTION: return plan.tasks.size();
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
    case QKV: return multiply(layer.qkv, hidden_input, task, scratch.matmul, qkv);
    case HEADS: return place_heads(layer, task);
    case ATTENTION: return attend(layer, task, scratch.attention);
    case OUT_INPUT:
      std::copy_n(buffers.attended + task * out_input.columns, out_input.columns, out_input.row(task));
      return out_input.finish_row(task);
    case OUT: return multiply(layer.out, out_input, task, scratch.matmul, delta);
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

// Queries after RoPE, and a token's keys and values in its page.
void DecodeLayers::place_heads(const Layer& layer, int64_t token) {
  const int64_t queries = sizes.heads * sizes.group, dim = sizes.dim, columns = (queries + 2 * sizes.heads) * dim;
  float* row = qkv.data() + token * columns;
  SHADOWKV_BEST(add_row)(row, layer.qkv.bias, columns);
  const int64_t angle = tokens.positions[token] * rope.pairs;
  for (int64_t head = 0; head < queries + sizes.heads; ++head) {
    const float* norm = head < queries ? layer.query_norm : layer.key_norm;
    if (norm != nullptr) SHADOWKV_BEST(norm_row)(row + head * dim, norm, sizes.eps, dim, row + head * dim);
    SHADOWKV_BEST(rotate_row)(row + head * dim, rope.cos + angle, rope.sin + angle, rope.pairs, rope.interleaved);
  }
  std::copy_n(row, queries * dim, buffers.q + token * queries * dim);
  const float *keys = row + queries * dim, *values = keys + sizes.heads * dim;
  for (int64_t head = 0; head < sizes.heads; ++head) {
    const int64_t at = tokens.pages[token] * sizes.page + head * sizes.head + tokens.offsets[token] * sizes.row;
    std::copy_n(keys + head * dim, dim, layer.k + at);
    std::copy_n(values + head * dim, dim, layer.v + at);
  }
}

void DecodeLayers::attend(const Layer& layer, int64_t number, PagedScratch& scratch) {
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
