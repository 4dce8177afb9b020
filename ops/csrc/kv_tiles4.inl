// The storage format of int4 K/V, and the part of the writing kernel that differs from int8. Included
// once per instruction set.
//
// K and V are rotated before they are rounded: a Hadamard transform over blocks of the head's
// dimensions spreads a large dimension over its block (as in QuaRot, Ashkboos et al. 2024). Queries are
// transformed too, so that q.k stays the same, and a row's result is transformed back. The transform H
// is not normalized, H H = block * I; the factor 1 / block is exact and is applied to q and to results.
//
// A value is one of 16 levels times the fp16 scale of its token and group. The levels suit a normal
// distribution, which the transform makes likely; they and the factors of the scales were found by
// Lloyd's algorithm on normal numbers in groups of 32. Of SCALES scales the one with the least squared
// error is taken.
//
// After its scales (kv_shape.inl), a head's part of a tile has
//   K [D/8][16 tokens][4] bytes; byte j has the codes of dimensions j (low half) and j + 4 of eight,
//   V [D/32][4 quads of tokens][16][4] bytes; byte [d][j] has the codes of dimensions d (low half) and
//     d + 16 of 32, of token j of the quad. The last block of an odd number of 16 dimensions is half empty.
// A byte belongs to one token. A load of 64 bytes has two registers of operands for 8-bit dot products.

namespace MS_ISA {
namespace {

// No level exceeds 64, so that the sum of two products fits in 16 bits (see dot_small).
constexpr int8_t LEVELS[16] = {-64, -50, -39, -30, -23, -16, -9, -3, 3, 9, 16, 23, 30, 39, 50, 64};
constexpr int TOP_LEVEL = 64, SCALES = 6;
// The largest level of each scale, over the largest magnitude of the group.
constexpr f32x16 TOPS = {0.98f, 0.89f, 0.93f, 1.02f, 1.06f, 1.26f};

MS_INLINE int hadamard_block(int dim) { return dim & -dim; }

template <int H>
MS_INLINE f32x16 butterfly(f32x16 x) {
  const f32x16 other = swap_lanes<H>(x);
  return select((LANES & H) != 0, other - x, x + other);
}

// Transforms the blocks of `dim` numbers in place.
void hadamard(float* x, int dim) {
  for (int d = 0; d < dim; d += 16)
    store(x + d, butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load<f32x16>(x + d))))));
  for (int h = 16; h < hadamard_block(dim); h *= 2)
    for (int first = 0; first < dim; first += 2 * h)
      for (int d = first; d < first + h; d += 16) {
        const f32x16 a = load<f32x16>(x + d), b = load<f32x16>(x + d + h);
        store(x + d, a + b), store(x + d + h, a - b);
      }
}

// Calls f(i) for the positive levels 1 to 7 after the first with whether a magnitude is nearer to it than
// to the level before.
template <class F>
MS_INLINE void for_reached_levels(f32x16 magnitude, F&& f) {
  unroll<7>([&](auto i) MS_LAMBDA {
    constexpr int BEFORE = LEVELS[8 + i], AFTER = LEVELS[9 + i];
    f(magnitude > 0.5f * (BEFORE + AFTER), AFTER - BEFORE);
  });
}

// Returns the squared error of rounding [first, end) of x, in squared steps of 1 / inverse.
MS_INLINE float squared_error(const float* x, int first, int end, f32x16 inverse) {
  f32x16 sum = {};
  for (int d = first; d < end; d += 16) {
    const f32x16 magnitude = absolute(load<f32x16>(x + d)) * inverse;
    f32x16 level = splat(static_cast<float>(LEVELS[8]));
    for_reached_levels(magnitude, [&](i32x16 reached, int rise) MS_LAMBDA {
      level += select(reached, splat(static_cast<float>(rise)), f32x16{});
    });
    const f32x16 rest = magnitude - level;
    sum = sum + rest * rest;
  }
  return reduce_add(sum);
}

