// Definitions that the attention kernels share. Included once per instruction set.

namespace MS_ISA {
namespace {

constexpr float NOTHING = -1e30f;  // a masked score
constexpr float NO_KEYS = -__builtin_inff();  // log-sum-exp of a row without visible keys
constexpr int SPLIT = 512;         // positions of one partial sum; the parts are merged in order

// Sizes of the prefill kernels, which have a query row in each lane: the number of vectors of rows,
// and of keys or dimensions that are summed at a time.
constexpr int TILE_VECS = HAS_32_REGISTERS ? 3 : 1, TILE_ROWS = TILE_VECS * 16;
constexpr int AT_ONCE = HAS_32_REGISTERS ? 8 : 4;

// Moves x[i][j] to x[j][i].
MS_INLINE void transpose(f32x16 (&x)[16]) {
#if defined(__AVX512F__)
  unroll<4>([&](auto stage) MS_LAMBDA {
    constexpr int S = 8 >> stage;
    const i32x16 upper = (LANES & S) != 0;
    const i32x16 first = LANES ^ (upper & (16 | S)), second = (LANES | (upper & 16)) ^ (~upper & S);
    unroll<16>([&](auto i) MS_LAMBDA {
      if constexpr ((i & S) == 0) {
        const f32x16 a = x[i], b = x[i | S];
        x[i] = __builtin_shuffle(a, b, first);
        x[i | S] = __builtin_shuffle(a, b, second);
      }
    });
  });
#else
  float from[16][16], to[16][16];
  std::memcpy(from, x, sizeof(from));
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) to[j][i] = from[i][j];
  std::memcpy(x, to, sizeof(to));
#endif
}

// Returns the integer above log2(x) for scales of V. The product of a weight and V's scale is
// rounded in steps of the largest weight times the largest scale. A token with a large weight and
// tiny values (an attention sink) would make the steps too coarse for the other tokens. Therefore
// the order of its scale moves into its score: 2^(score + order) times scale * 2^-order is the same
// product, and the second factor is between 1/2 and 1 for every token.
MS_INLINE f32x16 binary_order(f32x16 x) {
  const i32x16 exponent = ((i32x16)x >> 23) & 255;
  return min(max(to_float(exponent - 126), splat(-24.0f)), splat(24.0f));  // fp16 has -23 to 16
}
MS_INLINE f32x16 power_of_two(f32x16 order) { return (f32x16)((to_int_nearest(order) + 127) << 23); }

// Changes that a few models make to scores before the softmax; scores are in base 2 here.
MS_INLINE f32x16 soft_capped(float soft_cap, f32x16 score) {
  const float cap = soft_cap * LOG2E;
  return cap * tanh(score / cap);
}
MS_INLINE f32x16 alibi(f32x16 score, i32x16 distance, f32x16 slope) {
  return score + to_float(distance) * (slope * LOG2E);
}
MS_INLINE bool changes_scores(const AttentionLayer& layer) { return layer.soft_cap > 0.0f || layer.slopes; }

// Returns the factor for a row's sums at the end, its sink included, and writes lse unless it is
// null. sinks: those of all heads, or null. Where attention is cut into parts, the sink belongs to
// the part with the row's own key.
MS_INLINE float finish_row(const float* sinks, int head, float m, float l, float* lse) {
  float keep = 1.0f;
  if (sinks) {
    const float sink = sinks[head] * LOG2E, now = m > sink ? m : sink;
    keep = exp2_neg(splat(m - now))[0];
    l = l * keep + exp2_neg(splat(sink - now))[0];
    m = now;
  }
  if (lse) *lse = l == 0.0f ? NO_KEYS : (m + __builtin_log2f(l)) * LN2;
  return l == 0.0f ? 0.0f : keep / l;
}

// Returns the number of rows of a prefill task, given `all` rows of each K/V head: as many as the
// caches allow, so that preparing K/V costs little, but few enough that all threads have work.
MS_INLINE int rows_of_a_task(int all, int kv_heads, int dim, int threads) {
  const int fair = static_cast<int>(static_cast<int64_t>(all) * kv_heads / (4 * threads));
  const int most = 64 * 1024 / dim < 512 ? 64 * 1024 / dim : 512;
  const int tiles = ((fair < most ? fair : most) + TILE_ROWS - 1) / TILE_ROWS;
  return (tiles > 0 ? tiles : 1) * TILE_ROWS;
}

// The keys that a call adds: all that a row sees, those before its block, or those of its block.
enum class Keys : int { all, earlier, recent };

MS_INLINE int first_recent(int position) { return position / RECENT_BLOCK * RECENT_BLOCK; }

// Attention of one layer over int8 or int4 K/V.
struct AttendCall {
  const Step& step;
  const AttentionLayer& layer;
  const float* q;
  size_t q_stride;
  float* out;
  size_t out_stride;
  float* lse;  // [rows][heads], or null
  HeadShape shape;
  int per_kv;  // query heads of each K/V head
  Keys keys = Keys::all;

  const uint8_t* head_at(const SequenceRows& seq, int tile, int kv_head) const {
    if (seq.tiles) tile = seq.tiles[static_cast<size_t>(kv_head) * seq.tiles_stride + tile];
    return seq.tile_at(static_cast<size_t>(tile), step.tile_bytes) + layer.cache.offset_bytes + kv_head * shape.bytes;
  }
  // A row attends to keys [low_of, high_of) of its position, to none if that range is empty.
  int low_of(int position) const {
    const int low = layer.window > 0 && position + 1 > layer.window ? position + 1 - layer.window : 0;
    return keys == Keys::recent && low < first_recent(position) ? first_recent(position) : low;
  }
  int high_of(const SequenceRows& seq, int position) const {
    const int high = keys == Keys::earlier ? first_recent(position) : position + 1;
    return high < seq.kv_len ? high : seq.kv_len;
  }
  // The sink belongs to the part with the row's own key.
  const float* sinks_of(const SequenceRows& seq, int position) const {
    return position < seq.kv_len || seq.tiles ? layer.sinks : nullptr;
  }
};

}  // namespace
}  // namespace MS_ISA
