// Binds linear layers with weights in superblocks, k-quants and IQ4_XS of GGUF files (gemm_superblocks.inl).
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <vector>

#include "layers.h"
#include "team.h"

namespace nb = nanobind;
using namespace ms;

namespace {

// The parts of the weights, each [channels][...]; minimums and lifts are null for kinds without them.
struct Parts {
  const uint8_t* codes;      // [num_in] bytes
  const uint16_t* scales;    // [superblocks] fp16
  const uint8_t* steps;      // [groups]
  const uint16_t* minimums;  // [superblocks] fp16
  const uint8_t* lifts;      // [groups]
};

// Writes the codes of 32 outputs and 256 inputs in the units of gemm_superblocks.inl, four inputs at a time.
void pack_codes(const uint8_t (&codes)[PANEL][SUPERBLOCK], int bits, uint8_t* to) {
  const int lines = bits == 4 ? 1 : bits == 5 ? 5 : 3, quads = bits == 4 ? 1 : bits == 5 ? 4 : 2;
  for (int k = 0; k < SUPERBLOCK; k += 4 * quads, to += 64 * lines)
    for (int lane = 0; lane < 16; lane++) {
      uint32_t c[8];
      for (int i = 0; i < 2 * quads; i++) std::memcpy(c + i, codes[lane + i % 2 * 16] + k + i / 2 * 4, 4);
      if (bits == 4) {
        c[0] |= c[1] << 4;
      } else if (bits == 5) {
        c[0] |= (c[5] & 0x1c1c1c1cu) << 3;
        c[1] |= (c[5] & 0x03030303u) << 6 | (c[7] & 0x02020202u) << 4;
        c[2] |= (c[6] & 0x1c1c1c1cu) << 3;
        c[3] |= (c[6] & 0x03030303u) << 6 | (c[7] & 0x01010101u) << 5;
        c[4] |= (c[7] & 0x1c1c1c1cu) << 3;
      } else {
        c[0] |= (c[3] & 0x30303030u) << 2;
        c[1] |= (c[3] & 0x0c0c0c0cu) << 4;
        c[2] |= (c[3] & 0x03030303u) << 6;
      }
      for (int i = 0; i < lines; i++) std::memcpy(to + 64 * i + 4 * lane, c + i, 4);
    }
}

class SuperblockLinear : public QuantizedLinear {
 public:
  // kind: the number in the enumeration Superblock; parts: the addresses in Parts; channel_scales: [channels]
  // fp32. Codes are below 2^bits, and num_in is a multiple of SUPERBLOCK.
  SuperblockLinear(int num_in, int num_out, int kind, const std::vector<uintptr_t>& parts, uintptr_t channel_scales,
                   uintptr_t bias, int activation, bool is_gated)
      : SuperblockLinear(num_in, num_out, checked(kind, num_in), bias, activation, is_gated, nullptr) {
    if (parts.size() != 5) throw nb::value_error("weights in superblocks have five parts");
    const Parts from{pointer<uint8_t>(parts[0]), pointer<uint16_t>(parts[1]), pointer<uint8_t>(parts[2]),
                     pointer<uint16_t>(parts[3]), pointer<uint8_t>(parts[4])};
    nb::gil_scoped_release release;
    spread(pointer<float>(channel_scales), scales_.as<float>());
    const int all = num_in / SUPERBLOCK;
    const size_t bytes = layout_of(superblocks_.kind).bytes();
    Team::get().parallel(op_.num_panels, [&](int panel) {
      uint8_t* to = packed_.as<uint8_t>() + panel * bytes * all;
      for (int b = 0; b < all; b++, to += bytes) pack(from, panel, b, to);
    });
  }

  SuperblockLinear(int num_in, int num_out, int kind, const Stored& stored, int activation, bool is_gated)
      : SuperblockLinear(num_in, num_out, checked(kind, num_in), 0, activation, is_gated, &stored) {}

  int kind() const { return static_cast<int>(superblocks_.kind); }
  const void* product() const { return &superblocks_; }
  void multiply(const Quantized& x, int rows, void* out, size_t out_stride, DType type, bool add) const {
    kernels().linear_superblocks(superblocks_, x, rows, out, out_stride, type, add);
  }

 private:
  SuperblockLinear(int num_in, int num_out, Superblock kind, uintptr_t bias, int activation, bool is_gated,
                   const Stored* stored)
      : QuantizedLinear(num_in, num_out, SUPERBLOCK, num_in / SUPERBLOCK * layout_of(kind).bytes(), bias, activation,
                        is_gated, stored),
        superblocks_{op_, kind} {}

  static Superblock checked(int kind, int num_in) {
    if (kind < 0 || kind >= NUM_SUPERBLOCK_KINDS) throw nb::value_error("there is no such kind of superblocks");
    if (num_in <= 0 || num_in % SUPERBLOCK) throw nb::value_error("the inputs are no whole superblocks");
    return static_cast<Superblock>(kind);
  }

  // Writes superblock b of a panel.
  void pack(const Parts& from, int panel, int b, uint8_t* to) const {
    const SuperblockLayout layout = layout_of(superblocks_.kind);
    const int groups = layout.groups(), all = op_.num_in / SUPERBLOCK;
    uint8_t codes[PANEL][SUPERBLOCK] = {};
    std::memset(to, 0, layout.head_bytes());
    uint8_t* steps = to + (layout.has_minimums ? 128 : 64);
    for (int c = 0; c < PANEL; c++) {
      const int n = channel(panel, c);
      if (n < 0) continue;
      const size_t at = static_cast<size_t>(n) * all + b;
      std::memcpy(codes[c], from.codes + at * SUPERBLOCK, SUPERBLOCK);
      std::memcpy(to + 2 * c, from.scales + at, 2);
      for (int g = 0; g < groups; g++) steps[g * PANEL + c] = from.steps[at * groups + g];
      if (!layout.has_minimums) continue;
      std::memcpy(to + 64 + 2 * c, from.minimums + at, 2);
      uint8_t* lifts = steps + groups * PANEL + c / 16 * 64 + c % 16 * 4;
      for (int g = 0; g < groups; g++) lifts[g / 4 * 128 + g % 4] = from.lifts[at * groups + g];
    }
    pack_codes(codes, layout.bits, to + layout.head_bytes());
  }

  LinearSuperblocks superblocks_;
};

}  // namespace

void ms::bind_superblocks(nb::module_& m) {
  nb::class_<SuperblockLinear> superblocks(m, "SuperblockLinear");
  superblocks.def(nb::init<int, int, int, const std::vector<uintptr_t>&, uintptr_t, uintptr_t, int, bool>());
  with_quantized(superblocks)
      .def_prop_ro("kind", &SuperblockLinear::kind)
      .def_static("restore", [](int num_in, int num_out, int kind, const Spans& spans, int activation, bool is_gated) {
        return new SuperblockLinear(num_in, num_out, kind, stored_in(spans), activation, is_gated);
      }, nb::rv_policy::take_ownership);
}
