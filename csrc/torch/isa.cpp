// C symbols for `specdec info`: the instruction set that the CPU kernels run with on this machine, and those
// built.
#include "../cpu/ops.h"

extern "C" __attribute__((visibility("default"))) const char* specdec_cpu_isa() {
  return specdec::cpu::isa_name();
}

extern "C" __attribute__((visibility("default"))) const char* specdec_cpu_isa_builds() {
  return specdec::cpu::isa_builds();
}
