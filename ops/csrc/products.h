// The products of several linear layers, which one kernel computes together.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "binding.h"
#include "kernels.h"

namespace ms {

inline const LinearInt8& base_of(const void* op, WeightKind kind) {
  if (kind == WeightKind::superblocks) return static_cast<const LinearSuperblocks*>(op)->base;
  return kind == WeightKind::int4 ? static_cast<const LinearInt4*>(op)->base : *static_cast<const LinearInt8*>(op);
}

inline bool are_alike(const void* a, const void* b, WeightKind kind) {
  if (kind == WeightKind::plain) {
    const auto &one = *static_cast<const LinearPlain*>(a), &other = *static_cast<const LinearPlain*>(b);
    return one.num_in == other.num_in && one.num_out == other.num_out && one.is_gated == other.is_gated &&
           one.activation == other.activation && one.type == other.type;
  }
  if (kind == WeightKind::int4 && static_cast<const LinearInt4*>(a)->group != static_cast<const LinearInt4*>(b)->group)
    return false;
  if (kind == WeightKind::superblocks &&
      static_cast<const LinearSuperblocks*>(a)->kind != static_cast<const LinearSuperblocks*>(b)->kind)
    return false;
  const LinearInt8 &one = base_of(a, kind), &other = base_of(b, kind);
  return one.num_in_padded == other.num_in_padded && one.num_in == other.num_in && one.num_out == other.num_out &&
         one.is_gated == other.is_gated && one.activation == other.activation;
}

// Products of one shape. They belong to the linear layers, which the caller keeps alive.
class Products {
 public:
  Products(const std::vector<uintptr_t>& ops, int kind) : kind_(static_cast<WeightKind>(kind)) {
    for (const uintptr_t op : ops) {
      ops_.push_back(pointer<void>(op));
      if (!are_alike(ops_.front(), ops_.back(), kind_)) throw nanobind::value_error("the products are not of one shape");
    }
  }
  ProductList get() const { return {ops_.data(), kind_}; }

 private:
  std::vector<const void*> ops_;
  WeightKind kind_;
};

}  // namespace ms
