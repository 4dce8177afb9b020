// Attention over int8 K/V (kv_tiles.inl), one kernel for decode and prefill rows. Included once
// per instruction set.
//
// Arithmetic, for every query row by itself (flash attention, Dao et al. 2022, in base 2):
//   q is rounded to 15 bits, as hi * 128 + lo, so that q.k is two exact integer dot products;
//   tokens go 64 at a time (a stretch): p = exp2(s - m), then p * v_scale is rounded to 15 bits of
//   the stretch's largest and summed against V in integers;
//   each run of SPLIT positions starts afresh, and the parts are merged in order.
// Nothing of this depends on which rows are computed together, on how a prompt was cut into
// chunks, or on the number of threads: a row has the same bits in any batch.

namespace MS_ISA {
namespace {

constexpr int STRETCH_TILES = 4, STRETCH = STRETCH_TILES * TILE, SPLIT = 512;
constexpr int MAX_ROWS = HAS_32_REGISTERS ? 6 : IS_AVX_VNNI ? 4 : 2;  // of the micro kernels, AT_MOST sums each
constexpr int AT_MOST = IS_AVX_VNNI ? 1 : STRETCH_TILES;
constexpr float NOTHING = -1e30f;

// Buffers of one thread, grown as needed.
struct Scratch {
  int8_t *hi, *lo;     // [rows][dim]
  int32_t* offsets;    // [rows][groups]: 128 * sum of q over the group
  float* q_scale;      // [rows]
  float *m, *l, *acc;  // of the current split: [rows], [rows], [rows][dim]
  float *total_m, *total_l, *total;
  int *low, *high;  // visible positions of each row
  int* head;        // query head of each row
};

MS_INLINE Scratch scratch_for(int rows, int dim, int groups) {
  static thread_local List<char> memory;
  auto round = [](size_t n) { return (n + 63) / 64 * 64; };
  const size_t r = rows, bytes[] = {r * dim, r * dim, r * groups * 4, r * 4, r * 4, r * 4, r * dim * 4,
                                    r * 4, r * 4, r * dim * 4, r * 4, r * 4, r * 4};
  size_t need = 64;
  for (size_t b : bytes) need += round(b);
  if (memory.size() < need) memory.resize(need);
  char* at = memory.data() + -reinterpret_cast<uintptr_t>(memory.data()) % 64;
  void* part[13];
  for (int i = 0; i < 13; i++) part[i] = at, at += round(bytes[i]);
  auto f = [&](int i) { return static_cast<float*>(part[i]); };
  return {static_cast<int8_t*>(part[0]), static_cast<int8_t*>(part[1]), static_cast<int32_t*>(part[2]),
          f(3), f(4), f(5), f(6), f(7), f(8), f(9), static_cast<int*>(part[10]),
          static_cast<int*>(part[11]), static_cast<int*>(part[12])};
}

void round_query(const float* q, const HeadShape& shape, float scale, Scratch& s, int row) {
  f32x16 largest = {};
  for (int d = 0; d < shape.dim; d += 16) largest = max_magnitude(largest, load<f32x16>(q + d));
  const float top = reduce_magnitude(largest), step = top > 0.0f ? 16256.0f / top : 0.0f;
  int32_t* offsets = s.offsets + row * shape.num_groups;
  i32x16 sum = {};
  for (int d = 0; d < shape.dim; d += 16) {
    const i32x16 x = to_int_nearest(load<f32x16>(q + d) * step);
    store_i8(s.hi + row * shape.dim + d, x >> 7);
    store_i8(s.lo + row * shape.dim + d, x & 127);
    if (shape.group == 8) {  // two groups
      offsets[d / 8] = 128 * reduce_add(x & (LANES < 8));
      offsets[d / 8 + 1] = 128 * reduce_add(x & (LANES >= 8));
      continue;
    }
    sum += x;
    if ((d + 16) % shape.group == 0) {
      offsets[d / shape.group] = 128 * reduce_add(sum);
      sum = i32x16{};
    }
  }
  s.q_scale[row] = top / 16256.0f * scale;
}

struct Stretch {
  const uint8_t* tile[STRETCH_TILES];  // this head's part of each tile
  // Of the head or stretch that follows, to prefetch. Line after line: two tiles while K is read,
  // two while V is, so that the processor's own prefetching sees streams.
  const uint8_t* next[STRETCH_TILES];
  int first;                           // position of the first token
};

// scores[R][TILES] = q.k of R rows with 16 tokens of each tile from FIRST on, K's scales applied.
template <int R, int FIRST, int TILES>
MS_INLINE void query_key(const HeadShape& shape, const Scratch& s, int row, const Stretch& at,
                         f32x16 (&scores)[MAX_ROWS][STRETCH_TILES]) {
  const int8_t* hi = s.hi + row * shape.dim;
  const int8_t* lo = s.lo + row * shape.dim;
  const int quads = shape.group / 4;
  for (int g = 0; g < shape.num_groups; g++) {
    i32x16 sum[R][TILES];
    unroll<R>([&](auto r) MS_LAMBDA { unroll<TILES>([&](auto t) MS_LAMBDA { sum[r][t] = i32x16{}; }); });
    auto pass = [&](const int8_t* q, const uint8_t* next) MS_LAMBDA {
      for (int i = g * quads; i < (g + 1) * quads; i++) {
        i32x16 k[TILES];
        unroll<TILES>([&](auto t) MS_LAMBDA { k[t] = load<i32x16>(at.tile[FIRST + t] + shape.k + i * 64); });
        if (FIRST == 0) prefetch(next + i * 128), prefetch(next + i * 128 + 64);
        unroll<R>([&](auto r) MS_LAMBDA {
          const i32x16 x = splat_bytes(q + r * shape.dim + 4 * i);
          unroll<TILES>([&](auto t) MS_LAMBDA { sum[r][t] = dot_u8_i8(sum[r][t], k[t], x); });
        });
      }
    };
    for (int t = 0; t < STRETCH_TILES && FIRST == 0; t++) prefetch(at.next[t] + 32 * shape.dim + 64 * g);
    pass(hi, at.next[0]);
    unroll<R>([&](auto r) MS_LAMBDA { unroll<TILES>([&](auto t) MS_LAMBDA { sum[r][t] <<= 7; }); });
    pass(lo, at.next[1]);
    unroll<TILES>([&](auto t) MS_LAMBDA {
      const f32x16 scale = from_half(reinterpret_cast<const uint16_t*>(at.tile[FIRST + t] + shape.k_scales) + g * TILE);
      unroll<R>([&](auto r) MS_LAMBDA {
        const f32x16 part = to_float(sum[r][t] - s.offsets[(row + r) * shape.num_groups + g]);
        scores[r][FIRST + t] = g == 0 ? part * scale : fma(part, scale, scores[r][FIRST + t]);
      });
    });
  }
}

// What a few models do to scores before the softmax; scores are in base 2 here.
__attribute__((noinline)) void bend_scores(const AttentionLayer& layer, const Scratch& s, int row, int first,
                                           f32x16* score, int tiles) {
  for (int t = 0; t < tiles; t++) {
    f32x16 x = score[t];
    if (layer.soft_cap > 0.0f) {
      const float cap = layer.soft_cap * LOG2E;
      x = cap * tanh(x / cap);
    }
    if (layer.slopes)
      x += to_float(LANES + (first + t * TILE - (s.high[row] - 1))) * (layer.slopes[s.head[row]] * LOG2E);
    score[t] = x;
  }
}

// Softmax of R rows' scores over a stretch. p: weights times V's scales as 15-bit integers, for
// each group; unit: what one of them is worth; shrink: what the rows' earlier sums are to be
// multiplied by.
template <int R, int TILES, bool MASKED>
MS_INLINE void soften(const HeadShape& shape, const AttentionLayer& layer, Scratch& s, int row,
                      const Stretch& at, f32x16 (&x)[MAX_ROWS][STRETCH_TILES],
                      int16_t (*p)[MAX_ROWS][STRETCH], float (*unit)[MAX_ROWS], float* shrink) {
  i32x16 seen[R][TILES];
  f32x16 top[R], now[R], sum[R];
  unroll<R>([&](auto r) MS_LAMBDA {
    unroll<TILES>([&](auto t) MS_LAMBDA { x[r][t] = x[r][t] * s.q_scale[row + r]; });
  });
  if (layer.soft_cap > 0.0f || layer.slopes)
    for (int r = 0; r < R; r++) bend_scores(layer, s, row + r, at.first, x[r], TILES);
  unroll<R>([&](auto r) MS_LAMBDA {
    top[r] = splat(s.m[row + r]);
    unroll<TILES>([&](auto t) MS_LAMBDA {
      if (MASKED) {
        const i32x16 position = LANES + (at.first + t * TILE);
        seen[r][t] = (position >= s.low[row + r]) & (position < s.high[row + r]);
        x[r][t] = select(seen[r][t], x[r][t], splat(NOTHING));
      }
      top[r] = max(top[r], x[r][t]);
    });
  });
  unroll<R>([&](auto r) MS_LAMBDA { now[r] = max_all(top[r]); });
  unroll<R>([&](auto r) MS_LAMBDA {
    sum[r] = splat(0.0f);
    unroll<TILES>([&](auto t) MS_LAMBDA {
      x[r][t] = exp2_neg(x[r][t] - now[r]);
      if (MASKED) x[r][t] = select(seen[r][t], x[r][t], splat(0.0f));
      sum[r] += x[r][t];
    });
  });
  for (int g = 0; g < shape.num_groups; g++) {
    f32x16 scale[TILES];
    unroll<TILES>([&](auto t) MS_LAMBDA {
      scale[t] = from_half(reinterpret_cast<const uint16_t*>(at.tile[t] + shape.v_scales) + g * TILE);
    });
    unroll<R>([&](auto r) MS_LAMBDA {
      f32x16 weight[TILES], largest = {};
      unroll<TILES>([&](auto t) MS_LAMBDA {
        weight[t] = x[r][t] * scale[t];
        if (MASKED) weight[t] = select(seen[r][t], weight[t], splat(0.0f));
        largest = max_magnitude(largest, weight[t]);
      });
      largest = max_magnitude_all(largest);
      const f32x16 step = 32767.0f / max(largest, splat(1e-30f));
      unroll<TILES>([&](auto t) MS_LAMBDA { store_i16(p[g][r] + t * TILE, to_int_nearest(weight[t] * step)); });
      unit[g][r] = largest[0] * (1.0f / 32767.0f);
    });
  }
  unroll<R>([&](auto r) MS_LAMBDA {
    const float less = exp2_neg(splat(s.m[row + r]) - now[r])[0];
    shrink[r] = less;
    s.m[row + r] = now[r][0];
    s.l[row + r] = s.l[row + r] * less + reduce_add(sum[r]);
  });
}

// sums[R][VECS] = p . V over 16 * VECS dimensions from d on.
template <int R, int VECS, int TILES>
MS_INLINE void weigh(const HeadShape& shape, const Stretch& at, int d, const int16_t (*p)[STRETCH],
                     i32x16 (&sum)[R][VECS]) {
  unroll<R>([&](auto r) MS_LAMBDA { unroll<VECS>([&](auto i) MS_LAMBDA { sum[r][i] = i32x16{}; }); });
  for (int t = 0; t < TILES; t++) {
    const int8_t* v = reinterpret_cast<const int8_t*>(at.tile[t] + shape.v) + 2 * d;
    // the other half of what follows: tile 2 meanwhile, then tile 3
    const uint8_t* next = at.next[2 + t / 2] + (d / (16 * VECS) * 16 + t % 2 * 8) * (32 * VECS);
    for (int pair = 0; pair < TILE / 2; pair++, v += 2 * shape.dim, next += 32 * VECS) {
      i32x16 wide[VECS];
      unroll<VECS>([&](auto i) MS_LAMBDA { wide[i] = widen_i8(v + 32 * i); });
      unroll<(VECS + 1) / 2>([&](auto i) MS_LAMBDA { prefetch(next + 64 * i); });
      unroll<R>([&](auto r) MS_LAMBDA {
        const i32x16 x = splat_bytes(p[r] + t * TILE + 2 * pair);
        unroll<VECS>([&](auto i) MS_LAMBDA { sum[r][i] = dot_i16(sum[r][i], wide[i], x); });
      });
    }
  }
}

template <int R, int VECS, int TILES>
MS_INLINE void add_values(const HeadShape& shape, Scratch& s, int row, const Stretch& at, int d, int g,
                          int16_t (*p)[MAX_ROWS][STRETCH], float (*unit)[MAX_ROWS], const float* shrink) {
  i32x16 sum[R][VECS];
  weigh<R, VECS, TILES>(shape, at, d, p[g], sum);
  unroll<R>([&](auto r) MS_LAMBDA {
    float* acc = s.acc + (row + r) * shape.dim + d;
    unroll<VECS>([&](auto i) MS_LAMBDA {
      const f32x16 old = load<f32x16>(acc + 16 * i) * shrink[r];
      store(acc + 16 * i, fma(to_float(sum[r][i]), splat(unit[g][r]), old));
    });
  });
}

// Two groups of 8 share a register: both sums are taken, and half of each is kept.
template <int R, int TILES>
MS_INLINE void add_values_by_8(const HeadShape& shape, Scratch& s, int row, const Stretch& at, int d, int g,
                               int16_t (*p)[MAX_ROWS][STRETCH], float (*unit)[MAX_ROWS], const float* shrink) {
  const i32x16 first = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  i32x16 a[R][1], b[R][1];
  weigh<R, 1, TILES>(shape, at, d, p[g], a);
  weigh<R, 1, TILES>(shape, at, d, p[g + 1], b);
  unroll<R>([&](auto r) MS_LAMBDA {
    float* acc = s.acc + (row + r) * shape.dim + d;
    const f32x16 x = select(first, to_float(a[r][0]) * unit[g][r], to_float(b[r][0]) * unit[g + 1][r]);
    store(acc, load<f32x16>(acc) * shrink[r] + x);
  });
}

template <int R, int TILES>
__attribute__((noinline)) void stretch_rows(const HeadShape& shape, const AttentionLayer& layer,
                                            Scratch& s, int row, const Stretch& at) {
  f32x16 scores[MAX_ROWS][STRETCH_TILES];
  alignas(64) int16_t p[MAX_GROUPS][MAX_ROWS][STRETCH];
  float unit[MAX_GROUPS][MAX_ROWS], shrink[MAX_ROWS];
#if defined(MS_AVX_VNNI)
  unroll<TILES>([&](auto t) MS_LAMBDA { query_key<R, t, 1>(shape, s, row, at, scores); });
#else
  query_key<R, 0, TILES>(shape, s, row, at, scores);
#endif
  bool is_whole = true;
  for (int r = row; r < row + R; r++) is_whole &= at.first >= s.low[r] && at.first + TILES * TILE <= s.high[r];
  if (is_whole) soften<R, TILES, false>(shape, layer, s, row, at, scores, p, unit, shrink);
  else soften<R, TILES, true>(shape, layer, s, row, at, scores, p, unit, shrink);
  if (shape.group == 8) {
    for (int d = 0; d < shape.dim; d += 16)
      add_values_by_8<R, TILES>(shape, s, row, at, d, d / 8, p, unit, shrink);
    return;
  }
  for (int d = 0; d < shape.dim;) {
    const int g = d / shape.group, left = (g + 1) * shape.group - d;
    if (AT_MOST >= 4 && left >= 64) add_values<R, 4, TILES>(shape, s, row, at, d, g, p, unit, shrink), d += 64;
    else if (AT_MOST >= 2 && left >= 32) add_values<R, 2, TILES>(shape, s, row, at, d, g, p, unit, shrink), d += 32;
    else add_values<R, 1, TILES>(shape, s, row, at, d, g, p, unit, shrink), d += 16;
  }
}

using StretchRows = void (*)(const HeadShape&, const AttentionLayer&, Scratch&, int, const Stretch&);
template <int R, size_t... T>
constexpr void fill_tiles(StretchRows* to, std::index_sequence<T...>) {
  ((to[T] = stretch_rows<R, static_cast<int>(T) + 1>), ...);
}
struct StretchTable { StretchRows at[MAX_ROWS][STRETCH_TILES]; };
template <size_t... R>
constexpr StretchTable stretch_table(std::index_sequence<R...>) {
  StretchTable table{};
  (fill_tiles<static_cast<int>(R) + 1>(table.at[R], std::make_index_sequence<STRETCH_TILES>{}), ...);
  return table;
}
constexpr StretchTable STRETCH_ROWS = stretch_table(std::make_index_sequence<MAX_ROWS>{});

MS_INLINE void clear(Scratch& s, int rows, int dim) {
  for (int r = 0; r < rows; r++) s.m[r] = NOTHING, s.l[r] = 0.0f;
  std::memset(s.acc, 0, sizeof(float) * rows * dim);
}

// One row's part of a later split joins what the earlier ones gave.
MS_INLINE void merge(float& total_m, float& total_l, float* total, float m, float l, const float* acc, int dim) {
  const float now = total_m > m ? total_m : m;
  const f32x16 a = exp2_neg(splat(total_m - now)), b = exp2_neg(splat(m - now));
  total_l = total_l * a[0] + l * b[0];
  total_m = now;
  for (int d = 0; d < dim; d += 16)
    store(total + d, fma(load<f32x16>(acc + d), b, load<f32x16>(total + d) * a));
}

MS_INLINE void finish_row(const AttentionLayer& layer, int head, float m, float l, const float* acc,
                          float* out, float* lse) {
  const int dim = layer.cache.head_dim;
  float keep = 1.0f;
  if (layer.sinks) {
    const float sink = layer.sinks[head] * LOG2E, now = m > sink ? m : sink;
    keep = exp2_neg(splat(m - now))[0];
    l = l * keep + exp2_neg(splat(sink - now))[0];
    m = now;
  }
  const float inverse = l == 0.0f ? 0.0f : keep / l;
  for (int d = 0; d < dim; d += 16) store(out + d, load<f32x16>(acc + d) * inverse);
  if (lse) *lse = l == 0.0f ? NOTHING : (m + __builtin_log2f(l)) * LN2;
}

struct AttendCall {
  const Step& step;
  const AttentionLayer& layer;
  const float* q;
  size_t q_stride;
  float* out;
  size_t out_stride;
  float* lse;  // or null: [rows][heads]
  HeadShape shape;
  int per_kv;  // query heads of a K/V head

