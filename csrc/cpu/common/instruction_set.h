// Which of the instruction sets that kernels are compiled for this machine supports.

#pragma once

namespace shadowkv {

enum class InstructionSet { baseline, avx2, avx512 };

// The best one on this machine.
InstructionSet instruction_set();

const char* instruction_set_name();

}  // namespace shadowkv
