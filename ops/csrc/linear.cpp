// Binds the linear layers. A layer owns its packed weights, quantizes its rows and multiplies.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <vector>

#include "layers.h"
#include "team.h"

namespace nb = nanobind;
using namespace ms;

namespace {

// parts: the address, row stride and number of rows of each part.
PackSource pack_source(const std::vector<size_t>& parts, int dtype) {
  PackSource source{{}, {}, {}, static_cast<DType>(dtype)};
  for (size_t i = 0, rows = 0; i < MAX_PARTS && 3 * i + 3 <= parts.size(); i++) {
    source.parts[i] = pointer<void>(parts[3 * i]);
    source.strides[i] = parts[3 * i + 1];
    source.ends[i] = static_cast<int>(rows += parts[3 * i + 2]);
  }
  return source;
}

class Int8Linear : public QuantizedLinear {
 public:
  // Rounds plain weights; parts as in pack_source.
  Int8Linear(int num_in, int num_out, const std::vector<size_t>& parts, int dtype, uintptr_t bias,
             int activation, bool is_gated)
      : Int8Linear(num_in, num_out, bias, activation, is_gated) {
    const PackSource source = pack_source(parts, dtype);
    nb::gil_scoped_release release;
    kernels().pack_int8(source, op_, packed_.as<uint8_t>(), scales_.as<float>());
  }

  // Takes int8 weights, [channels][num_in], and a scale for each channel.
  Int8Linear(int num_in, int num_out, uintptr_t weight, uintptr_t scales, uintptr_t bias, int activation,
             bool is_gated)
      : Int8Linear(num_in, num_out, bias, activation, is_gated) {
    nb::gil_scoped_release release;
    spread(pointer<float>(scales), scales_.as<float>());
    const auto* rows = pointer<uint8_t>(weight);
    const size_t panel_bytes = size_t{PANEL} * op_.num_in_padded;
    Team::get().parallel(op_.num_panels, [&](int panel) {
      uint8_t* to = packed_.as<uint8_t>() + panel * panel_bytes;
      std::memset(to, 128, panel_bytes);
      constexpr int SOME = 256;
      for (int first = 0; first < num_in; first += SOME)  // the inputs of one pass stay in cache
        for (int c = 0; c < PANEL; c++) {
          const int n = channel(panel, c), end = num_in - first < SOME ? num_in : first + SOME;
          if (n < 0) continue;
          const uint8_t* row = rows + static_cast<size_t>(n) * num_in;
          for (int k = first; k < end; k += 4) put_quad(row + k, end - k, to + k * PANEL + c * 4);
        }
    });
  }

  Int8Linear(int num_in, int num_out, const Stored& stored, int activation, bool is_gated)
      : Int8Linear(num_in, num_out, 0, activation, is_gated, &stored) {}

  // What the product of several layers takes (see experts.cpp).
  const void* product() const { return &op_; }
  void multiply(const Quantized& x, int rows, void* out, size_t out_stride, DType type, bool add) const {
    kernels().linear_int8(op_, x, rows, out, out_stride, type, add);
  }

 private:
  // Writes four weights, or those that are left, as unsigned bytes.
  static void put_quad(const uint8_t* from, int left, uint8_t* to) {
    uint32_t four = 0;
    if (left >= 4) std::memcpy(&four, from, 4);
    else std::memcpy(&four, from, left);
    four ^= 0x80808080u;
    std::memcpy(to, &four, 4);
  }

