// Decode attention over a part of a sequence's tiles, those that may matter most to the row. Included once
// per instruction set.
//
// The bounds of a tile's keys (kv_bounds.inl) give an upper bound of the score of any of its keys: the sum
// over the dimensions of the larger of q * maximum and q * minimum (Quest, Tang et al. 2024). For each K/V
// head the tiles with the largest bounds are read, and always those that the bounds do not cover yet: the
// row's own tile, or its own block where that is in a store of its own. Query heads that share a K/V head
// read the same tiles, those of the largest sum of their bounds (bench/kernels/selection_mass.py: the sum holds
// more of their attention than the largest of the bounds). It is one product: that of the maxima with the sum of
// what is positive in the queries, and of the minima with the sum of what is negative.
//
// Rows then attend to the chosen tiles in the order of their positions as to a shorter sequence, by a table
// (SequenceRows::tiles). Rows that read everything are left to `attend` and have the bits that it gives.
//
// Where a step's rows attend to the keys before the step alone, they choose among the tiles of these, with the
// budgets that they have where their own keys lie after these. A last tile that is not complete is read in any case.
//
// Choosing and attending can be two calls, so that the chosen tiles are brought to memory in between. What was
// chosen stays in memory of the calling thread. Attention can be two calls, too (Phase): a row chooses among tiles
// that are complete before its own key is written, so the first call chooses and attends to what it can.

namespace MS_ISA {
namespace {

constexpr int SCORED_TILES = 128;  // of one task
constexpr int TILES_AHEAD = 64;    // whose addresses are translated before they are read
constexpr float SIDE_STEPS = 255.0f;

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

// A row that reads a part of its tiles. bounds: those of its sequence's first tile; scored: how many tiles have
// bounds; chosen: how many of them are read; rest: how many keys of the tile after these are read; numbers: where
// its scores and table begin.
struct SelectedRow {
  SequenceRows seq;
  const uint8_t* bounds;
  int scored, chosen, rest, stride;
  size_t numbers;

  int num_read() const { return chosen + (rest > 0 ? 1 : 0); }
};

struct ScoreTask { int row, first; };

// The calling thread keeps this memory between calls, so that a layer allocates nothing.
struct SelectMemory {
  List<SequenceRows> whole, whole_recent, part, part_recent;
  List<SelectedRow> rows;
  List<ScoreTask> tasks;
  List<float> scores;
  List<int32_t> tables;
  const SequenceRows* step = nullptr;  // of which and of whose layer the tables are
  const AttentionLayer* layer = nullptr;
};

SelectMemory& select_memory() {
  static thread_local SelectMemory memory;
  return memory;
}

// What multiplies the bounds, as bytes without signs, [K/V heads][2 * D, padded]: sums over the query heads of a
// K/V head, of what is above zero and then of what is below.
struct RowSides {
  List<uint8_t> bytes;
  List<float> steps;
};

void round_to_sides(const AttentionLayer& layer, const HeadShape& shape, size_t head_bytes, const float* q,
                    RowSides& to) {
  alignas(64) float x[MAX_HEAD_DIM], sides[2][MAX_HEAD_DIM];
  const int kv_heads = layer.cache.num_kv_heads, per_kv = layer.num_heads / kv_heads;
  const size_t need = head_bytes * kv_heads;
  if (to.bytes.size() < need) to.bytes.resize(need);
  if (static_cast<int>(to.steps.size()) < kv_heads) to.steps.resize(kv_heads);
  std::memset(to.bytes.data(), 0, need);
  for (int h = 0; h < kv_heads; h++) {
    std::memset(sides, 0, sizeof(sides));
    for (int r = 0; r < per_kv; r++, q += shape.dim) {
      std::memcpy(x, q, sizeof(float) * shape.dim);
      if (shape.bits == 4) hadamard(x, shape.dim);
      for (int d = 0; d < shape.dim; d += 16) {
        const f32x16 values = load<f32x16>(x + d);
        store(sides[0] + d, load<f32x16>(sides[0] + d) + max(values, f32x16{}));
        store(sides[1] + d, load<f32x16>(sides[1] + d) + max(-values, f32x16{}));
      }
    }
    f32x16 largest = {};
    for (const float* side : sides)
      for (int d = 0; d < shape.dim; d += 16) largest = max_magnitude(largest, load<f32x16>(side + d));
    const float top = reduce_magnitude(largest), step = top > 0.0f ? SIDE_STEPS / top : 0.0f;
    int8_t* bytes = reinterpret_cast<int8_t*>(to.bytes.data() + h * head_bytes);
    for (int side = 0; side < 2; side++)
      for (int d = 0; d < shape.dim; d += 16)
        store_i8(bytes + side * shape.dim + d, to_int_nearest(load<f32x16>(sides[side] + d) * step));
    to.steps[h] = top / SIDE_STEPS;
  }
}

class Selector {
 public:
  Selector(const Step& step, const AttentionLayer& layer, const float* q, size_t q_stride, const Selection& selection,
           SelectMemory& memory)
      : step_(step), layer_(layer), q_(q), q_stride_(q_stride), bounds_(selection.bounds), shape_(layer.cache),
        bounds_shape_(layer.cache), memory_(memory) {}

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
        const int scored = own ? first_recent(one.first_position) / TILE : std::min(all - 1, one.kv_len / TILE);
        const int kept = budget - (all - scored), stride = (scored + 15) / 16 * 16 + 16;
        const int rest = own ? 0 : one.kv_len - scored * TILE;
        const uint8_t* bounds = bounds_.step.sequences[s].base + bounds_.offset;
        memory_.rows.push_back({one, bounds, scored, kept > 0 ? kept : 0, rest, stride, numbers});
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
  void choose() {
    const int heads = layer_.cache.num_kv_heads;
    ms::Team::get().parallel(static_cast<int>(memory_.rows.size()) * heads,
                             [&](int i) { choose_of_head(memory_.rows[i / heads], i % heads); });
    size_t at = 0;
    for (const SelectedRow& row : memory_.rows) {
      while (memory_.part[at].first_row != row.seq.first_row) at++;
      SequenceRows& seq = memory_.part[at];
      seq.tiles = memory_.tables.data() + row.numbers;
      seq.tiles_stride = row.stride;
      seq.kv_len = row.chosen * TILE + row.rest;
    }
  }

