// Prefill attention over bf16 or fp32 K/V: many query rows of one sequence, keys and values at any
// token and head stride. Included once per instruction set.
//
// This is flash attention with a query row in each lane: S = K Q^T, weights and sums are all
// [.][rows]. So the softmax needs no sum across lanes, K is used as it is stored, and the query
// heads of a K/V head are just more rows. All data consists of 32-bit units: one fp32 number, or two
// of bf16 where the processor multiplies them (elsewhere bf16 is widened).
//
//   A task has some rows of one K/V head, in tiles of up to TILE_VECS * 16. For each block of
//   KEY_BLOCK keys it copies the keys into dense memory (a token's stride may map all keys to the
//   same few cache sets; V's units are pairs of tokens) and adds them to its tiles. It skips groups
//   of keys that are masked for all rows of a tile.
//
// Blocks begin at multiples of KEY_BLOCK keys, keys are summed in order, each row has its own lane,
// and a masked key adds zero. So a row has the same bits whatever rows are computed with it.

namespace MS_ISA {
namespace {

constexpr int KEY_BLOCK = 128;
static_assert(KEY_BLOCK % AT_ONCE == 0 && 16 % AT_ONCE == 0 && AT_ONCE % 2 == 0);

// ---- units

struct Singles {
  static constexpr int COUNT = 1;
  static MS_INLINE f32x16 dot(f32x16 sum, f32x16 a, f32x16 b) { return fma(a, b, sum); }
  // Stores the weights of two consecutive keys, `step` floats apart.
  static MS_INLINE void put(float* to, int step, f32x16 even, f32x16 odd) { store(to, even), store(to + step, odd); }
  static MS_INLINE f32x16 query(const void* q, size_t at, int, DType type) {
    return type == DType::f32 ? plain_at<DType::f32>(q, at) : plain_at<DType::bf16>(q, at);
  }
  template <DType TYPE>
  static MS_INLINE void key(float* to, const void* from, int dim) {
    for (int d = 0; d < dim; d += 16) store(to + d, plain_at<TYPE>(from, d));
  }
  template <DType TYPE>
  static MS_INLINE f32x16 value(const void* even, const void*, int d) { return plain_at<TYPE>(even, d); }
};

#if defined(__AVX512BF16__)
struct Pairs {
  static constexpr int COUNT = 2;
  static MS_INLINE f32x16 dot(f32x16 sum, f32x16 a, f32x16 b) {
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  static MS_INLINE void put(float* to, int, f32x16 even, f32x16 odd) {
    const i32x16 halves = (LANES + 16) << 16 | LANES;  // words 0, 16, 1, 17...
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    store(to, _mm512_permutexvar_epi16((__m512i)halves, (__m512i)both));
  }
  static MS_INLINE f32x16 query(const void* q, size_t at, int left, DType) {
    const uint16_t* from = static_cast<const uint16_t*>(q) + at;
    if (left >= 16) return load<f32x16>(from);
    return (f32x16)_mm512_zextsi256_si512(load<__m256i>(from));
  }
  template <DType>
  static MS_INLINE void key(float* to, const void* from, int dim) { std::memcpy(to, from, 2 * dim); }
  template <DType>
  static MS_INLINE f32x16 value(const void* even, const void* odd, int d) {
    const u32x16 low = __builtin_convertvector(load<u16x16>(static_cast<const uint16_t*>(even) + d), u32x16);
    return (f32x16)(low | (u32x16)plain_at<DType::bf16>(odd, d));
  }
};
#endif

// ---- a tile of rows and a block of keys

// Up to TILE_ROWS consecutive rows of one K/V head, ordered [token][query head of the K/V head].
struct QueryTile {
  int vecs;         // of 16 rows
  float *q, *acc;   // [units][vecs][16], [dim][vecs][16]
  float *m, *l;     // [vecs][16]
  int *low, *high;  // each row attends to keys [low, high)
  int min_low, max_low, min_high, max_high;
};

// A block of keys: K as [key][units], V as [dim / 16][units of keys][16 dimensions].
struct KeyBlock {
  float *k, *v;
  int first;  // position of the first key
  int dim;
};

// Computes sum[r] += lanes[u] * x[r * r_step + u * u_step] for all u < count.
template <class U, int C>
MS_INLINE void multiply(f32x16 (&sum)[AT_ONCE][C], const float* lanes, const float* x, int r_step, int u_step,
                        int count) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  static_assert(C == 1 && U::COUNT == 1);  // with whole vectors, gcc would keep the sums in memory
  __m256 half[AT_ONCE][2];
  unroll<AT_ONCE>([&](auto r) MS_LAMBDA { std::memcpy(half[r], &sum[r], 64); });
  for (int u = 0; u < count; u++) {
    const __m256 low = _mm256_loadu_ps(lanes + u * 16), high = _mm256_loadu_ps(lanes + u * 16 + 8);
    unroll<AT_ONCE>([&](auto r) MS_LAMBDA {
      const __m256 one = _mm256_broadcast_ss(x + r * r_step + u * u_step);
      half[r][0] = _mm256_fmadd_ps(low, one, half[r][0]);
      half[r][1] = _mm256_fmadd_ps(high, one, half[r][1]);
    });
  }
  unroll<AT_ONCE>([&](auto r) MS_LAMBDA { std::memcpy(&sum[r], half[r], 64); });
#else
  for (int u = 0; u < count; u++) {
    f32x16 lane[C];
    unroll<C>([&](auto c) MS_LAMBDA { lane[c] = load<f32x16>(lanes + (u * C + c) * 16); });
    unroll<AT_ONCE>([&](auto r) MS_LAMBDA {
      const f32x16 one = (f32x16)splat_bytes(x + r * r_step + u * u_step);
      unroll<C>([&](auto c) MS_LAMBDA { sum[r][c] = U::dot(sum[r][c], lane[c], one); });
    });
  }
#endif
}

// What a tile and a block need: no masks, masks, or soft caps of scores, which then include masks.
enum class Scores : int { plain, masked, capped };

// Adds keys [from, to) of the block, in runs of AT_ONCE, to all rows of a tile.
template <class U, int C, Scores SCORES>
__attribute__((noinline)) void tile_block(const QueryTile& tile, const KeyBlock& block, int from, int to, float scale,
                                          float soft_cap) {
  alignas(64) float scores[KEY_BLOCK * C * 16];  // overwritten by the weights
  const int units = block.dim / U::COUNT;
  const auto is_seen = [&](auto c, int key) MS_LAMBDA {
    const int position = block.first + key;
    return (load<i32x16>(tile.low + 16 * c) <= position) & (load<i32x16>(tile.high + 16 * c) > position);
  };
  // True if some of the `count` keys are masked for some row; only such keys pay for masks.
  const auto is_edge = [&](int key, int count) MS_LAMBDA {
    return SCORES != Scores::plain && (block.first + key < tile.max_low || block.first + key + count > tile.min_high);
  };
  f32x16 top[C], shrink[C], even[C], odd[C];
  unroll<C>([&](auto c) MS_LAMBDA { top[c] = load<f32x16>(tile.m + 16 * c); });
  for (int key = from; key < to; key += AT_ONCE) {
    f32x16 sum[AT_ONCE][C];
    unroll<AT_ONCE>([&](auto r) MS_LAMBDA { unroll<C>([&](auto c) MS_LAMBDA { sum[r][c] = f32x16{}; }); });
    multiply<U, C>(sum, tile.q, block.k + key * units, units, 1, units);
    const bool masks = is_edge(key, AT_ONCE);
    if constexpr (SCORES == Scores::capped)
      for (auto& row : sum)
        for (f32x16& x : row) x = soft_capped(soft_cap, x * scale);
    unroll<AT_ONCE>([&](auto r) MS_LAMBDA {
      unroll<C>([&](auto c) MS_LAMBDA {
        f32x16 x = SCORES == Scores::capped ? sum[r][c] : sum[r][c] * scale;
        if (masks) x = select(is_seen(c, key + r), x, splat(NOTHING));
        top[c] = max(top[c], x);
        store(scores + ((key + r) * C + c) * 16, x);
      });
    });
  }
  unroll<C>([&](auto c) MS_LAMBDA {
    shrink[c] = exp2_neg(load<f32x16>(tile.m + 16 * c) - top[c]);
    store(tile.m + 16 * c, top[c]);
    even[c] = odd[c] = f32x16{};
  });
  for (int key = from; key < to; key += 2) {
    const bool masks = is_edge(key, 2);
    unroll<C>([&](auto c) MS_LAMBDA {
      f32x16 a = exp2_neg(load<f32x16>(scores + (key * C + c) * 16) - top[c]);
      f32x16 b = exp2_neg(load<f32x16>(scores + ((key + 1) * C + c) * 16) - top[c]);
      if (masks) a = select(is_seen(c, key), a, f32x16{}), b = select(is_seen(c, key + 1), b, f32x16{});
      even[c] += a, odd[c] += b;
      U::put(scores + (key / U::COUNT * C + c) * 16, C * 16, a, b);
    });
  }
  unroll<C>([&](auto c) MS_LAMBDA {
    store(tile.l + 16 * c, fma(load<f32x16>(tile.l + 16 * c), shrink[c], even[c] + odd[c]));
  });
  for (int d = 0; d < block.dim; d += AT_ONCE) {
    f32x16 sum[AT_ONCE][C];
    float* acc = tile.acc + d * C * 16;
    unroll<AT_ONCE>([&](auto r) MS_LAMBDA {
      unroll<C>([&](auto c) MS_LAMBDA { sum[r][c] = load<f32x16>(acc + (r * C + c) * 16) * shrink[c]; });
    });
    const int first = from / U::COUNT, count = (to - from) / U::COUNT;
    const float* v = block.v + (d / 16 * (KEY_BLOCK / U::COUNT) + first) * 16 + d % 16;
    multiply<U, C>(sum, scores + first * C * 16, v, 1, 16, count);
    unroll<AT_ONCE>([&](auto r) MS_LAMBDA {
      unroll<C>([&](auto c) MS_LAMBDA { store(acc + (r * C + c) * 16, sum[r][c]); });
    });
  }
}

using TileBlock = void (*)(const QueryTile&, const KeyBlock&, int, int, float, float);
template <class U, size_t... C>
constexpr TileBlock tile_block_for(int vecs, Scores scores, std::index_sequence<C...>) {
  constexpr TileBlock all[][3] = {{tile_block<U, C + 1, Scores::plain>, tile_block<U, C + 1, Scores::masked>,
                                   tile_block<U, C + 1, Scores::capped>}...};
  return all[vecs - 1][static_cast<int>(scores)];
}

// ---- a task

struct PrefillCall {
  const PlainSequence& seq;
  const PlainLayer& layer;
  const PrefillRows& rows;
  int per_kv;  // query heads of a K/V head

