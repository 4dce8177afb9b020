#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace ms {
namespace {

const Kernels* by_name(const char* name) {
  for (const Kernels* set : {avx512_kernels(), avx2_kernels(), portable_kernels()})
    if (set && is_usable(set) && std::strcmp(set->name, name) == 0) return set;
  return nullptr;
}

const Kernels* best() {
  for (const Kernels* set : {avx512_kernels(), avx2_kernels()})
    if (set && is_usable(set)) return set;
  return portable_kernels();
}

const Kernels* chosen = nullptr;

}  // namespace

bool is_usable(const Kernels* set) {
#if defined(__x86_64__)
  if (set == avx512_kernels())
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
  if (set == avx2_kernels()) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return set == portable_kernels();
}

const Kernels& kernels() {
  if (!chosen) chosen = best();
  return *chosen;
}

bool choose(const char* name) {
  const Kernels* set = by_name(name);
  if (set) chosen = set;
  return set != nullptr;
}

}  // namespace ms