  Int8Linear(int num_in, int num_out, uintptr_t bias, int activation, bool is_gated, const Stored* stored = nullptr)
      : QuantizedLinear(num_in, num_out, 64, size_t{PANEL} * round_up(num_in, 64), bias, activation, is_gated,
                        stored) {}
};

class Int4Linear : public QuantizedLinear {
 public:
  // codes: [channels][num_in] bytes below 16; scales: [channels][groups] fp16; zeros, or 0:
  // [channels][groups] bytes; minimums, or 0: like scales; channel_scales: [channels] fp32; table: the
  // index in TABLES of ops/backend.py.
  Int4Linear(int num_in, int num_out, uintptr_t codes, uintptr_t scales, uintptr_t zeros, uintptr_t minimums,
             uintptr_t channel_scales, int group, int table, uintptr_t bias, int activation, bool is_gated)
      : Int4Linear(num_in, num_out, group, kind(zeros, minimums, table), bias, activation, is_gated) {
    nb::gil_scoped_release release;
    spread(pointer<float>(channel_scales), scales_.as<float>());
    Team::get().parallel(op_.num_panels, [&](int panel) {
      uint8_t* to = packed_.as<uint8_t>() + panel * panel_bytes(num_in, group, op4_.codes);
      std::memset(to, 0, panel_bytes(num_in, group, op4_.codes));
      for (int c = 0; c < PANEL; c++)
        if (channel(panel, c) >= 0)
          pack_factors(to, c, channel(panel, c), pointer<uint16_t>(scales), pointer<uint8_t>(zeros),
                       pointer<uint16_t>(minimums));
      pack_codes(to, panel, pointer<uint8_t>(codes), zeros || minimums);
    });
  }

  // Rounds plain weights; parts as in pack_source. bounds: the 15 bounds between the values of NF4
  // codes, or 0 for int4. is_searched: the scales of int4 are searched.
  Int4Linear(int num_in, int num_out, const std::vector<size_t>& parts, int dtype, int group, uintptr_t bounds,
             bool is_searched, uintptr_t bias, int activation, bool is_gated)
      : Int4Linear(num_in, num_out, group, kind(0, 0, bounds != 0), bias, activation, is_gated) {
    const PackSource source = pack_source(parts, dtype);
    nb::gil_scoped_release release;
    kernels().pack_int4(source, op4_, pointer<float>(bounds), is_searched, packed_.as<uint8_t>(), scales_.as<float>());
  }

  // codes: the number in the enumeration Codes.
  Int4Linear(int num_in, int num_out, int group, int codes, const Stored& stored, int activation, bool is_gated)
      : Int4Linear(num_in, num_out, group, static_cast<Codes>(codes), 0, activation, is_gated, &stored) {}

  int group() const { return op4_.group; }
  int codes() const { return static_cast<int>(op4_.codes); }
  const void* product() const { return &op4_; }
  void multiply(const Quantized& x, int rows, void* out, size_t out_stride, DType type, bool add) const {
    kernels().linear_int4(op4_, x, rows, out, out_stride, type, add);
  }

 private:
  Int4Linear(int num_in, int num_out, int group, Codes codes, uintptr_t bias, int activation, bool is_gated,
             const Stored* stored = nullptr)
      : QuantizedLinear(num_in, num_out, padding(group), panel_bytes(num_in, group, codes), bias, activation,
                        is_gated, stored),
        op4_{op_, group, codes} {}

  static int padding(int group) { return group < 64 ? 64 : group; }
  static Codes kind(uintptr_t zeros, uintptr_t minimums, int table) {
    if (table) return static_cast<Codes>(static_cast<int>(Codes::nf4) + table - 1);
    return zeros ? Codes::with_zeros : minimums ? Codes::with_minimums : Codes::centred;
  }
  static size_t panel_bytes(int num_in, int group, Codes codes) {
    return round_up(num_in, padding(group)) / group * group_bytes(group, codes);
  }

  // Writes the scale, zero point and minimum of every group of channel n.
  void pack_factors(uint8_t* to, int c, int n, const uint16_t* scales, const uint8_t* zeros,
                    const uint16_t* minimums) const {
    const int groups = (op_.num_in + op4_.group - 1) / op4_.group;
    for (int g = 0; g < groups; g++, to += group_bytes(op4_.group, op4_.codes)) {
      const size_t at = static_cast<size_t>(n) * groups + g;
      std::memcpy(to + 2 * c, scales + at, 2);
      if (zeros) {  // what the kernel adds to codes, twice, with outputs c and c + 16 in one lane
        const uint8_t added = 16 - zeros[at];
        std::memset(to + 64 + 4 * (c % 16) + 2 * (c / 16), added, 2);
      }
      if (minimums) std::memcpy(to + 64 + 2 * c, minimums + at, 2);
    }
  }