  const uint8_t* head_at(const SequenceRows& seq, int tile, int kv_head) const {
    return seq.base + static_cast<size_t>(tile) * step.tile_bytes + layer.cache.offset_bytes + kv_head * shape.bytes;
  }
  int low_of(int position) const {
    return layer.window > 0 && position + 1 > layer.window ? position + 1 - layer.window : 0;
  }
  void set_row(Scratch& s, int row, const SequenceRows& seq, int index, int head) const {
    const int position = seq.kv_len - seq.num_rows + index;
    s.low[row] = low_of(position);
    s.high[row] = position + 1;
    s.head[row] = head;
    round_query(q + (seq.first_row + index) * q_stride + head * shape.dim, shape, layer.scale * LOG2E, s, row);
  }
  // The stretches of one split that any row from `row` on sees, for one K/V head.
  void stretch(Scratch& s, int rows, const SequenceRows& seq, int kv_head, int first, int next_first,
               int next_head, int high) const {
    Stretch at;
    at.first = first;
    const int last_tile = (high - 1) / TILE;
    for (int t = 0; t < STRETCH_TILES; t++) {
      const int tile = first / TILE + t, ahead = next_first / TILE + t;
      at.tile[t] = head_at(seq, tile <= last_tile ? tile : last_tile, kv_head);
      at.next[t] = head_at(seq, ahead <= last_tile ? ahead : last_tile, next_head);
    }
    for (int row = 0; row < rows; row += MAX_ROWS) {
      const int r = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
      int most = 0;
      for (int i = row; i < row + r; i++) most = s.high[i] > most ? s.high[i] : most;
      int tiles = (most - first + TILE - 1) / TILE;
      if (tiles <= 0) continue;
      tiles = tiles > STRETCH_TILES ? STRETCH_TILES : tiles;
      STRETCH_ROWS.at[r - 1][tiles - 1](shape, layer, s, row, at);
    }
  }

