// Binds what the policies that drop K/V need of int8 tiles. ops/cpu/native_key_scores.py checks the arguments.
#include <nanobind/nanobind.h>

#include "binding.h"
#include "isa.h"

namespace nb = nanobind;
using namespace ms;

namespace {

class KeyScoring {
 public:
  KeyScoring(size_t offset_bytes, int num_heads, int num_kv_heads, int head_dim, int group, float scale, float soft_cap)
      : layer_{{offset_bytes, num_kv_heads, head_dim, group, 8}, num_heads, scale, 0, soft_cap, nullptr, nullptr} {}

  void add(uintptr_t base, size_t tile_bytes, int num_rows, int kv_len, uintptr_t q, size_t q_stride, uintptr_t sums,
           size_t stride, uintptr_t noise, uintptr_t sharpness) const {
    nb::gil_scoped_release release;
    const SequenceRows rows{pointer<uint8_t>(base), 0, num_rows, kv_len, kv_len - num_rows};
    kernels().add_key_scores({&rows, 1, tile_bytes}, layer_, pointer<float>(q), q_stride,
                             {pointer<float>(sums), stride, pointer<float>(noise), pointer<float>(sharpness)});
  }
  void gather(uintptr_t source, uintptr_t target, size_t tile_bytes, uintptr_t kept, int count) const {
    nb::gil_scoped_release release;
    kernels().gather_kv(layer_.cache, tile_bytes, pointer<uint8_t>(source), pointer<uint8_t>(target),
                        pointer<int32_t>(kept), count);
  }

 private:
  AttentionLayer layer_;
};

}  // namespace

namespace ms {

void bind_key_scores(nb::module_& m) {
  nb::class_<KeyScoring>(m, "KeyScoring")
      .def(nb::init<size_t, int, int, int, int, float, float>())
      .def("add", &KeyScoring::add)
      .def("gather", &KeyScoring::gather);
}

}  // namespace ms
