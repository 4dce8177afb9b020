// What linear layers of all kinds share: rows, norm, bias, the placement of channels in panels, bindings.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "binding.h"
#include "buffer.h"
#include "isa.h"
#include "stored.h"

namespace ms {

constexpr int PANEL = 32;

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }
inline int count_panels(int num_out, bool is_gated) { return is_gated ? (num_out + 15) / 16 : (num_out + 31) / 32; }

// Returns a buffer for quantized rows. Each calling thread has its own, kept between calls.
inline Quantized scratch(int rows, int num_in_padded) {
  static thread_local std::vector<int8_t> memory;
  const size_t slices = (num_in_padded + SLICE - 1) / SLICE, slice_stride = size_t{SLICE} * rows;
  const size_t need = slices * slice_stride + rows * 8 + 64;
  if (memory.size() < need) memory.resize(need);
  auto* values = reinterpret_cast<int8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  auto* scales = reinterpret_cast<float*>(values + slices * slice_stride);
  return {values, slice_stride, num_in_padded, scales, reinterpret_cast<int32_t*>(scales + rows)};
}

// The common part of the layers: the norm, the bias and the placement of channels in panels.
class Linear {
 public:
  // The weights are those of `stored`, if it is there, and are left to the derived class otherwise.
  Linear(int num_out, size_t panel_bytes, uintptr_t bias, bool is_gated, const Stored* stored = nullptr)
      : num_out_(num_out),
        num_panels_(count_panels(num_out, is_gated)),
        is_gated_(is_gated),
        has_bias_(stored ? stored->bias.bytes != 0 : bias != 0),
        packed_(buffer(num_panels_ * panel_bytes, stored, &Stored::packed)),
        bias_(buffer(has_bias_ ? num_panels_ * size_t{PANEL} * 4 : 0, stored, &Stored::bias)) {
    if (bias && !stored) spread(pointer<float>(bias), bias_.as<float>());
  }

  void set_norm(int kind, uintptr_t weight, uintptr_t bias, float eps) {
    norm_ = {static_cast<NormKind>(kind), pointer<float>(weight), pointer<float>(bias), eps};
  }

 protected:
  int channel(int panel, int c) const { return channel_at(panel, c, num_out_, is_gated_); }

  // Copies one number for each channel into the order of the panels.
  void spread(const float* from, float* to) const {
    for (int i = 0; i < num_panels_ * PANEL; i++) {
      const int n = channel(i / PANEL, i % PANEL);
      to[i] = n < 0 ? 0.0f : from[n];
    }
  }

  const float* bias() const { return has_bias_ ? bias_.as<float>() : nullptr; }

  int num_out_, num_panels_;
  bool is_gated_, has_bias_;
  Buffer packed_, bias_;
  Norm norm_{NormKind::none, nullptr, nullptr, 0.0f};
};

class QuantizedLinear : public Linear {
 public:
  QuantizedLinear(int num_in, int num_out, int align, size_t panel_bytes, uintptr_t bias, int activation,
                  bool is_gated, const Stored* stored)
      : Linear(num_out, panel_bytes, bias, is_gated, stored),
        scales_(buffer(num_panels_ * size_t{PANEL} * 4, stored, &Stored::scales)) {
    op_ = {packed_.as<uint8_t>(), scales_.as<float>(), this->bias(), num_in, round_up(num_in, align), num_out,
           num_panels_, is_gated, static_cast<Activation>(activation)};
  }

  size_t bytes() const { return packed_.bytes() + scales_.bytes(); }
  Stored stored() const { return {packed_.span(), scales_.span(), bias_.span()}; }

  // Normalizes and rounds the rows into memory of the calling thread.
  Quantized quantize(uintptr_t x, size_t x_stride, int x_type, int rows) const {
    const Quantized quantized = scratch(rows, op_.num_in_padded);
    const Rows in{pointer<void>(x), x_stride, static_cast<DType>(x_type)};
    kernels().quantize_rows(in, rows, op_.num_in, norm_, quantized);
    return quantized;
  }

 protected:
  Buffer scales_;
  LinearInt8 op_;
};

template <class T>
nanobind::class_<T>& with_common(nanobind::class_<T>& c) {
  return c.def("set_norm", [](T& self, int kind, uintptr_t weight, uintptr_t bias,
                              float eps) { self.set_norm(kind, weight, bias, eps); })
      .def_prop_ro("bytes", [](const T& self) { return self.bytes(); })
      .def_prop_ro("buffers", [](const T& self) { return spans_of(self.stored()); })
      .def_prop_ro("product", [](const T& self) { return reinterpret_cast<uintptr_t>(self.product()); });
}

template <class T>
nanobind::class_<T>& with_quantized(nanobind::class_<T>& c) {
  return with_common(c)
      .def("run", [](const T& self, uintptr_t x, size_t x_stride, int x_type, int rows, uintptr_t out,
                     size_t out_stride, int out_type, bool add) {
        nanobind::gil_scoped_release release;
        const Quantized quantized = self.quantize(x, x_stride, x_type, rows);
        self.multiply(quantized, rows, pointer<void>(out), out_stride, static_cast<DType>(out_type), add);
      })
      .def("only_quantize", [](const T& self, uintptr_t x, size_t stride, int type, int rows) {
        nanobind::gil_scoped_release release;
        self.quantize(x, stride, type, rows);
      });
}

}  // namespace ms