  // Writes a panel's codes, four inputs of two channels at a time.
  void pack_codes(uint8_t* to, int panel, const uint8_t* codes, bool has_offsets) const {
    const uint8_t* rows[PANEL];
    for (int c = 0; c < PANEL; c++) {
      const int n = channel(panel, c);
      rows[c] = n < 0 ? nullptr : codes + static_cast<size_t>(n) * op_.num_in;
    }
    // A cache line of each row after the other: rows whose length is a power of two would evict each
    // other if they were read side by side.
    constexpr int LINE = 64;
    const int group = op4_.group;
    for (int first = 0; first < op_.num_in; first += LINE) {
      const int count = op_.num_in - first < LINE ? op_.num_in - first : LINE, quads = (count + 3) / 4;
      uint8_t* quad[LINE / 4];
      for (int q = 0; q < quads; q++) {
        const int k = first + 4 * q;
        quad[q] = to + k / group * group_bytes(group, op4_.codes) + (has_offsets ? 128 : 64) + k % group * 16;
      }
      for (int c = 0; c < PANEL / 2; c++) {
        uint8_t low[LINE] = {}, high[LINE] = {};  // codes are below 16
        if (rows[c]) std::memcpy(low, rows[c] + first, count);
        if (rows[c + 16]) std::memcpy(high, rows[c + 16] + first, count);
        for (int i = 0; i < LINE; i++) low[i] |= high[i] << 4;
        for (int q = 0; q < quads; q++) std::memcpy(quad[q] + 4 * c, low + 4 * q, 4);
      }
    }
  }

  LinearInt4 op4_;
};

class PlainLinear : public Linear {
 public:
  // weight: [channels][num_in] of DType `type`, rows `stride` elements apart; bias: fp32, or 0.
  PlainLinear(int num_in, int num_out, uintptr_t weight, size_t stride, int type, uintptr_t bias, int activation,
              bool is_gated)
      : PlainLinear(num_in, num_out, type, bias, activation, is_gated) {
    nb::gil_scoped_release release;
    Team::get().parallel(num_panels_, [&](int panel) { pack(panel, pointer<uint8_t>(weight), stride); });
  }

  PlainLinear(int num_in, int num_out, int type, const Stored& stored, int activation, bool is_gated)
      : PlainLinear(num_in, num_out, type, 0, activation, is_gated, &stored) {}

  size_t bytes() const { return packed_.bytes(); }
  Stored stored() const { return {packed_.span(), {}, bias_.span()}; }
  const void* product() const { return &op_; }

  void run(uintptr_t x, size_t x_stride, int rows, uintptr_t out, size_t out_stride, bool add) const {
    kernels().linear_plain(op_, {pointer<void>(x), x_stride, op_.type}, rows, norm_, pointer<void>(out), out_stride,
                           add);
  }

 private:
  PlainLinear(int num_in, int num_out, int type, uintptr_t bias, int activation, bool is_gated,
              const Stored* stored = nullptr)
      : Linear(num_out, steps(num_in, type) * STEP_BYTES, bias, is_gated, stored) {
    op_ = {packed_.as<uint8_t>(), this->bias(), num_in, num_out, num_panels_, is_gated,
           static_cast<Activation>(activation), static_cast<DType>(type)};
  }

  static constexpr size_t STEP_BYTES = 4 * PANEL;  // four bytes of every output
  static size_t steps(int num_in, int type) {
    return static_cast<DType>(type) == DType::f32 ? num_in : (num_in + 1) / 2;
  }

