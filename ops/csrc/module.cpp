// Python's view of the kernels: addresses, sizes and strides come in as integers (elements, not
// bytes), the interpreter is released while they run. ops/native.py checks what it passes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "isa.h"
#include "team.h"

namespace nb = nanobind;
using namespace ms;

namespace {

// Memory for weights, on huge pages where the system gives them.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    const size_t huge = size_t{2} << 20, align = bytes >= huge ? huge : 64;
    data_ = std::aligned_alloc(align, (bytes + align - 1) / align * align);
    if (!data_) throw std::bad_alloc();
#if defined(__linux__)
    if (align == huge) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  template <class T>
  T* as() const { return static_cast<T*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  void* data_;
  size_t bytes_;
};

template <class T>
T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

int round_up(int n, int to) { return (n + to - 1) / to * to; }

// The caller's quantized rows; one for each thread that calls, kept between calls.
Quantized scratch(int rows, int num_in_padded) {
  static thread_local std::vector<int8_t> memory;
  const size_t slices = (num_in_padded + SLICE - 1) / SLICE, slice_stride = size_t{SLICE} * rows;
  const size_t need = slices * slice_stride + rows * 8 + 64;
  if (memory.size() < need) memory.resize(need);
  auto* values = reinterpret_cast<int8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  auto* scales = reinterpret_cast<float*>(values + slices * slice_stride);
  return {values, slice_stride, num_in_padded, scales, reinterpret_cast<int32_t*>(scales + rows)};
}

// A linear layer with packed int8 weights, and what is fused around it.
class Int8Linear {
 public:
  Int8Linear(int num_in, int num_out, uintptr_t weight, size_t stride, int dtype, uintptr_t bias,
             int activation, bool is_gated)
      : packed_(panels(num_out, is_gated) * size_t{32} * round_up(num_in, 64)),
        scales_(panels(num_out, is_gated) * size_t{32} * 4),
        bias_(panels(num_out, is_gated) * size_t{32} * 4) {
    op_ = {packed_.as<uint8_t>(), scales_.as<float>(), nullptr, num_in, round_up(num_in, 64), num_out,
           panels(num_out, is_gated), is_gated, static_cast<Activation>(activation)};
    const PackSource source{pointer<void>(weight), stride, static_cast<DType>(dtype)};
    nb::gil_scoped_release release;
    kernels().pack_int8(source, op_, packed_.as<uint8_t>(), scales_.as<float>());
    if (bias) set_bias(pointer<float>(bias));
  }

  void set_norm(int kind, uintptr_t weight, uintptr_t bias, float eps) {
    norm_ = {static_cast<NormKind>(kind), pointer<float>(weight), pointer<float>(bias), eps};
  }

  void run(uintptr_t x, size_t x_stride, int x_type, int rows, uintptr_t out, size_t out_stride,
           int out_type, bool add) const {
    nb::gil_scoped_release release;
    const Quantized quantized = quantize(x, x_stride, x_type, rows);
    kernels().linear_int8(op_, quantized, rows, pointer<void>(out), out_stride, static_cast<DType>(out_type), add);
  }

  // The first half of run, for measuring it alone.
  void only_quantize(uintptr_t x, size_t x_stride, int x_type, int rows) const {
    nb::gil_scoped_release release;
    quantize(x, x_stride, x_type, rows);
  }

  size_t bytes() const { return packed_.bytes() + scales_.bytes(); }

 private:
  Quantized quantize(uintptr_t x, size_t x_stride, int x_type, int rows) const {
    const Quantized quantized = scratch(rows, op_.num_in_padded);
    const Rows in{pointer<void>(x), x_stride, static_cast<DType>(x_type)};
    kernels().quantize_rows(in, rows, op_.num_in, norm_, quantized);
    return quantized;
  }
  static int panels(int num_out, bool is_gated) { return is_gated ? (num_out + 15) / 16 : (num_out + 31) / 32; }
  void set_bias(const float* bias) {
    float* to = bias_.as<float>();
    for (int panel = 0; panel < op_.num_panels; panel++)
      for (int c = 0; c < 32; c++) {
        int channel = panel * 32 + c;
        bool is_real = channel < op_.num_out;
        if (op_.is_gated) {
          const int gate = panel * 16 + c % 16;
          is_real = gate < op_.num_out;
          channel = gate + (c < 16 ? 0 : op_.num_out);
        }
        to[panel * 32 + c] = is_real ? bias[channel] : 0.0f;
      }
    op_.bias = to;
  }

  Buffer packed_, scales_, bias_;
  LinearInt8 op_;
  Norm norm_{NormKind::none, nullptr, nullptr, 0.0f};
};

// The sequences of one step, shared by all layers.
class StepPlan {
 public:
  StepPlan(uintptr_t cache, size_t tile_bytes, const std::vector<size_t>& starts,
           const std::vector<int>& num_rows, const std::vector<int>& kv_lens)
      : tile_bytes_(tile_bytes) {
    int row = 0;
    for (size_t i = 0; i < starts.size(); i++) {
      sequences_.push_back({pointer<uint8_t>(cache) + starts[i], row, num_rows[i], kv_lens[i]});
      row += num_rows[i];
    }
  }
  Step get() const { return {sequences_.data(), static_cast<int>(sequences_.size()), tile_bytes_}; }

