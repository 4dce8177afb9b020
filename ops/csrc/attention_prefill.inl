// Prefill attention over int8 and int4 K/V for many rows of one sequence. Included once per instruction set.
//
// The results equal those of attention_decode.inl to the bit, but a query row is in each lane:
// scores, weights and sums are all [.][rows]. So the softmax needs no sum across lanes, and the
// query heads of a K/V head are just more rows. A task has some rows of one K/V head, in tiles of up
// to TILE_ROWS. It widens each stretch of tokens once: int8 to 16 bits, as pairs of dimensions of K and of
// tokens of V, int4 to bytes, as quads of them; and adds it to its tiles. It skips runs of AT_ONCE tokens that are masked for all
// rows of a tile, and applies masks only to runs that are masked for some rows.

namespace MS_ISA {
namespace {

// Up to TILE_ROWS consecutive rows of one K/V head, ordered [token][query head of the K/V head].
struct RowTile {
  int vecs;                            // of 16 rows
  int32_t* q;                          // [dim / 2][vecs][16] pairs of 16 bits; int4: [dim / 4][vecs][16] quads of bytes
  int32_t* offset;                     // int4: [groups][vecs][16], as in Scratch
  float *q_scale, *slope;              // [vecs][16]
  float *m, *l, *acc;                  // sums of the current split: [vecs][16], [vecs][16], [dim][vecs][16]
  float *total_m, *total_l, *total;    // sums of the earlier splits
  int *low, *high, *position;          // each row attends to positions [low, high) and is at `position`
  int min_low, max_low, min_high, max_high;
};

// A stretch of tokens from position `first` on.
struct WideStretch {
  int32_t* k;                          // [tile][dim / 4][token][2] pairs of 16 bits; int4: [tile][dim / 4][token] quads
  int32_t* v;                          // [dim / 16][STRETCH / 2][16] pairs of tokens; int4: [dim / 16][STRETCH / 4][16] quads
  float *k_scale, *v_scale, *v_weight; // [groups][STRETCH]; v_weight: the number of steps of a weight of 1
  float* v_top;                        // [groups]: the largest v_scale
  float *order, *order_factor;               // [STRETCH]: binary order of V's scales, moved into the scores; 2^-order
  int first, tiles;
};

// Memory for a tile's scores and weights.
struct WeightBuffers {
  float* scores;  // [STRETCH][vecs][16]
  int32_t* p;     // [groups][STRETCH / 2][vecs][16] pairs of 15-bit weights; int4: [groups][STRETCH / 4][vecs][16] quads of bytes
  float* v_step;  // [groups][vecs][16]: steps per unit of weight * v_scale, for masked rows
  float* unit;    // [groups][vecs][16]: the value of one step
  float* carried; // int4: [groups][4][vecs][16], as in store_weights
};

MS_INLINE float steps_of(float largest, int bits = 8) {
  return (bits == 4 ? WEIGHT_STEPS4 : WEIGHT_STEPS) / (largest < 1e-30f ? 1e-30f : largest);
}

// Computes sum[r] += lanes * x[r * R_STEP], where each 32-bit number is a pair of 16-bit integers, or for
// int4 four bytes, of which those of the lanes are unsigned if ARE_WEIGHTS, else those of x.
template <int BITS, bool ARE_WEIGHTS, int C, int R_STEP>
MS_INLINE void multiply(i32x16 (&sum)[AT_ONCE][C], const int32_t* lanes, const int32_t* x) {
  i32x16 lane[C];
  unroll<C>([&](auto c) MS_LAMBDA { lane[c] = load<i32x16>(lanes + c * 16); });
  unroll<AT_ONCE>([&](auto r) MS_LAMBDA {
    const i32x16 one = splat_bytes(x + r * R_STEP);
    unroll<C>([&](auto c) MS_LAMBDA {
      if constexpr (BITS == 8) sum[r][c] = dot_i16(sum[r][c], lane[c], one);
      else if constexpr (ARE_WEIGHTS) sum[r][c] = dot_small(sum[r][c], lane[c], one);
      else sum[r][c] = dot_small(sum[r][c], one, lane[c]);
    });
  });
}

template <int C>
MS_INLINE i32x16 sees(const RowTile& tile, int c, int position) {
  return (load<i32x16>(tile.low + 16 * c) <= position) & (load<i32x16>(tile.high + 16 * c) > position);
}

// Applies the changes that a few models make to scores, and masks, to the scores of AT_ONCE tokens.
template <int C>
__attribute__((noinline)) void change_and_mask(const AttentionLayer& layer, const RowTile& tile, float* scores,
                                             const float* order, int position) {
  for (int r = 0; r < AT_ONCE; r++)
    for (int c = 0; c < C; c++) {
      float* at = scores + (r * C + c) * 16;
      f32x16 x = load<f32x16>(at);
      if (layer.soft_cap > 0.0f) x = soft_capped(layer.soft_cap, x);
      if (layer.slopes) {
        const i32x16 own = load<i32x16>(tile.position + 16 * c);
        x = alibi(x, (position + r) - own, load<f32x16>(tile.slope + 16 * c));
      }
      store(at, select(sees<C>(tile, c, position + r), x + order[r], splat(NOTHING)));
    }
}

// Computes scores = q.k of tokens [from, to) of the stretch; `top` is the largest score of each row.
template <int BITS, int C>
MS_INLINE void score_rows(const HeadShape& shape, const AttentionLayer& layer, const RowTile& tile,
                          const WideStretch& at, int from, int to, float* scores, f32x16 (&top)[C]) {
  const bool has_changes = changes_scores(layer);
  for (int key = from; key < to; key += AT_ONCE) {
    float* run = scores + key * C * 16;
    constexpr int WORDS = BITS / 4;  // of four dimensions of K
    const int32_t* k = at.k + key / TILE * (TILE * shape.dim / 4 * WORDS) + key % TILE * WORDS;
    const int position = at.first + key;
    const bool is_unfinished = has_changes || position < tile.max_low || position + AT_ONCE > tile.min_high;
    const int32_t* q = tile.q;
    for (int g = 0; g < shape.num_groups; g++) {
      i32x16 sum[AT_ONCE][C];
      unroll<AT_ONCE>([&](auto r) MS_LAMBDA { unroll<C>([&](auto c) MS_LAMBDA { sum[r][c] = i32x16{}; }); });
      for (int quad = 0; quad < shape.group / 4; quad++, q += 16 * C * WORDS, k += TILE * WORDS)
        unroll<WORDS>([&](auto i) MS_LAMBDA { multiply<BITS, false, C, WORDS>(sum, q + 16 * C * i, k + i); });
      const float* scale = at.k_scale + g * STRETCH + key;
      const bool is_last = g == shape.num_groups - 1;
      unroll<AT_ONCE>([&](auto r) MS_LAMBDA {
        unroll<C>([&](auto c) MS_LAMBDA {
          float* to_score = run + (r * C + c) * 16;
          if constexpr (BITS == 4) sum[r][c] -= load<i32x16>(tile.offset + (g * C + c) * 16);
          f32x16 x = to_float(sum[r][c]);
          if (g == 0) x = x * scale[r];
          else x = fma(x, splat(scale[r]), load<f32x16>(to_score));
          if (is_last) {
            x = x * load<f32x16>(tile.q_scale + 16 * c);
            if (!is_unfinished) x = x + at.order[key + r], top[c] = max(top[c], x);
          }
          store(to_score, x);
        });
      });
    }
    if (!is_unfinished) continue;
    change_and_mask<C>(layer, tile, run, at.order + key, position);
    unroll<AT_ONCE>([&](auto r) MS_LAMBDA {
      unroll<C>([&](auto c) MS_LAMBDA { top[c] = max(top[c], load<f32x16>(run + (r * C + c) * 16)); });
    });
  }
}

// Sets v_step, and unit without its factor, from the largest scale of V among the visible tokens of
// each row.
template <int C>
__attribute__((noinline)) void edge_scales(const HeadShape& shape, const RowTile& tile, const WideStretch& at,
                                           const WeightBuffers& buffers) {
  for (int g = 0; g < shape.num_groups; g++)
    for (int i = 0; i < C * 16; i++) {
      const int to = g * C * 16 + i;
      if (i && tile.low[i] == tile.low[i - 1] && tile.high[i] == tile.high[i - 1]) {
        buffers.unit[to] = buffers.unit[to - 1], buffers.v_step[to] = buffers.v_step[to - 1];
        continue;
      }
      f32x16 largest = {};
      for (int t = 0; t < at.tiles; t++) {
        const i32x16 position = LANES + (at.first + t * TILE);
        const i32x16 seen = (position >= tile.low[i]) & (position < tile.high[i]);
        const f32x16 scale = load<f32x16>(at.v_scale + g * STRETCH + t * TILE);
        largest = max_magnitude(largest, select(seen, scale, f32x16{}));
      }
      buffers.unit[to] = reduce_magnitude(largest);
      buffers.v_step[to] = steps_of(buffers.unit[to], shape.bits);
    }
}

// Rounds the weights of N tokens and writes them as the pairs or quads of a group.
template <int N>
MS_INLINE void store_weights_of_rows(int32_t* to, float* carried, size_t stride, f32x16 (&x)[N]) {
  i32x16 w[N];
  unroll<N>([&](auto n) MS_LAMBDA {
    if constexpr (N == 4) x[n] = x[n] + load<f32x16>(carried + n * stride);
    w[n] = to_int_nearest(x[n]);
    if constexpr (N == 4) store(carried + n * stride, x[n] - to_float(w[n]));
  });
  if constexpr (N == 4) store(to, w[0] | w[1] << 8 | w[2] << 16 | w[3] << 24);
  else store(to, (w[0] & 0xffff) | w[1] << 16);
}

// Converts the scores of the tiles that hold tokens [from, to) to weights. `sum` is the sum of each
// row's weights without V's scales, added in the order of the decode kernel. IS_WHOLE: all tokens of
// the stretch are visible to all rows.
template <int BITS, int C, bool IS_WHOLE>
MS_INLINE void weigh_rows(const HeadShape& shape, const RowTile& tile, const WideStretch& at, int from, int to,
                          const WeightBuffers& buffers, const f32x16 (&top)[C], f32x16 (&sum)[C]) {
  constexpr int N = 16 / BITS;  // tokens at a time
  alignas(64) float sums[TILE * C * 16];
  for (int j = 0; j < TILE; j += N) {
    f32x16 total[N][C];
    unroll<N>([&](auto n) MS_LAMBDA { unroll<C>([&](auto c) MS_LAMBDA { total[n][c] = f32x16{}; }); });
    if constexpr (BITS == 4) std::memset(buffers.carried, 0, sizeof(float) * shape.num_groups * N * C * 16);
    for (int key = from / TILE * TILE + j; key < to; key += TILE) {
      const float* x = buffers.scores + key * C * 16;
      const int position = at.first + key;
      const bool masks = !IS_WHOLE && (position < tile.max_low || position + N > tile.min_high);
      f32x16 a[N][C];
      unroll<C>([&](auto c) MS_LAMBDA {
        unroll<N>([&](auto n) MS_LAMBDA { a[n][c] = exp2_neg(load<f32x16>(x + (n * C + c) * 16) - top[c]); });
        if (masks)
          unroll<N>([&](auto n) MS_LAMBDA { a[n][c] = select(sees<C>(tile, c, position + n), a[n][c], f32x16{}); });
        unroll<N>([&](auto n) MS_LAMBDA { total[n][c] += a[n][c] * at.order_factor[key + n]; });
      });
      for (int g = 0; g < shape.num_groups; g++) {
        const float* scale = (IS_WHOLE ? at.v_weight : at.v_scale) + g * STRETCH + key;
        int32_t* p = buffers.p + (g * (STRETCH / N) + key / N) * C * 16;
        float* carried = buffers.carried + g * N * C * 16;
        unroll<C>([&](auto c) MS_LAMBDA {
          f32x16 weight[N];
          unroll<N>([&](auto n) MS_LAMBDA {
            weight[n] = splat(scale[n]);
            if (!IS_WHOLE) weight[n] = weight[n] * load<f32x16>(buffers.v_step + (g * C + c) * 16);
            weight[n] = a[n][c] * weight[n];
            if (masks) weight[n] = select(sees<C>(tile, c, position + n), weight[n], f32x16{});
          });
          store_weights_of_rows<N>(p + c * 16, carried + c * 16, C * 16, weight);
        });
      }
    }
    unroll<N>([&](auto n) MS_LAMBDA {
      unroll<C>([&](auto c) MS_LAMBDA { store(sums + ((j + n) * C + c) * 16, total[n][c]); });
    });
  }
  for (int half = TILE / 2; half; half /= 2)
    for (int i = 0; i < half * C * 16; i += 16)
      store(sums + i, load<f32x16>(sums + i) + load<f32x16>(sums + half * C * 16 + i));
  unroll<C>([&](auto c) MS_LAMBDA { sum[c] = load<f32x16>(sums + c * 16); });
}

// Adds tokens [from, to) of a stretch to C * 16 rows.
template <int BITS, int C>
__attribute__((noinline)) void tile_stretch(const HeadShape& shape, const AttentionLayer& layer, const RowTile& tile,
                                            const WideStretch& at, int from, int to, const WeightBuffers& buffers) {
  f32x16 top[C], sum[C], shrink[C], gain[C];
  unroll<C>([&](auto c) MS_LAMBDA { top[c] = splat(NOTHING); });
  score_rows<BITS, C>(shape, layer, tile, at, from, to, buffers.scores, top);
  const bool is_whole = tile.max_low <= at.first && tile.min_high >= at.first + at.tiles * TILE;
  if (is_whole) {
    for (int i = 0; i < shape.num_groups * C * 16; i += 16) store(buffers.unit + i, splat(at.v_top[i / (C * 16)]));
    weigh_rows<BITS, C, true>(shape, tile, at, from, to, buffers, top, sum);
  } else {
    edge_scales<C>(shape, tile, at, buffers);
    weigh_rows<BITS, C, false>(shape, tile, at, from, to, buffers, top, sum);
  }
  unroll<C>([&](auto c) MS_LAMBDA {
    const f32x16 before = load<f32x16>(tile.m + 16 * c), now = max(before, top[c]);
    shrink[c] = exp2_neg(before - now), gain[c] = exp2_neg(top[c] - now);
    store(tile.m + 16 * c, now);
    store(tile.l + 16 * c, load<f32x16>(tile.l + 16 * c) * shrink[c] + sum[c] * gain[c]);
  });
  for (int g = 0; g < shape.num_groups; g++)
    unroll<C>([&](auto c) MS_LAMBDA {
      float* unit = buffers.unit + (g * C + c) * 16;
      store(unit, load<f32x16>(unit) * (1.0f / STEPS_OF_WEIGHTS<BITS>) * gain[c]);
    });
  for (int d = 0; d < shape.dim; d += AT_ONCE) {
    const int g = d / shape.group;
    constexpr int N = 16 / BITS;
    const int32_t* v = at.v + (d / 16 * (STRETCH / N) + from / N) * 16 + d % 16;
    const int32_t* p = buffers.p + (g * (STRETCH / N) + from / N) * C * 16;
    i32x16 total[AT_ONCE][C];
    unroll<AT_ONCE>([&](auto r) MS_LAMBDA { unroll<C>([&](auto c) MS_LAMBDA { total[r][c] = i32x16{}; }); });
    for (int n = from / N; n < to / N; n++, p += C * 16, v += 16) multiply<BITS, true, C, 1>(total, p, v);
    float* acc = tile.acc + d * C * 16;
    unroll<AT_ONCE>([&](auto r) MS_LAMBDA {
      unroll<C>([&](auto c) MS_LAMBDA {
        const f32x16 old = load<f32x16>(acc + (r * C + c) * 16) * shrink[c];
        const f32x16 unit = load<f32x16>(buffers.unit + (g * C + c) * 16);
        store(acc + (r * C + c) * 16, fma(to_float(total[r][c]), unit, old));
      });
    });
  }
}

using TileStretch = void (*)(const HeadShape&, const AttentionLayer&, const RowTile&, const WideStretch&, int, int,
                             const WeightBuffers&);
template <size_t... C>
constexpr TileStretch tile_stretch_for(int bits, int vecs, std::index_sequence<C...>) {
  constexpr TileStretch all[2][TILE_VECS] = {{tile_stretch<8, C + 1>...}, {tile_stretch<4, C + 1>...}};
  return all[bits == 4][vecs - 1];
}

}  // namespace
}  // namespace MS_ISA
