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
#include "cpu/recurrence/recurrence.h"

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
struct Attention {
  const float *query_norm, *key_norm;
  float *k, *v;  // pages of the same strides
};

// Linear attention. One of the two states of the delta rule is null.
struct DeltaNet {
  const float *convolution, *log_rate, *rate_bias, *norm;
  float* inputs;  // states of the convolution
  float* matrices;
  BFloat16* narrow_matrices;
};

struct Layer {
  const float *attention_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm;
  std::optional<Attention> attention;  // either this or delta_net
  std::optional<DeltaNet> delta_net;
  Projection inputs, out, gate_up, down;
};

// Of linear attention.
struct DeltaNetSizes {
  int64_t heads, key_heads, key_dim, value_dim, channels, width;
  int64_t inputs_row, matrices_row;  // strides of states
  bool tiled;                        // as in DeltaInputs
  float unit_eps;                    // added to the squared norm of queries and keys

  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return heads * value_dim; }
  int64_t rows() const { return channels + values() + 2 * heads; }  // of the projection to its inputs
  int64_t parts() const { return (channels + CHANNELS_PER_TASK - 1) / CHANNELS_PER_TASK; }
};

struct LayerSizes {
  int64_t batch, hidden, intermediate, heads, group, dim;
  bool gated;               // whether each query head's rows are followed by those of its gate
  int64_t page, head, row;  // strides of pages
  float eps;
  DeltaNetSizes delta_net;  // zeros without linear attention

  int64_t queries() const { return heads * group * dim; }
  int64_t gates() const { return gated ? queries() : 0; }
  int64_t qkv() const { return queries() + gates() + 2 * heads * dim; }
};

struct Rope {
  const float *cos, *sin;  // [positions, pairs]
  int64_t pairs;
  bool interleaved;
};

// Where each sequence's new token goes, [batch] each. States are of one token each, none without linear attention.
struct NewTokens {
  const int64_t *positions, *pages, *offsets;
  std::vector<Span> states;
};

// The results, and what the stages hand on.
struct LayerBuffers {
  float* x;         // [batch, hidden], the residual stream
  float* q;         // [batch, heads * group * dim], after RoPE
  float* attended;  // the same shape
  float* lse;       // [batch, heads * group]
  float* gate;      // [batch, heads * group * dim], before the sigmoid; empty if there are no gates
};

// Layers that follow one another, of which the first may begin after its attention, and the last end with it.
class DecodeLayers {
 public:
  // Arguments are to outlive it.
  DecodeLayers(
      const LayerSizes& sizes, const std::vector<Layer>& layers, const Rope& rope, const NewTokens& tokens,
      const PagedPlan& plan, const LayerBuffers& buffers, bool after_attention, bool to_attention, int64_t threads);

  // To be called by any number of threads, best by `threads`; returns when all is done.
  void run();

 private:
  // In linear attention, HEADS is the convolution, and MIXER the delta rule.
  enum Stage { INPUT, INPUTS, HEADS, MIXER, OUT_INPUT, OUT, MLP_INPUT, GATE_UP, ACTIVATION, DOWN, STAGES };

  struct Progress {
    TaskRanges next;
    std::atomic<int64_t> done{0};
  };

  struct Scratch {
    MatmulScratch matmul;
    PagedScratch attention;
    ConvolutionScratch convolution;
    DeltaScratch rule;
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
  void place_heads(const float* bias, const Attention& layer, int64_t token);
  void attend(const Attention& layer, int64_t task, PagedScratch& scratch);
  void convolve(const DeltaNet& delta_net, int64_t task, ConvolutionScratch& scratch);
  void apply_delta_rule(const DeltaNet& delta_net, int64_t task, DeltaScratch& scratch);
  Input& out_input_of(const Layer& layer) { return layer.delta_net ? delta_net_out_input : out_input; }
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
  Input hidden_input, out_input, delta_net_out_input, down_input;
  std::vector<float> inputs, delta, gate_up;  // products; delta is what is to be added to the residual stream
  std::vector<int64_t> chains;                // of states
  std::vector<float> convolved;               // [batch, channels]
  std::vector<float> log_decay, beta;         // [batch, heads of linear attention]
};

}  // namespace shadowkv
