// Decoder layers of a decode step, on raw pointers: every thread goes through all of their stages, and all of them share
// the tasks of each.

#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/attention/paged_attention.h"
#include "cpu/common/task_ranges.h"
#include "cpu/quantized_matmul/quantized_matmul.h"

namespace shadowkv {

// Rows of a matrix that are stored alike: blocks, or floats.
struct RowBlock {
  std::optional<QuantizedMatrix> blocks;
  const float* floats;
  int64_t row_size;  // floats from one row to the next
  int64_t rows;
};

struct Projection {
  std::vector<RowBlock> row_blocks;
  const float* bias;  // null for none
  int64_t rows, columns;
};

// Norms are null where there are none.
struct Layer {
  const float *attention_norm, *query_norm, *key_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm;
  Projection qkv, out, gate_up, down;
  float *k, *v;  // pages of the same strides
};

struct LayerSizes {
  int64_t batch, hidden, intermediate, heads, group, dim;
  int64_t page, head, row;  // strides of pages
  float eps;
};

struct Rope {
  const float *cos, *sin;  // [positions, pairs]
  int64_t pairs;
  bool interleaved;
};

// Where each sequence's new token goes, [batch] each.
struct NewTokens {
  const int64_t *positions, *pages, *offsets;
};

// The results, and what the stages hand on.
struct LayerBuffers {
  float* x;         // [batch, hidden], the residual stream
  float* q;         // [batch, heads * group * dim], after RoPE
  float* attended;  // the same shape
  float* lse;       // [batch, heads * group]
};

// Layers that follow one another, of which the first may begin behind its attention, and the last end with it.
class DecodeLayers {
 public:
  // Arguments are to outlive it.
  DecodeLayers(
      const LayerSizes& sizes, const std::vector<Layer>& layers, const Rope& rope, const NewTokens& tokens,
      const PagedPlan& plan, const LayerBuffers& buffers, bool behind_attention, bool to_attention, int64_t threads);

  // To be called by any number of threads, best by `threads`; returns when all is done.
  void run();

 private:
  enum Stage { INPUT, QKV, HEADS, ATTENTION, OUT_INPUT, OUT, MLP_INPUT, GATE_UP, ACTIVATION, DOWN, STAGES };

  struct Progress {
    TaskRanges next;
    std::atomic<int64_t> done{0};
  };

  struct Scratch {
    MatmulScratch matmul;
    PagedScratch attention;
  };

  // What a projection multiplies [batch, columns]: for blocks, and for floats.
  struct Input {
    Activations activations;
    std::vector<float> floats;
    int64_t columns;

    Input(int64_t batch, int64_t columns) : activations(batch, columns), floats(batch * columns), columns(columns) {}
    float* row(int64_t token) { return floats.data() + token * columns; }
    void finish_row(int64_t token) { activations.write(token, row(token)); }
  };

  static bool is_product(int64_t stage);
  int64_t count_tasks(int64_t stage) const;
  void run_task(int64_t stage, int64_t task, Scratch& scratch);
  void add_delta(const float* bias, const float* norm, int64_t token);
  void place_heads(const Layer& layer, int64_t token);
  void attend(const Layer& layer, int64_t task, PagedScratch& scratch);
  void multiply(
      const Projection& by, Input& x, int64_t task, MatmulScratch& scratch, std::vector<float>& out) const;

  const LayerSizes& sizes;
  const std::vector<Layer>& layers;
  const Rope& rope;
  const NewTokens& tokens;
  const PagedPlan& plan;
  const LayerBuffers& buffers;
  int64_t threads;
  int64_t first, last;  // stages, counted over all layers; one more than the layers have adds what the last one leaves
  std::vector<Progress> progress;
  std::vector<std::atomic<int64_t>> left;  // tasks of each sequence and head in the attention that is under way
  PagedPartials partials;
  Input hidden_input, out_input, down_input;
  std::vector<float> qkv, delta, gate_up;  // products; delta is what is to be added to the residual stream
};

}  // namespace shadowkv