  // Writes which tiles of each sequence any head of its rows reads.
  void mark(bool has_recent, uint8_t* is_read) const {
    size_t whole = 0, part = 0, row = 0;
    for (int s = 0; s < step_.num_sequences; s++) {
      const SequenceRows& seq = step_.sequences[s];
      const int end = seq.first_row + seq.num_rows, num_tiles = (seq.kv_len + TILE - 1) / TILE;
      std::memset(is_read, 0, num_tiles);
      for (; whole < memory_.whole.size() && memory_.whole[whole].first_row < end; whole++)
        mark_all(memory_.whole[whole], has_recent, is_read);
      for (; part < memory_.part.size() && memory_.part[part].first_row < end; part++)
        if (memory_.part[part].tiles) mark_table(memory_.rows[row++], is_read);
        else mark_all(memory_.part[part], has_recent, is_read);
      is_read += num_tiles;
    }
  }

 protected:
  // Rows that read everything read all tiles that the last of them sees.
  static void mark_all(const SequenceRows& seq, bool has_recent, uint8_t* is_read) {
    const int end = has_recent ? first_recent(seq.first_position + seq.num_rows - 1) : seq.kv_len;
    std::memset(is_read, 1, (end + TILE - 1) / TILE);
  }
  void mark_table(const SelectedRow& row, uint8_t* is_read) const {
    const int32_t* table = memory_.tables.data() + row.numbers;
    for (int h = 0; h < layer_.cache.num_kv_heads; h++, table += row.stride)
      for (int i = 0; i < row.num_read(); i++) is_read[table[i]] = 1;
  }
  static SequenceRows rows_of(const SequenceRows& seq, int first, int count) {
    const int position = seq.first_position + first;
    return {seq.base, seq.first_row + first, count, std::min(position + count, seq.kv_len), position, seq.places};
  }
  static bool reads_everything(const SequenceRows& seq, int before, const int* budgets) {
    for (int i = before; i < seq.num_rows; i++)
      if (budgets[i - before] * TILE <= seq.first_position + i) return false;
    return true;
  }

  void run(const ScoreTask& task) {
    static thread_local RowSides sides;
    const SelectedRow& row = memory_.rows[task.row];
    round_to_sides(layer_, shape_, bounds_shape_.head_bytes, q_ + row.seq.first_row * q_stride_, sides);
    const int end = task.first + SCORED_TILES < row.scored ? task.first + SCORED_TILES : row.scored;
    for (int tile = task.first; tile < task.first + TILES_AHEAD; tile++) prefetch(bounds_of(row, tile));
    for (int tile = task.first; tile < task.first + 16; tile++) fetch(row, tile);
    for (int first = task.first; first < end; first += 16) score_tiles(row, sides, first);
  }