  // Rows [index, index + n) of one sequence with the query heads of one K/V head.
  void block(const SequenceRows& seq, int kv_head, int index, int n) const {
    const int rows = n * per_kv;
    Scratch s = scratch_for(rows, shape.dim, shape.num_groups);
    for (int i = 0; i < n; i++)
      for (int g = 0; g < per_kv; g++) set_row(s, i * per_kv + g, seq, index + i, kv_head * per_kv + g);
    const int low = s.low[0], high = s.high[rows - 1];
    bool is_first = true;
    for (int split = low / SPLIT * SPLIT; split < high; split += SPLIT) {
      clear(s, rows, shape.dim);
      const int end = split + SPLIT < high ? split + SPLIT : high;
      for (int first = split; first < end; first += STRETCH)
        if (first + STRETCH > low) stretch(s, rows, seq, kv_head, first, first + STRETCH, kv_head, high);
      if (is_first) {
        std::memcpy(s.total_m, s.m, 4 * rows), std::memcpy(s.total_l, s.l, 4 * rows);
        std::memcpy(s.total, s.acc, sizeof(float) * rows * shape.dim);
        is_first = false;
        continue;
      }
      for (int r = 0; r < rows; r++)
        merge(s.total_m[r], s.total_l[r], s.total + r * shape.dim, s.m[r], s.l[r], s.acc + r * shape.dim, shape.dim);
    }
    for (int r = 0; r < rows; r++) {
      const size_t row = seq.first_row + index + r / per_kv;
      finish_row(layer, s.head[r], s.total_m[r], s.total_l[r], s.total + r * shape.dim,
                 out + row * out_stride + s.head[r] * shape.dim,
                 lse ? lse + row * layer.num_heads + s.head[r] : nullptr);
    }
  }

