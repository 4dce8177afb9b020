// What the policies that drop K/V need of int8 tiles: how much weight rows give to each key, and the move of the
// tokens that stay. Included once per instruction set.
//
// A row's weights are those of attention_decode.inl's scores: q in 15 bits, K's integers and scales, base 2. Each
// row and query head is added after the one before, so that a sum has the same bits however the rows were cut into
// calls.

namespace MS_ISA {
namespace {

// Writes the scores of R rows and a stretch's tokens, [R][stride].
template <int R>
__attribute__((noinline)) void score_stretch(const HeadShape& shape, const Scratch& s, int row, const Stretch& at,
                                             float soft_cap, size_t stride, float* scores) {
  f32x16 x[MAX_ROWS][STRETCH_TILES];
  constexpr int AT_A_TIME = IS_AVX_VNNI ? 1 : STRETCH_TILES;
  unroll<STRETCH_TILES / AT_A_TIME>([&](auto i) MS_LAMBDA {
    query_key<R, i * AT_A_TIME, AT_A_TIME>(shape, s, row, at, x);
  });
  for (int r = 0; r < R; r++)
    for (int t = 0; t < STRETCH_TILES; t++) {
      f32x16 score = x[r][t] * s.q_scale[row + r];
      if (soft_cap > 0.0f) score = soft_capped(soft_cap, score);
      store(scores + r * stride + t * TILE, score);
    }
}
using ScoreStretch = void (*)(const HeadShape&, const Scratch&, int, const Stretch&, float, size_t, float*);
struct ScoreTable { ScoreStretch at[MAX_ROWS]; };
template <size_t... R>
constexpr ScoreTable score_table(std::index_sequence<R...>) {
  return {{score_stretch<static_cast<int>(R) + 1>...}};
}
constexpr ScoreTable SCORE_STRETCH = score_table(std::make_index_sequence<MAX_ROWS>{});

// Writes the scores of the query heads of one K/V head, [per_kv][stride], for keys [0, length) and what follows
// them up to the end of the last stretch.
void score_keys(const AttendCall& call, const SequenceRows& seq, const float* q, int kv_head, int length, size_t stride,
                float* scores) {
  const int per_kv = call.per_kv, last_tile = (length - 1) / TILE;
  Scratch s = scratch_for(per_kv, call.shape.dim, call.shape.num_groups);
  for (int h = 0; h < per_kv; h++) round_query(q + h * call.shape.dim, call.shape, call.layer.scale * LOG2E, s, h);
  for (int first = 0; first < length; first += STRETCH) {
    Stretch at;
    at.first = first;
    for (int t = 0; t < STRETCH_TILES; t++) {
      const int tile = first / TILE + t, ahead = tile + STRETCH_TILES;
      at.tile[t] = call.head_at(seq, tile < last_tile ? tile : last_tile, kv_head);
      // query_key would prefetch V as well: it gets what is in the cache, and K is prefetched here
      at.next[t] = reinterpret_cast<const uint8_t*>(s.hi);
      const uint8_t* next = call.head_at(seq, ahead < last_tile ? ahead : last_tile, kv_head);
      for (size_t line = 0; line < call.shape.v; line += 64) prefetch(next + line);
    }
    for (int row = 0; row < per_kv; row += MAX_ROWS) {
      const int rows = per_kv - row < MAX_ROWS ? per_kv - row : MAX_ROWS;
      SCORE_STRETCH.at[rows - 1](call.shape, s, row, at, call.layer.soft_cap, stride, scores + row * stride + first);
    }
  }
}

// Adds the softmax over scores [0, length) to `sums`. noise: is added to the scores first, or null. sharpness: the
// scores are multiplied by it. Both arrays may be written and read up to the end of the last tile.
void add_weights(float* scores, int length, const float* noise, float sharpness, float* sums) {
  const int tiles = (length + TILE - 1) / TILE;
  f32x16 top = splat(NOTHING);
  for (int i = 0; i < tiles * TILE; i += TILE) {
    f32x16 x = load<f32x16>(scores + i);
    if (noise) x = x + load<f32x16>(noise + i) * LOG2E;
    x = select(LANES + i < length, x * sharpness, splat(NOTHING));
    top = max(top, x);
    store(scores + i, x);
  }
  top = max_all(top);
  f32x16 total = {};
  for (int i = 0; i < tiles * TILE; i += TILE) {
    const f32x16 p = select(LANES + i < length, exp2_neg(load<f32x16>(scores + i) - top), splat(0.0f));
    total += p;
    store(scores + i, p);
  }
  const float share = 1.0f / reduce_add(total);
  for (int i = 0; i < tiles * TILE; i += TILE)
    store(sums + i, load<f32x16>(sums + i) + load<f32x16>(scores + i) * share);
}

void add_key_scores(const ScoredRows* scored, int count, size_t tile_bytes, const AttentionLayer& layer, int number,
                    const float* q, size_t q_stride) {
  const int kv_heads = layer.cache.num_kv_heads, per_kv = layer.num_heads / kv_heads;
  const Step step{nullptr, 0, tile_bytes};
  const AttendCall call{step, layer, q, q_stride, nullptr, 0, nullptr, HeadShape(layer.cache), per_kv};
  ms::Team::get().parallel(count * kv_heads, [&](int task) {
    static thread_local List<float> memory;
    const ScoredRows& to = scored[task / kv_heads];
    const SequenceRows& seq = to.rows;
    const int kv_head = task % kv_heads;
    const size_t at = (static_cast<size_t>(number) * kv_heads + kv_head) * to.stride;
    const size_t stride = (seq.kv_len + STRETCH - 1) / STRETCH * STRETCH;
    if (memory.size() < stride * per_kv) memory.resize(stride * per_kv);
    for (int row = 0; row < seq.num_rows; row++) {
      const int length = seq.first_position + row + 1;
      const float* rows = q + (seq.first_row + row) * q_stride + kv_head * per_kv * call.shape.dim;
      score_keys(call, seq, rows, kv_head, length, stride, memory.data());
      for (int h = 0; h < per_kv; h++)
        add_weights(memory.data() + h * stride, length, to.noise ? to.noise + at : nullptr,
                    to.sharpness ? to.sharpness[row] : 1.0f, to.sums + at);
    }
  });
}

// Copies one token's K and V of one head from lane `from` of a tile to lane `to` of another one.
MS_INLINE void move_lane(const HeadShape& shape, const uint8_t* source, int from, uint8_t* target, int to) {
  for (int g = 0; g < 2 * shape.num_groups; g++)
    std::memcpy(target + 2 * (g * TILE + to), source + 2 * (g * TILE + from), 2);
  const uint8_t* k = source + shape.k + 4 * from;
  uint8_t* to_k = target + shape.k + 4 * to;
  for (int d = 0; d < shape.dim; d += 4) std::memcpy(to_k + d * TILE, k + d * TILE, 4);
  const uint8_t* v = source + shape.v + (from / 2) * 2 * shape.dim + from % 2;
  uint8_t* to_v = target + shape.v + (to / 2) * 2 * shape.dim + to % 2;
  for (int d = 0; d < 2 * shape.dim; d += 2) to_v[d] = v[d];
}

// kept: [heads][count], rising; no token moves back, so that source and target may be the same tiles.
void gather_kv(const CacheLayer& layer, size_t tile_bytes, const uint8_t* source, uint8_t* target, const int32_t* kept,
               int count) {
  const HeadShape shape(layer);
  ms::Team::get().parallel(layer.num_kv_heads, [&](int head) {
    const size_t offset = layer.offset_bytes + head * shape.bytes;
    const int32_t* tokens = kept + static_cast<size_t>(head) * count;
    for (int i = 0; i < count; i++) {
      if (source == target && tokens[i] == i) continue;
      move_lane(shape, source + tokens[i] / TILE * tile_bytes + offset, tokens[i] % TILE,
                target + i / TILE * tile_bytes + offset, i % TILE);
    }
  });
}

}  // namespace
}  // namespace MS_ISA
