// Binds what the policies that drop K/V need of int8 tiles and of plain K. ops/cpu/native_key_scores.py checks the arguments.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "binding.h"
#include "isa.h"

namespace nb = nanobind;
using namespace ms;

namespace {

// The rows of a step that give scores, shared by all layers.
class ScorePlan {
 public:
  ScorePlan(size_t tile_bytes) : tile_bytes(tile_bytes) {}

  void add(uintptr_t base, int first_row, int num_rows, int kv_len, uintptr_t sums, size_t stride, uintptr_t noise,
           uintptr_t sharpness) {
    rows.push_back({{pointer<uint8_t>(base), first_row, num_rows, kv_len, kv_len - num_rows}, pointer<float>(sums),
                    stride, pointer<float>(noise), pointer<float>(sharpness)});
  }

  size_t tile_bytes;  // of plain K: a token's
  std::vector<ScoredRows> rows;
};

class KeyScoring {
 public:
  KeyScoring(size_t offset_bytes, int num_heads, int num_kv_heads, int head_dim, int group, float scale, float soft_cap)
      : layer_{{offset_bytes, num_kv_heads, head_dim, group, 8}, num_heads, scale, 0, soft_cap, nullptr, nullptr} {}

  void add(const ScorePlan& plan, int number, uintptr_t q, size_t q_stride) const {
    nb::gil_scoped_release release;
    kernels().add_key_scores(plan.rows.data(), static_cast<int>(plan.rows.size()), plan.tile_bytes, layer_, number,
                             pointer<float>(q), q_stride);
  }
  void gather(uintptr_t source, uintptr_t target, size_t tile_bytes, uintptr_t kept, int count) const {
    nb::gil_scoped_release release;
    kernels().gather_kv(layer_.cache, tile_bytes, pointer<uint8_t>(source), pointer<uint8_t>(target),
                        pointer<int32_t>(kept), count);
  }

 private:
  AttentionLayer layer_;
};

class PlainKeyScoring {
 public:
  PlainKeyScoring(size_t offset_bytes, int num_heads, int num_kv_heads, int head_dim, int type, float scale,
                  float soft_cap)
      : layer_{offset_bytes, num_heads, num_kv_heads, head_dim, static_cast<DType>(type), scale, soft_cap} {}

  void add(const ScorePlan& plan, int number, uintptr_t q, size_t q_stride) const {
    nb::gil_scoped_release release;
    kernels().add_plain_key_scores(plan.rows.data(), static_cast<int>(plan.rows.size()), plan.tile_bytes, layer_, number,
                                   pointer<float>(q), q_stride);
  }

 private:
  PlainKeys layer_;
};

}  // namespace

namespace ms {

void bind_key_scores(nb::module_& m) {
  nb::class_<ScorePlan>(m, "ScorePlan").def(nb::init<size_t>()).def("add", &ScorePlan::add);
  nb::class_<KeyScoring>(m, "KeyScoring")
      .def(nb::init<size_t, int, int, int, int, float, float>())
      .def("add", &KeyScoring::add)
      .def("gather", &KeyScoring::gather);
  nb::class_<PlainKeyScoring>(m, "PlainKeyScoring")
      .def(nb::init<size_t, int, int, int, int, float, float>())
      .def("add", &PlainKeyScoring::add);
}

}  // namespace ms
