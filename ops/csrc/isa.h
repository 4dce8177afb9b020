// Which set of kernels runs: the best this processor has, unless one is asked for by name.
#pragma once

#include "kernels.h"

namespace ms {

bool is_usable(const Kernels* set);
const Kernels& kernels();
bool choose(const char* name);  // false: unknown, not built or not usable here

}  // namespace ms
