// What loading a model does with all its weights: checks that they are finite, and rounds plain ones
// into the panels of gemm.inl and gemm4.inl.

namespace MS_ISA {
namespace {

// Rounds each channel with its largest magnitude as 127.
void pack_int8(const PackSource& source, const LinearInt8& op, uint8_t* packed, float* scales) {
  const int quads = op.num_in_padded / 4;
  ms::Team::get().parallel(op.num_panels, [&](int panel) {
    uint8_t* to = packed + static_cast<size_t>(panel) * quads * 128;
    std::memset(to, 128, static_cast<size_t>(quads) * 128);
    for (int c = 0; c < PANEL; c++) {
      const int n = channel_at(panel, c, op.num_out, op.is_gated);
      scales[panel * PANEL + c] = 0.0f;
      if (n < 0) continue;
      const char* row = source.row(n);
      auto get = [&](int k) MS_LAMBDA { return row_at(row, source.type, k, op.num_in - k); };
      f32x16 largest = splat(0.0f);
      for (int k = 0; k < op.num_in; k += 16) largest = max_magnitude(largest, get(k));
      const float top = reduce_magnitude(largest);
      const f32x16 inverse = splat(top > 0.0f ? 127.0f / top : 0.0f);
      scales[panel * PANEL + c] = top / 127.0f;
      uint8_t* lane = to + (c / 16) * 64 + (c % 16) * 4;
      for (int k = 0; k < op.num_in; k += 16) {
        alignas(16) uint8_t bytes[16];
        store_i8(reinterpret_cast<int8_t*>(bytes), to_int_nearest(get(k) * inverse) ^ 128);
        for (int q = 0; q < 4; q++) std::memcpy(lane + (k / 4 + q) * 128, bytes + 4 * q, 4);
      }
    }
  });
}

// The weights of one channel, which become 4-bit codes. The scales of its groups are stored as fp16
// times `factor`, a power of two above the largest of them (split_scales in ops/linear.py).
struct Channel {
  const char* row;  // null for a lane without a channel
  DType type;
  int num_in;
  float* scales;  // of the groups, before they are rounded
  float factor;

  MS_INLINE f32x16 get(int k) const { return row_at(row, type, k, num_in - k); }

