// What decode attention over int8 and int4 K/V share: a stretch of tokens and the softmax over it. Included
// once per instruction set.

namespace MS_ISA {
namespace {

constexpr int STRETCH_TILES = 4, STRETCH = STRETCH_TILES * TILE;
constexpr int MAX_ROWS = HAS_32_REGISTERS ? 6 : IS_AVX_VNNI ? 4 : 2;  // of the micro kernels; each row has AT_MOST sums
constexpr int AT_MOST = IS_AVX_VNNI ? 1 : STRETCH_TILES;
constexpr float WEIGHT_STEPS = 32767.0f, QUERY_STEPS = 16256.0f;
constexpr float WEIGHT_STEPS4 = 254.0f;  // with what is carried, a weight rounds to 255 at most
template <int BITS>
constexpr float STEPS_OF_WEIGHTS = BITS == 4 ? WEIGHT_STEPS4 : WEIGHT_STEPS;

// Buffers of one thread for some rows, the query heads of one token. They grow as needed.
struct Scratch {
  int8_t *hi, *lo;     // [rows][dim]; lo is unused with int4
  int32_t* offsets;    // [rows][groups]: the sum of q over the group times what K's bytes are above its values
  float* q_scale;      // [rows]
  float *m, *l, *acc;  // sums of a split: [rows], [rows], [rows][dim]
  int low, high;       // visible positions
  int position;        // of the query row
  int head;            // query head of the first row
};

MS_INLINE Scratch scratch_for(int rows, int dim, int groups) {
  static thread_local List<char> memory;
  auto round = [](size_t n) { return (n + 63) / 64 * 64; };
  const size_t r = rows, bytes[] = {r * dim, r * dim, r * groups * 4, r * 4, r * 4, r * 4, r * dim * 4};
  size_t need = 64;
  for (size_t b : bytes) need += round(b);
  if (memory.size() < need) memory.resize(need);
  char* at = memory.data() + -reinterpret_cast<uintptr_t>(memory.data()) % 64;
  void* part[7];
  for (int i = 0; i < 7; i++) part[i] = at, at += round(bytes[i]);
  auto f = [&](int i) { return static_cast<float*>(part[i]); };
  return {static_cast<int8_t*>(part[0]), static_cast<int8_t*>(part[1]), static_cast<int32_t*>(part[2]),
          f(3), f(4), f(5), f(6), 0, 0, 0, 0};
}

struct Stretch {
  const uint8_t* tile[STRETCH_TILES];  // address of this head's part of each tile
  // The tiles of the next head or stretch, to be prefetched line by line: two of them while K is
  // read and two while V is read, so that the hardware prefetcher detects streams.
  const uint8_t* next[STRETCH_TILES];
  int first;                           // position of the first token
};

__attribute__((noinline)) void change_scores(const AttentionLayer& layer, const Scratch& s, int row, int first,
                                           f32x16* score, int tiles) {
  for (int t = 0; t < tiles; t++) {
    if (layer.soft_cap > 0.0f) score[t] = soft_capped(layer.soft_cap, score[t]);
    if (layer.slopes)
      score[t] = alibi(score[t], LANES + (first + t * TILE - s.position), splat(layer.slopes[s.head + row]));
  }
}

// The weights of a stretch for R rows.
struct Weights {
  // 15-bit integers, for each group; with int4, bytes, which fill half of each row
  alignas(64) int16_t p[MAX_GROUPS][MAX_ROWS][STRETCH];
  float unit[MAX_GROUPS][MAX_ROWS];                      // the value of one step of p
  float shrink[MAX_ROWS];                                // factor for the rows' earlier sums
};

// Rounds a tile's weights to integers and stores them. int4 has 8 bits of them, of which a rounding error
// goes to the token 16 places further on in the stretch, so that many small weights do not vanish beside
// a large one.
template <int BITS>
MS_INLINE void store_weights(int16_t* p, int t, f32x16 x, f32x16& carried) {
  if constexpr (BITS == 4) {
    x = x + carried;
    const i32x16 rounded = to_int_nearest(x);
    carried = x - to_float(rounded);
    store_i8(reinterpret_cast<int8_t*>(p) + t * TILE, rounded);
  } else {
    store_i16(p + t * TILE, to_int_nearest(x));
  }
}

// Computes the softmax of R rows' scores x over a stretch.
template <int BITS, int R, int TILES, bool MASKED>
MS_INLINE void softmax_stretch(const HeadShape& shape, const AttentionLayer& layer, const Scratch& s, int row,
                      const Stretch& at, f32x16 (&x)[MAX_ROWS][STRETCH_TILES], Weights& w) {
  i32x16 seen[TILES];
  f32x16 top[R], sum[R];
  float gain[R];
  unroll<R>([&](auto r) MS_LAMBDA {
    unroll<TILES>([&](auto t) MS_LAMBDA { x[r][t] = x[r][t] * s.q_scale[row + r]; });
  });
  if (changes_scores(layer))
    for (int r = 0; r < R; r++) change_scores(layer, s, row + r, at.first, x[r], TILES);
  unroll<TILES>([&](auto t) MS_LAMBDA {
    const i32x16 position = LANES + (at.first + t * TILE);
    if (MASKED) seen[t] = (position >= s.low) & (position < s.high);
  });
  f32x16 order[TILES], order_factor[TILES];
  unroll<TILES>([&](auto t) MS_LAMBDA {
    f32x16 largest = {};
    for (int g = 0; g < shape.num_groups; g++)
      largest = max_magnitude(
          largest, from_half(reinterpret_cast<const uint16_t*>(at.tile[t] + shape.v_scales) + g * TILE));
    order[t] = binary_order(largest), order_factor[t] = power_of_two(-order[t]);
  });
  unroll<R>([&](auto r) MS_LAMBDA {
    top[r] = splat(NOTHING);
    unroll<TILES>([&](auto t) MS_LAMBDA {
      x[r][t] = x[r][t] + order[t];
      if (MASKED) x[r][t] = select(seen[t], x[r][t], splat(NOTHING));
      top[r] = max(top[r], x[r][t]);
    });
  });
  unroll<R>([&](auto r) MS_LAMBDA { top[r] = max_all(top[r]); });
  unroll<R>([&](auto r) MS_LAMBDA {
    sum[r] = splat(0.0f);
    unroll<TILES>([&](auto t) MS_LAMBDA {
      x[r][t] = exp2_neg(x[r][t] - top[r]);
      if (MASKED) x[r][t] = select(seen[t], x[r][t], splat(0.0f));
      sum[r] += x[r][t] * order_factor[t];
    });
  });
  unroll<R>([&](auto r) MS_LAMBDA {
    const f32x16 before = splat(s.m[row + r]), now = max(before, top[r]);
    const float less = exp2_neg(before - now)[0];
    gain[r] = exp2_neg(top[r] - now)[0];
    w.shrink[r] = less;
    s.m[row + r] = now[0];
    s.l[row + r] = s.l[row + r] * less + reduce_add(sum[r]) * gain[r];
  });
  for (int g = 0; g < shape.num_groups; g++) {
    f32x16 scale[TILES], largest = {};
    unroll<TILES>([&](auto t) MS_LAMBDA {
      scale[t] = from_half(reinterpret_cast<const uint16_t*>(at.tile[t] + shape.v_scales) + g * TILE);
      scale[t] = scale[t] * order_factor[t];
      if (MASKED) scale[t] = select(seen[t], scale[t], splat(0.0f));
      largest = max_magnitude(largest, scale[t]);
    });
    largest = max_magnitude_all(largest);
    const f32x16 step = STEPS_OF_WEIGHTS<BITS> / max(largest, splat(1e-30f));
    unroll<TILES>([&](auto t) MS_LAMBDA { scale[t] = scale[t] * step; });
    unroll<R>([&](auto r) MS_LAMBDA {
      f32x16 carried = {};
      unroll<TILES>([&](auto t) MS_LAMBDA { store_weights<BITS>(w.p[g][r], t, x[r][t] * scale[t], carried); });
      w.unit[g][r] = largest[0] * (1.0f / STEPS_OF_WEIGHTS<BITS>) * gain[r];
    });
  }
}

}  // namespace
}  // namespace MS_ISA
