// Binds the operators of layers with a state.
#include <nanobind/nanobind.h>

#include "binding.h"
#include "isa.h"
#include "states.h"

namespace nb = nanobind;
using namespace ms;

namespace {

// Segments of a step and the records that they read and write. The arguments are addresses of int64 numbers.
class StatePlan {
 public:
  StatePlan(uintptr_t firsts, uintptr_t sources, uintptr_t targets, int num_segments, uintptr_t sequences,
            int num_sequences, uintptr_t states, size_t stride, int64_t num_records, int64_t rows)
      : segments_{pointer<int64_t>(firsts), pointer<int64_t>(sources), pointer<int64_t>(targets),
                  pointer<int64_t>(sequences), num_sequences},
        records_{pointer<float>(states), stride} {
    const int64_t* starts = segments_.sequences;
    bool is_right = starts[0] == 0 && starts[num_sequences] == num_segments;
    for (int s = 0; s < num_sequences; s++) is_right &= starts[s] < starts[s + 1];
    if (!is_right) throw nb::value_error("sequences: not one or more segments each, in order");
    is_right = segments_.firsts[0] == 0 && segments_.firsts[num_segments] == rows;
    for (int i = 0; i < num_segments; i++) is_right &= segments_.firsts[i] < segments_.firsts[i + 1];
    if (!is_right) throw nb::value_error("firsts: not one or more rows each, in order");
    for (const int64_t* records : {segments_.sources, segments_.targets})
      for (int i = 0; i < num_segments; i++)
        if (records[i] < NO_RECORD || records[i] >= num_records) throw nb::value_error("there is no such record");
  }
  const StateSegments& segments() const { return segments_; }
  const StateRecords& records() const { return records_; }

 private:
  StateSegments segments_;
  StateRecords records_;
};

void convolve(const StatePlan& plan, uintptr_t x, size_t stride, int type, int channels, int width, uintptr_t weight,
              uintptr_t bias, bool has_silu, uintptr_t out) {
  nb::gil_scoped_release release;
  kernels().convolve({{pointer<void>(x), stride, static_cast<DType>(type)}, channels, width, pointer<float>(weight),
                      pointer<float>(bias), has_silu, pointer<void>(out)},
                     plan.records(), plan.segments());
}

// A layer's linear attention; the arguments are the fields of LinearAttention that all its calls share.
class LinearAttentionCall {
 public:
  LinearAttentionCall(int heads, int key_heads, int key_dim, int value_dim, uintptr_t rates, uintptr_t bias,
                      uintptr_t skip, bool is_delta, bool is_per_channel, bool has_unit_keys, float scale,
                      float beta_scale, float dt_min, float dt_max)
      : call_{} {
    call_.heads = heads, call_.key_heads = key_heads, call_.key_dim = key_dim, call_.value_dim = value_dim;
    call_.rates = pointer<float>(rates), call_.bias = pointer<float>(bias), call_.skip = pointer<float>(skip);
    call_.is_delta = is_delta, call_.is_per_channel = is_per_channel, call_.has_unit_keys = has_unit_keys;
    call_.scale = scale, call_.beta_scale = beta_scale, call_.dt_min = dt_min, call_.dt_max = dt_max;
  }

  void run(const StatePlan& plan, int type, uintptr_t q, size_t q_stride, uintptr_t k, size_t k_stride, uintptr_t v,
           size_t v_stride, uintptr_t a, size_t a_stride, uintptr_t b, size_t b_stride, uintptr_t out) const {
    nb::gil_scoped_release release;
    const DType of = static_cast<DType>(type);
    LinearAttention call = call_;
    call.q = {pointer<void>(q), q_stride, of}, call.k = {pointer<void>(k), k_stride, of};
    call.v = {pointer<void>(v), v_stride, of}, call.a = {pointer<void>(a), a_stride, of};
    call.b = {pointer<void>(b), b_stride, of}, call.out = pointer<void>(out);
    kernels().attend_linear(call, plan.records(), plan.segments());
  }

 private:
  LinearAttention call_;
};

void gate_and_norm(uintptr_t x, size_t x_stride, int x_type, uintptr_t gate, size_t gate_stride, int gate_type, int rows,
                   int num_in, int group, uintptr_t weight, float eps, bool is_silu, bool gates_first, uintptr_t out) {
  nb::gil_scoped_release release;
  kernels().gate_and_norm({{pointer<void>(x), x_stride, static_cast<DType>(x_type)},
                           {pointer<void>(gate), gate_stride, static_cast<DType>(gate_type)},
                           rows, num_in, group, pointer<float>(weight), eps, is_silu, gates_first, pointer<void>(out)});
}

}  // namespace

void ms::bind_states(nb::module_& m) {
  m.attr("MAX_CONV_WIDTH") = MAX_CONV_WIDTH;
  nb::class_<StatePlan>(m, "StatePlan")
      .def(nb::init<uintptr_t, uintptr_t, uintptr_t, int, uintptr_t, int, uintptr_t, size_t, int64_t, int64_t>());
  nb::class_<LinearAttentionCall>(m, "LinearAttentionCall")
      .def(nb::init<int, int, int, int, uintptr_t, uintptr_t, uintptr_t, bool, bool, bool, float, float, float, float>())
      .def("run", &LinearAttentionCall::run);
  m.def("convolve", &convolve);
  m.def("gate_and_norm", &gate_and_norm);
}
