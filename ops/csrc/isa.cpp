#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace ms {
namespace {

const Kernels* by_name(const char* name) {
  for (const Kernels* set : {avx512_kernels(), avxvnni_kernels(), avx2_kernels(), portable_kernels()})
    if (set && is_usable(set) && std::strcmp(set->name, name) == 0) return set;
  return nullptr;
}

const Kernels* best() {
  for (const Kernels* set : {avx512_kernels(), avxvnni_kernels(), avx2_kernels()})
    if (set && is_usable(set)) return set;
  return portable_kernels();
}

const Kernels* chosen = nullptr;

#if defined(__x86_64__)
bool has_leaf(unsigned leaf, unsigned part, unsigned (&r)[4]) {
  return __get_cpuid_count(leaf, part, &r[0], &r[1], &r[2], &r[3]);
}

// These features are read from CPUID, since not every supported compiler knows them by name.
bool has_f16c() {
  unsigned r[4];
  return has_leaf(1, 0, r) && (r[2] >> 29 & 1);
}
bool has_avxvnni() {
  unsigned r[4];
  return has_leaf(7, 0, r) && r[0] >= 1 && has_leaf(7, 1, r) && (r[0] >> 4 & 1);
}
// The compiler's test for "avx2" includes that the operating system saves the registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

#if defined(__linux__)
bool has_matrix() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl, since Linux 5.16
  unsigned r[4];
  const bool has_both = has_leaf(7, 0, r) && (r[3] >> 24 & 1) && (r[3] >> 25 & 1);  // tiles and bytes
  return has_both && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#else
bool has_matrix() { return false; }
#endif
#else
bool has_matrix() { return false; }
#endif

}  // namespace

bool may_use_matrix() {
  static const bool may = has_matrix();
  return may;
}

bool is_usable(const Kernels* set) {
#if defined(__x86_64__)
  if (set == avx512_kernels())
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
  if (set == avxvnni_kernels()) return has_avx2() && has_avxvnni();
  if (set == avx2_kernels()) return has_avx2();
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
