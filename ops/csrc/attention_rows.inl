// Tasks of prefill attention over int8 and int4 K/V. A task has some rows of one sequence and one K/V head.
// Included once per instruction set.

namespace MS_ISA {
namespace {

// Clears the sums of a tile for a new split.
MS_INLINE void clear_tile(const RowTile& tile, int dim) {
  for (int i = 0; i < tile.vecs * 16; i++) tile.m[i] = NOTHING, tile.l[i] = 0.0f;
  std::memset(tile.acc, 0, sizeof(float) * dim * tile.vecs * 16);
}

// Merges the sums of a split into the totals of the earlier splits.
MS_INLINE void merge_tile(const RowTile& tile, int dim) {
  for (int c = 0; c < tile.vecs; c++) {
    const f32x16 m = load<f32x16>(tile.m + 16 * c), total_m = load<f32x16>(tile.total_m + 16 * c);
    const f32x16 now = max(total_m, m), a = exp2_neg(total_m - now), b = exp2_neg(m - now);
    float* l = tile.total_l + 16 * c;
    store(l, load<f32x16>(l) * a + load<f32x16>(tile.l + 16 * c) * b);
    store(tile.total_m + 16 * c, now);
    for (int d = 0; d < dim; d++) {
      const int at = (d * tile.vecs + c) * 16;
      store(tile.total + at, fma(load<f32x16>(tile.acc + at), b, load<f32x16>(tile.total + at) * a));
    }
  }
}

// Rounds a query row of `dim` numbers to 16-bit integers; returns the value of one step.
MS_INLINE float round_row(const float* q, int dim, int16_t* to) {
  f32x16 largest = {};
  for (int d = 0; d < dim; d += 16) largest = max_magnitude(largest, load<f32x16>(q + d));
  const float top = reduce_magnitude(largest), step = top > 0.0f ? QUERY_STEPS / top : 0.0f;
  for (int d = 0; d < dim; d += 16) store_i16(to + d, to_int_nearest(load<f32x16>(q + d) * step));
  return top / QUERY_STEPS;
}

// Widens the values of tile t of a stretch.
MS_INLINE void widen_tile(const HeadShape& shape, const uint8_t* from, int t, const WideStretch& to) {
  constexpr int HALF = TILE / 2;
  const int dim = shape.dim;
  alignas(64) int8_t bytes[64];
  for (int i = 0; i < TILE * dim; i += 64) {
    store(bytes, load<i32x16>(from + shape.k + i) ^ splat_i32(static_cast<int32_t>(0x80808080u)));
    int32_t* k = to.k + t * TILE * dim / 2 + i / 2;
    store(k, widen_i8(bytes)), store(k + 16, widen_i8(bytes + 32));
  }
  const int8_t* v = reinterpret_cast<const int8_t*>(from + shape.v);
  for (int pair = 0; pair < HALF; pair++, v += 2 * dim)
    for (int d = 0; d < dim; d += 16)
      store(to.v + (d / 16 * (STRETCH / 2) + t * HALF + pair) * 16, widen_i8(v + 2 * d));
}

// The same for int4, whose codes become operands.
MS_INLINE void widen_tile4(const HeadShape& shape, const uint8_t* from, int t, const WideStretch& to) {
  const int dim = shape.dim;
  for (int d = 0; d < dim; d += 8) {
    int32_t* k = to.k + (t * dim / 4 + d / 4) * TILE;
    store(k, operands<false>(K_BYTES, from + shape.k + d * 8));
    store(k + TILE, operands<true>(K_BYTES, from + shape.k + d * 8));
  }
  for (int d = 0; d < dim; d += 32)
    for (int quad = 0; quad < 4; quad++) {
      const uint8_t* codes = from + shape.v + d * 8 + quad * 64;
      int32_t* v = to.v + (d / 16 * (STRETCH / 4) + t * 4 + quad) * 16;
      store(v, operands<false>(LEVELS, codes));
      if (d + 16 < dim) store(v + STRETCH / 4 * 16, operands<true>(LEVELS, codes));
    }
}

// What a row's result becomes in `finish`: its sums over the earlier keys, which `out` keeps, are added
// with these factors.
struct RowFactors {
  alignas(64) float keep[16] = {}, add[16] = {}, inverse[16] = {};
  bool has_earlier[16] = {};  // whether there are earlier keys
};

// Computes query rows [from, to) of a sequence and one K/V head. Over earlier keys, out gets the sums of
// values, and `sums` the other two sums of each row. Over recent keys, these are added; they may be null.
class RowTask {
 public:
  RowTask(const AttendCall& call, const SequenceRows& seq, int kv_head, int from, int to, float* sums)
      : call_(call), seq_(seq), kv_head_(kv_head), from_(from), to_(to), dim_(call.shape.dim), sums_(sums) {
    const HeadShape& shape = call.shape;
    const int count = (to - from + TILE_ROWS - 1) / TILE_ROWS, groups = shape.num_groups;
    const size_t tile_size = static_cast<size_t>(dim_ / 2 + 2 * dim_ + groups + 9) * TILE_ROWS;
    const size_t need = STRETCH * (dim_ + groups * 3 + 2) + MAX_GROUPS + count * tile_size +
                        TILE_ROWS * (STRETCH + groups * (STRETCH / 2 + 6)) + 16;
    if (memory().size() < need) memory().resize(need);
    at_ = memory().data() + -reinterpret_cast<uintptr_t>(memory().data()) % 64 / 4;
    stretch_ = {ints(STRETCH * dim_ / 2), ints(STRETCH * dim_ / 2), take(STRETCH * groups), take(STRETCH * groups),
                take(STRETCH * groups), take(MAX_GROUPS), take(STRETCH), take(STRETCH), 0, 0};
    buffers_ = {take(STRETCH * TILE_ROWS), ints(groups * (STRETCH / 2) * TILE_ROWS), take(groups * TILE_ROWS),
                take(groups * TILE_ROWS), take(groups * 4 * TILE_ROWS)};
    tiles().resize(count);
    for (int i = 0; i < count; i++) begin(tiles()[i], first_of(i), end_of(i));
  }

