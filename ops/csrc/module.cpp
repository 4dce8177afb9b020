// Binds the kernels. Addresses, sizes and strides are integers, strides in elements; the GIL is
// released while a kernel runs. ops/cpu/native_*.py check the arguments.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "binding.h"
#include "isa.h"
#include "team.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace ms;

namespace {

// Attention over K/V with `bits` of 8 or 4. recent_group: the group of a second store with 8 bits, whose
// part of a tile begins at recent_offset; 0: there is none. It takes part in steps that have it. bounds_offset:
// where the bounds of the layer's keys begin in a tile of the store that has them; -1: it has none, and rows read
// everything.
class QuantizedAttention {
 public:
  QuantizedAttention(size_t offset_bytes, int num_heads, int num_kv_heads, int head_dim, int group, int bits,
                     float scale, int window, float soft_cap, std::vector<float> slopes, std::vector<float> sinks,
                     size_t recent_offset, int recent_group, ptrdiff_t bounds_offset)
      : bounds_offset_(bounds_offset), recent_{recent_offset, num_kv_heads, head_dim, recent_group, 8},
        slopes_(std::move(slopes)), sinks_(std::move(sinks)) {
    layer_ = {{offset_bytes, num_kv_heads, head_dim, group, bits}, num_heads, scale, window, soft_cap,
              slopes_.empty() ? nullptr : slopes_.data(), sinks_.empty() ? nullptr : sinks_.data()};
  }
  void append(const StepPlan& step, uintptr_t k, uintptr_t v, size_t stride, uintptr_t cos, uintptr_t sin,
              int half) const {
    nb::gil_scoped_release release;
    const Rotation rotation{pointer<float>(cos), pointer<float>(sin), half};
    kernels().append_kv(step.get(), layer_.cache, pointer<float>(k), pointer<float>(v), stride, rotation);
    if (has_recent(step))
      kernels().append_kv(step.recent(), recent_, pointer<float>(k), pointer<float>(v), stride, rotation);
    if (bounds_offset_ >= 0) kernels().bound_keys(step.get(), layer_.cache, step.bounds(bounds_offset_));
  }
  void attend(const StepPlan& step, uintptr_t q, size_t q_stride, uintptr_t out, size_t out_stride,
              uintptr_t lse, int phase, uintptr_t sums) const {
    nb::gil_scoped_release release;
    const RecentStore recent{step.recent(), recent_};
    const Phased phased{static_cast<Phase>(phase), pointer<float>(sums)};
    if (selects(step))
      return kernels().attend_selected(step.get(), layer_, pointer<float>(q), q_stride, pointer<float>(out), out_stride,
                                       pointer<float>(lse), has_recent(step) ? &recent : nullptr,
                                       step.selection(bounds_offset_), phased);
    kernels().attend(step.get(), layer_, pointer<float>(q), q_stride, pointer<float>(out), out_stride,
                     pointer<float>(lse), phased, has_recent(step) ? &recent : nullptr);
  }
  // Writes which tiles of each sequence rows read: all where they do not select.
  void choose(const StepPlan& step, uintptr_t q, size_t q_stride, uintptr_t is_read) const {
    nb::gil_scoped_release release;
    if (!selects(step)) {
      std::memset(pointer<uint8_t>(is_read), 1, step.num_tiles());
      return;
    }
    const RecentStore recent{step.recent(), recent_};
    kernels().choose_tiles(step.get(), layer_, pointer<float>(q), q_stride, has_recent(step) ? &recent : nullptr,
                           step.selection(bounds_offset_), pointer<uint8_t>(is_read));
  }
  void attend_chosen(const StepPlan& step, uintptr_t q, size_t q_stride, uintptr_t out, size_t out_stride,
                     uintptr_t lse) const {
    if (!selects(step)) return attend(step, q, q_stride, out, out_stride, lse, 0, 0);
    bool is_chosen;
    {
      nb::gil_scoped_release release;
      const RecentStore recent{step.recent(), recent_};
      is_chosen = kernels().attend_chosen(step.get(), layer_, pointer<float>(q), q_stride, pointer<float>(out),
                                          out_stride, pointer<float>(lse), has_recent(step) ? &recent : nullptr);
    }
    if (!is_chosen) throw std::logic_error("the thread's last choice of tiles was for another step or layer");
  }

