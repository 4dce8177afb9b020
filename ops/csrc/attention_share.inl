// Rows that choose among tiles of which this machine has a part: other machines have the others. Included once per
// instruction set.
//
// Each machine lists its own tiles that may be among the chosen ones (list_tiles). From all lists follows how many
// tiles of each are chosen (count_tiles), and each machine attends to so many of its best ones (attend_listed), in
// the order of their positions. The same tiles are chosen as where one machine has them all: those of the largest
// scores, and of tiles with the same score at the edge the newest.
//
// A list of a row and K/V head has the scores of the tiles in the order of their positions, as integers of the same
// order (to_order). It has all tiles, or as many as the row chooses anywhere, if these are fewer; then a bit for each
// tile follows, 1 where its score is listed.

namespace MS_ISA {
namespace {

MS_INLINE int words_of_bits(int count) { return (count + 31) / 32; }

// How long the lists of one row are.
struct ListShape {
  int tiles, listed;  // those here, and those whose scores are listed

  ListShape(const TileShares& shares, int row)
      : tiles(shares.num_tiles[row]), listed(std::min(shares.wanted[row], shares.num_tiles[row])) {}
  bool is_whole() const { return listed == tiles; }
  int words() const { return listed == 0 ? 0 : listed + (is_whole() ? 0 : words_of_bits(tiles)); }
  // The numbers that scores of so many tiles take in memory: whole registers, and one more.
  static int stride_of(int count) { return (count + 15) / 16 * 16 + 16; }
};

// Calls visit(tile, place in the list) for each listed tile, in order.
template <class Visit>
MS_INLINE void for_listed(const ListShape& shape, const int32_t* list, Visit visit) {
  if (shape.is_whole()) {
    for (int i = 0; i < shape.listed; i++) visit(i, i);
    return;
  }
  int place = 0;
  for (int word = 0; place < shape.listed && word < words_of_bits(shape.tiles); word++)
    for (uint32_t bits = static_cast<uint32_t>(list[shape.listed + word]); bits && place < shape.listed;
         bits &= bits - 1)
      visit(word * 32 + __builtin_ctz(bits), place++);
}

// Lists the tiles of the only row of each sequence.
class TileLister : public Selector {
 public:
  TileLister(const Step& step, const AttentionLayer& layer, const float* q, size_t q_stride, const Selection& bounds,
             const TileShares& shares, SelectMemory& memory)
      : Selector(step, layer, q, q_stride, bounds, memory), shares_(shares) {
    memory.rows.clear(), memory.step = nullptr;
    size_t numbers = 0;
    for (int row = 0; row < step.num_sequences; row++) {
      const ListShape shape(shares, row);
      const int stride = ListShape::stride_of(shape.tiles);
      const uint8_t* at = bounds_.step.sequences[row].base + bounds_.offset;
      memory.rows.push_back({step.sequences[row], at, shape.listed ? shape.tiles : 0, shape.listed, 0, stride, numbers});
      numbers += static_cast<size_t>(stride) * layer.cache.num_kv_heads;
    }
    if (memory.scores.size() < numbers + 16) memory.scores.resize(numbers + 16), memory.tables.resize(numbers + 16);
  }

  void list(int32_t* to) {
    score();
    const int heads = layer_.cache.num_kv_heads;
    static thread_local List<size_t> starts;
    starts.clear();
    size_t at = 0;
    for (int row = 0; row < step_.num_sequences; row++) {
      starts.push_back(at);
      at += static_cast<size_t>(ListShape(shares_, row).words()) * heads;
    }
    const size_t* first = starts.data();  // of the calling thread
    ms::Team::get().parallel(step_.num_sequences * heads, [&](int i) {
      const int row = i / heads, h = i % heads;
      list_head(row, h, to + first[row] + static_cast<size_t>(h) * ListShape(shares_, row).words());
    });
  }

