// The weights that a block of rows gives to keys, added to a sum for each key. Included once per instruction set.
//
// The rows of a block are the query heads of one K/V head for some tokens of a sequence, [token][query head]. One
// pass over K takes a stretch of keys at a time: each score becomes 2^(score - reference), which is kept, and the
// row's total grows by it. A row's reference is the largest score of its first stretch; a score far above it raises
// the reference, and what was kept of the row is scaled to it. The second pass reads what was kept, divides it by
// the rows' totals and adds it to the sums.
//
// Nothing of a row depends on the others, and a key's sum takes one row after the other. So the bits are the same
// however rows are cut into blocks.

namespace MS_ISA {
namespace {

constexpr float HEADROOM = 32.0f;  // how far a score may exceed its row's reference, in powers of two
constexpr int MAX_SCORED_TOKENS = 16;
// What a block keeps fits about a second-level cache. More tokens read K less often, fewer leave more of what is kept
// in the cache.
constexpr size_t MOST_KEPT = (size_t{1} << 20) / sizeof(float);

struct ScoreBlock {
  int rows, per_kv;
  const float* noise;      // of each key, is added to the scores; or null
  float soft_cap;
  int* length;             // [rows]: the keys that a row sees
  float *scale, *gain;     // [rows]: of scores before the soft cap, and after it; without one, gain has both
  float *noise_gain;       // [rows]
  float *reference;        // [rows]
  float *total;            // [rows][16]
  float *kept;             // [stretches][rows][STRETCH]
};

MS_INLINE int stretches_of(int keys) { return (keys + STRETCH - 1) / STRETCH; }

// Returns how many tokens a block has at most, for `keys` keys.
MS_INLINE int tokens_of_a_block(int per_kv, int keys) {
  const size_t tokens = MOST_KEPT / (static_cast<size_t>(stretches_of(keys)) * STRETCH * per_kv);
  return tokens < 1 ? 1 : tokens > MAX_SCORED_TOKENS ? MAX_SCORED_TOKENS : static_cast<int>(tokens);
}

// Returns a block of `tokens` tokens of a sequence, the first of which is its row `row`, with memory of this thread.
ScoreBlock block_of(const ScoredRows& to, size_t at, int row, int tokens, int per_kv, float soft_cap) {
  static thread_local List<float> memory;
  const int rows = tokens * per_kv, keys = to.rows.first_position + row + tokens;
  const size_t need = static_cast<size_t>(rows) * (stretches_of(keys) * STRETCH + 16 + 5);
  if (memory.size() < need + 16) memory.resize(need + 16);
  float* free = memory.data() + -reinterpret_cast<uintptr_t>(memory.data()) % 64 / 4;
  const auto take = [&](size_t count) { return std::exchange(free, free + count); };
  ScoreBlock block{rows, per_kv, to.noise ? to.noise + at : nullptr, soft_cap, nullptr, nullptr, nullptr, nullptr, nullptr,
                   nullptr, nullptr};
  block.kept = take(static_cast<size_t>(stretches_of(keys)) * rows * STRETCH);
  block.total = take(static_cast<size_t>(rows) * 16);
  block.length = reinterpret_cast<int*>(take(rows));
  block.scale = take(rows), block.gain = take(rows), block.noise_gain = take(rows), block.reference = take(rows);
  for (int i = 0; i < rows; i++) {
    const int token = row + i / per_kv;
    block.length[i] = to.rows.first_position + token + 1;
    block.gain[i] = to.sharpness ? to.sharpness[token] : 1.0f;
    block.noise_gain[i] = block.gain[i] * LOG2E;
    block.reference[i] = 0.0f;
    store(block.total + 16 * i, splat(0.0f));
  }
  return block;
}

// Sets the factor between a row's products with K and its scores, in base 2.
MS_INLINE void set_scale(ScoreBlock& block, int row, float scale) {
  block.scale[row] = scale;
  if (block.soft_cap <= 0.0f) block.gain[row] *= scale;
}

// Raises a row's reference by the largest number of `above`, which are the scores of the stretch from key `first` on
// above the reference; returns by how much.
__attribute__((noinline)) float raise_reference(const ScoreBlock& block, int row, int first, f32x16 above) {
  const float rise = reduce_max(above);
  block.reference[row] += rise;
  if (first == 0) return rise;
  const f32x16 less = exp2_neg(splat(-rise));
  store(block.total + 16 * row, load<f32x16>(block.total + 16 * row) * less);
  for (int s = 0; s < first / STRETCH; s++) {
    float* kept = block.kept + (static_cast<size_t>(s) * block.rows + row) * STRETCH;
    for (int i = 0; i < STRETCH; i += 16) store(kept + i, load<f32x16>(kept + i) * less);
  }
  return rise;
}

// Makes weights of the scores of a stretch from key `first` on, above the row's reference; returns their sum.
// length: the keys that are visible, of those that are cut.
template <bool IS_CUT>
MS_INLINE f32x16 weights_of(const ScoreBlock& block, int row, int first, int length, f32x16 (&x)[STRETCH_TILES]) {
  if (IS_CUT)
    unroll<STRETCH_TILES>([&](auto t) MS_LAMBDA {
      x[t] = select(LANES + (first + t * TILE) < length, x[t], splat(NOTHING));
    });
  const f32x16 top = max(max(x[0], x[1]), max(x[2], x[3]));
  if (first == 0 || is_any_above(top, HEADROOM)) {
    const float rise = raise_reference(block, row, first, top);
    unroll<STRETCH_TILES>([&](auto t) MS_LAMBDA { x[t] = x[t] - rise; });
  }
  unroll<STRETCH_TILES>([&](auto t) MS_LAMBDA { x[t] = exp2_neg(x[t]); });
  if (IS_CUT)
    unroll<STRETCH_TILES>([&](auto t) MS_LAMBDA {
      x[t] = select(LANES + (first + t * TILE) < length, x[t], splat(0.0f));
    });
  return (x[0] + x[1]) + (x[2] + x[3]);
}

// Keeps the weights of a block's rows [from, to) over the stretch from key `first` on; products: theirs with K,
// [to - from][STRETCH]. HAS_CHANGES: there is a soft cap or noise, or some rows do not see all of the keys.
template <bool HAS_CHANGES>
__attribute__((noinline)) void keep_weights(const ScoreBlock& shared, int from, int to, int first,
                                            const float* products) {
  const ScoreBlock block = shared;  // a copy: nothing that is stored can change it
  float* kept = block.kept + (static_cast<size_t>(first / STRETCH) * block.rows + from) * STRETCH;
  for (int row = from; row < to; row++, products += STRETCH, kept += STRETCH) {
    const int length = block.length[row];
    const f32x16 gain = splat(block.gain[row]), reference = splat(-block.reference[row]);
    f32x16 x[STRETCH_TILES];
    unroll<STRETCH_TILES>([&](auto t) MS_LAMBDA { x[t] = load<f32x16>(products + t * TILE); });
    if (HAS_CHANGES && block.soft_cap > 0.0f)
      for (f32x16& score : x) score = soft_capped(block.soft_cap, score * block.scale[row]);
    unroll<STRETCH_TILES>([&](auto t) MS_LAMBDA { x[t] = fma(x[t], gain, reference); });
    if (HAS_CHANGES && block.noise)
      for (int t = 0; t < STRETCH_TILES && first + t * TILE < length; t++)  // the noise ends with the last key's tile
        x[t] = fma(load<f32x16>(block.noise + first + t * TILE), splat(block.noise_gain[row]), x[t]);
    const bool is_cut = HAS_CHANGES && length < first + STRETCH;
    const f32x16 sum = is_cut ? weights_of<true>(block, row, first, length, x)
                              : weights_of<false>(block, row, first, length, x);
    float* total = block.total + 16 * row;
    store(total, load<f32x16>(total) + sum);
    unroll<STRETCH_TILES>([&](auto t) MS_LAMBDA { store(kept + t * TILE, x[t]); });
  }
}

MS_INLINE void keep_rows(const ScoreBlock& block, int from, int to, int first, const float* products) {
  if (block.noise || block.soft_cap > 0.0f || block.length[from] < first + STRETCH)
    keep_weights<true>(block, from, to, first, products);
  else keep_weights<false>(block, from, to, first, products);
}

// Adds the kept weights of S stretches to the sums of their keys, of which `tiles` tiles are there. shares: [rows].
template <int S>
MS_INLINE void add_kept(const ScoreBlock& block, const float* shares, int stretch, int tiles, float* sums) {
  constexpr int VECS = S * STRETCH_TILES;
  const int first = stretch * STRETCH_TILES;
  f32x16 sum[VECS];
  unroll<VECS>([&](auto i) MS_LAMBDA {
    sum[i] = first + i < tiles ? load<f32x16>(sums + (first + i) * TILE) : splat(0.0f);
  });
  const float* kept = block.kept + static_cast<size_t>(stretch) * block.rows * STRETCH;
  const size_t next = static_cast<size_t>(block.rows) * STRETCH;
  for (int row = 0; row < block.rows; row++, kept += STRETCH) {
    const f32x16 share = splat(shares[row]);
    unroll<VECS>([&](auto i) MS_LAMBDA {
      sum[i] = fma(load<f32x16>(kept + i / STRETCH_TILES * next + i % STRETCH_TILES * TILE), share, sum[i]);
    });
  }
  unroll<VECS>([&](auto i) MS_LAMBDA {
    if (first + i < tiles) store(sums + (first + i) * TILE, sum[i]);
  });
}

// Adds what a block has kept to the sums of its keys, row after row.
void add_block(const ScoreBlock& shared, float* sums) {
  const ScoreBlock block = shared;
  const int keys = block.length[block.rows - 1], stretches = stretches_of(keys), tiles = (keys + TILE - 1) / TILE;
  float* shares = block.noise_gain;
  for (int row = 0; row < block.rows; row++) shares[row] = 1.0f / reduce_add(load<f32x16>(block.total + 16 * row));
  int stretch = 0;
  if (HAS_32_REGISTERS)
    for (; stretch + 2 <= stretches; stretch += 2) add_kept<2>(block, shares, stretch, tiles, sums);
  for (; stretch < stretches; stretch++) add_kept<1>(block, shares, stretch, tiles, sums);
}

// Scores blocks of rows, those of a sequence and K/V head in order, and adds their weights. score(rows of a sequence,
// the block's first of them, K/V head, block): keeps the weights of a block.
template <class Score>
void for_each_block(const ScoredRows* scored, int count, int num_heads, int kv_heads, float soft_cap, int number,
                    const Score& score) {
  const int per_kv = num_heads / kv_heads;
  ms::Team::get().parallel(count * kv_heads, [&](int task) {
    const ScoredRows& to = scored[task / kv_heads];
    const int head = task % kv_heads, num_rows = to.rows.num_rows, most = tokens_of_a_block(per_kv, to.rows.kv_len);
    const size_t at = (static_cast<size_t>(number) * kv_heads + head) * to.stride;
    for (int row = 0; row < num_rows; row += most) {
      const int tokens = num_rows - row < most ? num_rows - row : most;
      ScoreBlock block = block_of(to, at, row, tokens, per_kv, soft_cap);
      score(to, row, head, block);
      add_block(block, to.sums + at);
    }
  });
}

}  // namespace
}  // namespace MS_ISA
