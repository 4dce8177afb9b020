// Row-wise operations between two linear layers: normalization, quantization, rotation.

namespace MS_ISA {
namespace {

MS_INLINE f32x16 row_at(const void* row, DType type, int k, int left) {
  if (left >= 16)
    return type == DType::f32 ? load<f32x16>(static_cast<const float*>(row) + k)
                              : from_bf16(static_cast<const uint16_t*>(row) + k);
  if (type == DType::f32) {
    float some[16] = {};
    std::memcpy(some, static_cast<const float*>(row) + k, 4 * left);
    return load<f32x16>(some);
  }
  uint16_t some[16] = {};
  std::memcpy(some, static_cast<const uint16_t*>(row) + k, 2 * left);
  return from_bf16(some);
}
MS_INLINE f32x16 some_of(const float* p, int k, int left) { return row_at(p, DType::f32, k, left); }

// Calls f(k, vector, which) for all of a row, 16 values at a time; zeros fill up the last vector.
// `which` is the constant 0 or 1 in turn, for two chains of sums.
template <DType TYPE, class F>
MS_INLINE void for_row(const void* row, int n, F&& f) {
  constexpr std::integral_constant<int, 0> even{};
  constexpr std::integral_constant<int, 1> odd{};
  int k = 0;
  for (; k + 32 <= n; k += 32) {
    f(k, row_at(row, TYPE, k, 16), even);
    f(k + 16, row_at(row, TYPE, k + 16, 16), odd);
  }
  if (k < n) f(k, row_at(row, TYPE, k, n - k), even);
  if (k + 16 < n) f(k + 16, row_at(row, TYPE, k + 16, n - k - 16), odd);
}

// Computes the mean and 1 / sqrt(variance + eps); the mean is 0 for an RMS norm.
template <DType TYPE, NormKind KIND>
MS_INLINE void moments(const void* row, int n, float eps, float& mean, float& inverse) {
  f32x16 sum[2] = {};
  mean = 0.0f;
  if (KIND == NormKind::layer) {
    for_row<TYPE>(row, n, [&](int, f32x16 x, auto i) MS_LAMBDA { sum[i] += x; });
    mean = reduce_add(sum[0] + sum[1]) / static_cast<float>(n);
    sum[0] = sum[1] = splat(0.0f);
  }
  for_row<TYPE>(row, n, [&](int k, f32x16 x, auto i) MS_LAMBDA {
    x -= mean;
    if (KIND == NormKind::layer && k + 16 > n) x = select(LANES < n - k, x, splat(0.0f));
    sum[i] = fma(x, x, sum[i]);
  });
  inverse = 1.0f / __builtin_sqrtf(reduce_add(sum[0] + sum[1]) / static_cast<float>(n) + eps);
}

// Returns sixteen values of a row after its norm.
template <NormKind KIND>
MS_INLINE f32x16 normed(f32x16 x, int k, int n, const Norm& norm, float mean, float inverse) {
  if (KIND == NormKind::none) return x;
  if (KIND == NormKind::layer) x -= mean;
  const bool is_full = k + 16 <= n;
  x = x * inverse * (is_full ? load<f32x16>(norm.weight + k) : some_of(norm.weight, k, n - k));
  if (KIND == NormKind::layer && norm.bias)
    x += is_full ? load<f32x16>(norm.bias + k) : some_of(norm.bias, k, n - k);
  return x;
}

// Normalizes and quantizes row m. next_row is the offset in bytes of the next row, which is
// prefetched. A row with a NaN or an infinity gets a scale that is not finite, and so do its products.
template <DType TYPE, NormKind KIND>
__attribute__((noinline)) void quantize_row(const void* row, size_t next_row, int n,
                                            const Norm& norm, const Quantized& out, int m) {
  float mean = 0.0f, inverse = 1.0f;
  if (KIND != NormKind::none) moments<TYPE, KIND>(row, n, norm.eps, mean, inverse);
  auto value = [&](int k, f32x16 x) MS_LAMBDA { return normed<KIND>(x, k, n, norm, mean, inverse); };
  f32x16 largest[2] = {};
  const char* next = static_cast<const char*>(row) + next_row;
  for_row<TYPE>(row, n, [&](int k, f32x16 x, auto i) MS_LAMBDA {
    prefetch(next + k * (TYPE == DType::f32 ? 4 : 2));
    largest[i] = max_magnitude(largest[i], value(k, x));
  });
  const float top = reduce_magnitude(max_magnitude(largest[0], largest[1]));
  const float step = top > 0.0f ? 127.0f / top : 0.0f;
  i32x16 total[2] = {};
  int8_t* to = out.values + m * SLICE;
  for_row<TYPE>(row, n, [&](int k, f32x16 x, auto i) MS_LAMBDA {
    const i32x16 q = to_int_nearest(value(k, x) * step);
    total[i] += q;
    store_i8(to + k / SLICE * out.slice_stride + k % SLICE, q);
  });
  for (int k = (n + 15) / 16 * 16; k < out.num_in_padded; k += 16)
    store_i8(to + k / SLICE * out.slice_stride + k % SLICE, i32x16{});
  out.scales[m] = top / 127.0f;
  out.sums[m] = reduce_add(total[0] + total[1]);
}

using QuantizeRow = void (*)(const void*, size_t, int, const Norm&, const Quantized&, int);
constexpr QuantizeRow QUANTIZE_ROW[2][3] = {
    {quantize_row<DType::f32, NormKind::none>, quantize_row<DType::f32, NormKind::rms>,
     quantize_row<DType::f32, NormKind::layer>},
    {quantize_row<DType::bf16, NormKind::none>, quantize_row<DType::bf16, NormKind::rms>,
     quantize_row<DType::bf16, NormKind::layer>},
};

void quantize_rows(const Rows& in, int rows, int num_in, const Norm& norm, const Quantized& out) {
  const size_t row_bytes = in.stride * (in.type == DType::f32 ? 4 : 2);
  const QuantizeRow quantize = QUANTIZE_ROW[static_cast<int>(in.type)][static_cast<int>(norm.kind)];
  // One share takes a few microseconds.
  const int share = num_in > 16384 ? 1 : 16384 / num_in;
  const int tasks = (rows + share - 1) / share;
  ms::Team::get().parallel(tasks, [&](int task) {
    for (int m = task * share; m < rows && m < (task + 1) * share; m++) {
      const void* row = static_cast<const char*>(in.data) + m * row_bytes;
      quantize(row, row_bytes, num_in, norm, out, m);
    }
  });
}

// Writes x to `to`, with the pairs (i, i + half) of its first 2 * half elements rotated by the row's
// angles. `to` may be x.
MS_INLINE void rotate_head(float* to, const float* x, const float* cos, const float* sin, int half) {
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const f32x16 a = load<f32x16>(x + i), b = load<f32x16>(x + half + i);
    const f32x16 c = load<f32x16>(cos + i), s = load<f32x16>(sin + i);
    store(to + i, a * c - b * s);
    store(to + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    to[i] = a * cos[i] - b * sin[i];
    to[half + i] = b * cos[i] + a * sin[i];
  }
}

void rotate(float* x, size_t stride, int rows, int heads, int head_dim, const Rotation& by) {
  const int share = 1 + 8192 / (heads * head_dim);
  ms::Team::get().parallel((rows + share - 1) / share, [&](int task) {
    for (int m = task * share; m < rows && m < (task + 1) * share; m++)
      for (int h = 0; h < heads; h++) {
        float* head = x + m * stride + h * head_dim;
        const size_t at = static_cast<size_t>(m) * by.half;
        rotate_head(head, head, by.cos + at, by.sin + at, by.half);
      }
  });
}

}  // namespace
}  // namespace MS_ISA
