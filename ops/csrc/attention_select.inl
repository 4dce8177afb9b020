// Decode attention over a part of a sequence's tiles, those that may matter most to the row. Included once
// per instruction set.
//
// The bounds of a tile's keys (kv_bounds.inl) give an upper bound of the score of any of its keys: the sum
// over the dimensions of the larger of q * maximum and q * minimum (Quest, Tang et al. 2024). For each K/V
// head the tiles with the largest bounds are read, and always those that the bounds do not cover yet: the
// row's own tile, or its own block where that is in a store of its own. Query heads that share a K/V head
// read the same tiles, those of the largest sum of their bounds (bench/kernels/selection_mass.py: the sum holds
// more of their attention than the largest of the bounds).
//
// Rows then attend to the chosen tiles in the order of their positions as to a shorter sequence, by a table
// (SequenceRows::tiles). Rows that read everything are left to `attend` and have the bits that it gives.

namespace MS_ISA {
namespace {

constexpr int SCORED_TILES = 128;  // of one task
constexpr int TILES_AHEAD = 64;    // whose addresses are translated before they are read
constexpr float QUERY_STEPS_OF_BOUNDS = 255.0f;

// Returns the sums of x[0], ..., x[15] in this order.
MS_INLINE i32x16 sums_of(i32x16 (&x)[16]) {
#if defined(__AVX512F__)
  unroll<4>([&](auto stage) MS_LAMBDA {
    constexpr int S = 8 >> stage;  // vectors hold sums of 2 * S lanes, which become sums of S lanes
    const i32x16 block = LANES / S, within = LANES % S, half = splat_i32(8 / S);
    const i32x16 second = (block >= half) & 16;
    const i32x16 low = second + (block % half) * (2 * S) + within;
    unroll<S>([&](auto i) MS_LAMBDA {
      const i32x16 a = x[2 * i], b = x[2 * i + 1];
      x[i] = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + S);
    });
  });
  return x[0];
#else
  i32x16 sums;
  for (int i = 0; i < 16; i++) sums[i] = reduce_add(x[i]);
  return sums;
#endif
}

// A row that reads a part of its tiles. scored: how many tiles have bounds; chosen: how many of them
// are read; numbers: where its scores and table begin.
struct SelectedRow {
  SequenceRows seq;
  int scored, chosen, stride;
  size_t numbers;
};

struct ScoreTask { int row, first; };

// The calling thread keeps this memory between calls, so that a layer allocates nothing.
struct SelectMemory {
  List<SequenceRows> whole, whole_recent, part, part_recent;
  List<SelectedRow> rows;
  List<ScoreTask> tasks;
  List<float> scores;
  List<int32_t> tables;
};

// The queries of one row as bytes without signs, [heads][2 * D, padded]: those above zero, then those below.
struct RowQueries {
  List<uint8_t> bytes;
  List<float> steps;
};

void round_to_sides(const AttentionLayer& layer, const HeadShape& shape, size_t head_bytes, const float* q,
                    RowQueries& to) {
  alignas(64) float x[MAX_HEAD_DIM];
  const size_t need = head_bytes * layer.num_heads;
  if (to.bytes.size() < need) to.bytes.resize(need);
  if (to.steps.size() < static_cast<size_t>(layer.num_heads)) to.steps.resize(layer.num_heads);
  std::memset(to.bytes.data(), 0, need);
  for (int h = 0; h < layer.num_heads; h++) {
    std::memcpy(x, q + h * shape.dim, sizeof(float) * shape.dim);
    if (shape.bits == 4) hadamard(x, shape.dim);
    f32x16 largest = {};
    for (int d = 0; d < shape.dim; d += 16) largest = max_magnitude(largest, load<f32x16>(x + d));
    const float top = reduce_magnitude(largest), step = top > 0.0f ? QUERY_STEPS_OF_BOUNDS / top : 0.0f;
    int8_t* bytes = reinterpret_cast<int8_t*>(to.bytes.data() + h * head_bytes);
    for (int d = 0; d < shape.dim; d += 16) {
      const f32x16 scaled = load<f32x16>(x + d) * step;
      store_i8(bytes + d, to_int_nearest(max(scaled, f32x16{})));
      store_i8(bytes + shape.dim + d, to_int_nearest(max(-scaled, f32x16{})));
    }
    to.steps[h] = top / QUERY_STEPS_OF_BOUNDS;
  }
}

class Selector {
 public:
  Selector(const Step& step, const AttentionLayer& layer, const float* q, size_t q_stride, const Selection& selection,
           SelectMemory& memory)
      : step_(step), layer_(layer), q_(q), q_stride_(q_stride), shape_(layer.cache),
        bounds_(layer.cache, selection.bounds_offset), memory_(memory) {}

