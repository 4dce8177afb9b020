// The two integer products of attention over latents: scores of rows and tokens, and weights times
// values. Included once per instruction set.
//
// Both are exact sums of 32 bits, so matrix instructions (AMX) and vector instructions give the same
// bits. A query is rounded to 15 bits, high * 128 + low with signed bytes; a weight too, with unsigned
// bytes. A block has up to 16 rows, a stretch up to 256 tokens.

namespace MS_ISA {
namespace {

constexpr int LATENT_ROWS = 16, LATENT_TILES = 16, LATENT_STRETCH = LATENT_TILES * TILE;
constexpr int RUN = 64;  // tokens of a product of bytes
// From 16 values to the next 16 of a stretch. 64 bytes more than they take spread them over the caches.
constexpr int VALUE_BYTES = LATENT_STRETCH * 16 + 64;

// Up to 16 rows: pairs of a token of a sequence and a query head, in this order.
struct LatentBlock {
  int8_t* q;                         // [2][16][dim]: the high and the low bytes
  int32_t* offsets;                  // [groups][16]: 128 * sum of q over the group
  float* q_scale;                    // [2][16]: the value of a step, of K's first part and of its rest
  float *m, *l, *acc;                // sums of the current split: [16], [16], [16][value_dim]
  float *total_m, *total_l, *total;  // sums of the earlier splits
  int* high;                         // [16]: each row attends to positions below it
  int rows, max_high;
};

// Tokens of a sequence from position `first` on.
struct LatentStretch {
  const uint8_t* tile[LATENT_TILES];  // the layer's part of each tile; the last one repeats
  int8_t* v;                          // [value_dim / 16][VALUE_BYTES]: [tokens / 4][16 numbers][4], see turn_values
  float *k_scale, *v_scale;           // [groups][STRETCH], [value groups][STRETCH]
  float *v_weight, *v_top;            // v_scale in steps of its largest: [value groups][STRETCH], [value groups]
  float *order, *order_factor;        // [STRETCH], see binary_order()
  int first, tokens;

  bool has_values;                    // v is whole, because several blocks use it

  int runs() const { return (tokens + RUN - 1) / RUN; }

  // Lays out 16 * count values from number d on at v.
  void turn(int d, int count, int8_t* v) const {
    for (int i = 0; i < count; i++, d += 16, v += VALUE_BYTES)
      for (int t = 0; t < runs() * (RUN / TILE); t++) turn_values(tile[t] + d * TILE, v + t / 4 * (RUN * 16), t % 4);
  }
  // Returns them: where they are laid out already, or laid out at v.
  const int8_t* values(int d, int count) const {
    if (has_values) return v + d / 16 * VALUE_BYTES;
    turn(d, count, v);
    return v;
  }
};

struct LatentBuffers {
  float* scores;                 // [16][STRETCH], later the weights
  uint8_t* weights;              // [2][16][STRETCH]: high and low bytes for one group, in runs
  int32_t* sums;                 // [2][4][16][16], for matrix registers
  float *shrink, *gain, *unit;   // [16]
};

// The cache lines of the next stretch, which are prefetched evenly during the products, so that reading
// memory and computing overlap. More than a few at a time would hold up the loads of the products.
struct Ahead {
  const uint8_t* tile[LATENT_TILES];
  int tiles = 0, lines = 0, tile_at = 0, line_at = 0;
  int share = 0, credit = 0;  // lines of a unit of work, and those not yet prefetched, in 256ths

