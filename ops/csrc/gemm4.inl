// Linear layers with 4-bit weights on rows of signed bytes. Included once per instruction set.
//
// y[m, n] = act((sum over groups g of scale[n, g] * sum over k in g of x[m, k] * v[n, k]
//                                     - minimum[n, g] * sum over k in g of x[m, k])
//               * x_scale[m] * channel_scale[n] + bias[n])
//
// A code becomes an unsigned byte in registers: the code itself, the code plus 16 minus its group's zero
// point, or an entry of a table of 16. The sum of a group starts at minus what the bytes have in excess
// (8, 16, 128, or 0 with minimums) times the sum of the group's x. These sums are exact integers; the
// groups are added in fp32 in a fixed order, so a row has the same bits in any batch.
//
// Weights are packed in panels of 32 outputs. A panel has for each group 32 fp16 scales, 64 bytes of zero
// points or 32 fp16 minimums if there are any, and [group / 4][16][4 inputs] bytes, with outputs 0-15 in
// the low nibbles and 16-31 in the high ones. A panel is read from end to end.

namespace MS_ISA {
namespace {

// The NF4 values of QLoRA (arXiv 2305.14314) in 127ths, the FP4 values (e2m1) in halves, and those of IQ4_NL,
// plus 128.
alignas(16) constexpr uint8_t NF4_BYTES[16] = {1,   40,  61,  78,  92,  105, 116, 128,
                                               138, 148, 159, 171, 184, 199, 220, 255};
alignas(16) constexpr uint8_t FP4_BYTES[16] = {128, 129, 130, 131, 132, 134, 136, 140,
                                               128, 127, 126, 125, 124, 122, 120, 116};
alignas(16) constexpr uint8_t IQ4_BYTES[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                               129, 141, 153, 166, 181, 197, 217, 241};
constexpr bool has_table(Codes codes) { return codes == Codes::nf4 || codes == Codes::fp4 || codes == Codes::iq4; }
// Returns the binary order of what the bytes of codes have in excess, or -1 for nothing.
constexpr int offset_bits(Codes codes) {
  if (has_table(codes)) return 7;
  return codes == Codes::with_minimums ? -1 : codes == Codes::centred ? 3 : 4;
}

// Returns the table's byte for each code, bytes of 0..15. The compiler loads a constant table where
// registers are scarce, which is faster than to keep one.
template <const uint8_t (&TABLE)[16]>
MS_INLINE i32x16 table_bytes(i32x16 codes) {
#if defined(__AVX512BW__)
  const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)TABLE));
  return (i32x16)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)TABLE));
  return by_pieces<i32x16>([=](auto v) MS_LAMBDA { return _mm256_shuffle_epi8(table, (__m256i)v); }, codes);
#elif defined(__aarch64__)
  const auto look_up = [](auto v) MS_LAMBDA { return vqtbl1q_u8(load<uint8x16_t>(TABLE), (uint8x16_t)v); };
  return by_pieces<i32x16>(look_up, codes);
#else
  uint8_t bytes[64];
  store(bytes, codes);
  for (int i = 0; i < 64; i++) bytes[i] = TABLE[bytes[i]];
  return load<i32x16>(bytes);
#endif
}

// Converts codes, bytes of 0..15, to their unsigned factors.
template <Codes CODES>
MS_INLINE i32x16 factors(i32x16 codes) {
  if constexpr (CODES == Codes::nf4) return table_bytes<NF4_BYTES>(codes);
  if constexpr (CODES == Codes::fp4) return table_bytes<FP4_BYTES>(codes);
  if constexpr (CODES == Codes::iq4) return table_bytes<IQ4_BYTES>(codes);
  return codes;
}

// Returns what is added to the codes of 32 outputs, in each of a lane's four bytes: 16 minus the zero
// point, which is at most 16. both: as pack_factors in linear.cpp writes it.
MS_INLINE void spread_zeros(i32x16 both, i32x16 (&to)[2]) {
  const i32x16 low = splat_i32(0x0000ffff);
  to[0] = (both & low) | both << 16;
  to[1] = (i32x16)((u32x16)both >> 16) | (both & ~low);
}

