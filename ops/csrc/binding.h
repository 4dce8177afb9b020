// What the files that face Python share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace ms {

template <class T>
T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

// Int8Linear, Int4Linear and PlainLinear, in linear.cpp.
void bind_linear(nanobind::module_& m);

// IoRing and checksum, in storage.cpp.
void bind_storage(nanobind::module_& m);

}  // namespace ms