 private:
  void list_head(int number, int h, int32_t* to) {
    const ListShape shape(shares_, number);
    if (!shape.listed) return;
    const SelectedRow& row = memory_.rows[number];
    const size_t at = row.numbers + static_cast<size_t>(h) * row.stride;
    if (shape.is_whole()) {
      to_order(memory_.scores.data() + at, row.scored);
      std::memcpy(to, memory_.scores.data() + at, sizeof(int32_t) * row.scored);
      return;
    }
    choose_of_head(row, h);
    const int32_t* table = memory_.tables.data() + at;
    const int32_t* orders = reinterpret_cast<const int32_t*>(memory_.scores.data() + at);
    uint32_t* bits = reinterpret_cast<uint32_t*>(to + shape.listed);
    std::memset(bits, 0, sizeof(uint32_t) * words_of_bits(shape.tiles));
    for (int i = 0; i < shape.listed; i++) {
      to[i] = orders[table[i]];
      bits[table[i] / 32] |= 1u << table[i] % 32;
    }
  }

  const TileShares& shares_;
};

void list_tiles(const Step& step, const AttentionLayer& layer, const float* q, size_t q_stride,
                const KeyBounds& bounds, const TileShares& shares, int32_t* to) {
  TileLister(step, layer, q, q_stride, {bounds, nullptr, nullptr}, shares, select_memory()).list(to);
}

// How many tiles of each machine's list are among the `wanted` best ones.
class TileCounter : public Selector {
 public:
  static void count(const ListedPart* parts, int num_parts, const int32_t* const* lists, int row, int head, int heads,
                    int wanted) {
    static thread_local List<int32_t> all;
    int total = 0;
    for (int p = 0; p < num_parts; p++) total += ListShape(parts[p].shares, row).listed;
    const size_t need = ListShape::stride_of(total);
    if (all.size() < need) all.resize(need);
    for (int p = 0, at = 0; p < num_parts; p++) {
      const int listed = ListShape(parts[p].shares, row).listed;
      std::memcpy(all.data() + at, lists[p], sizeof(int32_t) * listed);
      at += listed;
    }
    for (size_t i = total; i < need; i++) all[i] = INT32_MIN;
    const int32_t least = wanted >= total ? INT32_MIN : wanted > 0 ? least_chosen(all.data(), total, wanted) : INT32_MAX;
    int chosen = 0;
    for (int p = 0; p < num_parts; p++) {
      const int listed = ListShape(parts[p].shares, row).listed;
      int found = 0;
      if (wanted > 0)
        for (int i = 0; i < listed; i++) found += lists[p][i] >= least;
      parts[p].counts[row * heads + head] = found;
      chosen += found;
    }
    if (chosen > wanted) leave_out(parts, num_parts, lists, row, row * heads + head, least, chosen - wanted);
  }