  void run() {
    const int count = static_cast<int>(tiles().size()), low = tiles()[0].min_low, high = tiles()[count - 1].max_high;
    int split = low / SPLIT * SPLIT;
    do {  // runs at least once: the window of all rows may end before the keys
      const int end = split + SPLIT < high ? split + SPLIT : high;
      for (int first = low > split ? low / STRETCH * STRETCH : split; first < end; first += STRETCH) {
        widen(first, high);
        for (int i = 0; i < count; i++) {
          prefetch_next(first + STRETCH, high, i, count);
          add_stretch(tiles()[i]);
        }
      }
      for (RowTile& tile : tiles()) end_split(tile, split <= low, split + SPLIT < high);
      split += SPLIT;
    } while (split < high);
    for (int i = 0; i < count; i++) finish(tiles()[i], first_of(i), end_of(i));
  }

 private:
  static List<float>& memory() {
    static thread_local List<float> all;
    return all;
  }
  static List<RowTile>& tiles() {
    static thread_local List<RowTile> all;
    return all;
  }
  float* take(size_t size) {
    float* taken = at_;
    at_ += size;
    return taken;
  }
  int32_t* ints(size_t size) { return reinterpret_cast<int32_t*>(take(size)); }
  int first_of(int tile) const { return from_ + tile * TILE_ROWS; }
  int end_of(int tile) const { return first_of(tile + 1) < to_ ? first_of(tile + 1) : to_; }
  int head_of(int row) const { return kv_head_ * call_.per_kv + row % call_.per_kv; }
  size_t step_row(int row) const { return seq_.first_row + row / call_.per_kv; }
  const float* query(int row) const { return call_.q + step_row(row) * call_.q_stride + head_of(row) * dim_; }
  float* result(int row) const { return call_.out + step_row(row) * call_.out_stride + head_of(row) * dim_; }