  void pack(int panel, const uint8_t* weight, size_t stride) {
    const size_t item = op_.type == DType::f32 ? 4 : 2, row_bytes = op_.num_in * item;
    const size_t all = steps(op_.num_in, static_cast<int>(op_.type)), some = 64;
    uint8_t* to = packed_.as<uint8_t>() + panel * all * STEP_BYTES;
    std::memset(to, 0, all * STEP_BYTES);
    for (size_t first = 0; first < all; first += some)  // the steps of one pass stay in cache
      for (int c = 0; c < PANEL; c++) {
        if (channel(panel, c) < 0) continue;
        const uint8_t* row = weight + channel(panel, c) * stride * item;
        for (size_t s = first; s < all && s < first + some; s++) {
          const size_t left = row_bytes - 4 * s;
          std::memcpy(to + s * STEP_BYTES + 4 * c, row + 4 * s, left < 4 ? left : 4);
        }
      }
  }

  LinearPlain op_;
};

// Writes the two codes of each byte, which spread() places in 16 bits.
template <class F>
void unpack_some(const uint8_t* from, size_t count, uint8_t* to, F&& spread) {
  for (size_t i = 0; i < count; i++) {
    const uint16_t pair = static_cast<uint16_t>(spread(from[i]) & 0x0f0f);
    std::memcpy(to + 2 * i, &pair, 2);
  }
}

}  // namespace

void ms::bind_linear(nb::module_& m) {
  m.def("unpack_nibbles", [](uintptr_t from, size_t bytes, bool is_low_first, uintptr_t to) {
    const auto* packed = pointer<uint8_t>(from);
    auto* codes = pointer<uint8_t>(to);
    constexpr size_t SHARE = size_t{1} << 16;
    nb::gil_scoped_release release;
    Team::get().parallel(static_cast<int>((bytes + SHARE - 1) / SHARE), [&](int task) {
      const size_t begin = task * SHARE, end = begin + SHARE < bytes ? begin + SHARE : bytes;
      if (is_low_first)
        unpack_some(packed + begin, end - begin, codes + 2 * begin, [](uint8_t x) { return x | x << 4; });
      else
        unpack_some(packed + begin, end - begin, codes + 2 * begin, [](uint8_t x) { return x >> 4 | x << 8; });
    });
  });
  nb::class_<Int8Linear> int8(m, "Int8Linear");
  int8.def(nb::init<int, int, const std::vector<size_t>&, int, uintptr_t, int, bool>())
      .def(nb::init<int, int, uintptr_t, uintptr_t, uintptr_t, int, bool>());
  with_quantized(int8).def_static("restore", [](int num_in, int num_out, const Spans& spans, int activation,
                                                bool is_gated) {
    return new Int8Linear(num_in, num_out, stored_in(spans), activation, is_gated);
  }, nb::rv_policy::take_ownership);
  nb::class_<Int4Linear> int4(m, "Int4Linear");
  int4.def(nb::init<int, int, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, int, int, uintptr_t, int, bool>())
      .def(nb::init<int, int, const std::vector<size_t>&, int, int, uintptr_t, bool, uintptr_t, int, bool>());
  with_quantized(int4)
      .def_prop_ro("group", &Int4Linear::group)
      .def_prop_ro("codes", &Int4Linear::codes)
      .def_static("restore", [](int num_in, int num_out, int group, int codes, const Spans& spans, int activation,
                                bool is_gated) {
        return new Int4Linear(num_in, num_out, group, codes, stored_in(spans), activation, is_gated);
      }, nb::rv_policy::take_ownership);
  nb::class_<PlainLinear> plain(m, "PlainLinear");
  plain.def(nb::init<int, int, uintptr_t, size_t, int, uintptr_t, int, bool>());
  with_common(plain).def_static("restore", [](int num_in, int num_out, int type, const Spans& spans, int activation,
                                              bool is_gated) {
    return new PlainLinear(num_in, num_out, type, stored_in(spans), activation, is_gated);
  }, nb::rv_policy::take_ownership);
  plain.def("run", &PlainLinear::run, nb::call_guard<nb::gil_scoped_release>());
}
