// Ops that carry a state from token to token: the gated delta rule, Mamba-2's state space model and the causal
// convolution, on raw pointers.
//
// A task is a chain of spans. Tasks are independent of each other, and each computes its tokens in order, so that results
// are bitwise equal for any number of threads.

#pragma once

#include <cstdint>
#include <vector>

#include "cpu/common/numbers.h"

namespace shadowkv {

// Neighbouring tokens of a sequence, and the rows of the states before and after them, which may be the same.
struct Span {
  int64_t first, last;  // tokens
  int64_t read, write;
};

// The first span of each chain, then the number of all spans. A chain is computed in order: each of its spans reads the
// row that the span before it writes, and writes another.
std::vector<int64_t> chains_of(const std::vector<Span>& spans);

// Strides count elements, the last dimension is contiguous. Of the state space model, q is C, k is B, v is x, log_decay is
// dt A and beta is dt.
template <typename T>
struct DeltaInputs {
  const T *q, *k, *v;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  const float *log_decay, *beta;  // [tokens, heads]
  int64_t heads, key_heads;       // heads of values; heads of keys, each for heads / key_heads heads of values
  bool tiled;                     // whether these are key_heads apart, not neighbours
  int64_t key_dim, value_dim;
  const float* skip;  // D [heads] of the state space model; null in the delta rule, which corrects states instead
  float eps;          // added to the squared norm of queries and keys, which only the delta rule normalises
  int64_t state_row;  // states are [rows, heads, key_dim, value_dim]
  T* out;             // [tokens, heads, value_dim]

  int64_t key_head(int64_t head) const { return tiled ? head % key_heads : head / (heads / key_heads); }
};

// What one token does to a head's state.
struct DeltaToken {
  const float *q, *k, *v;
  float decay, beta;
  float product;  // of q and k
  float skip;     // factor of v in the result
};

// Working memory of one thread.
struct DeltaScratch {
  std::vector<float> q, k;    // [key_dim]
  std::vector<float> v, out;  // [value_dim]
  std::vector<float> state;   // [key_dim, value_dim]; empty if states are float32

  DeltaScratch(int64_t key_dim, int64_t value_dim, bool converts)
      : q(key_dim), k(key_dim), v(value_dim), out(value_dim), state(converts ? key_dim * value_dim : 0) {}
};

// The tokens of a span for one head of values. A state of another type S than float is rounded at the end of the span.
template <typename T, typename S>
void run_delta_rule(const DeltaInputs<T>& in, const Span& span, int64_t head, S* states, DeltaScratch& scratch);

constexpr int64_t CHANNELS_PER_TASK = 256;

template <typename T>
struct ConvolutionInputs {
  const T* x;  // [tokens, channels], rows `x_token` apart
  int64_t x_token;
  const T* weight;  // [channels, width]
  const T* bias;    // [channels]; null without one
  int64_t channels, width;
  int64_t state_row;  // states are float32 [rows, channels, width - 1]
  T* out;             // [tokens, channels]
};

// Working memory of one thread.
struct ConvolutionScratch {
  std::vector<float> weight;  // [width, CHANNELS_PER_TASK]
  std::vector<float> bias;    // [CHANNELS_PER_TASK]; 0 without one
  std::vector<float> inputs;  // [width, CHANNELS_PER_TASK], the newest ones: the one at position p is in row p % width
  std::vector<float> out;     // [CHANNELS_PER_TASK]

  explicit ConvolutionScratch(int64_t width)
      : weight(width * CHANNELS_PER_TASK),
        bias(CHANNELS_PER_TASK),
        inputs(width * CHANNELS_PER_TASK),
        out(CHANNELS_PER_TASK) {}
};

// The tokens of a span in the channels from `channel` on, CHANNELS_PER_TASK at most.
template <typename T>
void run_convolution(
    const ConvolutionInputs<T>& in, const Span& span, int64_t channel, float* states, ConvolutionScratch& scratch);

}  // namespace shadowkv
