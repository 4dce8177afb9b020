// Binds the products of heads, and the rounding of stored weights.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "binding.h"
#include "isa.h"
#include "products.h"

namespace nb = nanobind;
using namespace ms;

namespace {

class HeadLayer {
 public:
  // products: the addresses of each head's product, of a kind of WeightKind.
  HeadLayer(const std::vector<uintptr_t>& products, int kind)
      : products_(products, kind), heads_(static_cast<int>(products.size())) {}

  void run(uintptr_t x, size_t stride, size_t head_stride, int type, int rows, uintptr_t out) const {
    nb::gil_scoped_release release;
    kernels().linear_heads(products_.get(), {pointer<void>(x), stride, head_stride, static_cast<DType>(type), rows,
                                             heads_, pointer<void>(out)});
  }

 private:
  Products products_;
  int heads_;
};

// kind: the index in ByteCodes; zeros may be 0.
void round_rows(uintptr_t codes, size_t stride, int kind, int rows, int num_in, int group, uintptr_t scales,
                uintptr_t zeros, uintptr_t to, uintptr_t steps) {
  nb::gil_scoped_release release;
  kernels().round_rows({pointer<uint8_t>(codes), stride, static_cast<ByteCodes>(kind), num_in, group,
                        pointer<float>(scales), pointer<float>(zeros)},
                       rows, pointer<int8_t>(to), pointer<float>(steps));
}

}  // namespace

void ms::bind_heads(nb::module_& m) {
  nb::class_<HeadLayer>(m, "HeadLayer")
      .def(nb::init<const std::vector<uintptr_t>&, int>())
      .def("run", &HeadLayer::run);
  m.def("round_rows", &round_rows);
}
