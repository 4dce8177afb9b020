// Rounds stored rows of 8-bit codes to int8 with one scale per row. Included once per instruction set.
//
// A value is (code - zero) * scale, with a scale and perhaps a zero for each group of inputs. A row's
// values stay in cache between the search for the largest and the rounding. All operations and their
// order are those of Weight8 in quant/formats/weights.py, so that the bits are the same.

namespace MS_ISA {
namespace {

template <ByteCodes KIND>
MS_INLINE f32x16 from_codes(const uint8_t* p) {
  const i32x16 x = from_i8(reinterpret_cast<const int8_t*>(p));
  if (KIND == ByteCodes::int8) return to_float(x);
  if (KIND == ByteCodes::uint8) return to_float(x & 0xff);
  alignas(32) uint16_t halves[16];  // the bits of e4m3 are those of fp16 / 256
  store_u16(halves, (u32x16)((x << 7) & 0xbf80));
  return from_half(halves) * 256.0f;
}

// Writes the values of a row, which may be followed by others of up to the next multiple of sixteen.
// Returns the largest magnitude.
template <ByteCodes KIND>
float read_codes(const CodedRows& in, int row, float* values) {
  const uint8_t* codes = in.codes + static_cast<size_t>(row) * in.stride;
  const int groups = (in.num_in + in.group - 1) / in.group;
  const size_t at = static_cast<size_t>(row) * groups;
  f32x16 largest = splat(0.0f);
  for (int g = 0; g < groups; g++) {
    const int first = g * in.group, end = in.num_in - first < in.group ? in.num_in : first + in.group;
    const f32x16 scale = splat(in.scales[at + g]), zero = splat(in.zeros ? in.zeros[at + g] : 0.0f);
    auto scaled = [&](const uint8_t* p) MS_LAMBDA { return (from_codes<KIND>(p) - zero) * scale; };
    int k = first;
    for (; k + 16 <= end; k += 16) {
      const f32x16 x = scaled(codes + k);
      store(values + k, x);
      largest = max_magnitude(largest, x);
    }
    if (k == end) continue;
    uint8_t some[16] = {};
    std::memcpy(some, codes + k, end - k);
    const f32x16 x = scaled(some);
    store(values + k, x);
    largest = max_magnitude(largest, select(LANES < end - k, x, splat(0.0f)));
  }
  return reduce_magnitude(largest);
}

template <ByteCodes KIND>
void round_row(const CodedRows& in, int row, float* values, int8_t* to, float* step) {
  constexpr float SMALLEST = 1e-30f;  // a row of smaller values becomes zeros
  const float top = read_codes<KIND>(in, row, values);
  const bool is_usual = top >= SMALLEST;
  const f32x16 inverse = splat(is_usual ? 1.0f / top * 127.0f : 0.0f);
  *step = is_usual ? top / 127.0f : 0.0f;
  int k = 0;
  for (; k + 16 <= in.num_in; k += 16) store_i8(to + k, to_int_nearest(load<f32x16>(values + k) * inverse));
  if (k == in.num_in) return;
  int8_t some[16];
  store_i8(some, to_int_nearest(load<f32x16>(values + k) * inverse));
  std::memcpy(to + k, some, in.num_in - k);
}

void round_rows(const CodedRows& in, int rows, int8_t* to, float* steps) {
  constexpr decltype(&round_row<ByteCodes::e4m3>) BY_KIND[3] = {
      round_row<ByteCodes::e4m3>, round_row<ByteCodes::int8>, round_row<ByteCodes::uint8>};
  const auto round = BY_KIND[static_cast<int>(in.kind)];
  const int share = 1 + 65536 / in.num_in;  // takes about ten microseconds
  ms::Team::get().parallel((rows + share - 1) / share, [&](int task) {
    static thread_local List<float> values;
    if (static_cast<int>(values.size()) < in.num_in + 16) values.resize(in.num_in + 16);
    for (int n = task * share; n < rows && n < (task + 1) * share; n++)
      round(in, n, values.data(), to + static_cast<size_t>(n) * in.num_in, steps + n);
  });
}

}  // namespace
}  // namespace MS_ISA