// Returns 32 fp16 numbers.
MS_INLINE void read_halves(const uint8_t* from, f32x16 (&to)[2]) {
  to[0] = from_half(reinterpret_cast<const uint16_t*>(from));
  to[1] = from_half(reinterpret_cast<const uint16_t*>(from) + 16);
}

#if defined(MS_PAIRS_OF_BYTES)
// Adds quads to the sums of all rows. weights(h, q): the factors of a half of the panel for quad q.
// Eight products of factors up to 31, of four quads, fit 16 bits, and four of factors up to 63.
template <int QUADS, int MR, class F>
MS_INLINE void add_quads_in_pairs(i32x16 (&sum)[MR][2], const int8_t* x, F&& weights) {
  unroll<2>([&](auto h) MS_LAMBDA {
    i32x16 pairs[MR] = {};
    unroll<QUADS>([&](auto q) MS_LAMBDA {
      const i32x16 w = weights(h, q);
      unroll<MR>([&](auto m) MS_LAMBDA {
        pairs[m] = dot_pairs_u8_i8(pairs[m], w, splat_bytes(x + m * SLICE + 4 * q));
      });
    });
    unroll<MR>([&](auto m) MS_LAMBDA { sum[m][h] = add_pairs(sum[m][h], pairs[m]); });
    forget_loads();
  });
}
constexpr int quads_at_once(Codes codes) { return has_table(codes) ? 1 : 4; }
#else
constexpr int quads_at_once(Codes) { return 1; }
#endif

// Rows of the micro kernel. With 32 registers the results of six rows stay in registers beside the sums
// of a group: unpacking the codes again for more rows costs less than loading and storing results.
constexpr int MAX_ROWS4 = HAS_32_REGISTERS ? 6 : MAX_GROUP;

// Where a micro kernel reads weights, where it prefetches to L1 (CACHE 3) or L2 (CACHE 2), and how far
// that moves on with each cache line of weights.
template <int CACHE>
struct WeightLines {
  const uint8_t *at, *ahead;
  size_t step;

  MS_INLINE void next() {
    __builtin_prefetch(ahead, 0, CACHE);
    ahead += step;
    at += 64;
  }
};

// What a group has beside its codes.
template <Codes CODES>
struct GroupHead {
  f32x16 scale[2], minimum[2];
  i32x16 shift[2];  // added to codes

  template <class Lines>
  MS_INLINE void read(Lines& lines) {
    read_halves(lines.at, scale);
    lines.next();
    if (CODES == Codes::with_zeros) spread_zeros(load<i32x16>(lines.at), shift);
    if (CODES == Codes::with_minimums) read_halves(lines.at, minimum);
    if (CODES == Codes::with_zeros || CODES == Codes::with_minimums) lines.next();
  }

  // Returns the factors of half h of a panel.
  template <int H>
  MS_INLINE i32x16 weights(i32x16 both, std::integral_constant<int, H>) const {
    const i32x16 w = factors<CODES>((i32x16)((u32x16)both >> 4 * H) & splat_i32(0x0f0f0f0f));
    return CODES == Codes::with_zeros ? w + shift[H] : w;
  }
};

// Adds the products of a group's quads to the sums.
template <int MR, Codes CODES, class Lines>
MS_INLINE void add_group(i32x16 (&sum)[MR][2], const GroupHead<CODES>& head, Lines& lines, const int8_t* x,
                         int quads) {
#if defined(MS_PAIRS_OF_BYTES)
  if constexpr (!has_table(CODES)) {
    for (int q = 0; q < quads; q += 4, x += 16) {
      const uint8_t* at = lines.at;
      add_quads_in_pairs<4>(sum, x, [&](auto h, int i) MS_LAMBDA { return head.weights(load<i32x16>(at + 64 * i), h); });
      unroll<4>([&](auto) MS_LAMBDA { lines.next(); });
    }
    return;
  }
#endif
  for (int q = 0; q < quads; q++, x += 4) {
#if defined(MS_AVX_VNNI)
    add_quad(sum, x, [&](auto h) MS_LAMBDA { return head.weights(load<i32x16>(lines.at), h); });
#else
    const i32x16 both = load<i32x16>(lines.at);
    const i32x16 w0 = head.weights(both, std::integral_constant<int, 0>{});
    const i32x16 w1 = head.weights(both, std::integral_constant<int, 1>{});
    unroll<MR>([&](auto m) MS_LAMBDA {
      const i32x16 xs = splat_bytes(x + m * SLICE);
      sum[m][0] = dot_u8_i8(sum[m][0], w0, xs);
      sum[m][1] = dot_u8_i8(sum[m][1], w1, xs);
    });
#endif
    lines.next();
  }
}

