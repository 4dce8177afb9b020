// Decode attention over int8 and int4 K/V for one query row of a sequence. Included once per
// instruction set.
//
// Every query row is computed independently (flash attention, Dao et al. 2022, in base 2); over int8:
//   q is rounded to 15 bits, as hi * 128 + lo, so that q.k is two exact integer dot products;
//   tokens are taken 64 at a time (a stretch): p = exp2(s - the stretch's largest s), then
//   p * v_scale is rounded to 15 bits of the stretch's largest v_scale and multiplied with V in
//   integers;
//   each run of SPLIT positions has its own sums, and these parts are merged in order.
// The result does not depend on the rows computed together, on the chunks of a prompt or on the
// number of threads: a row has the same bits in any batch. attention_prefill.inl computes many rows
// of a sequence to the same bits.

namespace MS_ISA {
namespace {

void round_query(const float* q, const HeadShape& shape, float scale, Scratch& s, int row) {
  f32x16 largest = {};
  for (int d = 0; d < shape.dim; d += 16) largest = max_magnitude(largest, load<f32x16>(q + d));
  const float top = reduce_magnitude(largest), step = top > 0.0f ? QUERY_STEPS / top : 0.0f;
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
  s.q_scale[row] = top / QUERY_STEPS * scale;
}

// Computes scores[R][TILES] = q.k of R rows and the 16 tokens of each tile from FIRST on, with K's
// scales applied.
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

// Computes sum[R][VECS] = p . V for 16 * VECS dimensions from d on.
template <int R, int VECS, int TILES>
MS_INLINE void weigh(const HeadShape& shape, const Stretch& at, int d, const int16_t (*p)[STRETCH],
                     i32x16 (&sum)[R][VECS]) {
  unroll<R>([&](auto r) MS_LAMBDA { unroll<VECS>([&](auto i) MS_LAMBDA { sum[r][i] = i32x16{}; }); });
  for (int t = 0; t < TILES; t++) {
    const int8_t* v = reinterpret_cast<const int8_t*>(at.tile[t] + shape.v) + 2 * d;
    // Prefetches the other half of the next stretch, tile 2 and then tile 3.
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
MS_INLINE void add_values(const HeadShape& shape, const Scratch& s, int row, const Stretch& at, int d, int g,
                          const Weights& w) {
  i32x16 sum[R][VECS];
  weigh<R, VECS, TILES>(shape, at, d, w.p[g], sum);
  unroll<R>([&](auto r) MS_LAMBDA {
    float* acc = s.acc + (row + r) * shape.dim + d;
    unroll<VECS>([&](auto i) MS_LAMBDA {
      const f32x16 old = load<f32x16>(acc + 16 * i) * w.shrink[r];
      store(acc + 16 * i, fma(to_float(sum[r][i]), splat(w.unit[g][r]), old));
    });
  });
}

// Two groups of 8 share a register, so both sums are computed and half of each is kept.
template <int R, int TILES>
MS_INLINE void add_values_by_8(const HeadShape& shape, const Scratch& s, int row, const Stretch& at, int d, int g,
                               const Weights& w) {
  const i32x16 first = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  i32x16 a[R][1], b[R][1];
  weigh<R, 1, TILES>(shape, at, d, w.p[g], a);
  weigh<R, 1, TILES>(shape, at, d, w.p[g + 1], b);
  unroll<R>([&](auto r) MS_LAMBDA {
    float* acc = s.acc + (row + r) * shape.dim + d;
    const f32x16 x = to_float(a[r][0]), y = to_float(b[r][0]);
    const f32x16 unit = select(first, splat(w.unit[g][r]), splat(w.unit[g + 1][r]));
    store(acc, fma(select(first, x, y), unit, load<f32x16>(acc) * w.shrink[r]));
  });
}

template <int BITS, int R, int TILES>
__attribute__((noinline)) void stretch_rows(const HeadShape& shape, const AttentionLayer& layer,
                                            const Scratch& s, int row, const Stretch& at) {
  f32x16 scores[MAX_ROWS][STRETCH_TILES];
  Weights w;
  constexpr int AT_A_TIME = BITS == 4 && !HAS_32_REGISTERS ? 1 : IS_AVX_VNNI ? 1 : TILES;
  unroll<TILES / AT_A_TIME>([&](auto i) MS_LAMBDA {
    if constexpr (BITS == 4) query_key4<R, i * AT_A_TIME, AT_A_TIME>(shape, s, row, at, scores);
    else query_key<R, i * AT_A_TIME, AT_A_TIME>(shape, s, row, at, scores);
  });
  const bool is_whole = at.first >= s.low && at.first + TILES * TILE <= s.high;
  if (is_whole) softmax_stretch<BITS, R, TILES, false>(shape, layer, s, row, at, scores, w);
  else softmax_stretch<BITS, R, TILES, true>(shape, layer, s, row, at, scores, w);
  if constexpr (BITS == 4) return add_values4<R, TILES>(shape, s, row, at, w);
  if (shape.group == 8) {
    for (int d = 0; d < shape.dim; d += 16)
      add_values_by_8<R, TILES>(shape, s, row, at, d, d / 8, w);
    return;
  }
  for (int d = 0; d < shape.dim;) {
    const int g = d / shape.group, left = (g + 1) * shape.group - d;
    if (AT_MOST >= 4 && left >= 64) add_values<R, 4, TILES>(shape, s, row, at, d, g, w), d += 64;
    else if (AT_MOST >= 2 && left >= 32) add_values<R, 2, TILES>(shape, s, row, at, d, g, w), d += 32;
    else add_values<R, 1, TILES>(shape, s, row, at, d, g, w), d += 16;
  }
}

using StretchRows = void (*)(const HeadShape&, const AttentionLayer&, const Scratch&, int, const Stretch&);
template <int BITS, int R, size_t... T>
constexpr void fill_tiles(StretchRows* to, std::index_sequence<T...>) {
  // With int4, a stretch of one or three tiles has its last tile twice, the second time masked.
  ((to[T] = stretch_rows<BITS, R, static_cast<int>(BITS == 4 ? T / 2 * 2 + 2 : T + 1)>), ...);
}
struct StretchTable { StretchRows at[MAX_ROWS][STRETCH_TILES]; };
template <int BITS, size_t... R>
constexpr StretchTable stretch_table(std::index_sequence<R...>) {
  StretchTable table{};
  (fill_tiles<BITS, static_cast<int>(R) + 1>(table.at[R], std::make_index_sequence<STRETCH_TILES>{}), ...);
  return table;
}
constexpr StretchTable STRETCH_ROWS8 = stretch_table<8>(std::make_index_sequence<MAX_ROWS>{});
constexpr StretchTable STRETCH_ROWS4 = stretch_table<4>(std::make_index_sequence<MAX_ROWS>{});

MS_INLINE void clear(Scratch& s, int rows, int dim) {
  for (int r = 0; r < rows; r++) s.m[r] = NOTHING, s.l[r] = 0.0f;
  std::memset(s.acc, 0, sizeof(float) * rows * dim);
}

// Begins to translate the addresses of tiles that a row has chosen, long before they are read: unlike
// neighbours, each has pages of its own.
MS_INLINE void touch_chosen(const AttendCall& call, const SequenceRows& seq, int kv_head, int tile, int last_tile) {
  for (int t = 0; t < STRETCH_TILES && tile + t <= last_tile; t++) {
    const uint8_t* at = call.head_at(seq, tile + t, kv_head);
    prefetch(at), prefetch(at + call.shape.bytes - 1);
  }
}

// Adds the stretch from position `first` on to all rows of a K/V head, and prefetches the stretch
// at next_first of next_head.
void attend_stretch(const AttendCall& call, const Scratch& s, int rows, const SequenceRows& seq, int kv_head, int first,
                    int next_first, int next_head) {
  Stretch at;
  at.first = first;
  const int last_tile = (s.high - 1) / TILE;
  for (int t = 0; t < STRETCH_TILES; t++) {
    const int tile = first / TILE + t, ahead = next_first / TILE + t;
    at.tile[t] = call.head_at(seq, tile <= last_tile ? tile : last_tile, kv_head);
    at.next[t] = call.head_at(seq, ahead <= last_tile ? ahead : last_tile, next_head);
  }
  if (seq.tiles) touch_chosen(call, seq, kv_head, next_first / TILE + STRETCH_TILES, last_tile);
  const int left = last_tile - first / TILE + 1, tiles = left < STRETCH_TILES ? left : STRETCH_TILES;
  const StretchTable& table = call.shape.bits == 4 ? STRETCH_ROWS4 : STRETCH_ROWS8;
  for (int row = 0; row < rows; row += MAX_ROWS) {
    const int r = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
    table.at[r - 1][tiles - 1](call.shape, call.layer, s, row, at);
  }
}

// Computes positions [first, end) of one split of a single row for K/V heads [from, to): (m, l, acc)
// of each query head. `begun` has the sums over the earlier positions of the split, or is null.
void attend_part(const AttendCall& call, const SequenceRows& seq, int first, int end, int from, int to,
                 const float* begun, float* parts) {
  const int per_kv = call.per_kv, heads = (to - from) * per_kv, dim = call.shape.dim, groups = call.shape.num_groups;
  Scratch s = scratch_for(heads, dim, groups);
  s.position = seq.first_position;
  s.low = call.low_of(s.position), s.high = call.high_of(seq, s.position);
  const float* rows = call.q + seq.first_row * call.q_stride + from * per_kv * dim;
  const auto round = call.shape.bits == 4 ? round_query4 : round_query;
  for (int h = 0; h < heads; h++) round(rows + h * dim, call.shape, call.layer.scale * LOG2E, s, h);
  clear(s, heads, dim);
  for (int h = 0; h < heads && begun; h++) {
    const float* part = begun + (from * per_kv + h) * (dim + 2);
    s.m[h] = part[0], s.l[h] = part[1];
    std::memcpy(s.acc + h * dim, part + 2, sizeof(float) * dim);
  }
  if (end > s.high) end = s.high;
  if (s.low > first) first = s.low / STRETCH * STRETCH;
  for (; first < end; first += STRETCH)
    for (int h = from; h < to; h++) {
      Scratch one = s;  // the rows of this K/V head
      const int r = (h - from) * per_kv;
      one.hi += r * dim, one.lo += r * dim, one.offsets += r * groups, one.q_scale += r;
      one.m += r, one.l += r, one.acc += r * dim, one.head = h * per_kv;
      const int ahead = h - from + 1, count = to - from;
      attend_stretch(call, one, per_kv, seq, h, first, first + ahead / count * STRETCH, from + ahead % count);
    }
  for (int h = 0; h < heads; h++) {
    float* to_part = parts + (from * per_kv + h) * (dim + 2);
    to_part[0] = s.m[h], to_part[1] = s.l[h];
    std::memcpy(to_part + 2, s.acc + h * dim, sizeof(float) * dim);
  }
}

// Merges a later split's part of one row into the total of the earlier splits.
MS_INLINE void merge(float& total_m, float& total_l, float* total, float m, float l, const float* acc, int dim) {
  const float now = total_m > m ? total_m : m;
  const f32x16 a = exp2_neg(splat(total_m - now)), b = exp2_neg(splat(m - now));
  total_l = total_l * a[0] + l * b[0];
  total_m = now;
  for (int d = 0; d < dim; d += 16)
    store(total + d, fma(load<f32x16>(acc + d), b, load<f32x16>(total + d) * a));
}

}  // namespace
}  // namespace MS_ISA