 private:
  // Leaves out the oldest tiles whose score is `least`. Part p has tiles p, p + num_parts, ... of the sequence.
  static void leave_out(const ListedPart* parts, int num_parts, const int32_t* const* lists, int row, int at,
                        int32_t least, int count) {
    static thread_local List<int64_t> tied;
    tied.clear();
    for (int p = 0; p < num_parts; p++)
      for_listed(ListShape(parts[p].shares, row), lists[p], [&](int tile, int place) {
        if (lists[p][place] == least) tied.push_back((static_cast<int64_t>(tile) * num_parts + p) * num_parts + p);
      });
    // the comparison is of this instruction set, and so what is made for it
    std::sort(tied.data(), tied.data() + tied.size(), [](int64_t a, int64_t b) { return a < b; });
    for (int i = 0; i < count && i < static_cast<int>(tied.size()); i++) parts[tied[i] % num_parts].counts[at]--;
  }
};

void count_tiles(const ListedPart* parts, int num_parts, int rows, int heads) {
  static thread_local List<const int32_t*> starts;  // [rows][parts]
  starts.clear();
  List<const int32_t*> next;
  for (int p = 0; p < num_parts; p++) next.push_back(parts[p].lists);
  for (int row = 0; row < rows; row++)
    for (int p = 0; p < num_parts; p++) {
      starts.push_back(next[p]);
      next[p] += static_cast<size_t>(ListShape(parts[p].shares, row).words()) * heads;
    }
  const int32_t* const* first = starts.data();
  ms::Team::get().parallel(rows * heads, [&](int i) {
    const int row = i / heads, h = i % heads;
    static thread_local List<const int32_t*> lists;
    lists.clear();
    for (int p = 0; p < num_parts; p++)
      lists.push_back(first[row * num_parts + p] + static_cast<size_t>(h) * ListShape(parts[p].shares, row).words());
    TileCounter::count(parts, num_parts, lists.data(), row, h, heads, parts[0].shares.wanted[row]);
  });
}

// The tiles that rows attend to: of each row and K/V head the `count` best ones of its list, in order.
class ListedRows : public Selector {
 public:
  static void table_of(const ListShape& shape, const int32_t* list, int count, int32_t* orders, int32_t* table) {
    if (count == shape.listed) {
      for_listed(shape, list, [&](int tile, int place) { table[place] = tile; });
      return;
    }
    std::memcpy(orders, list, sizeof(int32_t) * shape.listed);
    for (int i = shape.listed; i < ListShape::stride_of(shape.listed); i++) orders[i] = INT32_MIN;
    if (count == 0) return;
    const int32_t least = least_chosen(orders, shape.listed, count);
    int left_out = count_at_least(orders, shape.listed, least) - count, at = 0;
    for_listed(shape, list, [&](int tile, int place) {
      if (orders[place] < least || at == count) return;
      if (orders[place] == least && left_out > 0) left_out--;
      else table[at++] = tile;
    });
  }
};

// Each row and K/V head is a sequence of its own here, since they attend to different numbers of tiles.
void attend_listed(const Step& step, const AttentionLayer& layer, const float* q, const TileShares& shares,
                   const int32_t* lists, const int32_t* counts, float* out, float* lse) {
  static thread_local List<SequenceRows> sequences;
  static thread_local List<const int32_t*> starts;
  static thread_local List<int32_t> tables, orders;
  const int heads = layer.cache.num_kv_heads, per_kv = layer.num_heads / heads;
  const HeadShape head_shape(layer.cache);
  sequences.clear(), starts.clear();
  size_t numbers = 0;
  for (int row = 0; row < step.num_sequences; row++) {
    const SequenceRows& seq = step.sequences[row];
    const ListShape shape(shares, row);
    const int rest = seq.kv_len - shape.tiles * TILE;  // keys of the row's own tile
    for (int h = 0; h < heads; h++) {
      const int kv_len = counts[row * heads + h] * TILE + rest;
      sequences.push_back({seq.base + h * head_shape.bytes, row * heads + h, 1, kv_len, kv_len});
      sequences.back().tiles_stride = static_cast<int>(numbers);
      starts.push_back(lists);
      lists += shape.words();
      numbers += ListShape::stride_of(shape.listed + 1);
    }
  }
  if (tables.size() < numbers) tables.resize(numbers), orders.resize(numbers);
  SequenceRows* rows = sequences.data();
  const int32_t* const* list = starts.data();
  int32_t *table = tables.data(), *order = orders.data();
  ms::Team::get().parallel(static_cast<int>(sequences.size()), [&](int i) {
    const ListShape shape(shares, i / heads);
    const int first = rows[i].tiles_stride, count = counts[i];
    ListedRows::table_of(shape, list[i], count, order + first, table + first);
    if (rows[i].kv_len > count * TILE) table[first + count] = shape.tiles;
    rows[i].tiles = table + first, rows[i].tiles_stride = 0;
  });
  AttentionLayer one = layer;  // a K/V head
  one.cache.num_kv_heads = 1, one.num_heads = per_kv, one.sinks = nullptr;
  const size_t stride = static_cast<size_t>(per_kv) * head_shape.dim;
  const Step of_heads{rows, static_cast<int>(sequences.size()), step.tile_bytes};
  attend(of_heads, one, q, stride, out, stride, lse, {}, nullptr);
}

}  // namespace
}  // namespace MS_ISA
