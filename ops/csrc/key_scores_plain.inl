// How much weight rows give to keys in bf16 or fp32. Included once per instruction set.
//
// Each stretch of keys is widened and turned once for a block of rows, so that a key is in each lane; products are
// sums in fp32, one dimension after the other. key_weights.inl makes weights of them.

namespace MS_ISA {
namespace {

// Writes K of the stretch from key `first` on as [dim][STRETCH]; behind the last of `keys` keys are copies of it.
template <DType TYPE>
void turn_keys(const uint8_t* k, size_t token_bytes, int dim, int first, int keys, float* to) {
  for (int t = 0; t < STRETCH; t += 16)
    for (int d = 0; d < dim; d += 16) {
      f32x16 x[16];
      for (int i = 0; i < 16; i++) {
        const int key = first + t + i < keys ? first + t + i : keys - 1, ahead = key + STRETCH < keys ? STRETCH : 0;
        const uint8_t* row = k + key * token_bytes;
        prefetch(row + ahead * token_bytes + d * (TYPE == DType::f32 ? 4 : 2));
        x[i] = plain_at<TYPE>(row, d);
      }
      transpose(x);
      for (int i = 0; i < 16; i++) store(to + (d + i) * STRETCH + t, x[i]);
    }
}

// Writes the products of R rows and a stretch of keys to [R][STRETCH]. q: [R][dim].
template <int R>
__attribute__((noinline)) void multiply_plain_stretch(const float* q, const float* keys, int dim, float* products) {
  constexpr int TILES = HAS_32_REGISTERS ? STRETCH_TILES : IS_AVX_VNNI ? 1 : 2;
  for (int first = 0; first < STRETCH; first += TILES * TILE) {
    f32x16 sum[R][TILES];
    unroll<R>([&](auto r) MS_LAMBDA { unroll<TILES>([&](auto t) MS_LAMBDA { sum[r][t] = splat(0.0f); }); });
    for (int d = 0; d < dim; d++) {
      f32x16 k[TILES];
      unroll<TILES>([&](auto t) MS_LAMBDA { k[t] = load<f32x16>(keys + d * STRETCH + first + t * TILE); });
      unroll<R>([&](auto r) MS_LAMBDA {
        const f32x16 one = splat(q[r * dim + d]);
        unroll<TILES>([&](auto t) MS_LAMBDA { sum[r][t] = fma(k[t], one, sum[r][t]); });
      });
    }
    unroll<R>([&](auto r) MS_LAMBDA {
      unroll<TILES>([&](auto t) MS_LAMBDA { store(products + r * STRETCH + first + t * TILE, sum[r][t]); });
    });
  }
}
using MultiplyPlain = void (*)(const float*, const float*, int, float*);
struct PlainTable { MultiplyPlain at[MAX_ROWS]; };
template <size_t... R>
constexpr PlainTable plain_table(std::index_sequence<R...>) {
  return {{multiply_plain_stretch<static_cast<int>(R) + 1>...}};
}
constexpr PlainTable MULTIPLY_PLAIN = plain_table(std::make_index_sequence<MAX_ROWS>{});

// Keeps the weights of a block's rows. k: the first key of a K/V head; q: the first token's query heads.
void score_plain_block(const PlainKeys& layer, size_t token_bytes, const uint8_t* k, const float* q, size_t q_stride,
                       ScoreBlock& block) {
  static thread_local List<float> memory;
  const int dim = layer.head_dim, per_kv = layer.num_heads / layer.num_kv_heads;
  const int num_keys = block.length[block.rows - 1];
  const size_t need = static_cast<size_t>(dim) * (STRETCH + block.rows);
  if (memory.size() < need) memory.resize(need);
  float *keys = memory.data(), *queries = keys + dim * STRETCH;
  for (int i = 0; i < block.rows; i++) {
    std::memcpy(queries + i * dim, q + i / per_kv * q_stride + i % per_kv * dim, sizeof(float) * dim);
    set_scale(block, i, layer.scale * LOG2E);
  }
  alignas(64) float products[MAX_ROWS * STRETCH];
  for (int first = 0; first < num_keys; first += STRETCH) {
    if (layer.type == DType::f32) turn_keys<DType::f32>(k, token_bytes, dim, first, num_keys, keys);
    else turn_keys<DType::bf16>(k, token_bytes, dim, first, num_keys, keys);
    for (int row = 0; row < block.rows; row += MAX_ROWS) {
      const int rows = block.rows - row < MAX_ROWS ? block.rows - row : MAX_ROWS;
      MULTIPLY_PLAIN.at[rows - 1](queries + row * dim, keys, dim, products);
      keep_rows(block, row, row + rows, first, products);
    }
  }
}

void add_plain_key_scores(const ScoredRows* scored, int count, size_t token_bytes, const PlainKeys& layer, int number,
                          const float* q, size_t q_stride) {
  const size_t item = layer.type == DType::f32 ? 4 : 2;
  for_each_block(scored, count, layer.num_heads, layer.num_kv_heads, layer.soft_cap, number,
                 [&](const ScoredRows& to, int row, int head, ScoreBlock& block) {
    const uint8_t* k = to.rows.base + layer.offset_bytes + head * layer.head_dim * item;
    const float* first = q + (to.rows.first_row + row) * q_stride + head * block.per_kv * layer.head_dim;
    score_plain_block(layer, token_bytes, k, first, q_stride, block);
  });
}

}  // namespace
}  // namespace MS_ISA