  void list_tiles(const StepPlan& step, uintptr_t q, size_t q_stride, uintptr_t num_tiles, uintptr_t wanted,
                  uintptr_t lists) const {
    nb::gil_scoped_release release;
    kernels().list_tiles(step.get(), layer_, pointer<float>(q), q_stride, step.bounds(bounds_offset_),
                         {pointer<int>(num_tiles), pointer<int>(wanted)}, pointer<int32_t>(lists));
  }
  void attend_listed(const StepPlan& step, uintptr_t q, uintptr_t num_tiles, uintptr_t wanted, uintptr_t lists,
                     uintptr_t counts, uintptr_t out, uintptr_t lse) const {
    nb::gil_scoped_release release;
    kernels().attend_listed(step.get(), layer_, pointer<float>(q), {pointer<int>(num_tiles), pointer<int>(wanted)},
                            pointer<int32_t>(lists), pointer<int32_t>(counts), pointer<float>(out),
                            pointer<float>(lse));
  }

 private:
  bool selects(const StepPlan& step) const { return bounds_offset_ >= 0 && step.selects(); }
  bool has_recent(const StepPlan& step) const { return recent_.group > 0 && step.has_recent(); }

  ptrdiff_t bounds_offset_;  // -1: the layer has none
  CacheLayer recent_;
  std::vector<float> slopes_, sinks_;
  AttentionLayer layer_;
};

// parts: four numbers each, the addresses of num_tiles, wanted, lists and counts.
void count_tiles(const std::vector<uintptr_t>& parts, int rows, int kv_heads) {
  nb::gil_scoped_release release;
  std::vector<ListedPart> listed;
  for (size_t i = 0; i + 3 < parts.size(); i += 4)
    listed.push_back({{pointer<int>(parts[i]), pointer<int>(parts[i + 1])}, pointer<int32_t>(parts[i + 2]),
                      pointer<int32_t>(parts[i + 3])});
  kernels().count_tiles(listed.data(), static_cast<int>(listed.size()), rows, kv_heads);
}

void rotate(uintptr_t x, size_t stride, int rows, int heads, int head_dim, uintptr_t cos, uintptr_t sin, int half) {
  nb::gil_scoped_release release;
  kernels().rotate(pointer<float>(x), stride, rows, heads, head_dim,
                   {pointer<float>(cos), pointer<float>(sin), half});
}

// sequences: five numbers each, the addresses of K and V, token stride, head stride and length.
void decode_plain(const std::vector<size_t>& sequences, int num_heads, int num_kv_heads, int head_dim, float scale,
                  int type, uintptr_t q, size_t q_stride, int q_type, uintptr_t out, uintptr_t lse, float soft_cap,
                  uintptr_t sinks, int phase, uintptr_t sums) {
  std::vector<PlainSequence> all;
  for (size_t i = 0; i + 5 <= sequences.size(); i += 5)
    all.push_back({pointer<void>(sequences[i]), pointer<void>(sequences[i + 1]), sequences[i + 2], sequences[i + 3],
                   static_cast<int>(sequences[i + 4])});
  nb::gil_scoped_release release;
  kernels().decode_plain(all.data(), static_cast<int>(all.size()),
                         {num_heads, num_kv_heads, head_dim, scale, static_cast<DType>(type), soft_cap,
                          pointer<float>(sinks)},
                         pointer<void>(q), q_stride, static_cast<DType>(q_type), pointer<float>(out), pointer<float>(lse),
                         {static_cast<Phase>(phase), pointer<float>(sums)});
}

// q and out: [count][num_heads][head_dim], of the same type.
void prefill_plain(uintptr_t k, uintptr_t v, size_t token_stride, size_t head_stride, int length, int num_heads,
                   int num_kv_heads, int head_dim, float scale, int type, uintptr_t q, size_t q_stride, int q_type,
                   int count, int first_position, int window, uintptr_t out, uintptr_t lse, float soft_cap, uintptr_t sinks) {
  nb::gil_scoped_release release;
  kernels().prefill_plain({pointer<void>(k), pointer<void>(v), token_stride, head_stride, length},
                          {num_heads, num_kv_heads, head_dim, scale, static_cast<DType>(type), soft_cap,
                           pointer<float>(sinks)},
                          {pointer<void>(q), q_stride, static_cast<DType>(q_type), count, first_position, window, pointer<void>(out),
                           pointer<float>(lse)});
}

void merge_partials(uintptr_t out, int type, uintptr_t lse, uintptr_t part, int part_type, uintptr_t part_lse,
                    size_t stride, size_t lse_stride, uintptr_t rows, int count, int heads, int dim) {
  nb::gil_scoped_release release;
  const size_t width = static_cast<size_t>(heads) * dim;
  kernels().merge_partials({pointer<void>(out), static_cast<DType>(type), pointer<float>(lse), stride, lse_stride},
                           {pointer<void>(part), static_cast<DType>(part_type), pointer<float>(part_lse), width,
                            static_cast<size_t>(heads)},
                           pointer<int64_t>(rows), count, heads, dim);
}

void quantize_heads(uintptr_t x, size_t stride, int type, int rows, int heads, int dim, uintptr_t values,
                    uintptr_t scales) {
  nb::gil_scoped_release release;
  kernels().quantize_heads({pointer<void>(x), stride, static_cast<DType>(type)}, rows, heads, dim,
                           pointer<int8_t>(values), pointer<float>(scales));
}

void dequantize_heads(uintptr_t values, uintptr_t scales, int rows, int heads, int dim, uintptr_t out, int type) {
  nb::gil_scoped_release release;
  kernels().dequantize_heads(pointer<int8_t>(values), pointer<float>(scales), rows, heads, dim, pointer<void>(out),
                             static_cast<DType>(type));
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* set : {avx512_kernels(), avxvnni_kernels(), avx2_kernels(), portable_kernels()})
    if (set && is_usable(set)) names.emplace_back(set->name);
  return names;
}

}  // namespace

