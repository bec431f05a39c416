// What all kernels that search a key sketch have in common, in C++ and CUDA. Python has it in
// shadowkv/ops/{sketch_queries,sign_scores,select_by_sketch}/reference.py and sampling.py, which say what it means;
// tests/ops/test_constants.py compares the two.
#pragma once

#include <cstdint>

#include "page.h"

namespace shadowkv {

constexpr int kMostQueries = 8; // of a kv head, in CUDA
constexpr int kQueryPlanes = 4; // bits of the rounder whole numbers of a query
constexpr int kRun = 8;         // tokens that are looked at together
constexpr int kPageRuns = kPage / kRun;
constexpr int kScaleShift = 7;   // a scale's code, shifted so far, is the bits of a half
constexpr uint8_t kExcluded = 0; // the code of a token that may not be selected

constexpr int kKeptShare = 16;   // one of so many runs is looked at closely,
constexpr int kKeptFactor = 4;   // and so many times the tokens of the budget at least,
constexpr int kKeptLeast = 384;  // and so many runs
constexpr int kSampledShare = 4; // of these one in so many is sampled, where anything is

// Runs, of so many, that are looked at closely where so many tokens are selected.
constexpr int kept_runs(int runs, int64_t tokens) {
  const int wanted = int((tokens * kKeptFactor + kRun - 1) / kRun), share = (runs + kKeptShare - 1) / kKeptShare;
  const int most = share > kKeptLeast ? share : kKeptLeast, kept = most > wanted ? most : wanted;
  return runs < kept ? runs : kept;
}

constexpr int kMostChanceBits = 20;
constexpr float kCaution = 0.97f; // what chances add up to, in all that may be sampled

} // namespace shadowkv
