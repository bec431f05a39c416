#include "instruction_set.h"

#include <cstdlib>
#include <cstring>

namespace shadowkv {

namespace {

InstructionSet detect() {
#ifdef __x86_64__
  const char* limit = std::getenv("SHADOWKV_CPU_ISA");  // for tests: avx2 or baseline
  if (limit != nullptr && std::strcmp(limit, "baseline") == 0) return InstructionSet::baseline;
  __builtin_cpu_init();
  // All CPUs with AVX2 have F16C too, which compilers cannot ask for.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return InstructionSet::baseline;
  if (limit != nullptr && std::strcmp(limit, "avx2") == 0) return InstructionSet::avx2;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni");  // those of 2017, which lack it, do well with AVX2
  return avx512 ? InstructionSet::avx512 : InstructionSet::avx2;
#else
  return InstructionSet::baseline;
#endif
}

const InstructionSet best = detect();

}  // namespace

InstructionSet instruction_set() { return best; }

const char* instruction_set_name() {
  return best == InstructionSet::avx512 ? "avx512" : best == InstructionSet::avx2 ? "avx2" : "baseline";
}

}  // namespace shadowkv
