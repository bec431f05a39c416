// What all C++ and CUDA kernels that search a key sketch have in common. Python defines and documents it in
// shadowkv/ops/{sketch_queries,sign_scores,select_by_sketch}/reference.py and sampling.py;
// tests/ops/test_constants.py compares the two.
#pragma once

#include <cstdint>

#include "constants.h"

namespace shadowkv {

constexpr int kMostQueries = 16; // of a kv head, in CUDA
constexpr int kQueryPlanes = 4;  // bits of the coarser whole numbers of a query
constexpr int kRun = 8;          // tokens that are searched together
constexpr int kPageRuns = kPage / kRun;
constexpr int kScaleShift = 7;   // a scale's code, shifted left by this, gives the bits of a half
constexpr uint8_t kExcluded = 0; // the code of a token that may not be selected

constexpr int kKeptShare = 11;   // one in this many runs is examined closely,
constexpr int kKeptFactor = 6;   // but at least this many times the tokens of the budget,
constexpr int kKeptLeast = 720;  // and at least this many runs
constexpr int kSampledShare = 4; // one in this many of these is sampled, if anything is sampled

// How many of the runs are examined closely when that many tokens are selected.
constexpr int kept_runs(int runs, int64_t tokens) {
  const int of_budget = int((tokens * kKeptFactor + kRun - 1) / kRun), share = (runs + kKeptShare - 1) / kKeptShare;
  const int least = share > kKeptLeast ? share : kKeptLeast, kept = least > of_budget ? least : of_budget;
  return runs < kept ? runs : kept;
}

constexpr int kMostChanceBits = 20;
constexpr float kCaution = 0.97f; // what chances sum up to, as a share of all that may be sampled

} // namespace shadowkv
