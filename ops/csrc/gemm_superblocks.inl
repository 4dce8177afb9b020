// Linear layers with weights of 4, 5 and 6 bits in superblocks of 256 inputs, on rows of signed bytes.
// Included once per instruction set.
//
// y[m, n] = act(sum over superblocks b of
//                 (scale[n, b] * sum over groups g of b of step[n, g] * sum over k in g of x[m, k] * v[n, k]
//                  - minimum[n, b] * sum over groups g of b of lift[n, g] * sum over k in g of x[m, k])
//               * x_scale[m] * channel_scale[n] + bias[n])
//
// These are the k-quants and IQ4_XS of GGUF files as they are: steps and lifts are whole numbers of a byte. v
// is the unsigned code with minimums, and without them the code minus half of its range, or a table's value:
// there the sum of a group starts at minus that half, or 128, times the sum of the group's x. The sums of groups and the sum over lifts are
// exact integers, and what is added in fp32 is added in a fixed order, so a row has the same bits in any batch.
//
// Weights are packed in panels of 32 outputs, a panel from end to end in superblocks: 32 fp16 scales,
// 32 fp16 minimums if there are any, steps [groups][32], lifts [groups / 4][2][16 outputs][4 groups],
// and codes in units of lines of 64 bytes (see Unpacked).

