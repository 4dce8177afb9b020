// Declarations that the Python bindings share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace ms {

template <class T>
T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

// Binds Int8Linear, Int4Linear and PlainLinear; defined in linear.cpp.
void bind_linear(nanobind::module_& m);

// Binds Experts and route; defined in experts.cpp.
void bind_experts(nanobind::module_& m);

// Binds IoRing and checksum; defined in storage.cpp.
void bind_storage(nanobind::module_& m);

}  // namespace ms