  // One split of a single row, for K/V heads [from, to): (m, l, acc) of each query head.
  void part(const SequenceRows& seq, int split, int from, int to, float* parts) const {
    const int heads = (to - from) * per_kv, dim = shape.dim;
    Scratch s = scratch_for(heads, dim, shape.num_groups);
    for (int h = 0; h < heads; h++) set_row(s, h, seq, 0, from * per_kv + h);
    clear(s, heads, dim);
    const int low = s.low[0], high = s.high[0];
    const int end = split + SPLIT < high ? split + SPLIT : high;
    int first = split;
    if (low > first) first = low / STRETCH * STRETCH;
    for (; first < end; first += STRETCH)
      for (int h = from; h < to; h++) {
        Scratch one = s;  // the rows of this K/V head
        const int r = (h - from) * per_kv;
        one.hi += r * dim, one.lo += r * dim, one.offsets += r * shape.num_groups, one.q_scale += r;
        one.m += r, one.l += r, one.acc += r * dim, one.low += r, one.high += r, one.head += r;
        const int ahead = h - from + 1, count = to - from;
        stretch(one, per_kv, seq, h, first, first + ahead / count * STRETCH, from + ahead % count, high);
      }
    for (int h = 0; h < heads; h++) {
      float* to_part = parts + (from * per_kv + h) * (dim + 2);
      to_part[0] = s.m[h], to_part[1] = s.l[h];
      std::memcpy(to_part + 2, s.acc + h * dim, sizeof(float) * dim);
    }
  }
};

struct AttendTask {
  int sequence, from, to, at;  // rows [from, to) of K/V head `at`; or split `at` of heads [from, to)
  int single, part;            // which single row, and where its result goes; -1 for a block of rows
};

// Kept between the calls of a thread, so that a layer allocates nothing.
struct AttendMemory {
  List<AttendTask> tasks;
  List<float> parts;
  List<int> singles, first_parts;
  List<std::atomic<int>> waiting;  // parts that are still to come, for each share of a single row
};

// The tasks of one layer. Rows that stand alone are cut into splits and shares of the heads.
class AttendPlan {
 public:
  AttendPlan(const AttendCall& call, AttendMemory& memory, int threads) : call_(call), memory_(memory) {
    const Step& step = call.step;
    const int kv_heads = call.layer.cache.num_kv_heads, dim = call.shape.dim;
    const int block_rows = call.per_kv * dim >= 3072 ? 1 : 3072 / (call.per_kv * dim);
    memory_.tasks.clear(), memory_.singles.clear(), memory_.first_parts.clear();
    int parts = 0;
    for (int s = 0; s < step.num_sequences; s++) {
      const SequenceRows& seq = step.sequences[s];
      if (seq.num_rows == 1) {
        memory_.singles.push_back(s);
        memory_.first_parts.push_back(parts);
        parts += (seq.kv_len + SPLIT - 1) / SPLIT - first_split(seq);
        continue;
      }
      // the last rows see the most: they go first
      for (int end = seq.num_rows; end > 0; end -= block_rows)
        for (int h = 0; h < kv_heads; h++)
          memory_.tasks.push_back({s, end > block_rows ? end - block_rows : 0, end, h, -1, -1});
    }
    memory_.first_parts.push_back(parts);
    part_size_ = static_cast<size_t>(call.layer.num_heads) * (dim + 2);
    if (memory_.parts.size() < parts * part_size_) memory_.parts.resize(parts * part_size_);
    const int most = parts ? (4 * threads + parts - 1) / parts : 1;
    shares_ = most > kv_heads ? kv_heads : most;
    if (memory_.waiting.size() < memory_.singles.size() * shares_)
      memory_.waiting = List<std::atomic<int>>(memory_.singles.size() * shares_);
    for (size_t i = 0; i < memory_.singles.size(); i++) add_single(static_cast<int>(i), kv_heads);
  }