  // Divides the step's rows into those that read everything and those that choose.
  void divide(const Selection& selection, const RecentStore* recent) {
    memory_.whole.clear(), memory_.whole_recent.clear(), memory_.rows.clear();
    memory_.part.clear(), memory_.part_recent.clear();
    const int* budgets = selection.budgets;
    size_t numbers = 0;
    for (int s = 0; s < step_.num_sequences; budgets += selection.num_selecting[s++]) {
      const SequenceRows& seq = step_.sequences[s];
      const SequenceRows* own = recent ? &recent->step.sequences[s] : nullptr;
      int before = seq.num_rows - selection.num_selecting[s];  // rows that read everything
      if (reads_everything(seq, before, budgets)) before = seq.num_rows;
      if (before > 0) {
        memory_.whole.push_back(rows_of(seq, 0, before));
        if (own) memory_.whole_recent.push_back(rows_of(*own, 0, before));
      }
      for (int i = before; i < seq.num_rows; i++) {
        const SequenceRows one = rows_of(seq, i, 1);
        const int budget = budgets[i - before], all = one.first_position / TILE + 1;
        if (own) memory_.part_recent.push_back(rows_of(*own, i, 1));
        memory_.part.push_back(one);
        if (budget >= all) continue;
        const int scored = own ? first_recent(one.first_position) / TILE : all - 1;
        const int kept = budget - (all - scored), stride = (scored + 15) / 16 * 16;
        memory_.rows.push_back({one, scored, kept > 0 ? kept : 0, stride, numbers});
        numbers += static_cast<size_t>(stride) * layer_.cache.num_kv_heads;
      }
    }
    // never empty: a row with a table that reads its own block alone has no scores
    if (memory_.scores.size() < numbers + 16) memory_.scores.resize(numbers + 16), memory_.tables.resize(numbers + 16);
  }

  void score() {
    memory_.tasks.clear();
    for (size_t i = 0; i < memory_.rows.size(); i++)
      for (int first = 0; first < memory_.rows[i].scored; first += SCORED_TILES)
        memory_.tasks.push_back({static_cast<int>(i), first});
    ms::Team::get().parallel(static_cast<int>(memory_.tasks.size()), [&](int i) { run(memory_.tasks[i]); });
  }

  // Writes the tables of chosen tiles, and makes the rows read these.
  void choose(bool has_recent) {
    const int heads = layer_.cache.num_kv_heads;
    ms::Team::get().parallel(static_cast<int>(memory_.rows.size()) * heads, [&](int i) {
      choose_of_head(memory_.rows[i / heads], i % heads, !has_recent);
    });
    size_t at = 0;
    for (const SelectedRow& row : memory_.rows) {
      while (memory_.part[at].first_row != row.seq.first_row) at++;
      SequenceRows& seq = memory_.part[at];
      seq.tiles = memory_.tables.data() + row.numbers;
      seq.tiles_stride = row.stride;
      seq.kv_len = row.chosen * TILE + (has_recent ? 0 : seq.first_position % TILE + 1);
    }
  }

 private:
  static SequenceRows rows_of(const SequenceRows& seq, int first, int count) {
    const int position = seq.first_position + first;
    return {seq.base, seq.first_row + first, count, position + count, position};
  }
  static bool reads_everything(const SequenceRows& seq, int before, const int* budgets) {
    for (int i = before; i < seq.num_rows; i++)
      if (budgets[i - before] * TILE <= seq.first_position + i) return false;
    return true;
  }

  void run(const ScoreTask& task) {
    static thread_local RowQueries queries;
    const SelectedRow& row = memory_.rows[task.row];
    round_to_sides(layer_, shape_, bounds_.head_bytes, q_ + row.seq.first_row * q_stride_, queries);
    const int end = task.first + SCORED_TILES < row.scored ? task.first + SCORED_TILES : row.scored;
    for (int tile = task.first; tile < task.first + TILES_AHEAD; tile++) prefetch(bounds_of(row, tile));
    for (int tile = task.first; tile < task.first + 16; tile++) fetch(row, tile);
    for (int first = task.first; first < end; first += 16) score_tiles(row, queries, first);
  }

  const uint8_t* bounds_of(const SelectedRow& row, int tile) const {
    const int existing = tile < row.scored ? tile : row.scored - 1;
    return row.seq.base + static_cast<size_t>(existing) * step_.tile_bytes + bounds_.offset;
  }

  // Prefetches the bounds of a tile, whose address has been translated by then.
  MS_INLINE void fetch(const SelectedRow& row, int tile) const {
    const uint8_t* at = bounds_of(row, tile);
    for (size_t line = 0; line <= bounds_.scales; line += 64) prefetch(at + line);
  }

