// Binds attention over int8 latents. ops/cpu/native_latent_attention.py checks the arguments.
#include <nanobind/nanobind.h>

#include "binding.h"
#include "isa.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace ms;

namespace {

class LatentAttention {
 public:
  LatentAttention(size_t offset_bytes, int num_heads, int value_dim, int rope_dim, int group, int rope_group, float scale)
      : layer_{offset_bytes, num_heads, value_dim, rope_dim, group, rope_group, scale} {}

  void append(const StepPlan& step, uintptr_t k, size_t stride, uintptr_t cos, uintptr_t sin, int half) const {
    nb::gil_scoped_release release;
    kernels().append_latent(step.get(), layer_, pointer<float>(k), stride, {pointer<float>(cos), pointer<float>(sin), half});
  }
  void attend(const StepPlan& step, uintptr_t q, size_t q_stride, uintptr_t out, uintptr_t lse, bool with_matrix) const {
    nb::gil_scoped_release release;
    kernels().attend_latent(step.get(), layer_, pointer<float>(q), q_stride, pointer<float>(out), pointer<float>(lse),
                            with_matrix && may_use_matrix());
  }

 private:
  LatentLayer layer_;
};

}  // namespace

namespace ms {

void bind_latent(nb::module_& m) {
  m.attr("MAX_LATENT_DIM") = MAX_LATENT_DIM;
  m.def("may_use_matrix", &may_use_matrix, "Returns whether this process may use matrix registers for bytes.");
  nb::class_<LatentAttention>(m, "LatentAttention")
      .def(nb::init<size_t, int, int, int, int, int, float>())
      .def("append", &LatentAttention::append)
      .def("attend", &LatentAttention::attend);
}

}  // namespace ms