  int size() const { return static_cast<int>(memory_.tasks.size()); }

  void run(int index) {
    const AttendTask& task = memory_.tasks[index];
    const SequenceRows& seq = call_.step.sequences[task.sequence];
    if (task.single < 0) return call_.block(seq, task.at, task.from, task.to - task.from);
    call_.part(seq, task.at, task.from, task.to, memory_.parts.data() + task.part * part_size_);
    // whoever computes the last part of these heads joins all of them, in their order
    const int share = task.from * shares_ / call_.layer.cache.num_kv_heads;
    if (memory_.waiting[task.single * shares_ + share].fetch_sub(1) == 1) finish(task, seq);
  }

 private:
  int first_split(const SequenceRows& seq) const { return call_.low_of(seq.kv_len - 1) / SPLIT; }

  void add_single(int i, int kv_heads) {
    const int sequence = memory_.singles[i], low = first_split(call_.step.sequences[sequence]);
    for (int share = 0; share < shares_; share++) {
      // so that a head tells its share again: from = ceil(kv_heads * share / shares)
      const int from = (kv_heads * share + shares_ - 1) / shares_;
      const int to = (kv_heads * (share + 1) + shares_ - 1) / shares_;
      memory_.waiting[i * shares_ + share] = memory_.first_parts[i + 1] - memory_.first_parts[i];
      for (int p = memory_.first_parts[i]; p < memory_.first_parts[i + 1]; p++)
        memory_.tasks.push_back({sequence, from, to, (low + p - memory_.first_parts[i]) * SPLIT, i, p});
    }
  }

