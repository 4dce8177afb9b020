// The storage format of int8 latents (multi-head latent attention), and the kernel that writes it.
// Included once per instruction set.
//
// A layer keeps one vector of `dim` numbers for each token, which all query heads read: the first
// value_dim of them are K and V, the rest, which has the positions, is K only. A range is a series of
// tiles of 16 tokens. A layer's part of a tile has
//   the numbers [dim / 4][16 tokens][4] as unsigned bytes (value + 128),
//   scales [groups][16 tokens] fp16, those of the first value_dim numbers before those of the rest,
//   and padding up to a multiple of 64 bytes, so that a line of 16 tokens is a cache line.
// In this order a register, or a row of a matrix register, holds four numbers of 16 tokens.

namespace MS_ISA {
namespace {

struct LatentShape {
  int dim, value_dim, group, rope_group, value_groups, num_groups;
  size_t scales, bytes;  // the offset of the scales in a layer's part of a tile, and its size
  explicit LatentShape(const LatentLayer& c)
      : dim(c.value_dim + c.rope_dim), value_dim(c.value_dim), group(c.group), rope_group(c.rope_group),
        value_groups(c.value_dim / c.group), num_groups(value_groups + c.rope_dim / c.rope_group) {
    scales = static_cast<size_t>(dim) * TILE;
    bytes = (scales + num_groups * TILE * 2 + 63) / 64 * 64;
  }
  int first_of(int g) const { return g < value_groups ? g * group : value_dim + (g - value_groups) * rope_group; }
  int size_of(int g) const { return g < value_groups ? group : rope_group; }
};

// Writes x, the [dim] numbers of a token, to lane t of a tile.
void store_latent(const LatentShape& shape, const float* x, uint8_t* tile, int t) {
  uint16_t* scales = reinterpret_cast<uint16_t*>(tile + shape.scales);
  for (int g = 0; g < shape.num_groups; g++) {
    const int first = shape.first_of(g), end = first + shape.size_of(g);
    f32x16 largest = {};
    for (int d = first; d < end; d += 16) largest = max_magnitude(largest, load<f32x16>(x + d));
    const uint16_t half = scale_to_half(reduce_magnitude(largest) / 127.0f);
    const float scale = half_to_float(half), step = scale > 0.0f ? 1.0f / scale : 0.0f;
    std::memcpy(scales + g * TILE + t, &half, 2);
    for (int d = first; d < end; d += 16) {
      const f32x16 v = max(min(load<f32x16>(x + d) * step, splat(127.0f)), splat(-127.0f));
      alignas(16) int8_t bytes[16];
      store_i8(bytes, to_int_nearest(v) ^ 128);
      uint8_t* to = tile + d * TILE + 4 * t;
      unroll<4>([&](auto i) MS_LAMBDA { std::memcpy(to + i * 4 * TILE, bytes + 4 * i, 4); });
    }
  }
}

// Rotates the numbers after the first value_dim, quantizes and writes k: [rows][dim].
void append_latent(const Step& step, const LatentLayer& layer, const float* k, size_t stride, const Rotation& by) {
  const LatentShape shape(layer);
  int rows = 0;
  for (int s = 0; s < step.num_sequences; s++) rows += step.sequences[s].num_rows;
  const int share = 1 + 4096 / shape.dim;
  ms::Team::get().parallel((rows + share - 1) / share, [&](int task) {
    const int first = next_tile(step, task * share, rows), end = next_tile(step, (task + 1) * share, rows);
    const SequenceRows* seq = step.sequences;
    alignas(64) float turned[MAX_LATENT_DIM];
    for (int row = first; row < end; row++) {
      while (row >= seq->first_row + seq->num_rows) seq++;
      const int position = seq->first_position + row - seq->first_row;
      const float* x = k + row * stride;
      if (by.cos) {
        const size_t at = static_cast<size_t>(row) * by.half;
        std::memcpy(turned, x, sizeof(float) * shape.dim);
        rotate_head(turned + shape.value_dim, x + shape.value_dim, by.cos + at, by.sin + at, by.half);
        x = turned;
      }
      uint8_t* tile = seq->base + static_cast<size_t>(position / TILE) * step.tile_bytes + layer.offset_bytes;
      store_latent(shape, x, tile, position % TILE);
    }
  });
}

// Four of AVX-512's, AVX2's or portable registers of 16 numbers, packed to bytes: the weights of 64
// tokens as hi * 128 + lo. Byte 16 * (i / 4) + 4 * j + i % 4 belongs to token i of tile j. This is the
// order in which two packing instructions leave them; values are stored in the same order.
MS_INLINE void store_weight_bytes(uint8_t* hi, uint8_t* lo, const i32x16 (&p)[4]) {
#if defined(__AVX512BW__)
  const __m512i ab = _mm512_packs_epi32((__m512i)p[0], (__m512i)p[1]);
  const __m512i cd = _mm512_packs_epi32((__m512i)p[2], (__m512i)p[3]);
  const __m512i low = _mm512_set1_epi16(127);
  store(hi, _mm512_packus_epi16(_mm512_srli_epi16(ab, 7), _mm512_srli_epi16(cd, 7)));
  store(lo, _mm512_packus_epi16(_mm512_and_si512(ab, low), _mm512_and_si512(cd, low)));
#else
  for (int j = 0; j < 4; j++) {
    int32_t x[16];
    store(x, p[j]);
    for (int i = 0; i < 16; i++) {
      const int at = 16 * (i / 4) + 4 * j + i % 4;
      hi[at] = static_cast<uint8_t>(x[i] >> 7), lo[at] = static_cast<uint8_t>(x[i] & 127);
    }
  }
#endif
}

// Reads 16 numbers of 16 tokens, four lines of [16 tokens][4], of tile j of four, and writes them as
// signed bytes to lines [16 numbers][4 tokens]: line 4 * i + j has tokens 4i to 4i + 3.
MS_INLINE void turn_values(const uint8_t* from, int8_t* to, int j) {
#if defined(__AVX512BW__)
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i sign = _mm512_set1_epi8(-128);
  unroll<4>([&](auto i) MS_LAMBDA {
    const auto at = [&](int quad) MS_LAMBDA { return load<__m128i>(from + quad * 64 + i * 16); };
    __m512i x = _mm512_castsi128_si512(at(0));
    x = _mm512_inserti32x4(x, at(1), 1);
    x = _mm512_inserti32x4(x, at(2), 2);
    x = _mm512_inserti32x4(x, at(3), 3);
    store(to + (4 * i + j) * 64, _mm512_xor_si512(_mm512_shuffle_epi8(x, order), sign));
  });
#else
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  unroll<4>([&](auto i) MS_LAMBDA {
    unroll<4>([&](auto quad) MS_LAMBDA {
      const Bytes x = load<Bytes>(from + quad * 64 + i * 16);
      const Bytes turned = shuffle(x, x, std::index_sequence<0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15>{});
      store(to + (4 * i + j) * 64 + quad * 16, turned ^ 128);
    });
  });
#endif
}

}  // namespace
}  // namespace MS_ISA