  // Scores 16 tiles from `first` on for all K/V heads.
  void score_tiles(const SelectedRow& row, const RowQueries& queries, int first) const {
    const int per_kv = layer_.num_heads / layer_.cache.num_kv_heads;
    const int kv_heads = layer_.cache.num_kv_heads;
    const uint8_t* tiles[16];
    for (int i = 0; i < 16; i++) tiles[i] = bounds_of(row, first + i), prefetch(bounds_of(row, first + TILES_AHEAD + i));
    for (int h = 0; h < kv_heads; h++) {
      for (int i = 16 * h / kv_heads; i < 16 * (h + 1) / kv_heads; i++) fetch(row, first + 16 + i);
      const size_t at = h * bounds_.head_bytes;
      uint16_t halves[16];
      for (int i = 0; i < 16; i++) std::memcpy(halves + i, tiles[i] + bounds_.scales + 2 * h, 2);
      f32x16 joint = {};
      for (int r = 0; r < per_kv; r++) {
        const int head = h * per_kv + r;
        const uint8_t* q = queries.bytes.data() + head * bounds_.head_bytes;
        i32x16 sums[16];
        unroll<16>([&](auto i) MS_LAMBDA {
          sums[i] = dot_u8_i8(i32x16{}, load<i32x16>(q), load<i32x16>(tiles[i] + at));
        });
        for (size_t line = 64; line < bounds_.head_bytes; line += 64) {
          const i32x16 sides = load<i32x16>(q + line);
          unroll<16>([&](auto i) MS_LAMBDA { sums[i] = dot_u8_i8(sums[i], sides, load<i32x16>(tiles[i] + at + line)); });
        }
        const f32x16 bound = to_float(sums_of(sums)) * queries.steps[head];
        joint = r == 0 ? bound : joint + bound;
      }
      store(memory_.scores.data() + row.numbers + static_cast<size_t>(h) * row.stride + first, joint * from_half(halves));
    }
  }

  // Makes scores signed integers of the same order, with NaN at its ends, in place; those after `count` are
  // below all others.
  static void to_order(float* scores, int count) {
    for (int i = 0; i < count; i += 16) {
      const i32x16 bits = load<i32x16>(scores + i);
      i32x16 order = bits ^ ((bits >> 31) & 0x7fffffff);
      order -= order == splat_i32(INT32_MIN);
      const i32x16 is_there = LANES < count - i;
      store(scores + i, (order & is_there) | (splat_i32(INT32_MIN) & ~is_there));
    }
  }

  static int count_at_least(const int32_t* orders, int count, int32_t least) {
    i32x16 found = {};
    const i32x16 below = splat_i32(least);
    for (int i = 0; i < count; i += 16) found -= load<i32x16>(orders + i) >= below;
    return reduce_add(found);
  }

  // Returns the largest number that at least `wanted` orders reach, bit by bit.
  static int32_t least_chosen(const int32_t* orders, int count, int wanted) {
    int32_t least = count_at_least(orders, count, 0) >= wanted ? 0 : INT32_MIN;
    for (int bit = 30; bit >= 0; bit--)
      if (count_at_least(orders, count, least + (1 << bit)) >= wanted) least += 1 << bit;
    return least;
  }

  // Of tiles with the same score at the edge, the newest are chosen.
  void choose_of_head(const SelectedRow& row, int h, bool with_own) {
    const size_t at = row.numbers + static_cast<size_t>(h) * row.stride;
    int32_t* table = memory_.tables.data() + at;
    int count = 0;
    if (row.chosen > 0) {
      to_order(memory_.scores.data() + at, row.scored);
      const int32_t* orders = reinterpret_cast<const int32_t*>(memory_.scores.data() + at);
      const int32_t least = least_chosen(orders, row.scored, row.chosen);
      int left_out = count_at_least(orders, row.scored, least) - row.chosen;
      for (int i = 0; i < row.scored; i++) {
        const int is_left_out = (orders[i] == least) & (left_out > 0);
        left_out -= is_left_out;
        table[count] = i;
        count += (orders[i] >= least) & !is_left_out;
      }
    }
    if (with_own) table[count] = row.seq.first_position / TILE;
  }

  const Step& step_;
  const AttentionLayer& layer_;
  const float* q_;
  size_t q_stride_;
  const HeadShape shape_;
  const BoundsShape bounds_;
  SelectMemory& memory_;
};

void attend_selected(const Step& step, const AttentionLayer& layer, const float* q, size_t q_stride, float* out,
                     size_t out_stride, float* lse, const RecentStore* recent, const Selection& selection) {
  static thread_local SelectMemory memory;
  Selector selector(step, layer, q, q_stride, selection, memory);
  selector.divide(selection, recent);
  if (memory.rows.empty()) return attend(step, layer, q, q_stride, out, out_stride, lse, {}, recent);
  selector.score();
  selector.choose(recent != nullptr);
  const auto attend_to = [&](const List<SequenceRows>& sequences, const List<SequenceRows>& own) {
    if (sequences.empty()) return;
    const Step some{sequences.data(), static_cast<int>(sequences.size()), step.tile_bytes};
    const RecentStore blocks = recent ? RecentStore{{own.data(), some.num_sequences, recent->step.tile_bytes}, recent->cache}
                                      : RecentStore{};
    attend(some, layer, q, q_stride, out, out_stride, lse, {}, recent ? &blocks : nullptr);
  };
  attend_to(memory.whole, memory.whole_recent);
  attend_to(memory.part, memory.part_recent);
}

}  // namespace
}  // namespace MS_ISA
