// The products of decode attention with int4 K/V (kv_tiles4.inl). Included once per instruction set.
//
// As with int8 (attention_decode.inl), but q is transformed and rounded to 8 bits, whose error is a tenth
// of that of K, so that q.k is one dot product; and weights are rounded to 8 bits, for dot products over
// four tokens. All sums are exact, so their order does not matter.

namespace MS_ISA {
namespace {

constexpr float QUERY_STEPS4 = 127.0f;

// The bytes that stand for codes of K, which are unsigned: levels above the lowest.
constexpr int8_t K_BYTES[16] = {0, 14, 25, 34, 41, 48, 55, 61, 67, 73, 80, 87, 94, 103, 114, -128};

// Returns the operands of codes: K_BYTES, or LEVELS for V. IS_HIGH: those in the high halves of the bytes.
template <bool IS_HIGH>
MS_INLINE i32x16 operands(const int8_t (&table)[16], const uint8_t* from) {
  const i32x16 bytes = load<i32x16>(from);
  return look_up(table, (IS_HIGH ? bytes >> 4 : bytes) & 0x0f0f0f0f);
}

// Transforms a query and rounds it to bytes; returns the value of one step.
float round_query_to_bytes(const float* q, const HeadShape& shape, int8_t* to, int32_t* offsets) {
  alignas(64) float x[MAX_HEAD_DIM];
  std::memcpy(x, q, sizeof(float) * shape.dim);
  hadamard(x, shape.dim);
  f32x16 largest = {};
  for (int d = 0; d < shape.dim; d += 16) largest = max_magnitude(largest, load<f32x16>(x + d));
  const float top = reduce_magnitude(largest), step = top > 0.0f ? QUERY_STEPS4 / top : 0.0f;
  for (int g = 0; g < shape.num_groups; g++) {
    i32x16 sum = {};
    for (int d = g * shape.group; d < (g + 1) * shape.group; d += 16) {
      const i32x16 rounded = to_int_nearest(load<f32x16>(x + d) * step);
      store_i8(to + d, rounded);
      sum += rounded;
    }
    offsets[g] = TOP_LEVEL * reduce_add(sum);
  }
  return top / QUERY_STEPS4 / static_cast<float>(hadamard_block(shape.dim));
}

void round_query4(const float* q, const HeadShape& shape, float scale, Scratch& s, int row) {
  s.q_scale[row] = scale * round_query_to_bytes(q, shape, s.hi + row * shape.dim, s.offsets + row * shape.num_groups);
}

// Computes scores[R][TILES] = q.k of R rows and the 16 tokens of each tile from FIRST on, with K's
// scales applied.
template <int R, int FIRST, int TILES>
MS_INLINE void query_key4(const HeadShape& shape, const Scratch& s, int row, const Stretch& at,
                          f32x16 (&scores)[MAX_ROWS][STRETCH_TILES]) {
  const int8_t* q = s.hi + row * shape.dim;
  for (int g = 0; g < shape.num_groups; g++) {
    i32x16 sum[R][TILES];
    unroll<R>([&](auto r) MS_LAMBDA { unroll<TILES>([&](auto t) MS_LAMBDA { sum[r][t] = i32x16{}; }); });
    auto add = [&](auto is_high, size_t codes, const int8_t* quad) MS_LAMBDA {
      i32x16 k[TILES];
      unroll<TILES>([&](auto t) MS_LAMBDA { k[t] = operands<is_high>(K_BYTES, at.tile[FIRST + t] + codes); });
      unroll<R>([&](auto r) MS_LAMBDA {
        const i32x16 x = splat_bytes(quad + r * shape.dim);
        unroll<TILES>([&](auto t) MS_LAMBDA { sum[r][t] = dot_small(sum[r][t], k[t], x); });
      });
    };
    if (FIRST == 0) prefetch(at.next[0] + 64 * g), prefetch(at.next[1] + 64 * g);
    for (int d = g * shape.group; d < (g + 1) * shape.group; d += 8) {
      const size_t codes = shape.k + d * 8;
      if (FIRST == 0)
        unroll<2>([&](auto i) MS_LAMBDA {
          prefetch(at.next[i] + shape.k + d * 16), prefetch(at.next[i] + shape.k + d * 16 + 64);
        });
      add(std::false_type{}, codes, q + d);
      add(std::true_type{}, codes, q + d + 4);
    }
    unroll<TILES>([&](auto t) MS_LAMBDA {
      const f32x16 scale = from_half(reinterpret_cast<const uint16_t*>(at.tile[FIRST + t] + shape.k_scales) + g * TILE);
      unroll<R>([&](auto r) MS_LAMBDA {
        const f32x16 part = to_float(sum[r][t] - s.offsets[(row + r) * shape.num_groups + g]);
        scores[r][FIRST + t] = g == 0 ? part * scale : fma(part, scale, scores[r][FIRST + t]);
      });
    });
  }
}

// Computes sum[R][2] = p . V for the 32 dimensions of a block of V.
template <int R, int TILES>
MS_INLINE void weigh4(const HeadShape& shape, const Stretch& at, int block, const int16_t (*p)[STRETCH],
                      i32x16 (&sum)[R][2]) {
  const int8_t* weights = reinterpret_cast<const int8_t*>(p);
  unroll<R>([&](auto r) MS_LAMBDA { unroll<2>([&](auto i) MS_LAMBDA { sum[r][i] = i32x16{}; }); });
  for (int t = 0; t < TILES; t++) {
    const uint8_t* codes = at.tile[t] + shape.v + block * 256;
    const uint8_t* next = at.next[2 + t / 2] + shape.k + block * 512 + t % 2 * 256;
    for (int quad = 0; quad < 4; quad++) {
      const i32x16 v[2] = {operands<false>(LEVELS, codes + quad * 64), operands<true>(LEVELS, codes + quad * 64)};
      prefetch(next + quad * 64);
      unroll<R>([&](auto r) MS_LAMBDA {
        const i32x16 x = splat_bytes(weights + sizeof(*p) * r + t * TILE + quad * 4);
        unroll<2>([&](auto i) MS_LAMBDA { sum[r][i] = dot_small(sum[r][i], x, v[i]); });
      });
    }
  }
}

// Adds the weighted values of a stretch to the rows' sums.
template <int R, int TILES>
MS_INLINE void add_values4(const HeadShape& shape, const Scratch& s, int row, const Stretch& at, const Weights& w) {
  const int vectors = shape.dim / 16;
  for (int g = 0; g < shape.num_groups; g++) prefetch(at.next[2] + 64 * g), prefetch(at.next[3] + 64 * g);
  for (int vector = 0; vector < vectors;) {
    const int block = vector / 2, g = vector * 16 / shape.group;
    i32x16 sum[R][2];
    weigh4<R, TILES>(shape, at, block, w.p[g], sum);
    const int end = vector % 2 == 0 && shape.group == 16 ? vector + 1 : 2 * block + 2;
    for (; vector < end && vector < vectors; vector++)
      unroll<R>([&](auto r) MS_LAMBDA {
        float* acc = s.acc + (row + r) * shape.dim + 16 * vector;
        const f32x16 old = load<f32x16>(acc) * w.shrink[r], more = to_float(vector % 2 ? sum[r][1] : sum[r][0]);
        store(acc, fma(more, splat(w.unit[g][r]), old));
      });
  }
}

}  // namespace
}  // namespace MS_ISA