  // Returns the value of the largest magnitude from input `from` to `end`, of equal ones the first.
  float extreme(int from, int end) const {
    f32x16 high = get(from), low = high;
    for (int k = from + 16; k < end; k += 16) {
      const f32x16 x = get(k);
      high = max(high, x), low = min(low, x);
    }
    const float top = reduce_max(high), bottom = -reduce_max(-low);
    if (top != -bottom) return top > -bottom ? top : bottom;
    for (int k = from; k < end; k += 16) {
      float some[16];
      store(some, get(k));
      for (float x : some)
        if (__builtin_fabsf(x) == top) return x;
    }
    return top;
  }
};

// Returns the scale of a group with this extreme. The extreme becomes code 0 of int4, which is -8, or
// the first or the last NF4 value, -1 or 1.
template <Codes CODES>
MS_INLINE float scale_of(float extreme) {
  return CODES == Codes::nf4 ? __builtin_fabsf(extreme) : extreme / -8.0f;
}

// The searched scales: the extreme of a group becomes about minus this many steps.
constexpr float SEARCHED_STEPS[] = {8.0f, 7.0f, 8.5f, 8.25f, 7.75f};

// Returns the scale of int4 with the least weighted error of a group, up to 16 COUNT inputs from `from` to
// `end`. The operations and their order are those of searched_scales in ops/linear.py, so that the bits
// are the same.
template <int COUNT>
float searched_scale(const Channel& channel, int from, int end) {
  const float extreme = channel.extreme(from, end);
  if (extreme == 0.0f) return 0.0f;
  f32x16 x[COUNT];
  unroll<COUNT>([&](auto i) MS_LAMBDA {
    const int k = from + 16 * i;
    x[i] = k < end ? channel.get(k) / splat(extreme) : splat(0.0f);
  });
  float best = -1.0f, scale = 0.0f;
  for (const float steps : SEARCHED_STEPS) {
    f32x16 product = splat(0.0f), square = splat(0.0f);
    unroll<COUNT>([&](auto i) MS_LAMBDA {
      const f32x16 cut = min(splat(7.0f), max(splat(-8.0f), x[i] * splat(-steps)));
      const f32x16 code = to_float(to_int_nearest(cut)), weighted = absolute(x[i]) * code;
      product += weighted * x[i], square += weighted * code;
    });
    // the least squares for these codes are best with the scale product / square
    const float along = reduce_add(product), length = reduce_add(square), gain = along * along / length;
    if (gain > best) best = gain, scale = along / length;
  }
  return extreme * scale;
}

float searched_scale(const Channel& channel, int from, int end, int group) {
  if (group == 16) return searched_scale<1>(channel, from, end);
  if (group == 32) return searched_scale<2>(channel, from, end);
  if (group == 64) return searched_scale<4>(channel, from, end);
  return searched_scale<8>(channel, from, end);
}

// Writes the scales of a channel's groups and the power of two above the largest of them.
template <Codes CODES>
void find_scales(Channel& channel, int group, bool is_searched) {
  float largest = 0.0f, *to = channel.scales;
  for (int from = 0; from < channel.num_in; from += group, to++) {
    const int end = from + group < channel.num_in ? from + group : channel.num_in;
    *to = is_searched ? searched_scale(channel, from, end, group) : scale_of<CODES>(channel.extreme(from, end));
    const float magnitude = __builtin_fabsf(*to);
    if (magnitude > largest) largest = magnitude;
  }
  channel.factor = power_above(largest);
}

// Returns the codes of sixteen weights. bounds: the 15 bounds between the values of NF4 codes.
template <Codes CODES>
MS_INLINE i32x16 codes_of(f32x16 x, float scale, const float* bounds) {
  x = x / splat(scale == 0.0f ? 1.0f : scale);
  if (CODES != Codes::nf4) return to_int_nearest(min(splat(7.0f), max(splat(-8.0f), x))) + 8;
  i32x16 code = {};
  unroll<15>([&](auto i) MS_LAMBDA { code -= x > splat(bounds[i]); });
  return code;
}

// Packs the channels of lanes `lane` and `lane` + 16, which share bytes.
template <Codes CODES>
void pack_lanes(Channel (&channels)[2], int lane, int group, const float* bounds, uint8_t* to) {
  const int num_in = channels[0].num_in;
  for (int from = 0; from < num_in; from += group, to += group_bytes(group, CODES)) {
    const int end = from + group < num_in ? from + group : num_in;
    float scale[2] = {};
    for (int h = 0; h < 2; h++) {
      if (!channels[h].row) continue;
      const Channel& channel = channels[h];
      const uint16_t half = nearest_half(channel.scales[from / group] / channel.factor);
      scale[h] = half_to_float(half) * channel.factor;
      std::memcpy(to + 2 * (lane + 16 * h), &half, 2);
    }
    for (int k = from; k < end; k += 16) {
      i32x16 both = {};
      for (int h = 0; h < 2; h++)
        if (channels[h].row) both |= codes_of<CODES>(channels[h].get(k), scale[h], bounds) << 4 * h;
      alignas(16) uint8_t bytes[16];
      store_i8(reinterpret_cast<int8_t*>(bytes), both);
      for (int i = num_in - k; i < 16; i++) bytes[i] = 0;
      uint8_t* quads = to + 64 + (k - from) * 16 + lane * 4;
      for (int q = 0; q < 4; q++) std::memcpy(quads + q * 64, bytes + 4 * q, 4);
    }
  }
}

// Rounds the channels and packs them. factors: one for each lane.
template <Codes CODES>
void pack_codes(const PackSource& source, const LinearInt4& op, const float* bounds, bool is_searched, uint8_t* packed,
                float* factors) {
  const LinearInt8& base = op.base;
  const size_t groups = (base.num_in + op.group - 1) / op.group;
  const size_t panel_bytes = base.num_in_padded / op.group * group_bytes(op.group, CODES);
  ms::Team::get().parallel(base.num_panels, [&](int panel) {
    uint8_t* to = packed + panel * panel_bytes;
    std::memset(to, 0, panel_bytes);
    List<float> scales(2 * groups);
    for (int lane = 0; lane < 16; lane++) {
      Channel channels[2];
      for (int h = 0; h < 2; h++) {
        const int c = lane + 16 * h, n = channel_at(panel, c, base.num_out, base.is_gated);
        channels[h] = {n < 0 ? nullptr : source.row(n), source.type, base.num_in, scales.data() + h * groups, 0.0f};
        if (n >= 0) find_scales<CODES>(channels[h], op.group, is_searched);
        // gemm4.inl has NF4 values in 127ths.
        factors[panel * PANEL + c] = CODES == Codes::nf4 ? channels[h].factor / 127.0f : channels[h].factor;
      }
      pack_lanes<CODES>(channels, lane, op.group, bounds, to);
    }
  });
}

void pack_int4(const PackSource& source, const LinearInt4& op, const float* bounds, bool is_searched, uint8_t* packed,
               float* factors) {
  if (op.codes == Codes::nf4) pack_codes<Codes::nf4>(source, op, bounds, false, packed, factors);
  else pack_codes<Codes::centred>(source, op, bounds, is_searched, packed, factors);
}

// Returns whether no number has all the bits of its exponent set. low, high: these bits in the first
// and the second number of 32 bits; the same for numbers of 32 bits.
bool all_finite(const void* from, size_t bytes, uint32_t low, uint32_t high) {
  constexpr size_t SHARE = size_t{1} << 20;
  std::atomic<bool> found{false};
  ms::Team::get().parallel(static_cast<int>((bytes + SHARE - 1) / SHARE), [&](int task) {
    const char* at = static_cast<const char*>(from) + task * SHARE;
    const size_t size = bytes - task * SHARE < SHARE ? bytes - task * SHARE : SHARE;
    const i32x16 a = splat_i32(low), b = splat_i32(high);
    i32x16 any = {};
    auto check = [&](i32x16 x) MS_LAMBDA { any |= ((x & a) == a) | ((x & b) == b); };
    size_t i = 0;
    for (; i + 64 <= size; i += 64) check(load<i32x16>(at + i));
    alignas(64) char rest[64] = {};
    std::memcpy(rest, at + i, size - i);
    check(load<i32x16>(rest));
    int32_t lanes[16];
    store(lanes, any);
    for (int32_t lane : lanes)
      if (lane) found = true;
  });
  return !found;
}

}  // namespace
}  // namespace MS_ISA