// Computes c[MR][32] (+)= x[MR][groups] * w[groups]. negated: minus the group sums of x, [MR][stride].
template <int MR, Codes CODES, int CACHE>
__attribute__((noinline)) void micro4(const uint8_t* w, const int8_t* x, const int32_t* negated, int stride, float* c,
                                      int groups, int quads, bool is_first, const uint8_t* ahead, size_t step) {
  constexpr bool IN_REGISTERS = HAS_32_REGISTERS;
  constexpr int OFFSET_BITS = offset_bits(CODES);
  WeightLines<CACHE> lines{w, ahead, step};
  f32x16 total[MR][2];
  const auto for_totals = [&](auto&& f) MS_LAMBDA {
    unroll<MR>([&](auto m) MS_LAMBDA {
      unroll<2>([&](auto h) MS_LAMBDA { f(total[m][h], c + m * PANEL + 16 * h, m, h); });
    });
  };
  if (IN_REGISTERS)
    for_totals([&](f32x16& y, float* at, int, int) MS_LAMBDA { y = is_first ? f32x16{} : load<f32x16>(at); });
  for (int g = 0; g < groups; g++, negated++, x += 4 * quads) {
    GroupHead<CODES> head;
    head.read(lines);
    i32x16 sum[MR][2] = {};
    if constexpr (OFFSET_BITS > 0)
      unroll<MR>([&](auto m) MS_LAMBDA { sum[m][0] = sum[m][1] = splat_i32(negated[m * stride]) << OFFSET_BITS; });
    add_group(sum, head, lines, x, quads);
    const bool is_fresh = is_first && g == 0;
    for_totals([&](f32x16& y, float* at, int m, int h) MS_LAMBDA {
      if (!IN_REGISTERS) y = is_fresh ? f32x16{} : load<f32x16>(at);
      y = fma(to_float(sum[m][h]), head.scale[h], y);
      if (CODES == Codes::with_minimums) y = fma(to_float(splat_i32(negated[m * stride])), head.minimum[h], y);
      if (!IN_REGISTERS) store(at, y);
    });
  }
  if (IN_REGISTERS) for_totals([&](f32x16& y, float* at, int, int) MS_LAMBDA { store(at, y); });
}

using Micro4 = void (*)(const uint8_t*, const int8_t*, const int32_t*, int, float*, int, int, bool, const uint8_t*,
                        size_t);
struct Micro4Table { Micro4 at[MAX_ROWS4]; };
template <Codes CODES, int CACHE, size_t... I>
constexpr Micro4Table micro4_table(std::index_sequence<I...>) {
  return {{micro4<static_cast<int>(I) + 1, CODES, CACHE>...}};
}
template <int CACHE>
constexpr Micro4Table MICRO4[] = {
    micro4_table<Codes::centred, CACHE>(std::make_index_sequence<MAX_ROWS4>{}),
    micro4_table<Codes::with_zeros, CACHE>(std::make_index_sequence<MAX_ROWS4>{}),
    micro4_table<Codes::with_minimums, CACHE>(std::make_index_sequence<MAX_ROWS4>{}),
    micro4_table<Codes::nf4, CACHE>(std::make_index_sequence<MAX_ROWS4>{}),
    micro4_table<Codes::fp4, CACHE>(std::make_index_sequence<MAX_ROWS4>{}),
    micro4_table<Codes::iq4, CACHE>(std::make_index_sequence<MAX_ROWS4>{}),
};

