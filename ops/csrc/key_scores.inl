// What the policies that drop K/V need of int8 tiles: how much weight rows give to each key, and the move of the
// tokens that stay. Included once per instruction set.
//
// Scores are products of bytes: q is rounded to 8 bits, as K is, so that q.k is one dot product, half of the work
// of attention_decode.inl's. key_weights.inl makes weights of them.

namespace MS_ISA {
namespace {

// Rounds a query row to bytes. offsets: [groups], the sums of these times what K's bytes are above its values.
void round_query8(const float* q, const HeadShape& shape, float scale, Scratch& s, int row) {
  f32x16 largest = {};
  for (int d = 0; d < shape.dim; d += 16) largest = max_magnitude(largest, load<f32x16>(q + d));
  const float top = reduce_magnitude(largest), step = top > 0.0f ? 127.0f / top : 0.0f;
  int8_t* bytes = s.hi + row * shape.dim;
  for (int d = 0; d < shape.dim; d += 16) store_i8(bytes + d, to_int_nearest(load<f32x16>(q + d) * step));
  for (int g = 0; g < shape.num_groups; g++) {
    int sum = 0;
    for (int d = 0; d < shape.group; d++) sum += bytes[g * shape.group + d];
    s.offsets[row * shape.num_groups + g] = 128 * sum;
  }
  s.q_scale[row] = top / 127.0f * scale;
}

// Writes the products of R rows and the keys of TILES tiles from FIRST on, with K's scales applied, to [R][STRETCH].
template <int R, int FIRST, int TILES>
MS_INLINE void multiply_bytes(const HeadShape& shape, const Scratch& s, int row, const uint8_t* const* tile,
                              float* products) {
  const int8_t* q = s.hi + row * shape.dim;
  for (int g = 0; g < shape.num_groups; g++) {
    i32x16 sum[R][TILES];
    unroll<R>([&](auto r) MS_LAMBDA {
      unroll<TILES>([&](auto t) MS_LAMBDA { sum[r][t] = splat_i32(-s.offsets[(row + r) * shape.num_groups + g]); });
    });
    for (int d = g * shape.group; d < (g + 1) * shape.group; d += 4) {
      i32x16 k[TILES];
      unroll<TILES>([&](auto t) MS_LAMBDA { k[t] = load<i32x16>(tile[FIRST + t] + shape.k + d * TILE); });
      unroll<R>([&](auto r) MS_LAMBDA {
        const i32x16 one = splat_bytes(q + r * shape.dim + d);
        unroll<TILES>([&](auto t) MS_LAMBDA { sum[r][t] = dot_u8_i8(sum[r][t], k[t], one); });
      });
    }
    unroll<TILES>([&](auto t) MS_LAMBDA {
      const f32x16 scale = from_half(reinterpret_cast<const uint16_t*>(tile[FIRST + t] + shape.k_scales) + g * TILE);
      unroll<R>([&](auto r) MS_LAMBDA {
        float* to = products + r * STRETCH + (FIRST + t) * TILE;
        const f32x16 part = to_float(sum[r][t]);
        store(to, g == 0 ? part * scale : fma(part, scale, load<f32x16>(to)));
      });
    });
  }
}

// Writes the products of R rows of a block and a stretch of keys.
template <int R>
__attribute__((noinline)) void multiply_stretch(const HeadShape& shape, const Scratch& s, int row,
                                                const uint8_t* const* tile, float* products) {
  constexpr int AT_A_TIME = IS_AVX_VNNI ? 1 : STRETCH_TILES;
  unroll<STRETCH_TILES / AT_A_TIME>([&](auto i) MS_LAMBDA {
    multiply_bytes<R, i * AT_A_TIME, AT_A_TIME>(shape, s, row, tile, products);
  });
}
using MultiplyStretch = void (*)(const HeadShape&, const Scratch&, int, const uint8_t* const*, float*);
struct MultiplyTable { MultiplyStretch at[MAX_ROWS]; };
template <size_t... R>
constexpr MultiplyTable multiply_table(std::index_sequence<R...>) {
  return {{multiply_stretch<static_cast<int>(R) + 1>...}};
}
constexpr MultiplyTable MULTIPLY_STRETCH = multiply_table(std::make_index_sequence<MAX_ROWS>{});

// Keeps the weights of a block's rows; q: those of its first token's query heads.
void score_block(const AttendCall& call, const SequenceRows& seq, const float* q, int kv_head, ScoreBlock& block) {
  const int per_kv = call.per_kv, keys = block.length[block.rows - 1], last_tile = (keys - 1) / TILE;
  Scratch s = scratch_for(block.rows, call.shape.dim, call.shape.num_groups);
  for (int i = 0; i < block.rows; i++) {
    const float* row = q + i / per_kv * call.q_stride + i % per_kv * call.shape.dim;
    round_query8(row, call.shape, call.layer.scale * LOG2E, s, i);
    set_scale(block, i, s.q_scale[i]);
  }
  alignas(64) float products[MAX_ROWS * STRETCH];
  for (int first = 0; first < keys; first += STRETCH) {
    const uint8_t* tile[STRETCH_TILES];
    for (int t = 0; t < STRETCH_TILES; t++) {
      const int own = first / TILE + t, ahead = own + STRETCH_TILES;
      tile[t] = call.head_at(seq, own < last_tile ? own : last_tile, kv_head);
      const uint8_t* next = call.head_at(seq, ahead < last_tile ? ahead : last_tile, kv_head);
      for (size_t line = 0; line < call.shape.v; line += 64) prefetch(next + line);
    }
    for (int row = 0; row < block.rows; row += MAX_ROWS) {
      const int rows = block.rows - row < MAX_ROWS ? block.rows - row : MAX_ROWS;
      MULTIPLY_STRETCH.at[rows - 1](call.shape, s, row, tile, products);
      keep_rows(block, row, row + rows, first, products);
    }
  }
}

void add_key_scores(const ScoredRows* scored, int count, size_t tile_bytes, const AttentionLayer& layer, int number,
                    const float* q, size_t q_stride) {
  const int kv_heads = layer.cache.num_kv_heads, per_kv = layer.num_heads / kv_heads;
  const Step step{nullptr, 0, tile_bytes};
  const AttendCall call{step, layer, q, q_stride, nullptr, 0, nullptr, HeadShape(layer.cache), per_kv};
  for_each_block(scored, count, layer.num_heads, kv_heads, layer.soft_cap, number,
                 [&](const ScoredRows& to, int row, int head, ScoreBlock& block) {
    const float* first = q + (to.rows.first_row + row) * q_stride + head * per_kv * call.shape.dim;
    score_block(call, to.rows, first, head, block);
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