// Rounds x, [dim] numbers, to codes, and returns each group's scale through set_scale(group, fp16 bits).
template <class F>
MS_INLINE void round_to_codes(const HeadShape& shape, const float* x, uint8_t* codes, F&& set_scale) {
  for (int g = 0; g < shape.num_groups; g++) {
    const int first = g * shape.group, end = first + shape.group;
    f32x16 largest = {};
    for (int d = first; d < end; d += 16) largest = max_magnitude(largest, load<f32x16>(x + d));
    uint16_t halves[16];
    scales_to_half(halves, max_magnitude_all(largest) * (TOPS * (1.0f / TOP_LEVEL)));
    const f32x16 scale = from_half(halves), inverse = select(scale > 0.0f, 1.0f / scale, splat(0.0f));
    int best = 0;
    float least = 0.0f;
    for (int i = 0; i < SCALES; i++) {
      const float error = squared_error(x, first, end, splat(inverse[i])) * (scale[i] * scale[i]);
      if (i == 0 || error < least) best = i, least = error;
    }
    set_scale(g, halves[best]);
    const f32x16 step = splat(inverse[best]);
    for (int d = first; d < end; d += 16) {
      const f32x16 v = load<f32x16>(x + d);
      i32x16 above = {};  // minus the number of levels
      for_reached_levels(absolute(v) * step, [&](i32x16 reached, int) MS_LAMBDA { above += reached; });
      const i32x16 negative = v < 0.0f;
      store_i8(reinterpret_cast<int8_t*>(codes) + d, ((8 - above) & ~negative) | ((7 + above) & negative));
    }
  }
}

MS_INLINE void store_codes_of_k(const HeadShape& shape, const Lane& lane, const uint8_t* codes) {
  uint8_t* to = lane.at + shape.k + 4 * lane.t;
  for (int d = 0; d < shape.dim; d += 8, to += 4 * TILE) {
    uint32_t low, high;
    std::memcpy(&low, codes + d, 4), std::memcpy(&high, codes + d + 4, 4);
    low |= high << 4;
    std::memcpy(to, &low, 4);
  }
}

MS_INLINE void store_codes_of_v(const HeadShape& shape, const Lane& lane, const uint8_t* codes) {
  uint8_t* to = lane.at + shape.v + lane.t / 4 * 64 + lane.t % 4;
  for (int d = 0; d < shape.dim; d += 32, to += 256)
    for (int i = 0; i < 16; i++) to[4 * i] = static_cast<uint8_t>(codes[d + i] | codes[d + 16 + i] << 4);
}

__attribute__((noinline)) void store_block4(const HeadShape& shape, const Lane* lanes, int count, const Rotation& by) {
  alignas(64) float x[MAX_HEAD_DIM];
  alignas(64) uint8_t codes[MAX_HEAD_DIM + 16] = {};
  for (int i = 0; i < count; i++) {
    const Lane& lane = lanes[i];
    const auto scale_at = [&](size_t scales) {
      return [&lane, scales](int g, uint16_t half) {
        std::memcpy(lane.at + scales + 2 * (g * TILE + lane.t), &half, 2);
      };
    };
    std::memcpy(x, lane.k, sizeof(float) * shape.dim);
    if (by.cos) {
      const size_t at = static_cast<size_t>(lane.row) * by.half;
      rotate_head(x, x, by.cos + at, by.sin + at, by.half);
    }
    hadamard(x, shape.dim);
    round_to_codes(shape, x, codes, scale_at(shape.k_scales));
    store_codes_of_k(shape, lane, codes);
    std::memcpy(x, lane.v, sizeof(float) * shape.dim);
    hadamard(x, shape.dim);
    round_to_codes(shape, x, codes, scale_at(shape.v_scales));
    if (shape.dim % 32) std::memset(codes + shape.dim, 0, 16);
    store_codes_of_v(shape, lane, codes);
  }
}

// Prefetches the lines that a lane writes.
MS_INLINE void touch_lane4(const HeadShape& shape, const Lane& lane) {
  for (size_t line = 0; line < shape.v; line += 64) __builtin_prefetch(lane.at + line, 1, 3);
  for (size_t block = shape.v; block < shape.bytes; block += 256)
    __builtin_prefetch(lane.at + block + lane.t / 4 * 64, 1, 3);
}

}  // namespace
}  // namespace MS_ISA