  // Loads rows [from, to) into a tile. The remaining lanes are copies of the last row.
  void begin(RowTile& tile, int from, int to) {
    const HeadShape& shape = call_.shape;
    const int words = shape.bits == 4 ? dim_ / 4 : dim_ / 2;  // of a rounded row
    tile = {(to - from + 15) / 16, ints(words * TILE_ROWS), ints(shape.num_groups * TILE_ROWS), take(TILE_ROWS), take(TILE_ROWS), take(TILE_ROWS),
            take(TILE_ROWS), take(dim_ * TILE_ROWS), take(TILE_ROWS), take(TILE_ROWS), take(dim_ * TILE_ROWS),
            ints(TILE_ROWS), ints(TILE_ROWS), ints(TILE_ROWS), 0, 0, 0, 0};
    alignas(64) int16_t rounded[16][MAX_HEAD_DIM];
    int32_t offsets[MAX_GROUPS];
    for (int c = 0; c < tile.vecs; c++) {
      for (int i = 0; i < 16; i++) {
        const int lane = c * 16 + i, row = from + lane < to ? from + lane : to - 1, head = head_of(row);
        const int position = seq_.first_position + row / call_.per_kv, later = row + 16 < to_ ? row + 16 : row;
        for (int d = 0; d < dim_; d += 16) prefetch(query(later) + d);
        tile.low[lane] = call_.low_of(position), tile.high[lane] = call_.high_of(seq_, position);
        tile.position[lane] = position;
        tile.slope[lane] = call_.layer.slopes ? call_.layer.slopes[head] : 0.0f;
        int8_t* bytes = reinterpret_cast<int8_t*>(rounded[i]);
        const float step_value = shape.bits == 4 ? round_query_to_bytes(query(row), shape, bytes, offsets)
                                                 : round_row(query(row), dim_, rounded[i]);
        tile.q_scale[lane] = step_value * (call_.layer.scale * LOG2E);
        for (int g = 0; g < shape.num_groups && shape.bits == 4; g++)
          tile.offset[(g * tile.vecs + c) * 16 + i] = offsets[g];
      }
      for (int word = 0; word < words; word += 16) {
        f32x16 x[16];
        for (int i = 0; i < 16; i++) x[i] = load<f32x16>(rounded[i] + 2 * word);
        transpose(x);
        for (int i = 0; i < 16 && word + i < words; i++) store(tile.q + ((word + i) * tile.vecs + c) * 16, x[i]);
      }
    }
    const int last = tile.vecs * 16 - 1;
    tile.min_low = tile.low[0], tile.max_low = tile.low[last];
    tile.min_high = tile.high[0], tile.max_high = tile.high[last];
    clear_tile(tile, dim_);
  }

  // Widens the stretch of tokens from position `first` on, up to `high`, for all tiles.
  void widen(int first, int high) {
    const HeadShape& shape = call_.shape;
    const int left = (high - first + TILE - 1) / TILE;
    stretch_.first = first, stretch_.tiles = left < STRETCH_TILES ? left : STRETCH_TILES;
    for (int t = 0; t < stretch_.tiles; t++) {
      const uint8_t* from = call_.head_at(seq_, first / TILE + t, kv_head_);
      if (shape.bits == 4) widen_tile4(shape, from, t, stretch_);
      else widen_tile(shape, from, t, stretch_);
      for (int g = 0; g < shape.num_groups; g++) {
        const int at = g * STRETCH + t * TILE;
        store(stretch_.k_scale + at, from_half(reinterpret_cast<const uint16_t*>(from + shape.k_scales) + g * TILE));
        store(stretch_.v_scale + at, from_half(reinterpret_cast<const uint16_t*>(from + shape.v_scales) + g * TILE));
      }
    }
    for (int t = 0; t < stretch_.tiles * TILE; t += TILE) {
      f32x16 largest = {};
      for (int g = 0; g < shape.num_groups; g++)
        largest = max_magnitude(largest, load<f32x16>(stretch_.v_scale + g * STRETCH + t));
      const f32x16 order = binary_order(largest), order_factor = power_of_two(-order);
      store(stretch_.order + t, order), store(stretch_.order_factor + t, order_factor);
      for (int g = 0; g < shape.num_groups; g++) {
        float* scale = stretch_.v_scale + g * STRETCH + t;
        store(scale, load<f32x16>(scale) * order_factor);
      }
    }
    for (int g = 0; g < shape.num_groups; g++) {
      f32x16 largest = {};
      const float* scale = stretch_.v_scale + g * STRETCH;
      for (int t = 0; t < stretch_.tiles; t++) largest = max_magnitude(largest, load<f32x16>(scale + t * TILE));
      stretch_.v_top[g] = reduce_magnitude(largest);
      const float step = steps_of(stretch_.v_top[g], shape.bits);
      for (int t = 0; t < stretch_.tiles; t++)
        store(stretch_.v_weight + g * STRETCH + t * TILE, load<f32x16>(scale + t * TILE) * step);
    }
  }

  // Prefetches one of `count` shares of the next stretch into the second-level cache.
  void prefetch_next(int first, int high, int share, int count) const {
    const int lines = static_cast<int>((call_.shape.bytes + 63) / 64);
    for (int t = share; t < STRETCH_TILES && first + t * TILE < high; t += count) {
      const uint8_t* at = call_.head_at(seq_, first / TILE + t, kv_head_);
      for (int i = 0; i < lines; i++) __builtin_prefetch(at + i * 64, 0, 2);
    }
  }

