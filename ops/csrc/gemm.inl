// int8 x int8 linear layers. Included once per instruction set.
//
// y[m, n] = act((sum over k of x[m, k] * w[n, k]) * x_scale[m] * w_scale[n] + bias[n])
//
// Weights are stored as unsigned bytes (w + 128) because the dot product instruction takes one
// unsigned factor and can broadcast the signed one from memory; 128 * sum of x[m, :] is
// subtracted afterwards. Sums are exact 32-bit integers, so a row has the same bits in any batch.
//
// Weights are packed in panels of 32 outputs, [N/32][K/4][2][16 outputs][4 inputs], so that a panel
// is read from end to end. The kernel takes up to 12 rows at a time. The inputs of a panel are cut
// into slices; a slice stays in L1 for all rows, while the next one is prefetched.

namespace MS_ISA {
namespace {

constexpr int PANEL = 32;
constexpr int MAX_GROUP = HAS_32_REGISTERS ? 12 : IS_AVX_VNNI ? 3 : 4;  // rows of the micro kernel; each has two sums
constexpr int SLICE_QUADS = SLICE / 4;  // 16 KiB of weights
constexpr int MAX_BLOCK_ROWS = 128;  // rows of x that stay in L2
// Bytes from the read position of a stream to the prefetched one. The processor's own prefetcher does the rest,
// and better. With AHEAD instead, products of 1, 4 and 8 rows read 32, 32 and 26 GB/s instead of 35, 34 and 28
// with int8 weights and 32, 31 and 31 instead of 34, 35 and 34 with bf16, and one row of Q4_K 21 instead of 31
// (AMD EPYC Zen 4); 512 and 1024 are worse than 256. What unpacks codes of 4 bits with less effort, and the
// router with its four streams, read as fast either way.
constexpr size_t NEAR = 256, AHEAD = 4096;

#if defined(MS_AVX_VNNI)
// Computes sum[m][h] += weights(h) * x[m] for one half of a panel after the other: 12 sums, 2 weights
// and an input fill 15 registers.
template <int MR, class F>
MS_INLINE void add_quad(i32x16 (&sum)[MR][2], const int8_t* x, F&& weights) {
  unroll<2>([&](auto h) MS_LAMBDA {
    const i32x16 w = weights(h);
    unroll<MR>([&](auto m) MS_LAMBDA { sum[m][h] = dot_u8_i8(sum[m][h], w, splat_bytes(x + m * SLICE)); });
    forget_loads();
  });
}
#endif

// Computes c[MR][32] (+)= x[MR][SLICE] * w[quads][32][4]. For each quad it prefetches LINES cache
// lines from `next` on, to L1 (CACHE 3) or to L2 (CACHE 2).
template <int MR, int LINES, int CACHE>
__attribute__((noinline)) void micro(const uint8_t* w, const int8_t* x, int32_t* c, int quads,
                                     bool is_first, const uint8_t* next) {
  i32x16 sum[MR][2];
  unroll<MR>([&](auto m) MS_LAMBDA {
    sum[m][0] = is_first ? i32x16{} : load<i32x16>(c + m * PANEL);
    sum[m][1] = is_first ? i32x16{} : load<i32x16>(c + m * PANEL + 16);
  });
  for (int q = 0; q < quads; q++) {
#if defined(MS_AVX_VNNI)
    add_quad(sum, x, [&](auto h) MS_LAMBDA { return load<i32x16>(w + 64 * h); });
#else
    const i32x16 w0 = load<i32x16>(w), w1 = load<i32x16>(w + 64);
    unroll<MR>([&](auto m) MS_LAMBDA {
      const i32x16 xs = splat_bytes(x + m * SLICE);
      sum[m][0] = dot_u8_i8(sum[m][0], w0, xs);
      sum[m][1] = dot_u8_i8(sum[m][1], w1, xs);
    });
#endif
    w += 128;
    x += 4;
    __builtin_prefetch(next, 0, CACHE);
    if (LINES > 1) __builtin_prefetch(next + 64, 0, CACHE);
    next += 64 * LINES;
  }
  unroll<MR>([&](auto m) MS_LAMBDA {
    store(c + m * PANEL, sum[m][0]);
    store(c + m * PANEL + 16, sum[m][1]);
  });
}

using Micro = void (*)(const uint8_t*, const int8_t*, int32_t*, int, bool, const uint8_t*);
struct MicroTable { Micro at[MAX_GROUP]; };
template <int LINES, int CACHE, size_t... I>
constexpr MicroTable micro_table(std::index_sequence<I...>) {
  return {{micro<static_cast<int>(I) + 1, LINES, CACHE>...}};
}
constexpr MicroTable MICRO_L1 = micro_table<1, 3>(std::make_index_sequence<MAX_GROUP>{});
constexpr MicroTable MICRO_L2 = micro_table<1, 2>(std::make_index_sequence<MAX_GROUP>{});
constexpr MicroTable MICRO_STREAM = micro_table<2, 3>(std::make_index_sequence<MAX_GROUP>{});

MS_INLINE f32x16 activate(f32x16 x, Activation kind) {
  switch (kind) {
    case Activation::silu: return x * sigmoid(x);
    case Activation::gelu: return 0.5f * x * (1.0f + erf(x * 0.70710678f));
    case Activation::gelu_tanh:
      return 0.5f * x * (1.0f + tanh(0.79788456f * fma(x * x * x, splat(0.044715f), x)));
    case Activation::relu: return max(splat(0.0f), x);  // with this order of arguments NaN stays NaN
    case Activation::relu2: {
      const f32x16 positive = max(splat(0.0f), x);
      return positive * positive;
    }
    case Activation::swiglu_oai: {
      const f32x16 gate = min(splat(7.0f), x);
      return gate * sigmoid(1.702f * gate);
    }
    default: return x;
  }
}

// Returns what multiplies the activated gates.
MS_INLINE f32x16 gate_factor(f32x16 up, Activation kind) {
  return kind == Activation::swiglu_oai ? max(splat(-7.0f), min(splat(7.0f), up)) + 1.0f : up;
}

MS_INLINE void put(void* row, DType type, size_t at, f32x16 v, int n) {
  if (n >= 16) {
    if (type == DType::f32) store(static_cast<float*>(row) + at, v);
    else to_bf16(static_cast<uint16_t*>(row) + at, v);
    return;
  }
  alignas(64) float all[16];
  alignas(64) uint16_t cut[16];
  store(all, v);
  to_bf16(cut, v);
  for (int i = 0; i < n; i++) {
    if (type == DType::f32) static_cast<float*>(row)[at + i] = all[i];
    else static_cast<uint16_t*>(row)[at + i] = cut[i];
  }
}

// Returns sixteen sums as floats. The sums of gemm4.inl are already floats without an offset.
MS_INLINE f32x16 total(const int32_t* c, i32x16 offset) { return to_float(load<i32x16>(c) - offset); }
MS_INLINE f32x16 total(const float* c, i32x16) { return load<f32x16>(c); }

// Applies scales, bias, activation and residual to the sums of one panel and writes the output.
template <class Sum>
void finish_panel(const LinearInt8& op, const Sum* c, int rows, int first_row, int panel,
                  const Quantized& x, void* out, size_t out_stride, DType type, bool add) {
  const int n = panel * PANEL;
  const size_t size = type == DType::f32 ? 4 : 2;
  f32x16 scale[2], bias[2];
  for (int h = 0; h < 2; h++) {
    scale[h] = load<f32x16>(op.scales + n + 16 * h);
    bias[h] = op.bias ? load<f32x16>(op.bias + n + 16 * h) : f32x16{};
  }
  for (int m = 0; m < rows; m++) {
    char* row = static_cast<char*>(out) + (first_row + m) * out_stride * size;
    const i32x16 offset = splat_i32(128 * x.sums[first_row + m]);
    const f32x16 xs = splat(x.scales[first_row + m]);
    f32x16 y[2];
    for (int h = 0; h < 2; h++)
      y[h] = fma(total(c + m * PANEL + 16 * h, offset) * xs, scale[h], bias[h]);
    if (op.is_gated) {  // 16 gates and then their 16 factors
      const f32x16 factor = gate_factor(y[1], op.activation);
      put(row, type, n / 2, activate(y[0], op.activation) * factor, op.num_out - n / 2);
      continue;
    }
    for (int h = 0; h < 2; h++) {
      const int left = op.num_out - n - 16 * h;
      if (left <= 0) break;
      f32x16 v = activate(y[h], op.activation);
      if (add) {
        float old[16] = {};
        const float* at = reinterpret_cast<float*>(row) + n + 16 * h;
        if (left < 16) std::memcpy(old, at, 4 * left);
        v += load<f32x16>(left < 16 ? old : at);
      }
      put(row, type, n + 16 * h, v, left);
    }
  }
}

// Prefetches the lines that finish_panel will write, which are far apart and seldom in cache.
MS_INLINE void touch_rows(const char* at, int rows, size_t row_bytes, int panel, bool is_gated,
                          DType type) {
  const size_t width = (is_gated ? 16 : 32) * (type == DType::f32 ? 4 : 2);
  at += panel * width;
  for (int m = 0; m < rows; m++, at += row_bytes) {
    __builtin_prefetch(at, 1, 3);
    __builtin_prefetch(at + width - 1, 1, 3);
  }
}
MS_INLINE void touch_output(const LinearInt8& op, int panel, int row, int rows, void* out,
                            size_t out_stride, DType type) {
  const size_t row_bytes = out_stride * (type == DType::f32 ? 4 : 2);
  touch_rows(static_cast<char*>(out) + row * row_bytes, rows, row_bytes, panel, op.is_gated, type);
}

void panel_rows(const LinearInt8& op, int panel, int first_row, int rows, const Quantized& x,
                void* out, size_t out_stride, DType type, bool add) {
  alignas(64) int32_t c[MAX_BLOCK_ROWS * PANEL];
  const int quads = op.num_in_padded / 4;
  const uint8_t* w = op.packed + static_cast<size_t>(panel) * quads * 128;
  const int groups = (rows + MAX_GROUP - 1) / MAX_GROUP;
  for (int q = 0; q < quads; q += SLICE_QUADS) {
    const int some = quads - q < SLICE_QUADS ? quads - q : SLICE_QUADS;
    const uint8_t* slice = w + static_cast<size_t>(q) * 128;
    const int8_t* xs = x.values + q / SLICE_QUADS * x.slice_stride + first_row * SLICE;
    if (groups == 1) {  // every weight is read once, as a stream
      MICRO_STREAM.at[rows - 1](slice, xs, c, some, q == 0, slice + NEAR);
      continue;
    }
    const bool is_last = q + some == quads;
    for (int g = 0, m = 0; g < groups; g++) {
      const int mr = (rows - m + groups - g - 1) / (groups - g);
      // The first two groups prefetch the next slice, one half each. With many rows it would evict
      // them from L1, so the first two groups prefetch it to L2 and the last two to L1. The groups
      // between prefetch the next rows.
      const bool is_many = groups > 4;
      const int half = g < 2 ? g : is_many && g >= groups - 2 ? g - groups + 2 : -1;
      const uint8_t* next = half < 0 ? reinterpret_cast<const uint8_t*>(xs + (m + mr) * SLICE)
                                     : slice + SLICE_QUADS * (128 + 64 * half);
      if (is_last) touch_output(op, panel, first_row + m, mr, out, out_stride, type);
      (is_many && g < 2 ? MICRO_L2 : MICRO_L1)
          .at[mr - 1](slice, xs + m * SLICE, c + m * PANEL, some, q == 0, next);
      // Finishes the group now, while the prefetched output lines are still in cache.
      if (is_last) finish_panel(op, c + m * PANEL, mr, first_row + m, panel, x, out, out_stride, type, add);
      m += mr;
    }
  }
  if (groups == 1) finish_panel(op, c, rows, first_row, panel, x, out, out_stride, type, add);
}

// Calls f(panel, first row, rows) for all panels and blocks of rows on all threads of the team.
template <class F>
void for_panels(int panels, int rows, F&& f) {
  ms::Team& team = ms::Team::get();
  const int blocks = (rows + MAX_BLOCK_ROWS - 1) / MAX_BLOCK_ROWS;
  // The prefetcher can follow consecutive panels as one stream, so a thread takes long runs of them,
  // and shorter runs towards the end.
  const int all = panels * blocks, threads = team.size();
  std::atomic<int> taken{0};
  team.parallel(threads, [&](int) {
    for (int first = taken.load(); first < all;) {
      const int run = (all - first) / (2 * threads), some = run < 1 ? 1 : run;
      if (!taken.compare_exchange_weak(first, first + some)) continue;
      for (int item = first; item < first + some; item++) {
        const int block = item / panels;
        const int row = static_cast<int>(static_cast<int64_t>(rows) * block / blocks);
        const int end = static_cast<int>(static_cast<int64_t>(rows) * (block + 1) / blocks);
        f(item % panels, row, end - row);
      }
      first = taken.load();
    }
  });
}

void linear_int8(const LinearInt8& op, const Quantized& x, int rows, void* out, size_t out_stride,
                 DType type, bool add) {
  for_panels(op.num_panels, rows, [&](int panel, int first_row, int some) {
    panel_rows(op, panel, first_row, some, x, out, out_stride, type, add);
  });
}

}  // namespace
}  // namespace MS_ISA
