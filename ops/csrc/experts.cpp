// Binds the experts and the router of a mixture.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "binding.h"
#include "isa.h"
#include "products.h"

namespace nb = nanobind;
using namespace ms;

namespace {

class ExpertLayer {
 public:
  // ups, downs: the addresses of each expert's products, of a kind of WeightKind.
  ExpertLayer(const std::vector<uintptr_t>& ups, int up_kind, const std::vector<uintptr_t>& downs, int down_kind,
              bool scales_input)
      : ups_(ups, up_kind), downs_(downs, down_kind), num_experts_(static_cast<int>(ups.size())),
        scales_input_(scales_input) {}

  void run(uintptr_t x, size_t x_stride, int x_type, int rows, int top_k, uintptr_t experts, uintptr_t weights,
           uintptr_t out, size_t out_stride, int out_type, bool add, int part) const {
    const auto* chosen = pointer<int32_t>(experts);
    for (int i = 0; i < rows * top_k; i++)
      if (chosen[i] < 0 || chosen[i] >= num_experts_) throw nb::value_error("there is no such expert");
    nb::gil_scoped_release release;
    kernels().mix_experts({ups_.get(), downs_.get(), num_experts_, scales_input_},
                          {{pointer<void>(x), x_stride, static_cast<DType>(x_type)}, rows, top_k, chosen,
                           pointer<float>(weights), pointer<void>(out), out_stride, static_cast<DType>(out_type), add},
                          static_cast<ExpertsPart>(part));
  }

 private:
  Products ups_, downs_;
  int num_experts_;
  bool scales_input_;
};

// The arguments after the rows are the fields of Router in kernels.h; arrays may be 0.
void route(uintptr_t x, size_t x_stride, int x_type, int rows, uintptr_t experts, uintptr_t weights, uintptr_t weight,
           int type, uintptr_t bias, uintptr_t correction, uintptr_t expert_scales, int num_experts, int num_in,
           int top_k, bool is_sigmoid, bool is_after_top_k, bool is_normalized, float sum_eps, float scale,
           int num_groups, int num_top_groups, int group_best) {
  nb::gil_scoped_release release;
  kernels().route({pointer<void>(weight), static_cast<DType>(type), pointer<float>(bias), pointer<float>(correction),
                   pointer<float>(expert_scales), num_experts, num_in, top_k, is_sigmoid, is_after_top_k, is_normalized,
                   sum_eps, scale, num_groups, num_top_groups, group_best},
                  {pointer<void>(x), x_stride, static_cast<DType>(x_type)}, rows, pointer<int32_t>(experts),
                  pointer<float>(weights));
}

}  // namespace

void ms::bind_experts(nb::module_& m) {
  nb::class_<ExpertLayer>(m, "ExpertLayer")
      .def(nb::init<const std::vector<uintptr_t>&, int, const std::vector<uintptr_t>&, int, bool>())
      .def("run", &ExpertLayer::run);
  m.def("route", &route);
}