  void add_stretch(const RowTile& tile) const {
    int from = tile.min_low - stretch_.first, to = tile.max_high - stretch_.first;
    const int end = stretch_.tiles * TILE;
    from = from > 0 ? from / AT_ONCE * AT_ONCE : 0;
    to = ((to < end ? to : end) + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
    if (from >= to) return;
    const TileStretch run_tile = tile_stretch_for(call_.shape.bits, tile.vecs, std::make_index_sequence<TILE_VECS>{});
    run_tile(call_.shape, call_.layer, tile, stretch_, from, to, buffers_);
  }

  void end_split(RowTile& tile, bool is_first, bool is_more) {
    if (is_first) std::swap(tile.m, tile.total_m), std::swap(tile.l, tile.total_l), std::swap(tile.acc, tile.total);
    else merge_tile(tile, dim_);
    if (is_more) clear_tile(tile, dim_);
  }

  // Returns the factors of a row's sums, of lane i of its vector; writes its lse.
  void weigh_row(const RowTile& tile, int row, int lane, int i, RowFactors& factors) const {
    const int head = head_of(row);
    float m = tile.total_m[lane], l = tile.total_l[lane], *earlier = sums_ ? sums_ + 2 * (row - from_) : nullptr;
    if (call_.keys == Keys::earlier) {
      earlier[0] = m, earlier[1] = l;
      factors.inverse[i] = 1.0f;
      return;
    }
    factors.has_earlier[i] = earlier && earlier[1] != 0.0f;  // NaN, too
    if (factors.has_earlier[i]) {  // as `merge` adds two parts of a single row
      const float now = earlier[0] > m ? earlier[0] : m;
      factors.keep[i] = exp2_neg(splat(earlier[0] - now))[0], factors.add[i] = exp2_neg(splat(m - now))[0];
      l = earlier[1] * factors.keep[i] + l * factors.add[i];
      m = now;
    }
    float* lse = call_.lse ? call_.lse + step_row(row) * call_.layer.num_heads + head : nullptr;
    factors.inverse[i] = finish_row(call_.sinks_of(seq_, tile.position[lane]), head, m, l, lse);
  }

  void finish(const RowTile& tile, int from, int to) const {
    const bool is_turned = call_.shape.bits == 4, has_earlier = call_.keys == Keys::recent && sums_;
    const float block = is_turned ? static_cast<float>(hadamard_block(dim_)) : 1.0f;
    for (int c = 0; c < tile.vecs; c++) {
      const int first = from + c * 16, count = to - first < 16 ? to - first : 16;
      RowFactors factors;
      for (int i = 0; i < count; i++) {
        const int later = first + i + 16;
        for (int d = 0; d < dim_ && later < to_; d += 16) __builtin_prefetch(result(later) + d, 1, 3);
        weigh_row(tile, first + i, c * 16 + i, i, factors);
        factors.inverse[i] /= block;
      }
      for (int d = 0; d < dim_; d += 16) {
        f32x16 x[16];
        for (int i = 0; i < 16; i++) {
          x[i] = load<f32x16>(tile.total + ((d + i) * tile.vecs + c) * 16);
          if (!has_earlier) x[i] = x[i] * load<f32x16>(factors.inverse);
        }
        transpose(x);
        for (int i = 0; i < count; i++) {
          float* out = result(first + i) + d;
          if (factors.has_earlier[i])
            x[i] = fma(x[i], splat(factors.add[i]), load<f32x16>(out) * splat(factors.keep[i]));
          store(out, has_earlier ? x[i] * splat(factors.inverse[i]) : x[i]);
        }
      }
      for (int i = 0; i < count && is_turned; i++) hadamard(result(first + i), dim_);
    }
  }

  const AttendCall& call_;
  const SequenceRows& seq_;
  const int kv_head_, from_, to_, dim_;
  float* const sums_;
  float* at_;
  WideStretch stretch_;
  WeightBuffers buffers_;
};

void attend_rows(const AttendCall& call, const SequenceRows& seq, int kv_head, int from, int to, float* sums) {
  RowTask(call, seq, kv_head, from, to, sums).run();
}

}  // namespace
}  // namespace MS_ISA
