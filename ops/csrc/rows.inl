// What happens between two linear layers, row by row: normalization, quantization, rotation.

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

// Mean and 1 / sqrt(variance + eps); the mean is 0 for an RMS norm.
MS_INLINE void moments(const void* row, DType type, int n, const Norm& norm, float& mean, float& inverse) {
  f32x16 sum[2] = {};
  mean = 0.0f;
  if (norm.kind == NormKind::layer) {
    for (int k = 0; k < n; k += 16) sum[k / 16 % 2] += row_at(row, type, k, n - k);
    mean = reduce_add(sum[0] + sum[1]) / static_cast<float>(n);
    sum[0] = sum[1] = splat(0.0f);
  }
  for (int k = 0; k < n; k += 16) {
    f32x16 x = row_at(row, type, k, n - k) - mean;
    if (n - k < 16 && mean != 0.0f)
      for (int i = n - k; i < 16; i++) x[i] = 0.0f;
    sum[k / 16 % 2] = fma(x, x, sum[k / 16 % 2]);
  }
  inverse = 1.0f / __builtin_sqrtf(reduce_add(sum[0] + sum[1]) / static_cast<float>(n) + norm.eps);
}

template <NormKind KIND>
MS_INLINE void quantize_row(const void* row, DType type, int n, const Norm& norm, int8_t* to,
                            size_t stride, float& scale, int32_t& sum) {
  float mean = 0.0f, inverse = 1.0f;
  if (KIND != NormKind::none) moments(row, type, n, norm, mean, inverse);
  auto value = [&](int k) MS_LAMBDA {
    f32x16 x = row_at(row, type, k, n - k);
    if (KIND == NormKind::none) return x;
    x = (x - mean) * inverse * some_of(norm.weight, k, n - k);
    return KIND == NormKind::layer && norm.bias ? x + some_of(norm.bias, k, n - k) : x;
  };
  f32x16 largest[2] = {};
  for (int k = 0; k < n; k += 16) largest[k / 16 % 2] = max(largest[k / 16 % 2], absolute(value(k)));
  const float top = reduce_max(max(largest[0], largest[1]));
  const float step = top > 0.0f ? 127.0f / top : 0.0f;
  i32x16 total = {};
  for (int k = 0; k < n; k += 16) {
    const i32x16 q = to_int_nearest(value(k) * step);
    total += q;
    store_i8(to + k, q);
  }
  const int used = (n + 15) / 16 * 16;
  std::memset(to + used, 0, stride - used);
  scale = top / 127.0f;
  sum = reduce_add(total);
}

void quantize_rows(const Rows& in, int rows, int num_in, const Norm& norm, const Quantized& out) {
  const size_t row_bytes = in.stride * (in.type == DType::f32 ? 4 : 2);
  // one share is worth a few microseconds
  const int share = num_in > 16384 ? 1 : 16384 / num_in;
  const int tasks = (rows + share - 1) / share;
  ms::Team::get().parallel(tasks, [&](int task) {
    for (int m = task * share; m < rows && m < (task + 1) * share; m++) {
      const void* row = static_cast<const char*>(in.data) + m * row_bytes;
      int8_t* to = out.values + m * out.stride;
      switch (norm.kind) {
        case NormKind::none:
          quantize_row<NormKind::none>(row, in.type, num_in, norm, to, out.stride, out.scales[m], out.sums[m]);
          break;
        case NormKind::rms:
          quantize_row<NormKind::rms>(row, in.type, num_in, norm, to, out.stride, out.scales[m], out.sums[m]);
          break;
        default:
          quantize_row<NormKind::layer>(row, in.type, num_in, norm, to, out.stride, out.scales[m], out.sums[m]);
      }
    }
  });
}

// Pairs (i, i + half) of the first 2 * half elements turn by the row's angles.
MS_INLINE void rotate_head(float* x, const float* cos, const float* sin, int half) {
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const f32x16 a = load<f32x16>(x + i), b = load<f32x16>(x + half + i);
    const f32x16 c = load<f32x16>(cos + i), s = load<f32x16>(sin + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

void rotate(float* x, size_t stride, int rows, int heads, int head_dim, const Rotation& by) {
  const int share = 1 + 8192 / (heads * head_dim);
  ms::Team::get().parallel((rows + share - 1) / share, [&](int task) {
    for (int m = task * share; m < rows && m < (task + 1) * share; m++)
      for (int h = 0; h < heads; h++)
        rotate_head(x + m * stride + h * head_dim, by.cos + static_cast<size_t>(m) * by.half,
                    by.sin + static_cast<size_t>(m) * by.half, by.half);
  });
}

}  // namespace
}  // namespace MS_ISA