  const uint8_t* bounds_of(const SelectedRow& row, int tile) const {
    const int existing = tile < row.scored ? tile : row.scored - 1;
    return row.bounds + static_cast<size_t>(existing) * bounds_.step.tile_bytes;
  }

  // Prefetches the bounds of a tile, whose address has been translated by then.
  MS_INLINE void fetch(const SelectedRow& row, int tile) const {
    const uint8_t* at = bounds_of(row, tile);
    for (size_t line = 0; line <= bounds_shape_.scales; line += 64) prefetch(at + line);
  }

  // Scores 16 tiles from `first` on for all K/V heads.
  void score_tiles(const SelectedRow& row, const RowSides& sides, int first) const {
    const int kv_heads = layer_.cache.num_kv_heads;
    const uint8_t* tiles[16];
    for (int i = 0; i < 16; i++) {
      tiles[i] = bounds_of(row, first + i);
      prefetch(bounds_of(row, first + TILES_AHEAD + i));
    }
    for (int h = 0; h < kv_heads; h++) {
      for (int i = 16 * h / kv_heads; i < 16 * (h + 1) / kv_heads; i++) fetch(row, first + 16 + i);
      const size_t at = h * bounds_shape_.head_bytes;
      uint16_t halves[16];
      i32x16 sums[16];
      unroll<16>([&](auto i) MS_LAMBDA {
        std::memcpy(halves + i, tiles[i] + bounds_shape_.scales + 2 * h, 2);
        sums[i] = dot_u8_i8(i32x16{}, load<i32x16>(sides.bytes.data() + at), load<i32x16>(tiles[i] + at));
      });
      for (size_t line = 64; line < bounds_shape_.head_bytes; line += 64) {
        const i32x16 some = load<i32x16>(sides.bytes.data() + at + line);
        unroll<16>([&](auto i) MS_LAMBDA { sums[i] = dot_u8_i8(sums[i], some, load<i32x16>(tiles[i] + at + line)); });
      }
      const f32x16 scores = to_float(sums_of(sums)) * (from_half(halves) * sides.steps[h]);
      store(memory_.scores.data() + row.numbers + static_cast<size_t>(h) * row.stride + first, scores);
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

  // Returns a number that `wanted` orders reach, or the largest that more do, bit by bit.
  static int32_t least_chosen(const int32_t* orders, int count, int wanted) {
    int32_t least = count_at_least(orders, count, 0) >= wanted ? 0 : INT32_MIN;
    for (int bit = 30; bit >= 0; bit--) {
      const int found = count_at_least(orders, count, least + (1 << bit));
      if (found >= wanted) least += 1 << bit;
      if (found == wanted) break;
    }
    return least;
  }

  // Writes the numbers of 16 tiles from `first` on whose order is `least` or more; returns how many there are. It
  // may write 16.
  static MS_INLINE int list_chosen(const int32_t* orders, int first, int32_t least, int32_t* to) {
#if defined(__AVX512F__)
    const __mmask16 chosen = _mm512_cmpge_epi32_mask((__m512i)load<i32x16>(orders + first), _mm512_set1_epi32(least));
    store(to, (i32x16)_mm512_maskz_compress_epi32(chosen, (__m512i)(LANES + first)));
    return __builtin_popcount(chosen);
#else
    int count = 0;
    for (int i = first; i < first + 16; i++) to[count] = i, count += orders[i] >= least;
    return count;
#endif
  }

  // Of tiles with the same score at the edge, the newest are chosen.
  void choose_of_head(const SelectedRow& row, int h) {
    const size_t at = row.numbers + static_cast<size_t>(h) * row.stride;
    int32_t* table = memory_.tables.data() + at;
    int count = 0;
    if (row.chosen > 0) {
      to_order(memory_.scores.data() + at, row.scored);
      int32_t* orders = reinterpret_cast<int32_t*>(memory_.scores.data() + at);
      const int32_t least = least_chosen(orders, row.scored, row.chosen);
      int left_out = count_at_least(orders, row.scored, least) - row.chosen;
      for (int i = 0; left_out > 0; i++)
        if (orders[i] == least) orders[i] = INT32_MIN, left_out--;
      for (int i = 0; i < row.scored; i += 16) count += list_chosen(orders, i, least, table + count);
    }
    if (row.rest > 0) table[count] = row.scored;
  }

  const Step& step_;
  const AttentionLayer& layer_;
  const float* q_;
  size_t q_stride_;
  const KeyBounds& bounds_;
  const HeadShape shape_;
  const BoundsShape bounds_shape_;
  SelectMemory& memory_;
};

// Divides the rows and chooses tiles; what follows is in memory of the calling thread.
Selector selected(const Step& step, const AttentionLayer& layer, const float* q, size_t q_stride,
                  const RecentStore* recent, const Selection& selection) {
  SelectMemory& memory = select_memory();
  Selector selector(step, layer, q, q_stride, selection, memory);
  selector.divide(selection, recent);
  if (!memory.rows.empty()) selector.score(), selector.choose();
  memory.step = step.sequences, memory.layer = &layer;
  return selector;
}

void choose_tiles(const Step& step, const AttentionLayer& layer, const float* q, size_t q_stride,
                  const RecentStore* recent, const Selection& selection, uint8_t* is_read) {
  selected(step, layer, q, q_stride, recent, selection).mark(recent != nullptr, is_read);
}

// Returns whether the step's rows attend to the keys before the step alone.
bool has_only_prefixes(const Step& step) { return step.sequences[0].first_position >= step.sequences[0].kv_len; }

bool is_chosen(const Step& step, const AttentionLayer& layer) {
  return select_memory().step == step.sequences && select_memory().layer == &layer;
}

bool attend_chosen(const Step& step, const AttentionLayer& layer, const float* q, size_t q_stride, float* out,
                   size_t out_stride, float* lse, const RecentStore* recent) {
  if (!is_chosen(step, layer)) return false;
  const SelectMemory& memory = select_memory();
  if (memory.rows.empty()) {
    attend(step, layer, q, q_stride, out, out_stride, lse, {}, recent);
    return true;
  }
  // Sinks belong to the part with the rows' own keys, which a table hides from `attend`.
  AttentionLayer part_layer = layer;
  if (has_only_prefixes(step)) part_layer.sinks = nullptr;
  const auto attend_to = [&](const List<SequenceRows>& sequences, const List<SequenceRows>& own) {
    if (sequences.empty()) return;
    const Step some{sequences.data(), static_cast<int>(sequences.size()), step.tile_bytes};
    if (!recent) return attend(some, part_layer, q, q_stride, out, out_stride, lse, {}, nullptr);
    const RecentStore blocks{{own.data(), some.num_sequences, recent->step.tile_bytes}, recent->cache};
    attend(some, part_layer, q, q_stride, out, out_stride, lse, {}, &blocks);
  };
  attend_to(memory.whole, memory.whole_recent);
  attend_to(memory.part, memory.part_recent);
  return true;
}

// One phase of the attention of single rows. Rows with a table are in it what they are in the shorter sequence: the
// last key is their own.
void attend_in_phases(const Step& step, const AttentionLayer& layer, const float* q, size_t q_stride, float* out,
                      size_t out_stride, float* lse, const Selection& selection, const Phased& phased) {
  // between the two calls the thread may have chosen for another step; the choice is the same again
  if (phased.phase == Phase::begin || !is_chosen(step, layer)) selected(step, layer, q, q_stride, nullptr, selection);
  SelectMemory& memory = select_memory();
  float* sums = phased.sums;
  for (SequenceRows& seq : memory.part)
    if (seq.tiles) seq.first_position = seq.kv_len - 1;
  for (const List<SequenceRows>* sequences : {&memory.whole, &memory.part}) {
    const int count = static_cast<int>(sequences->size());
    if (count == 0) continue;
    const Step some{sequences->data(), count, step.tile_bytes};
    attend(some, layer, q, q_stride, out, out_stride, lse, {phased.phase, sums}, nullptr);
    sums += 2 * static_cast<size_t>(count) * layer.num_heads * (HeadShape(layer.cache).dim + 2);
  }
  if (phased.phase == Phase::finish) memory.step = nullptr;
}

void attend_selected(const Step& step, const AttentionLayer& layer, const float* q, size_t q_stride, float* out,
                     size_t out_stride, float* lse, const RecentStore* recent, const Selection& selection,
                     const Phased& phased) {
  if (phased.phase != Phase::whole)
    return attend_in_phases(step, layer, q, q_stride, out, out_stride, lse, selection, phased);
  selected(step, layer, q, q_stride, recent, selection);
  attend_chosen(step, layer, q, q_stride, out, out_stride, lse, recent);
}

}  // namespace
}  // namespace MS_ISA