void panel_rows4(const LinearInt4& op, int panel, int first_row, int rows, const Quantized& x,
                 const int32_t* negated, void* out, size_t out_stride, DType type, bool add) {
  alignas(64) float c[MAX_BLOCK_ROWS * PANEL];
  const int all = op.base.num_in_padded / op.group, per_slice = SLICE / op.group;
  const size_t bytes = group_bytes(op.group, op.codes);
  const uint8_t* w = op.base.packed + static_cast<size_t>(panel) * all * bytes;
  const int parts = (rows + MAX_ROWS4 - 1) / MAX_ROWS4;
  const int codes = static_cast<int>(op.codes);
  for (int g = 0; g < all; g += per_slice) {
    const int some = all - g < per_slice ? all - g : per_slice;
    const uint8_t* slice = w + g * bytes;
    const int8_t* xs = x.values + g / per_slice * x.slice_stride + first_row * SLICE;
    const bool is_last = g + some == all;
    for (int p = 0, m = 0; p < parts; p++) {
      const int mr = (rows - m + parts - p - 1) / (parts - p);
      if (parts > 1 && is_last)
        touch_output(op.base, panel, first_row + m, mr, out, out_stride, type);
      // Weights that are used once are a stream. Otherwise the first two parts prefetch a half each of the
      // slice after the next one, and the others the next rows.
      const Micro4Table& micro = parts > 1 && p < 2 ? MICRO4<2>[codes] : MICRO4<3>[codes];
      const uint8_t* ahead = slice + (parts == 1 ? AHEAD : some * bytes * (4 + p) / 2);
      if (p > 1) ahead = reinterpret_cast<const uint8_t*>(xs + (m + mr) * SLICE);
      micro.at[mr - 1](slice, xs + m * SLICE, negated + (first_row + m) * all + g, all, c + m * PANEL, some,
                       op.group / 4, g == 0, ahead, parts > 1 && p < 2 ? 32 : 64);
      m += mr;
    }
  }
  finish_panel(op.base, c, rows, first_row, panel, x, out, out_stride, type, add);
}

// Computes minus the sum of every group of row m.
MS_INLINE void sum_row_groups(const LinearInt4& op, const Quantized& x, int m, int32_t* negated) {
  const i32x16 ones = splat_i32(0x01010101);
  const int order = op.group == 16 ? 2 : op.group == 32 ? 3 : 4;  // of the lanes of a group
  const int groups = 16 >> order;                                 // that end in 64 inputs
  for (int k = 0; k < op.base.num_in_padded; k += 64) {
    const int8_t* at = x.values + k / SLICE * x.slice_stride + m * SLICE + k % SLICE;
    int32_t lanes[16];
    store(lanes, dot_u8_i8(i32x16{}, ones, load<i32x16>(at)));
    if (k % op.group == 0) std::memset(negated, 0, 4 * groups);
    for (int i = 0; i < 16; i++) negated[i >> order] -= lanes[i];
    if ((k + 64) % op.group == 0) negated += groups;
  }
}

// Computes minus the sum of every group of every row, [rows][groups].
void sum_groups(const LinearInt4& op, const Quantized& x, int rows, int32_t* negated) {
  const int all = op.base.num_in_padded / op.group;
  const int share = 1 + 16384 / op.base.num_in_padded;
  ms::Team::get().parallel((rows + share - 1) / share, [&](int task) {
    for (int m = task * share; m < rows && m < (task + 1) * share; m++)
      sum_row_groups(op, x, m, negated + static_cast<size_t>(m) * all);
  });
}

void linear_int4(const LinearInt4& op, const Quantized& x, int rows, void* out, size_t out_stride,
                 DType type, bool add) {
  List<int32_t> sums(static_cast<size_t>(rows) * (op.base.num_in_padded / op.group));
  sum_groups(op, x, rows, sums.data());
  for_panels(op.base.num_panels, rows, [&](int panel, int first_row, int some) {
    panel_rows4(op, panel, first_row, some, x, sums.data(), out, out_stride, type, add);
  });
}

}  // namespace
}  // namespace MS_ISA