namespace MS_ISA {
namespace {

// Returns `yes` where mask has ones and `no` elsewhere.
MS_INLINE i32x16 mix_bits(i32x16 mask, i32x16 yes, i32x16 no) {
#if defined(__AVX512F__)
  return (i32x16)_mm512_ternarylogic_epi32((__m512i)mask, (__m512i)yes, (__m512i)no, 0xca);
#else
  return (yes & mask) | (no & ~mask);
#endif
}
MS_INLINE i32x16 shifted(i32x16 v, int bits) { return (i32x16)((u32x16)v >> bits); }
MS_INLINE i32x16 in_bytes(int byte) { return splat_i32(byte * 0x01010101); }

// A unit has LINES lines of codes of QUADS quads of inputs: for each quad, the codes of outputs 0 to 15
// and of 16 to 31, a byte each. Of codes with 6 bits a byte of a line holds one in its low bits, and the
// high bits of three lines are the fourth; with 5 bits five are in low bits, and three in the high ones.
template <int BITS>
struct Unit;
template <>
struct Unit<4> {
  static constexpr int LINES = 1, QUADS = 1;
  template <int I>
  static MS_INLINE i32x16 codes(const uint8_t* at) {
    return shifted(load<i32x16>(at), 4 * I) & in_bytes(0x0f);
  }
};
template <>
struct Unit<5> {
  static constexpr int LINES = 5, QUADS = 4;
  template <int I>
  static MS_INLINE i32x16 codes(const uint8_t* at) {
    const auto line = [&](int i) MS_LAMBDA { return load<i32x16>(at + 64 * i); };
    i32x16 v;
    if constexpr (I < 5) v = line(I);
    else if constexpr (I < 7) v = mix_bits(in_bytes(0x1c), shifted(line(2 * I - 10), 3), shifted(line(2 * I - 9), 6));
    else v = mix_bits(in_bytes(0x1c), shifted(line(4), 3),
                      mix_bits(in_bytes(0x02), shifted(line(1), 4), shifted(line(3), 5)));
    return v & in_bytes(0x1f);
  }
};
template <>
struct Unit<6> {
  static constexpr int LINES = 3, QUADS = 2;
  template <int I>
  static MS_INLINE i32x16 codes(const uint8_t* at) {
    const auto line = [&](int i) MS_LAMBDA { return load<i32x16>(at + 64 * i); };
    i32x16 v;
    if constexpr (I < 3) v = line(I);
    else v = mix_bits(in_bytes(0x30), shifted(line(0), 2),
                      mix_bits(in_bytes(0x0c), shifted(line(1), 4), shifted(line(2), 6)));
    return v & in_bytes(0x3f);
  }
};

// Returns the factors of the codes I of a unit.
template <Superblock KIND, int I>
MS_INLINE i32x16 unit_factors(const uint8_t* at) {
  const i32x16 codes = Unit<layout_of(KIND).bits>::template codes<I>(at);
  if constexpr (layout_of(KIND).has_table) return table_bytes<IQ4_BYTES>(codes);
  return codes;
}

// Adds the products of a group to its sums.
template <int MR, Superblock KIND, class Lines>
MS_INLINE void add_codes(i32x16 (&sum)[MR][2], Lines& lines, const int8_t* x) {
  constexpr SuperblockLayout LAYOUT = layout_of(KIND);
  using U = Unit<LAYOUT.bits>;
#if defined(MS_PAIRS_OF_BYTES)
  if constexpr (!LAYOUT.has_table) {
    constexpr int QUADS = LAYOUT.bits == 6 ? 2 : 4;
    for (int k = 0; k < LAYOUT.group; k += 4 * QUADS, x += 4 * QUADS) {
      const uint8_t* at = lines.at;
      add_quads_in_pairs<QUADS>(sum, x, [&](auto h, auto q) MS_LAMBDA {
        return U::template codes<q % U::QUADS * 2 + h>(at + 64 * U::LINES * (q / U::QUADS));
      });
      unroll<QUADS / U::QUADS * U::LINES>([&](auto) MS_LAMBDA { lines.next(); });
    }
    return;
  }
#endif
  for (int k = 0; k < LAYOUT.group; k += 4 * U::QUADS, x += 4 * U::QUADS) {
    unroll<U::QUADS>([&](auto q) MS_LAMBDA {
#if defined(MS_AVX_VNNI)
      add_quad(sum, x + 4 * q, [&](auto h) MS_LAMBDA { return unit_factors<KIND, 2 * q + h>(lines.at); });
#else
      const i32x16 w0 = unit_factors<KIND, 2 * q>(lines.at), w1 = unit_factors<KIND, 2 * q + 1>(lines.at);
      unroll<MR>([&](auto m) MS_LAMBDA {
        const i32x16 xs = splat_bytes(x + 4 * q + m * SLICE);
        sum[m][0] = dot_u8_i8(sum[m][0], w0, xs);
        sum[m][1] = dot_u8_i8(sum[m][1], w1, xs);
      });
#endif
    });
    unroll<U::LINES>([&](auto) MS_LAMBDA { lines.next(); });
  }
}

// Computes c[MR][32] (+)= x[MR][blocks] * w[blocks]. sums: of each row, as sum_row_superblocks writes them.
template <int MR, Superblock KIND, int CACHE>
__attribute__((noinline)) void micro_superblocks(const uint8_t* w, const int8_t* x, const int32_t* sums, int stride,
                                                 float* c, int blocks, bool is_first, const uint8_t* ahead,
                                                 size_t step) {
  constexpr SuperblockLayout LAYOUT = layout_of(KIND);
  constexpr int GROUPS = LAYOUT.groups();
  WeightLines<CACHE> lines{w, ahead, step};
  for (int b = 0; b < blocks; b++, is_first = false, sums += LAYOUT.sums()) {
    const uint8_t* scales = lines.at;
    const uint8_t* steps = scales + (LAYOUT.has_minimums ? 128 : 64);
    unroll<LAYOUT.head_bytes() / 64>([&](auto) MS_LAMBDA { lines.next(); });
    f32x16 total[MR][2] = {};
    for (int g = 0; g < GROUPS; g++, steps += PANEL, x += LAYOUT.group) {
      i32x16 sum[MR][2] = {};
      if constexpr (!LAYOUT.has_minimums)
        unroll<MR>([&](auto m) MS_LAMBDA { sum[m][0] = sum[m][1] = splat_i32(sums[m * stride + g]); });
      add_codes<MR, KIND>(sum, lines, x);
      unroll<2>([&](auto h) MS_LAMBDA {
        const f32x16 factor = to_float(from_i8(reinterpret_cast<const int8_t*>(steps) + 16 * h));
        unroll<MR>([&](auto m) MS_LAMBDA { total[m][h] = fma(to_float(sum[m][h]), factor, total[m][h]); });
      });
    }
    unroll<2>([&](auto h) MS_LAMBDA {
      const f32x16 scale = from_half(reinterpret_cast<const uint16_t*>(scales) + 16 * h);
      unroll<MR>([&](auto m) MS_LAMBDA {
        float* at = c + m * PANEL + 16 * h;
        f32x16 y = fma(total[m][h], scale, is_first ? f32x16{} : load<f32x16>(at));
        if constexpr (LAYOUT.has_minimums) {
          const uint8_t* lifts = scales + 128 + GROUPS * PANEL + 64 * h;
          i32x16 high = {}, low = {};
          unroll<GROUPS / 4>([&](auto q) MS_LAMBDA {
            const i32x16 lift = load<i32x16>(lifts + 128 * q);
            high = dot_u8_i8(high, lift, splat_i32(sums[m * stride + q]));
            low = dot_u8_i8(low, lift, splat_i32(sums[m * stride + GROUPS / 4 + q]));
          });
          y = fma(to_float((high << 7) + low), from_half(reinterpret_cast<const uint16_t*>(scales + 64) + 16 * h), y);
        }
        store(at, y);
      });
    });
  }
}

using MicroSuperblocks = void (*)(const uint8_t*, const int8_t*, const int32_t*, int, float*, int, bool, const uint8_t*,
                                  size_t);
struct SuperblockTable { MicroSuperblocks at[MAX_ROWS4]; };
template <Superblock KIND, int CACHE, size_t... I>
constexpr SuperblockTable superblock_table(std::index_sequence<I...>) {
  return {{micro_superblocks<static_cast<int>(I) + 1, KIND, CACHE>...}};
}
template <int CACHE>
constexpr SuperblockTable MICRO_SUPERBLOCKS[] = {
    superblock_table<Superblock::q4_k, CACHE>(std::make_index_sequence<MAX_ROWS4>{}),
    superblock_table<Superblock::q5_k, CACHE>(std::make_index_sequence<MAX_ROWS4>{}),
    superblock_table<Superblock::q6_k, CACHE>(std::make_index_sequence<MAX_ROWS4>{}),
    superblock_table<Superblock::iq4_xs, CACHE>(std::make_index_sequence<MAX_ROWS4>{}),
};

// Returns how many numbers sum_row_superblocks writes.
MS_INLINE int sums_of_a_row(const LinearSuperblocks& op) {
  return op.base.num_in_padded / SUPERBLOCK * layout_of(op.kind).sums();
}

void panel_rows_superblocks(const LinearSuperblocks& op, int panel, int first_row, int rows, const Quantized& x,
                            const int32_t* sums, void* out, size_t out_stride, DType type, bool add) {
  alignas(64) float c[MAX_BLOCK_ROWS * PANEL];
  const SuperblockLayout layout = layout_of(op.kind);
  const int all = op.base.num_in_padded / SUPERBLOCK, per_slice = SLICE / SUPERBLOCK, stride = sums_of_a_row(op);
  const size_t bytes = layout.bytes();
  const uint8_t* w = op.base.packed + static_cast<size_t>(panel) * all * bytes;
  const int parts = (rows + MAX_ROWS4 - 1) / MAX_ROWS4, kind = static_cast<int>(op.kind);
  for (int b = 0; b < all; b += per_slice) {
    const int some = all - b < per_slice ? all - b : per_slice;
    const uint8_t* slice = w + b * bytes;
    const int8_t* xs = x.values + b / per_slice * x.slice_stride + first_row * SLICE;
    for (int p = 0, m = 0; p < parts; p++) {
      const int mr = (rows - m + parts - p - 1) / (parts - p);
      if (parts > 1 && b + some == all) touch_output(op.base, panel, first_row + m, mr, out, out_stride, type);
      // as in panel_rows4
      const bool reads_next = parts > 1 && p < 2;
      const uint8_t* ahead = slice + (parts == 1 ? NEAR : some * bytes * (4 + p) / 2);
      if (p > 1) ahead = reinterpret_cast<const uint8_t*>(xs + (m + mr) * SLICE);
      (reads_next ? MICRO_SUPERBLOCKS<2> : MICRO_SUPERBLOCKS<3>)[kind].at[mr - 1](
          slice, xs + m * SLICE, sums + static_cast<size_t>(first_row + m) * stride + b * layout.sums(), stride,
          c + m * PANEL, some, b == 0, ahead, reads_next ? 32 : 64);
      m += mr;
    }
  }
  finish_panel(op.base, c, rows, first_row, panel, x, out, out_stride, type, add);
}

// Computes what the kernel takes of the sums of row m's groups, negated: with minimums [superblocks][2]
// [groups / 4] times four signed bytes, the multiples of 128 and the rests; without them [groups] times
// what the factors of codes have in excess.
MS_INLINE void sum_row_superblocks(const LinearSuperblocks& op, const Quantized& x, int m, int32_t* to) {
  const SuperblockLayout layout = layout_of(op.kind);
  const i32x16 ones = in_bytes(1);
  const int lanes_each = layout.group / 4, groups = layout.groups();
  for (int k = 0; k < op.base.num_in_padded; k += SUPERBLOCK, to += layout.sums()) {
    const int8_t* at = x.values + k / SLICE * x.slice_stride + m * SLICE + k % SLICE;
    int32_t lanes[SUPERBLOCK / 4], negated[SUPERBLOCK / 16] = {};
    for (int i = 0; i < SUPERBLOCK; i += 64) store(lanes + i / 4, dot_u8_i8(i32x16{}, ones, load<i32x16>(at + i)));
    for (int i = 0; i < SUPERBLOCK / 4; i++) negated[i / lanes_each] -= lanes[i];
    auto* high = reinterpret_cast<int8_t*>(to);
    for (int g = 0; g < groups; g++) {
      if (!layout.has_minimums) {
        to[g] = negated[g] * (1 << layout.offset_bits());
        continue;
      }
      const int low = (negated[g] + 64 & 127) - 64;
      high[g] = static_cast<int8_t>((negated[g] - low) / 128);
      high[groups + g] = static_cast<int8_t>(low);
    }
  }
}

void linear_superblocks(const LinearSuperblocks& op, const Quantized& x, int rows, void* out, size_t out_stride,
                        DType type, bool add) {
  const int stride = sums_of_a_row(op);
  List<int32_t> sums(static_cast<size_t>(rows) * stride);
  const int share = 1 + 16384 / op.base.num_in_padded;
  ms::Team::get().parallel((rows + share - 1) / share, [&](int task) {
    for (int m = task * share; m < rows && m < (task + 1) * share; m++)
      sum_row_superblocks(op, x, m, sums.data() + static_cast<size_t>(m) * stride);
  });
  for_panels(op.base.num_panels, rows, [&](int panel, int first_row, int some) {
    panel_rows_superblocks(op, panel, first_row, some, x, sums.data(), out, out_stride, type, add);
  });
}

}  // namespace
}  // namespace MS_ISA
