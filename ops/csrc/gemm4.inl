// Linear layers with 4-bit weights on rows of signed bytes. Included once per instruction set.
//
// y[m, n] = act((sum over groups g of scale[n, g] * sum over k in g of x[m, k] * v[n, k]
//                                     - minimum[n, g] * sum over k in g of x[m, k])
//               * x_scale[m] * channel_scale[n] + bias[n])
//
// A code becomes an unsigned byte in registers: the code itself, or an entry of a table of 16. The
// sum of a group starts at minus its offset (8, the zero point, 0 or 128) times the sum of the
// group's x. These sums are exact integers; the groups are added in fp32 in a fixed order, so a row
// has the same bits in any batch.
//
// Weights are packed in panels of 32 outputs. A panel has for each group 32 fp16 scales, 32 int16
// zero points or fp16 minimums if there are any, and [group / 4][16][4 inputs] bytes, with outputs
// 0-15 in the low nibbles and 16-31 in the high ones. A panel is read from end to end.

namespace MS_ISA {
namespace {

// The NF4 values of QLoRA (arXiv 2305.14314) in 127ths and the FP4 values (e2m1) in halves, plus 128.
alignas(16) constexpr uint8_t NF4_BYTES[16] = {1,   40,  61,  78,  92,  105, 116, 128,
                                               138, 148, 159, 171, 184, 199, 220, 255};
alignas(16) constexpr uint8_t FP4_BYTES[16] = {128, 129, 130, 131, 132, 134, 136, 140,
                                               128, 127, 126, 125, 124, 122, 120, 116};
constexpr bool has_table(Codes codes) { return codes == Codes::nf4 || codes == Codes::fp4; }

// Converts codes, bytes of 0..15, to their unsigned factors. The compiler loads a constant table where
// registers are scarce, which is faster than to keep one.
template <Codes CODES>
MS_INLINE i32x16 factors(i32x16 codes) {
  if (!has_table(CODES)) return codes;
  constexpr const uint8_t(&TABLE)[16] = CODES == Codes::nf4 ? NF4_BYTES : FP4_BYTES;
#if defined(__AVX512BW__)
  const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)TABLE));
  return (i32x16)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)TABLE));
  return by_pieces<i32x16>([=](auto v) MS_LAMBDA { return _mm256_shuffle_epi8(table, (__m256i)v); }, codes);
#elif defined(__aarch64__)
  return by_pieces<i32x16>([](auto v) MS_LAMBDA { return vqtbl1q_u8(load<uint8x16_t>(TABLE), (uint8x16_t)v); }, codes);
#else
  uint8_t bytes[64];
  store(bytes, codes);
  for (int i = 0; i < 64; i++) bytes[i] = TABLE[bytes[i]];
  return load<i32x16>(bytes);
#endif
}

// Returns 32 fp16 numbers.
MS_INLINE void read_halves(const uint8_t* from, f32x16 (&to)[2]) {
  to[0] = from_half(reinterpret_cast<const uint16_t*>(from));
  to[1] = from_half(reinterpret_cast<const uint16_t*>(from) + 16);
}

// The most rows whose results are in registers beside the sums of a group. More rows share the
// unpacked weights; with groups of up to 32 that saves less than the loads and stores of results cost.
constexpr int ROWS_IN_REGISTERS = HAS_32_REGISTERS ? 6 : 0;

// Computes c[MR][32] (+)= x[MR][groups] * w[groups]. sums: the group sums of x, [MR][sums_stride].
template <int MR, Codes CODES>
__attribute__((noinline)) void micro4(const uint8_t* w, const int8_t* x, const int32_t* sums,
                                      int sums_stride, float* c, int groups, int quads,
                                      bool is_first, const uint8_t* next) {
  constexpr bool IN_REGISTERS = MR <= ROWS_IN_REGISTERS;
  const i32x16 low = splat_i32(0x0f0f0f0f);
  f32x16 total[MR][2];
  const auto for_totals = [&](auto&& f) MS_LAMBDA {
    unroll<MR>([&](auto m) MS_LAMBDA {
      unroll<2>([&](auto h) MS_LAMBDA { f(total[m][h], c + m * PANEL + 16 * h, m, h); });
    });
  };
  if (IN_REGISTERS)
    for_totals([&](f32x16& y, float* at, int, int) MS_LAMBDA { y = is_first ? f32x16{} : load<f32x16>(at); });
  for (int g = 0; g < groups; g++) {
    f32x16 scale[2];
    read_halves(w, scale);
    w += 64;
    const uint8_t* minimums = w;
    i32x16 sum[MR][2];
    if (CODES == Codes::with_zeros) {
      const i32x16 zero[2] = {MS_WIDEN(i32x16, i16x16, w), MS_WIDEN(i32x16, i16x16, w + 32)};
      w += 64;
      unroll<MR>([&](auto m) MS_LAMBDA {
        const i32x16 xs = splat_i32(-sums[m * sums_stride + g]);
        sum[m][0] = zero[0] * xs, sum[m][1] = zero[1] * xs;
      });
    } else if (CODES == Codes::with_minimums) {
      w += 64;
      unroll<MR>([&](auto m) MS_LAMBDA { sum[m][0] = sum[m][1] = i32x16{}; });
    } else {
      constexpr int ADDED = has_table(CODES) ? 128 : 8;
      unroll<MR>([&](auto m) MS_LAMBDA {
        sum[m][0] = sum[m][1] = splat_i32(-ADDED * sums[m * sums_stride + g]);
      });
    }
    for (int q = 0; q < quads; q++) {
#if defined(MS_AVX_VNNI)
      add_quad(sum, x, [&](auto h) MS_LAMBDA {
        return factors<CODES>((i32x16)((u32x16)load<i32x16>(w) >> 4 * h) & low);
      });
#else
      const i32x16 both = load<i32x16>(w);
      const i32x16 w0 = factors<CODES>(both & low);
      const i32x16 w1 = factors<CODES>((i32x16)((u32x16)both >> 4) & low);
      unroll<MR>([&](auto m) MS_LAMBDA {
        const i32x16 xs = splat_bytes(x + m * SLICE);
        sum[m][0] = dot_u8_i8(sum[m][0], w0, xs);
        sum[m][1] = dot_u8_i8(sum[m][1], w1, xs);
      });
#endif
      w += 64;
      x += 4;
      prefetch(next);
      next += 64;
    }
    f32x16 minimum[2];
    if (CODES == Codes::with_minimums) read_halves(minimums, minimum);
    const bool is_fresh = is_first && g == 0;
    for_totals([&](f32x16& y, float* at, int m, int h) MS_LAMBDA {
      if (!IN_REGISTERS) y = is_fresh ? f32x16{} : load<f32x16>(at);
      y = fma(to_float(sum[m][h]), scale[h], y);
      if (CODES == Codes::with_minimums)
        y = fma(splat(static_cast<float>(-sums[m * sums_stride + g])), minimum[h], y);
      if (!IN_REGISTERS) store(at, y);
    });
  }
  if (IN_REGISTERS) for_totals([&](f32x16& y, float* at, int, int) MS_LAMBDA { store(at, y); });
}

