// Linear layers on bf16 and fp32 weights. Included once per instruction set.
//
// y[m, n] = act(sum over k of x[m, k] * w[n, k] + bias[n]) (+ residual), in fp32. With bf16 weights
// the product, the activation and its product with the gated factor or sum with the residual are
// each rounded to bf16, as separate operators would round them.
//
// Weights are packed in panels of 32 outputs in steps of 128 bytes, [N/32][steps][32 outputs][inputs
// of a step]: one input in fp32, a pair in bf16. An output is one chain of sums over the steps, first
// to last, for any number of rows, so a row has the same bits in any batch. Rows and slices of the
// inputs are divided as in gemm.inl.

namespace MS_ISA {
namespace {

constexpr int PLAIN_GROUP = HAS_32_REGISTERS ? 12 : 3;  // rows of the micro kernel
constexpr int SLICE_STEPS = 128;  // 16 KiB of weights

// One register of outputs. GCC would keep sixteen lanes in two registers in memory.
#if defined(__AVX2__) && !defined(__AVX512F__)
typedef float Part __attribute__((vector_size(32)));
typedef uint32_t PartBits __attribute__((vector_size(32)));
MS_INLINE Part fma_part(Part a, Part b, Part c) { return (Part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#else
typedef f32x16 Part;
typedef u32x16 PartBits;
MS_INLINE Part fma_part(Part a, Part b, Part c) { return fma(a, b, c); }
#endif
constexpr int PARTS = PANEL * 4 / sizeof(Part), LANES_OF_PART = PANEL / PARTS;
MS_INLINE PartBits splat_part(const char* four) {
  uint32_t x;
  std::memcpy(&x, four, 4);
  return PartBits{} + x;
}
template <class V>
MS_INLINE V part_of(const void* panel, int p) { return load<V>(static_cast<const char*>(panel) + p * sizeof(V)); }

// A Step type multiplies one step and defines how rows are stored for it, slice by slice.
struct StepF32 {
  using Input = float;
  static constexpr DType TYPE = DType::f32;
  static constexpr int INPUTS = 1;
  static constexpr int ROW_BYTES = SLICE_STEPS * 4;
  template <int MR>
  static MS_INLINE void add(Part (&sum)[MR][PARTS], const uint8_t* w, const char* x) {
    Part ws[PARTS];
    unroll<PARTS>([&](auto p) MS_LAMBDA { ws[p] = part_of<Part>(w, p); });
    unroll<MR>([&](auto m) MS_LAMBDA {
      const Part xs = (Part)splat_part(x + m * ROW_BYTES);
      unroll<PARTS>([&](auto p) MS_LAMBDA { sum[m][p] = fma_part(ws[p], xs, sum[m][p]); });
    });
  }
  static MS_INLINE void put(Input* to, f32x16 x) { store(to, x); }
};

// bf16 without an instruction for it: weights are widened when they are read, rows kept as floats.
struct StepWide {
  using Input = float;
  static constexpr DType TYPE = DType::bf16;
  static constexpr int INPUTS = 2;
  static constexpr int ROW_BYTES = SLICE_STEPS * 8;
  template <int MR>
  static MS_INLINE void add(Part (&sum)[MR][PARTS], const uint8_t* w, const char* x) {
    unroll<PARTS>([&](auto p) MS_LAMBDA {
      const PartBits both = part_of<PartBits>(w, p);
      const Part even = (Part)(both << 16), odd = (Part)(both & 0xffff0000u);
      unroll<MR>([&](auto m) MS_LAMBDA {
        const char* at = x + m * ROW_BYTES;
        sum[m][p] = fma_part(even, (Part)splat_part(at), sum[m][p]);
        sum[m][p] = fma_part(odd, (Part)splat_part(at + 4), sum[m][p]);
      });
    });
  }
  static MS_INLINE void put(Input* to, f32x16 x) { store(to, round_bf16(x)); }
};

#if defined(__AVX512BF16__)
struct StepPairs {
  using Input = uint16_t;
  static constexpr DType TYPE = DType::bf16;
  static constexpr int INPUTS = 2;
  static constexpr int ROW_BYTES = SLICE_STEPS * 4;
  template <int MR>
  static MS_INLINE void add(Part (&sum)[MR][PARTS], const uint8_t* w, const char* x) {
    const __m512bh w0 = (__m512bh)part_of<Part>(w, 0), w1 = (__m512bh)part_of<Part>(w, 1);
    unroll<MR>([&](auto m) MS_LAMBDA {
      const __m512bh xs = (__m512bh)splat_part(x + m * ROW_BYTES);
      sum[m][0] = (Part)_mm512_dpbf16_ps((__m512)sum[m][0], w0, xs);
      sum[m][1] = (Part)_mm512_dpbf16_ps((__m512)sum[m][1], w1, xs);
    });
  }
  static MS_INLINE void put(Input* to, f32x16 x) { to_bf16(to, x); }
};
#endif

// Computes c[MR][32] (+)= x[MR][steps] * w[steps][32]. Each step of a stream prefetches two lines of
// weights; otherwise one, to L1 (CACHE 3) or to L2 (CACHE 2), and one of the next rows.
template <class S, int MR, bool IS_STREAM, int CACHE>
__attribute__((noinline)) void micro_plain(const uint8_t* w, const char* x, float* c, int steps,
                                           bool is_first, const void* next, const char* next_rows) {
  Part sum[MR][PARTS];
  unroll<MR * PARTS>([&](auto i) MS_LAMBDA {
    sum[i / PARTS][i % PARTS] = is_first ? Part{} : load<Part>(c + i * LANES_OF_PART);
  });
  const char* ahead = static_cast<const char*>(next);
  for (int s = 0; s < steps; s++) {
    S::template add<MR>(sum, w, x);
    w += 128;
    x += S::ROW_BYTES / SLICE_STEPS;
    __builtin_prefetch(ahead, 0, CACHE);
    prefetch(IS_STREAM ? ahead + 64 : next_rows);
    ahead += IS_STREAM ? 128 : 64;
    next_rows += 64;
  }
  unroll<MR * PARTS>([&](auto i) MS_LAMBDA { store(c + i * LANES_OF_PART, sum[i / PARTS][i % PARTS]); });
}

using MicroPlain = void (*)(const uint8_t*, const char*, float*, int, bool, const void*, const char*);
struct MicroPlainTable { MicroPlain at[PLAIN_GROUP]; };
template <class S, bool IS_STREAM, int CACHE, size_t... I>
constexpr MicroPlainTable micro_plain_table(std::index_sequence<I...>) {
  return {{micro_plain<S, static_cast<int>(I) + 1, IS_STREAM, CACHE>...}};
}
template <class S, bool IS_STREAM, int CACHE>
constexpr MicroPlainTable MICRO_PLAIN =
    micro_plain_table<S, IS_STREAM, CACHE>(std::make_index_sequence<PLAIN_GROUP>{});

// The normalized rows of a layer: [slice][row][ROW_BYTES].
struct PackedRows {
  char* values;
  size_t slice_stride;  // bytes
};

template <class S, NormKind KIND>
__attribute__((noinline)) void pack_row(const void* row, size_t next_row, int n, const Norm& norm,
                                        char* to, size_t slice_stride) {
  constexpr int SLICE_INPUTS = SLICE_STEPS * S::INPUTS;
  float mean = 0.0f, inverse = 1.0f;
  if (KIND != NormKind::none) moments<S::TYPE, KIND>(row, n, norm.eps, mean, inverse);
  const char* next = static_cast<const char*>(row) + next_row;
  for_row<S::TYPE>(row, n, [&](int k, f32x16 x, auto) MS_LAMBDA {
    prefetch(next + k * (S::TYPE == DType::f32 ? 4 : 2));
    auto* at = reinterpret_cast<typename S::Input*>(to + k / SLICE_INPUTS * slice_stride);
    S::put(at + k % SLICE_INPUTS, normed<KIND>(x, k, n, norm, mean, inverse));
  });
}

template <class S>
void pack_rows(const Rows& in, int rows, int num_in, const Norm& norm, const PackedRows& to) {
  constexpr decltype(&pack_row<S, NormKind::none>) BY_KIND[3] = {
      pack_row<S, NormKind::none>, pack_row<S, NormKind::rms>, pack_row<S, NormKind::layer>};
  const auto pack = BY_KIND[static_cast<int>(norm.kind)];
  const size_t row_bytes = in.stride * (S::TYPE == DType::f32 ? 4 : 2);
  // One share takes a few microseconds.
  const int share = num_in > 16384 ? 1 : 16384 / num_in;
  ms::Team::get().parallel((rows + share - 1) / share, [&](int task) {
    for (int m = task * share; m < rows && m < (task + 1) * share; m++)
      pack(static_cast<const char*>(in.data) + m * row_bytes, row_bytes, num_in, norm,
           to.values + static_cast<size_t>(m) * S::ROW_BYTES, to.slice_stride);
  });
}

template <DType TYPE>
MS_INLINE f32x16 rounded(f32x16 x) { return TYPE == DType::bf16 ? round_bf16(x) : x; }

// The sums of one panel become output.
template <DType TYPE>
void finish_plain(const LinearPlain& op, const float* c, int rows, int panel, char* out,
                  size_t row_bytes, bool add) {
  const int n = panel * PANEL;
  const float* bias = op.bias ? op.bias + n : nullptr;
  for (int m = 0; m < rows; m++, out += row_bytes) {
    f32x16 y[2];
    for (int h = 0; h < 2; h++) {
      y[h] = load<f32x16>(c + m * PANEL + 16 * h);
      if (bias) y[h] += load<f32x16>(bias + 16 * h);
      y[h] = rounded<TYPE>(y[h]);
    }
    if (op.is_gated) {  // 16 gates and then their 16 factors
      const f32x16 gate = rounded<TYPE>(activate(y[0], op.activation));
      put(out, TYPE, n / 2, gate * rounded<TYPE>(gate_factor(y[1], op.activation)), op.num_out - n / 2);
      continue;
    }
    for (int h = 0; h < 2; h++) {
      const int left = op.num_out - n - 16 * h;
      if (left <= 0) break;
      f32x16 v = y[h];
      if (op.activation != Activation::none) v = rounded<TYPE>(activate(v, op.activation));
      if (add) v += row_at(out, TYPE, n + 16 * h, left);
      put(out, TYPE, n + 16 * h, v, left);
    }
  }
}

template <class S>
void plain_panel(const LinearPlain& op, int panel, int first_row, int rows, const PackedRows& x,
                 char* out, size_t row_bytes, bool add) {
  alignas(64) float c[MAX_BLOCK_ROWS * PANEL];
  const int steps = (op.num_in + S::INPUTS - 1) / S::INPUTS;
  const uint8_t* w = op.packed + static_cast<size_t>(panel) * steps * 128;
  const int groups = (rows + PLAIN_GROUP - 1) / PLAIN_GROUP;
  out += first_row * row_bytes;
  for (int s = 0; s < steps; s += SLICE_STEPS) {
    const int some = steps - s < SLICE_STEPS ? steps - s : SLICE_STEPS;
    const uint8_t* slice = w + static_cast<size_t>(s) * 128;
    const char* xs = x.values + s / SLICE_STEPS * x.slice_stride + static_cast<size_t>(first_row) * S::ROW_BYTES;
    if (groups == 1) {  // every weight is read once, as a stream
      MICRO_PLAIN<S, true, 3>.at[rows - 1](slice, xs, c, some, s == 0, slice + NEAR, xs);
      continue;
    }
    const bool is_last = s + some == steps;
    for (int g = 0, m = 0; g < groups; g++) {
      const int mr = (rows - m + groups - g - 1) / (groups - g);
      if (is_last) touch_rows(out + m * row_bytes, mr, row_bytes, panel, op.is_gated, S::TYPE);
      // As in gemm.inl, the first two groups prefetch the next slice of weights, to L2 first where
      // there are many groups.
      const bool is_many = groups > 4;
      const int half = g < 2 ? g : is_many && g >= groups - 2 ? g - groups + 2 : -1;
      const char* next_rows = xs + (m + mr) * S::ROW_BYTES;
      const void* next = half < 0 ? static_cast<const void*>(next_rows) : slice + SLICE_STEPS * (128 + 64 * half);
      const MicroPlainTable& micro = is_many && g < 2 ? MICRO_PLAIN<S, false, 2> : MICRO_PLAIN<S, false, 3>;
      micro.at[mr - 1](slice, xs + m * S::ROW_BYTES, c + m * PANEL, some, s == 0, next, next_rows);
      m += mr;
    }
  }
  finish_plain<S::TYPE>(op, c, rows, panel, out, row_bytes, add);
}

template <class S>
void run_plain(const LinearPlain& op, const Rows& in, int rows, const Norm& norm, void* out,
               size_t out_stride, bool add) {
  // Each calling thread has its own buffer for rows, kept between calls.
  static thread_local List<char> memory;
  const size_t slice_inputs = SLICE_STEPS * S::INPUTS, slice_stride = size_t{S::ROW_BYTES} * rows;
  const size_t need = (op.num_in + slice_inputs - 1) / slice_inputs * slice_stride + 64;
  if (memory.size() < need) memory.resize(need);
  char* aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  const PackedRows x{aligned, slice_stride};
  pack_rows<S>(in, rows, op.num_in, norm, x);
  const size_t row_bytes = out_stride * (S::TYPE == DType::f32 ? 4 : 2);
  for_panels(op.num_panels, rows, [&](int panel, int first_row, int some) {
    plain_panel<S>(op, panel, first_row, some, x, static_cast<char*>(out), row_bytes, add);
  });
}

void linear_plain(const LinearPlain& op, const Rows& in, int rows, const Norm& norm, void* out,
                  size_t out_stride, bool add) {
  if (op.type == DType::f32) return run_plain<StepF32>(op, in, rows, norm, out, out_stride, add);
#if defined(__AVX512BF16__)
  if (__builtin_cpu_supports("avx512bf16"))
    return run_plain<StepPairs>(op, in, rows, norm, out, out_stride, add);
#endif
  run_plain<StepWide>(op, in, rows, norm, out, out_stride, add);
}

}  // namespace
}  // namespace MS_ISA
