// Attention over parts of the keys: merging two parts, and quantizing rows for the wire. Included once
// per instruction set.

namespace MS_ISA {
namespace {

// Returns log(1 + x) for 0 <= x <= 1 with an absolute error below 2e-7, by the power series of
// 2 artanh(s) with s = x / (2 + x).
MS_INLINE f32x16 log_1p(f32x16 x) {
  const f32x16 s = x / (2.0f + x), z = s * s;
  f32x16 y = splat(1.0f / 15);
  unroll<7>([&](auto i) MS_LAMBDA { y = fma(y, z, splat(1.0f / (13 - 2 * i))); });
  return 2.0f * s * y;
}

template <DType TYPE>
MS_INLINE void plain_to(void* rows, size_t i, f32x16 x) {
  if (TYPE == DType::f32) store(static_cast<float*>(rows) + i, x);
  else to_bf16(static_cast<uint16_t*>(rows) + i, x);
}

// The factors of the two parts for up to 16 heads of a row, and the merged log-sum-exp.
struct MergeWeights {
  alignas(64) float keep[16], add[16], lse[16];
};
MS_INLINE void weigh_parts(const float* total, const float* part, int count, MergeWeights& w) {
  const f32x16 a = some_of(total, 0, count), b = some_of(part, 0, count);
  const f32x16 top = max(splat(NOTHING), max(a, b));  // finite even where neither part has a visible key
  const f32x16 of_a = select(a == NO_KEYS, f32x16{}, exp2_neg((a - top) * LOG2E));
  const f32x16 of_b = select(b == NO_KEYS, f32x16{}, exp2_neg((b - top) * LOG2E));
  const f32x16 sum = of_a + of_b, inverse = select(sum == 0.0f, sum, 1.0f / sum);
  store(w.keep, of_a * inverse), store(w.add, of_b * inverse);
  store(w.lse, select(sum == 0.0f, splat(NO_KEYS), top + log_1p(sum - 1.0f)));
}

// Merges one row of all heads. A part without visible keys is not read.
template <DType TO, DType FROM>
void merge_row(void* out, float* lse, const void* part, const float* part_lse, int heads, int dim) {
  MergeWeights w;
  for (int first = 0; first < heads; first += 16) {
    const int count = heads - first < 16 ? heads - first : 16;
    weigh_parts(lse + first, part_lse + first, count, w);
    std::memcpy(lse + first, w.lse, sizeof(float) * count);
    for (int i = 0; i < count; i++) {
      const int at = (first + i) * dim;
      const f32x16 keep = splat(w.keep[i]), add = splat(w.add[i]);
      if (w.add[i] == 0.0f) continue;
      if (w.keep[i] == 0.0f)
        for (int d = at; d < at + dim; d += 16) plain_to<TO>(out, d, plain_at<FROM>(part, d));
      else
        for (int d = at; d < at + dim; d += 16)
          plain_to<TO>(out, d, fma(plain_at<FROM>(part, d), add, plain_at<TO>(out, d) * keep));
    }
  }
}

using MergeRow = void (*)(void*, float*, const void*, const float*, int, int);
constexpr MergeRow MERGE_ROW[2][2] = {
    {merge_row<DType::f32, DType::f32>, merge_row<DType::f32, DType::bf16>},
    {merge_row<DType::bf16, DType::f32>, merge_row<DType::bf16, DType::bf16>},
};

size_t size_of(DType type) { return type == DType::f32 ? 4 : 2; }

// Calls f(row) for all rows, in tasks of about a microsecond.
template <class F>
MS_INLINE void for_rows(int rows, int width, F&& f) {
  const int share = width > 16384 ? 1 : 16384 / width;
  ms::Team::get().parallel((rows + share - 1) / share, [&](int task) {
    for (int m = task * share; m < rows && m < (task + 1) * share; m++) f(m);
  });
}

void merge_partials(const PartialRows& total, const PartialRows& part, const int64_t* rows, int count, int heads,
                    int dim) {
  const MergeRow merge_one = MERGE_ROW[static_cast<int>(total.type)][static_cast<int>(part.type)];
  for_rows(count, heads * dim, [&](int m) {
    const size_t to = rows ? rows[m] : m;
    merge_one(static_cast<char*>(total.out) + to * total.stride * size_of(total.type), total.lse + to * total.lse_stride,
              static_cast<const char*>(part.out) + m * part.stride * size_of(part.type),
              part.lse + m * part.lse_stride, heads, dim);
  });
}

// Quantizes each head of a row in 127ths of its largest magnitude. A head with a NaN or an infinity
// gets a scale that is not finite, so that its dequantized values are not finite either.
template <DType TYPE>
void quantize_row_heads(const void* row, int heads, int dim, int8_t* values, float* scales) {
  for (int h = 0; h < heads; h++) {
    const int first = h * dim;
    f32x16 largest = {};
    for (int d = first; d < first + dim; d += 16) largest = max_magnitude(largest, plain_at<TYPE>(row, d));
    const float top = reduce_magnitude(largest), step = top > 0.0f ? 127.0f / top : 0.0f;
    for (int d = first; d < first + dim; d += 16) store_i8(values + d, to_int_nearest(plain_at<TYPE>(row, d) * step));
    scales[h] = top / 127.0f;
  }
}

template <DType TYPE>
void dequantize_row_heads(const int8_t* values, const float* scales, int heads, int dim, void* row) {
  for (int h = 0; h < heads; h++) {
    const f32x16 scale = splat(scales[h]);
    for (int d = h * dim; d < (h + 1) * dim; d += 16) plain_to<TYPE>(row, d, to_float(from_i8(values + d)) * scale);
  }
}

void quantize_heads(const Rows& in, int rows, int heads, int dim, int8_t* values, float* scales) {
  const auto quantize = in.type == DType::f32 ? quantize_row_heads<DType::f32> : quantize_row_heads<DType::bf16>;
  for_rows(rows, heads * dim, [&](int m) {
    const size_t head = static_cast<size_t>(m) * heads;
    const void* row = static_cast<const char*>(in.data) + m * in.stride * size_of(in.type);
    quantize(row, heads, dim, values + head * dim, scales + head);
  });
}

void dequantize_heads(const int8_t* values, const float* scales, int rows, int heads, int dim, void* out, DType type) {
  const auto restore = type == DType::f32 ? dequantize_row_heads<DType::f32> : dequantize_row_heads<DType::bf16>;
  for_rows(rows, heads * dim, [&](int m) {
    const size_t head = static_cast<size_t>(m) * heads;
    restore(values + head * dim, scales + head, heads, dim, static_cast<char*>(out) + head * dim * size_of(type));
  });
}

}  // namespace
}  // namespace MS_ISA
