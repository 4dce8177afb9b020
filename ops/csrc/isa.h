// Selects the set of kernels: the best that this processor supports, unless one is chosen by name.
#pragma once

#include "kernels.h"

namespace ms {

bool is_usable(const Kernels* set);
const Kernels& kernels();
bool choose(const char* name);  // returns false if the set is unknown, not built or not usable here

// Returns whether this process may use the matrix registers of AMX for bytes. The first call asks the
// system for them.
bool may_use_matrix();

}  // namespace ms