using Micro4 = void (*)(const uint8_t*, const int8_t*, const int32_t*, int, float*, int, int, bool,
                        const uint8_t*);
struct Micro4Table { Micro4 at[MAX_GROUP]; };
template <Codes CODES, size_t... I>
constexpr Micro4Table micro4_table(std::index_sequence<I...>) {
  return {{micro4<static_cast<int>(I) + 1, CODES>...}};
}
constexpr Micro4Table MICRO4[5] = {
    micro4_table<Codes::centred>(std::make_index_sequence<MAX_GROUP>{}),
    micro4_table<Codes::with_zeros>(std::make_index_sequence<MAX_GROUP>{}),
    micro4_table<Codes::with_minimums>(std::make_index_sequence<MAX_GROUP>{}),
    micro4_table<Codes::nf4>(std::make_index_sequence<MAX_GROUP>{}),
    micro4_table<Codes::fp4>(std::make_index_sequence<MAX_GROUP>{}),
};

void panel_rows4(const LinearInt4& op, int panel, int first_row, int rows, const Quantized& x,
                 const int32_t* sums, void* out, size_t out_stride, DType type, bool add) {
  alignas(64) float c[MAX_BLOCK_ROWS * PANEL];
  const int all = op.base.num_in_padded / op.group, per_slice = SLICE / op.group;
  const size_t bytes = group_bytes(op.group, op.codes);
  const uint8_t* w = op.base.packed + static_cast<size_t>(panel) * all * bytes;
  // Rows that fit the micro kernel stay together, as it then reads the weights as one stream.
  const int most = HAS_32_REGISTERS && op.group <= 32 && rows > MAX_GROUP ? ROWS_IN_REGISTERS : MAX_GROUP;
  const int parts = (rows + most - 1) / most;
  const Micro4Table& micro = MICRO4[static_cast<int>(op.codes)];
  for (int g = 0; g < all; g += per_slice) {
    const int some = all - g < per_slice ? all - g : per_slice;
    const uint8_t* slice = w + g * bytes;
    const int8_t* xs = x.values + g / per_slice * x.slice_stride + first_row * SLICE;
    const bool is_last = g + some == all;
    for (int p = 0, m = 0; p < parts; p++) {
      const int mr = (rows - m + parts - p - 1) / (parts - p);
      if (parts > 1 && is_last)
        touch_output(op.base, panel, first_row + m, mr, out, out_stride, type);
      // Weights that are used once are a stream; otherwise the first rows prefetch the next slice.
      const uint8_t* next = slice + (parts == 1 ? AHEAD : some * bytes);
      if (p > 0) next = reinterpret_cast<const uint8_t*>(xs + (m + mr) * SLICE);
      micro.at[mr - 1](slice, xs + m * SLICE, sums + (first_row + m) * all + g, all, c + m * PANEL,
                       some, op.group / 4, g == 0, next);
      m += mr;
    }
  }
  finish_panel(op.base, c, rows, first_row, panel, x, out, out_stride, type, add);
}

// Computes the sum of every group of row m.
MS_INLINE void sum_row_groups(const LinearInt4& op, const Quantized& x, int m, int32_t* sums) {
  const int all = op.base.num_in_padded / op.group;
  for (int g = 0; g < all; g++) {
    const int k = g * op.group;
    const int8_t* at = x.values + k / SLICE * x.slice_stride + m * SLICE + k % SLICE;
    i32x16 sum = {};
    for (int i = 0; i < op.group; i += 16)
      sum += MS_WIDEN(i32x16, i8x16, at + i);
    sums[g] = reduce_add(sum);
  }
}

// Computes the sum of every group of every row, [rows][groups].
void sum_groups(const LinearInt4& op, const Quantized& x, int rows, int32_t* sums) {
  const int all = op.base.num_in_padded / op.group;
  const int share = 1 + 16384 / op.base.num_in_padded;
  ms::Team::get().parallel((rows + share - 1) / share, [&](int task) {
    for (int m = task * share; m < rows && m < (task + 1) * share; m++)
      sum_row_groups(op, x, m, sums + static_cast<size_t>(m) * all);
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