NB_MODULE(_native, m) {
  // What frames of threads still hold when the process ends is no fault to tell users of.
  nb::set_leak_warnings(false);
  m.attr("TILE") = TILE;
  m.attr("MAX_HEAD_DIM") = MAX_HEAD_DIM;
  m.attr("MAX_PLAIN_DIM") = MAX_PLAIN_DIM;
  m.attr("MAX_PARTS") = MAX_PARTS;
  m.def("instruction_sets", &instruction_sets, "Returns the names of those that run here, the best first.");
  m.def("instruction_set", [] { return std::string(kernels().name); });
  m.def("choose_instruction_set", [](const std::string& name) { return choose(name.c_str()); });
  m.def("num_threads", [] { return Team::get().size(); });
  m.def("set_num_threads", [](int n) { Team::get().resize(n); }, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Host>(m, "Host").def(nb::init<>()).def("begin", &Host::begin).def("end", &Host::end);
  nb::class_<Guest>(m, "Guest")
      .def(nb::init<Host&>(), nb::keep_alive<1, 2>())
      .def("enter", &Guest::enter)
      .def_static("leave", &Guest::leave)
      .def("admit", &Guest::admit, nb::call_guard<nb::gil_scoped_release>())
      .def("end", &Guest::end)
      .def_prop_ro("has_ended", &Guest::has_ended);
  m.def("rotate", &rotate);
  m.def("decode_plain", &decode_plain, "sequences"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "scale"_a, "type"_a,
        "q"_a, "q_stride"_a, "q_type"_a, "out"_a, "lse"_a,
        "soft_cap"_a = 0.0f, "sinks"_a = 0, "phase"_a = 0, "sums"_a = 0);
  m.def("read_bytes", [](uintptr_t from, size_t bytes) {
    nb::gil_scoped_release release;
    return kernels().read_bytes(pointer<void>(from), bytes);
  });
  m.def("copy_bytes", [](uintptr_t to, uintptr_t from, size_t bytes) {
    nb::gil_scoped_release release;
    kernels().copy_bytes(pointer<void>(to), pointer<void>(from), bytes);
  });
  m.def("all_finite", [](uintptr_t from, size_t bytes, uint32_t low, uint32_t high) {
    nb::gil_scoped_release release;
    return kernels().all_finite(pointer<void>(from), bytes, low, high);
  });
  m.def("multiply_i8", [](int64_t rounds) { return kernels().multiply_i8(rounds); });
  m.def("multiply_bf16", [](int64_t rounds) { return kernels().multiply_bf16(rounds); });
  m.def("multiply_f32", [](int64_t rounds) { return kernels().multiply_f32(rounds); });
  m.attr("DRAW_BYTES") = sizeof(SamplingInputs);
  m.attr("DRAWN_BYTES") = sizeof(SampledRow);
  m.attr("MAX_TOP") = MAX_TOP;
  m.def("argmax", [](uintptr_t logits, size_t stride, int rows, int size) {
    std::vector<int32_t> out(rows);
    nb::gil_scoped_release release;
    kernels().argmax(pointer<float>(logits), stride, rows, size, out.data());
    return out;
  });
  m.def("sample", [](uintptr_t logits, size_t stride, int rows, int size, uintptr_t inputs, uintptr_t out) {
    nb::gil_scoped_release release;
    return kernels().sample(pointer<float>(logits), stride, rows, size, pointer<SamplingInputs>(inputs),
                            pointer<SampledRow>(out));
  });
  m.def("describe_tokens", [](uintptr_t logits, size_t stride, int rows, int size, uintptr_t tokens, int num_top,
                              uintptr_t out) {
    nb::gil_scoped_release release;
    return kernels().describe_tokens(pointer<float>(logits), stride, rows, size, pointer<int32_t>(tokens), num_top,
                                     pointer<SampledRow>(out));
  });
  bind_linear(m);
  bind_superblocks(m);
  bind_experts(m);
  bind_heads(m);
  bind_states(m);
  bind_storage(m);
  bind_latent(m);
  bind_key_scores(m);
  bind_suffix_index(m);
  nb::class_<StepPlan>(m, "StepPlan")
      .def(nb::init<uintptr_t, size_t, const std::vector<size_t>&, const std::vector<int>&,
                    const std::vector<int>&, bool>())
      .def("add_recent", &StepPlan::add_recent)
      .def("add_bounds", &StepPlan::add_bounds)
      .def_prop_ro("num_tiles", &StepPlan::num_tiles)
      .def("place_tiles", &StepPlan::place_tiles)
      .def("select", &StepPlan::select);
  nb::class_<QuantizedAttention>(m, "QuantizedAttention")
      .def(nb::init<size_t, int, int, int, int, int, float, int, float, std::vector<float>, std::vector<float>, size_t,
                    int, ptrdiff_t>(),
           "offset"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "group"_a, "bits"_a, "scale"_a, "window"_a,
           "soft_cap"_a, "slopes"_a, "sinks"_a, "recent_offset"_a = 0, "recent_group"_a = 0,
           "bounds_offset"_a = -1)
      .def("append", &QuantizedAttention::append)
      .def("attend", &QuantizedAttention::attend, "step"_a, "q"_a, "q_stride"_a, "out"_a, "out_stride"_a, "lse"_a,
           "phase"_a = 0, "sums"_a = 0)
      .def("choose", &QuantizedAttention::choose)
      .def("attend_chosen", &QuantizedAttention::attend_chosen)
      .def("list_tiles", &QuantizedAttention::list_tiles)
      .def("attend_listed", &QuantizedAttention::attend_listed);
  m.def("count_tiles", &count_tiles);
  m.def("prefill_plain", &prefill_plain);
  m.def("merge_partials", &merge_partials);
  m.def("quantize_heads", &quantize_heads);
  m.def("dequantize_heads", &dequantize_heads);
}