  MS_INLINE void take(int units) {
    for (credit += units * share; credit >= 256; credit -= 256) {
      if (tile_at == tiles) return;
      __builtin_prefetch(tile[tile_at] + 64 * line_at, 0, 2);
      if (++line_at == lines) line_at = 0, tile_at++;
    }
  }
  // Divides the lines among the units of work of `rows` rows.
  void divide(const LatentShape& shape, int rows) {
    const int products = LATENT_TILES / 2 * shape.num_groups + shape.value_dim / 32 * VALUES;
    share = 256 * tiles * lines / (rows * (products + SOFTMAX + shape.value_groups * WEIGHTS)) + 1;
    // A prefetch waits for the address translation of its page. Those of several pages are found at
    // the same time if they are asked for one after the other.
    for (int t = 0; t < tiles; t++)
      for (int line = 0; line < lines; line += PAGE_LINES) __builtin_prefetch(tile[t] + 64 * line, 0, 2);
    for (int t = 0; t < tiles; t++) __builtin_prefetch(tile[t] + 64 * (lines - 1), 0, 2);
  }
  static constexpr int PAGE_LINES = 4096 / 64;
  // Units of a row: its scores with two tiles of tokens are one.
  static constexpr int SOFTMAX = 10, WEIGHTS = 2, VALUES = 4;
};

// Adds a group's products to the scores of a row and 16 tokens.
MS_INLINE f32x16 add_group(const LatentShape& shape, const LatentBlock& block, int g, int row, f32x16 score, i32x16 sum,
                           f32x16 k_scale) {
  const f32x16 x = to_float(sum - block.offsets[g * LATENT_ROWS + row]);
  if (g >= shape.value_groups) return fma(x, k_scale * block.q_scale[LATENT_ROWS + row], score);
  score = g == 0 ? x * k_scale : fma(x, k_scale, score);
  return g == shape.value_groups - 1 ? score * block.q_scale[row] : score;
}

// Adds a group's products to the sums of a row and 16 of its numbers.
MS_INLINE void add_sums(const LatentShape& shape, const LatentBlock& block, const LatentBuffers& buffers, int row, int d,
                        i32x16 sum) {
  float* acc = block.acc + row * shape.value_dim + d;
  const f32x16 old = load<f32x16>(acc) * buffers.shrink[row];
  store(acc, fma(to_float(sum), splat(buffers.unit[row]), old));
}

// ---- vector instructions

constexpr int LATENT_TOKENS = IS_AVX_VNNI ? 1 : HAS_32_REGISTERS ? 4 : 2;  // tiles of tokens at a time
constexpr int SCORE_ROWS = MAX_ROWS, VALUE_ROWS = HAS_32_REGISTERS ? 6 : IS_AVX_VNNI ? 3 : 2;
constexpr int VALUE_VECS = HAS_32_REGISTERS ? 2 : 1;

// Computes scores of R rows from `row` on and of LATENT_TOKENS tiles from `t` on.
template <int R>
__attribute__((noinline)) void score_vectors(const LatentShape& shape, const LatentBlock& block, const LatentStretch& at,
                                             int row, int t, float* scores) {
  f32x16 score[R][LATENT_TOKENS];
  for (int g = 0; g < shape.num_groups; g++) {
    i32x16 sum[R][LATENT_TOKENS];
    unroll<R>([&](auto r) MS_LAMBDA { unroll<LATENT_TOKENS>([&](auto i) MS_LAMBDA { sum[r][i] = i32x16{}; }); });
    const int first = shape.first_of(g), end = first + shape.size_of(g);
    const auto pass = [&](const int8_t* q) MS_LAMBDA {
      for (int d = first; d < end; d += 4) {
        i32x16 k[LATENT_TOKENS];
        unroll<LATENT_TOKENS>([&](auto i) MS_LAMBDA { k[i] = load<i32x16>(at.tile[t + i] + d * TILE); });
        unroll<R>([&](auto r) MS_LAMBDA {
          const i32x16 x = splat_bytes(q + (row + r) * shape.dim + d);
          unroll<LATENT_TOKENS>([&](auto i) MS_LAMBDA { sum[r][i] = dot_u8_i8(sum[r][i], k[i], x); });
        });
      }
    };
    pass(block.q);
    unroll<R>([&](auto r) MS_LAMBDA { unroll<LATENT_TOKENS>([&](auto i) MS_LAMBDA { sum[r][i] <<= 7; }); });
    pass(block.q + LATENT_ROWS * shape.dim);
    unroll<LATENT_TOKENS>([&](auto i) MS_LAMBDA {
      const f32x16 k_scale = load<f32x16>(at.k_scale + g * LATENT_STRETCH + (t + i) * TILE);
      unroll<R>([&](auto r) MS_LAMBDA {
        score[r][i] = add_group(shape, block, g, row + r, score[r][i], sum[r][i], k_scale);
      });
    });
  }
  unroll<R>([&](auto r) MS_LAMBDA {
    unroll<LATENT_TOKENS>([&](auto i) MS_LAMBDA {
      store(scores + (row + r) * LATENT_STRETCH + (t + i) * TILE, score[r][i]);
    });
  });
}

// Adds the weighted sums of 16 * VECS numbers from d on, whose values are at v, to R rows.
template <int R, int VECS>
__attribute__((noinline)) void value_vectors(const LatentShape& shape, const LatentBlock& block, const LatentStretch& at,
                                             const LatentBuffers& buffers, int row, int d, const int8_t* v) {
  i32x16 high[R][VECS], low[R][VECS];
  unroll<R>([&](auto r) MS_LAMBDA {
    unroll<VECS>([&](auto i) MS_LAMBDA { high[r][i] = low[r][i] = i32x16{}; });
  });
  const uint8_t* weights = buffers.weights + row * LATENT_STRETCH;
  for (int token = 0; token < at.runs() * RUN; token += 4, v += 64) {
    i32x16 x[VECS];
    unroll<VECS>([&](auto i) MS_LAMBDA { x[i] = load<i32x16>(v + i * VALUE_BYTES); });
    unroll<R>([&](auto r) MS_LAMBDA {
      const i32x16 a = splat_bytes(weights + r * LATENT_STRETCH + token);
      const i32x16 b = splat_bytes(weights + (LATENT_ROWS + r) * LATENT_STRETCH + token);
      unroll<VECS>([&](auto i) MS_LAMBDA {
        high[r][i] = dot_u8_i8(high[r][i], a, x[i]);
        low[r][i] = dot_u8_i8(low[r][i], b, x[i]);
      });
    });
  }
  unroll<R>([&](auto r) MS_LAMBDA {
    unroll<VECS>([&](auto i) MS_LAMBDA {
      add_sums(shape, block, buffers, row + r, d + 16 * i, (high[r][i] << 7) + low[r][i]);
    });
  });
}

using ScoreVectors = void (*)(const LatentShape&, const LatentBlock&, const LatentStretch&, int, int, float*);
using ValueVectors = void (*)(const LatentShape&, const LatentBlock&, const LatentStretch&, const LatentBuffers&, int, int,
                              const int8_t*);
template <size_t... R>
constexpr ScoreVectors score_vectors_for(int rows, std::index_sequence<R...>) {
  constexpr ScoreVectors all[] = {score_vectors<R + 1>...};
  return all[rows - 1];
}
template <int VECS, size_t... R>
constexpr ValueVectors value_vectors_for(int rows, std::index_sequence<R...>) {
  constexpr ValueVectors all[] = {value_vectors<R + 1, VECS>...};
  return all[rows - 1];
}

void scores_by_vectors(const LatentShape& shape, const LatentBlock& block, const LatentStretch& at,
                       const LatentBuffers& buffers, Ahead& ahead) {
  for (int t = 0; t * TILE < at.tokens; t += LATENT_TOKENS) {
    for (int row = 0; row < block.rows; row += SCORE_ROWS) {
      const int rows = block.rows - row < SCORE_ROWS ? block.rows - row : SCORE_ROWS;
      ahead.take(rows * shape.num_groups * LATENT_TOKENS / 2);
      score_vectors_for(rows, std::make_index_sequence<SCORE_ROWS>{})(shape, block, at, row, t, buffers.scores);
    }
  }
}

// Adds the weighted sums of group g.
void values_by_vectors(const LatentShape& shape, const LatentBlock& block, const LatentStretch& at,
                       const LatentBuffers& buffers, int g, Ahead& ahead) {
  const int end = shape.first_of(g) + shape.group;
  for (int d = shape.first_of(g), vecs; d < end; d += 16 * vecs) {
    vecs = end - d < 16 * VALUE_VECS ? 1 : VALUE_VECS;
    const int8_t* v = at.values(d, vecs);
    for (int row = 0; row < block.rows; row += VALUE_ROWS) {
      const int rows = block.rows - row < VALUE_ROWS ? block.rows - row : VALUE_ROWS;
      ahead.take(rows * vecs * Ahead::VALUES / 2);
      constexpr auto each = std::make_index_sequence<VALUE_ROWS>{};
      const ValueVectors run = vecs == 1 ? value_vectors_for<1>(rows, each) : value_vectors_for<VALUE_VECS>(rows, each);
      run(shape, block, at, buffers, row, d, v);
    }
  }
}

// ---- matrix instructions

#if defined(__AMX_INT8__)
constexpr bool HAS_MATRIX = true;

// Registers 0 to 3 are sums [16 rows][16], 4 and 5 the high and low bytes [16 rows][depth] of one
// factor, 6 and 7 the other factor, [depth / 4][16][4].
MS_INLINE void configure_matrix(int depth) {
  struct alignas(64) Configuration {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  config.row_bytes[4] = config.row_bytes[5] = static_cast<uint16_t>(depth);
  config.rows[6] = config.rows[7] = static_cast<uint8_t>(depth / 4);
  _tile_loadconfig(&config);
}
MS_INLINE void release_matrix() { _tile_release(); }

MS_INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
MS_INLINE void store_sums(int32_t* sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}
// Returns high * 128 + low of `which` of the two products, 16 numbers of a row.
MS_INLINE i32x16 sum_of(const int32_t* sums, int which, int row) {
  const int32_t* at = sums + which * 512 + row * 16;
  return (load<i32x16>(at) << 7) + load<i32x16>(at + 256);
}

// The number of bytes of a group that are multiplied at a time: all groups have whole steps of it.
MS_INLINE int matrix_depth(const LatentShape& shape) {
  for (int depth = 64; depth > 16; depth /= 2)
    if (shape.group % depth == 0 && shape.rope_group % depth == 0) return depth;
  return 16;
}

// Adds group g's products, `sums`, to the scores of all rows and two tiles of tokens from t on.
template <class F>
MS_INLINE void for_scores(const LatentBlock& block, const LatentBuffers& buffers, const int32_t* sums,
                          const int32_t* offsets, int t, Ahead& ahead, F&& score_of) {
  float* scores = buffers.scores + t * TILE;
  for (int row = 0; row < block.rows; row++, scores += LATENT_STRETCH) {
    ahead.take(1);
    unroll<2>([&](auto i) MS_LAMBDA {
      float* score = scores + i * TILE;
      store(score, score_of(row, i, load<f32x16>(score), to_float(sum_of(sums, i, row) - offsets[row])));
    });
  }
}

__attribute__((noinline)) void finish_scores(const LatentShape& shape, const LatentBlock& block, const LatentStretch& at,
                                             const LatentBuffers& buffers, const int32_t* sums, int g, int t, Ahead& ahead) {
  const float* from = at.k_scale + g * LATENT_STRETCH + t * TILE;
  const f32x16 scale[2] = {load<f32x16>(from), load<f32x16>(from + TILE)};
  const int32_t* offsets = block.offsets + g * LATENT_ROWS;
  const float *first = block.q_scale, *rest = first + LATENT_ROWS;
  const bool is_last = g == shape.value_groups - 1;
  if (g >= shape.value_groups)
    for_scores(block, buffers, sums, offsets, t, ahead, [&](int row, auto i, f32x16 score, f32x16 x) MS_LAMBDA {
      return fma(x, scale[i] * rest[row], score);
    });
  else if (g == 0)
    for_scores(block, buffers, sums, offsets, t, ahead, [&](int row, auto i, f32x16, f32x16 x) MS_LAMBDA {
      return is_last ? x * scale[i] * first[row] : x * scale[i];
    });
  else if (is_last)
    for_scores(block, buffers, sums, offsets, t, ahead, [&](int row, auto i, f32x16 score, f32x16 x) MS_LAMBDA {
      return fma(x, scale[i], score) * first[row];
    });
  else
    for_scores(block, buffers, sums, offsets, t, ahead, [&](int, auto i, f32x16 score, f32x16 x) MS_LAMBDA {
      return fma(x, scale[i], score);
    });
}

// The products of one pair of tiles are issued before those of the pair before are used, so that
// matrix and vector units work at once.
void scores_by_matrix(const LatentShape& shape, const LatentBlock& block, const LatentStretch& at,
                      const LatentBuffers& buffers, Ahead& ahead) {
  const int depth = matrix_depth(shape), tiles = (at.tokens + TILE - 1) / TILE;
  configure_matrix(depth);
  forget_loads();
  int turn = 0, last_g = 0, last_t = -1;
  for (int g = 0; g < shape.num_groups; g++)
    for (int t = 0; t < tiles; t += 2, turn ^= 1) {
      clear_sums();
      for (int d = shape.first_of(g), first = d, end = d + shape.size_of(g); d < end; d += depth) {
        if (t == 0 || d > first || first + depth < end) {
          _tile_loadd(4, block.q + d, shape.dim);
          _tile_loadd(5, block.q + LATENT_ROWS * shape.dim + d, shape.dim);
        }
        _tile_loadd(6, at.tile[t] + d * TILE, 64);
        _tile_loadd(7, at.tile[t + 1] + d * TILE, 64);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 5, 6);
        _tile_dpbsud(2, 4, 7);
        _tile_dpbsud(3, 5, 7);
      }
      store_sums(buffers.sums + turn * 1024);
      if (last_t >= 0) finish_scores(shape, block, at, buffers, buffers.sums + (turn ^ 1) * 1024, last_g, last_t, ahead);
      last_g = g, last_t = t;
    }
  finish_scores(shape, block, at, buffers, buffers.sums + (turn ^ 1) * 1024, last_g, last_t, ahead);
}

void begin_values_matrix(const LatentShape& shape) {
  if (matrix_depth(shape) != RUN) configure_matrix(RUN);
}

void values_by_matrix(const LatentShape& shape, const LatentBlock& block, const LatentStretch& at,
                      const LatentBuffers& buffers, int g, Ahead& ahead) {
  const int first = shape.first_of(g), end = first + shape.group;
  forget_loads();
  const auto finish = [&](int d, const int32_t* sums) MS_LAMBDA {
    for (int row = 0; row < block.rows; row++) {
      ahead.take(Ahead::VALUES);
      add_sums(shape, block, buffers, row, d, sum_of(sums, 0, row));
      if (d + 16 < end) add_sums(shape, block, buffers, row, d + 16, sum_of(sums, 1, row));
    }
  };
  int turn = 0;
  for (int d = first; d < end; d += 32, turn ^= 1) {
    const bool is_pair = d + 16 < end;
    const int8_t* v = at.values(d, is_pair ? 2 : 1);
    forget_loads();
    clear_sums();
    for (int run = 0; run < at.runs(); run++, v += RUN * 16) {
      _tile_loadd(4, buffers.weights + run * RUN, LATENT_STRETCH);
      _tile_loadd(5, buffers.weights + LATENT_ROWS * LATENT_STRETCH + run * RUN, LATENT_STRETCH);
      _tile_loadd(6, v, 64);
      _tile_dpbusd(0, 4, 6);
      _tile_dpbusd(1, 5, 6);
      if (!is_pair) continue;
      _tile_loadd(7, v + VALUE_BYTES, 64);
      _tile_dpbusd(2, 4, 7);
      _tile_dpbusd(3, 5, 7);
    }
    store_sums(buffers.sums + turn * 1024);
    if (d > first) finish(d - 32, buffers.sums + (turn ^ 1) * 1024);
  }
  finish(first + (end - first - 1) / 32 * 32, buffers.sums + (turn ^ 1) * 1024);
}
#else
constexpr bool HAS_MATRIX = false;
MS_INLINE void begin_values_matrix(const LatentShape&) {}
MS_INLINE void release_matrix() {}
void scores_by_matrix(const LatentShape& shape, const LatentBlock& block, const LatentStretch& at,
                      const LatentBuffers& buffers, Ahead& ahead) {
  scores_by_vectors(shape, block, at, buffers, ahead);
}
void values_by_matrix(const LatentShape& shape, const LatentBlock& block, const LatentStretch& at,
                      const LatentBuffers& buffers, int g, Ahead& ahead) {
  values_by_vectors(shape, block, at, buffers, g, ahead);
}
#endif

}  // namespace
}  // namespace MS_ISA