  int item() const { return layer.type == DType::f32 ? 4 : 2; }
  size_t key_offset(int key, int kv_head) const {  // bytes
    return (key * seq.token_stride + kv_head * seq.head_stride) * item();
  }
  // Returns the index of row `row` of a K/V head among all heads of all rows.
  size_t head_of(int row, int kv_head) const {
    return static_cast<size_t>(row / per_kv) * layer.num_heads + kv_head * per_kv + row % per_kv;
  }

  // Copies n keys from block.first on, followed by zeros until a run of AT_ONCE is full.
  template <class U, DType TYPE>
  void pack(const KeyBlock& block, int n, int kv_head) const {
    const int dim = block.dim, units = dim / U::COUNT, end = (n + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
    alignas(64) static const char zeros[MAX_PLAIN_DIM * 4] = {};
    const size_t first = key_offset(block.first, kv_head), step = seq.token_stride * item();
    const char *k = static_cast<const char*>(seq.k) + first, *v = static_cast<const char*>(seq.v) + first;
    for (int t = 0; t < end; t++) U::template key<TYPE>(block.k + t * units, t < n ? k + t * step : zeros, dim);
    for (int t = 0; t < end; t += U::COUNT) {
      const char *even = t < n ? v + t * step : zeros, *odd = t + 1 < n ? v + (t + 1) * step : zeros;
      for (int d = 0; d < dim; d += 16)
        store(block.v + (d / 16 * (KEY_BLOCK / U::COUNT) + t / U::COUNT) * 16, U::template value<TYPE>(even, odd, d));
    }
  }

  void prefetch_keys(int first, int end, int kv_head) const {
    const int bytes = layer.head_dim * item();
    for (int key = first; key < end && key < seq.length; key++) {
      const size_t at = key_offset(key, kv_head);
      for (int line = 0; line < bytes; line += 64) {
        __builtin_prefetch(static_cast<const char*>(seq.k) + at + line, 0, 2);
        __builtin_prefetch(static_cast<const char*>(seq.v) + at + line, 0, 2);
      }
    }
  }

  // Loads rows [from, to) of a K/V head, at most TILE_ROWS. The remaining lanes have the same visible
  // keys as the last row.
  template <class U>
  void begin_tile(QueryTile& tile, int kv_head, int from, int to) const {
    const int dim = layer.head_dim, units = dim / U::COUNT;
    tile.vecs = (to - from + 15) / 16;
    for (int i = 0; i < tile.vecs * 16; i++) {
      const int row = from + i < to ? from + i : to - 1, position = rows.first_position + row / per_kv;
      tile.high[i] = position < seq.length ? position + 1 : seq.length;
      tile.low[i] = rows.window > 0 && position >= rows.window ? position + 1 - rows.window : 0;
      tile.m[i] = NOTHING, tile.l[i] = 0.0f;
    }
    tile.min_low = tile.low[0], tile.max_low = tile.low[tile.vecs * 16 - 1];
    tile.min_high = tile.high[0], tile.max_high = tile.high[tile.vecs * 16 - 1];
    std::memset(tile.acc, 0, sizeof(float) * dim * tile.vecs * 16);
    for (int c = 0; c < tile.vecs; c++)
      for (int u = 0; u < units; u += 16) {
        f32x16 x[16];
        for (int i = 0; i < 16; i++) {
          const int row = from + c * 16 + i;
          const size_t at = row / per_kv * rows.q_stride + (kv_head * per_kv + row % per_kv) * dim + u * U::COUNT;
          x[i] = row < to ? U::query(rows.q, at, units - u, rows.type) : f32x16{};
        }
        transpose(x);
        for (int i = 0; i < 16 && u + i < units; i++) store(tile.q + ((u + i) * tile.vecs + c) * 16, x[i]);
      }
  }

  void finish_tile(const QueryTile& tile, int kv_head, int from, int to) const {
    const int dim = layer.head_dim;
    for (int c = 0; c < tile.vecs; c++) {
      const f32x16 sum = load<f32x16>(tile.l + 16 * c);
      f32x16 inverse = select(sum == 0.0f, sum, 1.0f / sum);
      const int first = from + c * 16, count = to - first < 16 ? to - first : 16;
      if (layer.sinks) {
        alignas(64) float factors[16] = {};
        for (int i = 0; i < count; i++) {
          const int head = kv_head * per_kv + (first + i) % per_kv;
          factors[i] = finish_row(layer.sinks, head, tile.m[16 * c + i], tile.l[16 * c + i],
                                  rows.lse + head_of(first + i, kv_head));
        }
        inverse = load<f32x16>(factors);
      } else {
        for (int i = 0; i < count; i++)
          rows.lse[head_of(first + i, kv_head)] = (tile.m[16 * c + i] + __builtin_log2f(tile.l[16 * c + i])) * LN2;
      }
      for (int d = 0; d < dim; d += 16) {
        f32x16 x[16];
        for (int i = 0; i < 16; i++) x[i] = load<f32x16>(tile.acc + ((d + i) * tile.vecs + c) * 16) * inverse;
        transpose(x);
        for (int i = 0; i < count; i++) {
          const size_t at = head_of(first + i, kv_head) * dim + d;
          if (rows.type == DType::f32) store(static_cast<float*>(rows.out) + at, x[i]);
          else to_bf16(static_cast<uint16_t*>(rows.out) + at, x[i]);
        }
      }
    }
  }

  // Computes rows [from, to) of a K/V head over all their visible keys.
  template <class U, DType TYPE>
  void run(int kv_head, int from, int to) const {
    const int dim = layer.head_dim, units = dim / U::COUNT, count = (to - from + TILE_ROWS - 1) / TILE_ROWS;
    static thread_local List<float> memory;
    static thread_local List<QueryTile> tiles;
    const size_t block_size = KEY_BLOCK * units, tile_size = static_cast<size_t>(units + dim + 4) * TILE_ROWS;
    if (memory.size() < 2 * block_size + count * tile_size + 16) memory.resize(2 * block_size + count * tile_size + 16);
    float* at = memory.data() + -reinterpret_cast<uintptr_t>(memory.data()) % 64 / 4;
    KeyBlock block = {at, at + block_size, 0, dim};
    at += 2 * block_size;
    tiles.resize(count);
    for (int i = 0; i < count; i++, at += tile_size) {
      float *acc = at + units * TILE_ROWS, *m = acc + dim * TILE_ROWS;
      int* low = reinterpret_cast<int*>(m + 2 * TILE_ROWS);
      tiles[i] = {0, at, acc, m, m + TILE_ROWS, low, low + TILE_ROWS, 0, 0, 0, 0};
      const int first = from + i * TILE_ROWS;
      begin_tile<U>(tiles[i], kv_head, first, first + TILE_ROWS < to ? first + TILE_ROWS : to);
    }
    const int end = tiles[count - 1].max_high, share = (KEY_BLOCK + count - 1) / count;
    for (block.first = tiles[0].min_low / KEY_BLOCK * KEY_BLOCK; block.first < end; block.first += KEY_BLOCK) {
      const int n = end - block.first < KEY_BLOCK ? end - block.first : KEY_BLOCK;
      pack<U, TYPE>(block, n, kv_head);
      for (int i = 0; i < count; i++) {
        const int next = block.first + KEY_BLOCK;
        prefetch_keys(next + i * share, next + (i + 1) * share < end ? next + (i + 1) * share : end, kv_head);
        add_keys<U>(tiles[i], block, n);
      }
    }
    for (int i = 0; i < count; i++) {
      const int first = from + i * TILE_ROWS;
      finish_tile(tiles[i], kv_head, first, first + TILE_ROWS < to ? first + TILE_ROWS : to);
    }
  }

  // Adds those of the first n keys of a block that are visible to the tile.
  template <class U>
  void add_keys(const QueryTile& tile, const KeyBlock& block, int n) const {
    int from = tile.min_low - block.first, to = tile.max_high - block.first;
    from = from > 0 ? from / AT_ONCE * AT_ONCE : 0;
    to = (to < n ? to : n) + AT_ONCE - 1;
    to = to / AT_ONCE * AT_ONCE;
    if (from >= to || to <= 0) return;
    const bool is_whole = tile.max_low <= block.first + from && tile.min_high >= block.first + to;
    const Scores scores = layer.soft_cap > 0.0f ? Scores::capped : is_whole ? Scores::plain : Scores::masked;
    const TileBlock run_tile = tile_block_for<U>(tile.vecs, scores, std::make_index_sequence<TILE_VECS>{});
    run_tile(tile, block, from, to, layer.scale * LOG2E, layer.soft_cap);
  }
};

bool multiplies_bf16() {
#if defined(__AVX512BF16__)
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

void prefill_plain(const PlainSequence& seq, const PlainLayer& layer, const PrefillRows& rows) {
  ms::Team& team = ms::Team::get();
  const PrefillCall call{seq, layer, rows, layer.num_heads / layer.num_kv_heads};
  const int all = rows.count * call.per_kv;
  const int64_t multiplications = int64_t{2} * rows.count * seq.length * layer.num_heads * layer.head_dim;
  const int share = rows_of_a_task(all, layer.num_kv_heads, layer.head_dim, team.parts_for(multiplications));
  const bool pairs = layer.type == DType::bf16 && rows.type == DType::bf16 && multiplies_bf16();
  team.parallel((all + share - 1) / share * layer.num_kv_heads, [&](int task) {
    // The last rows have the most keys, so they start first.
    const int to = all - task / layer.num_kv_heads * share, from = to > share ? to - share : 0;
    const int head = task % layer.num_kv_heads;
#if defined(__AVX512BF16__)
    if (pairs) return call.run<Pairs, DType::bf16>(head, from, to);
#endif
    (void)pairs;
    if (layer.type == DType::bf16) call.run<Singles, DType::bf16>(head, from, to);
    else call.run<Singles, DType::f32>(head, from, to);
  });
}

}  // namespace
}  // namespace MS_ISA