 private:
  std::vector<SequenceRows> sequences_;
  size_t tile_bytes_;
};

class Int8Attention {
 public:
  Int8Attention(size_t offset_bytes, int num_heads, int num_kv_heads, int head_dim, int group, float scale,
                int window, float soft_cap, std::vector<float> slopes, std::vector<float> sinks)
      : slopes_(std::move(slopes)), sinks_(std::move(sinks)) {
    layer_ = {{offset_bytes, num_kv_heads, head_dim, group}, num_heads, scale, window, soft_cap,
              slopes_.empty() ? nullptr : slopes_.data(), sinks_.empty() ? nullptr : sinks_.data()};
  }
  void append(const StepPlan& step, uintptr_t k, uintptr_t v, size_t stride, uintptr_t cos, uintptr_t sin,
              int half) const {
    nb::gil_scoped_release release;
    kernels().append_kv(step.get(), layer_.cache, pointer<float>(k), pointer<float>(v), stride,
                        {pointer<float>(cos), pointer<float>(sin), half});
  }
  void attend(const StepPlan& step, uintptr_t q, size_t q_stride, uintptr_t out, size_t out_stride,
              uintptr_t lse) const {
    nb::gil_scoped_release release;
    kernels().attend(step.get(), layer_, pointer<float>(q), q_stride, pointer<float>(out), out_stride,
                     pointer<float>(lse));
  }

 private:
  std::vector<float> slopes_, sinks_;
  AttentionLayer layer_;
};

void rotate(uintptr_t x, size_t stride, int rows, int heads, int head_dim, uintptr_t cos, uintptr_t sin, int half) {
  nb::gil_scoped_release release;
  kernels().rotate(pointer<float>(x), stride, rows, heads, head_dim,
                   {pointer<float>(cos), pointer<float>(sin), half});
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* set : {avx512_kernels(), avx2_kernels(), portable_kernels()})
    if (set && is_usable(set)) names.emplace_back(set->name);
  return names;
}

}  // namespace

NB_MODULE(_native, m) {
  m.attr("TILE") = TILE;
  m.attr("MAX_HEAD_DIM") = MAX_HEAD_DIM;
  m.def("instruction_sets", &instruction_sets, "Those that run here, the best first.");
  m.def("instruction_set", [] { return std::string(kernels().name); });
  m.def("choose_instruction_set", [](const std::string& name) { return choose(name.c_str()); });
  m.def("num_threads", [] { return Team::get().size(); });
  m.def("set_num_threads", [](int n) { Team::get().resize(n); }, nb::call_guard<nb::gil_scoped_release>());
  m.def("rotate", &rotate);
  m.def("read_bytes", [](uintptr_t from, size_t bytes) {
    nb::gil_scoped_release release;
    return kernels().read_bytes(pointer<void>(from), bytes);
  });
  m.def("copy_bytes", [](uintptr_t to, uintptr_t from, size_t bytes) {
    nb::gil_scoped_release release;
    kernels().copy_bytes(pointer<void>(to), pointer<void>(from), bytes);
  });
  m.def("multiply_i8", [](int64_t rounds) { return kernels().multiply_i8(rounds); });
  m.def("multiply_bf16", [](int64_t rounds) { return kernels().multiply_bf16(rounds); });
  m.attr("DRAW_BYTES") = sizeof(Draw);
  m.attr("DRAWN_BYTES") = sizeof(Drawn);
  m.attr("MAX_TOP") = MAX_TOP;
  m.def("argmax", [](uintptr_t logits, size_t stride, int rows, int size) {
    std::vector<int32_t> out(rows);
    nb::gil_scoped_release release;
    kernels().argmax(pointer<float>(logits), stride, rows, size, out.data());
    return out;
  });
  m.def("sample", [](uintptr_t logits, size_t stride, int rows, int size, uintptr_t draws, uintptr_t out) {
    nb::gil_scoped_release release;
    return kernels().sample(pointer<float>(logits), stride, rows, size, pointer<Draw>(draws), pointer<Drawn>(out));
  });
  nb::class_<Int8Linear>(m, "Int8Linear")
      .def(nb::init<int, int, uintptr_t, size_t, int, uintptr_t, int, bool>())
      .def("set_norm", &Int8Linear::set_norm)
      .def("run", &Int8Linear::run)
      .def("only_quantize", &Int8Linear::only_quantize)
      .def_prop_ro("bytes", &Int8Linear::bytes);
  nb::class_<StepPlan>(m, "StepPlan")
      .def(nb::init<uintptr_t, size_t, const std::vector<size_t>&, const std::vector<int>&,
                    const std::vector<int>&>());
  nb::class_<Int8Attention>(m, "Int8Attention")
      .def(nb::init<size_t, int, int, int, int, float, int, float, std::vector<float>, std::vector<float>>())
      .def("append", &Int8Attention::append)
      .def("attend", &Int8Attention::attend);
}