  void finish(const AttendTask& task, const SequenceRows& seq) {
    const int dim = call_.shape.dim, heads = call_.layer.num_heads;
    for (int h = task.from * call_.per_kv; h < task.to * call_.per_kv; h++) {
      float* total = memory_.parts.data() + memory_.first_parts[task.single] * part_size_ + h * (dim + 2);
      float* more = total;
      for (int p = memory_.first_parts[task.single] + 1; p < memory_.first_parts[task.single + 1]; p++) {
        more += part_size_;
        merge(total[0], total[1], total + 2, more[0], more[1], more + 2, dim);
      }
      finish_row(call_.layer, h, total[0], total[1], total + 2,
                 call_.out + seq.first_row * call_.out_stride + h * dim,
                 call_.lse ? call_.lse + static_cast<size_t>(seq.first_row) * heads + h : nullptr);
    }
  }

  const AttendCall& call_;
  AttendMemory& memory_;
  size_t part_size_ = 0;
  int shares_ = 1;
};

void attend(const Step& step, const AttentionLayer& layer, const float* q, size_t q_stride, float* out,
            size_t out_stride, float* lse) {
  ms::Team& team = ms::Team::get();
  const AttendCall call{step, layer, q, q_stride, out, out_stride, lse, HeadShape(layer.cache),
                        layer.num_heads / layer.cache.num_kv_heads};
  static thread_local AttendMemory memory;
  AttendPlan plan(call, memory, team.size());
  team.parallel(plan.size(), [&](int task) { plan.run(task); });
}

}  // namespace
}  // namespace MS_ISA
