// Bounds of the keys of a tile, from which attention_select.inl estimates which tiles matter to a query.
// Included once per instruction set.
//
// After the parts of all K/V heads in a tile, or in a tile of a store beside it (KeyBounds), a layer that selects
// has for each head
//   the bounds of K [2 * D] signed bytes, padded to 64: the maximum of each dimension over the tile's 16
//   tokens, then minus the minimum;
// then a scale of each head, fp16, padded to 64 bytes. Bounds are those of the stored values, rounded
// outwards. A tile's are written when its last token is, from all of its keys: what was written to it
// before, such as drafts that were rejected, leaves no trace.

namespace MS_ISA {
namespace {

struct BoundsShape {
  size_t head_bytes, scales;  // of a head; from the start of the bounds
  explicit BoundsShape(const CacheLayer& c)
      : head_bytes((2 * static_cast<size_t>(c.head_dim) + 63) / 64 * 64),
        scales(head_bytes * c.num_kv_heads) {}
};

// Returns the stored values, in steps of their scales, of dimensions d to d + 3 of 16 tokens: a signed byte
// for each.
MS_INLINE i32x16 four_of_k(const HeadShape& shape, const uint8_t* from, int d) {
  if (shape.bits == 8) return load<i32x16>(from + shape.k + d * TILE) ^ splat_i32(static_cast<int32_t>(0x80808080u));
  const uint8_t* codes = from + shape.k + d / 8 * 64;
  return d % 8 ? operands<true>(LEVELS, codes) : operands<false>(LEVELS, codes);
}

// Rounds 16 bounds up to whole steps.
MS_INLINE i32x16 round_up_to_bytes(f32x16 x) {
  x = max(min(x, splat(127.0f)), splat(-127.0f));
  const i32x16 nearest = to_int_nearest(x);
  return nearest + ((to_float(nearest) < x) & 1);
}

__attribute__((noinline)) void bound_head(const HeadShape& shape, const uint8_t* from, int8_t* to, uint16_t* scale_to) {
  alignas(64) float bound[2][MAX_HEAD_DIM];
  f32x16 largest = {};
  for (int d = 0; d < shape.dim; d += 4) {
    const f32x16 scale = from_half(reinterpret_cast<const uint16_t*>(from + shape.k_scales) + d / shape.group * TILE);
    const i32x16 bytes = four_of_k(shape, from, d);
    unroll<4>([&](auto i) MS_LAMBDA {
      const f32x16 value = to_float((i32x16)((u32x16)bytes << (24 - 8 * i)) >> 24) * scale;
      bound[0][d + i] = reduce_max(value), bound[1][d + i] = reduce_max(-value);
    });
  }
  for (int side = 0; side < 2; side++)
    for (int d = 0; d < shape.dim; d += 16) largest = max_magnitude(largest, load<f32x16>(bound[side] + d));
  const uint16_t half = scale_to_half(reduce_magnitude(largest) / 127.0f);
  const float scale = half_to_float(half);
  const f32x16 inverse = splat(scale > 0.0f ? 1.0f / scale : 0.0f);
  for (int side = 0; side < 2; side++)
    for (int d = 0; d < shape.dim; d += 16)
      store_i8(to + side * shape.dim + d, round_up_to_bytes(load<f32x16>(bound[side] + d) * inverse));
  for (int i = 2 * shape.dim; i % 64; i += 16) std::memset(to + i, 0, 16);
  std::memcpy(scale_to, &half, 2);
}

// Writes the bounds of the tiles that the step's rows complete.
void bound_keys(const Step& step, const CacheLayer& layer, const KeyBounds& bounds) {
  struct Tile {
    const uint8_t* keys;
    uint8_t* bounds;
  };
  static thread_local List<Tile> tiles;
  tiles.clear();
  for (int s = 0; s < step.num_sequences; s++) {
    const SequenceRows& seq = step.sequences[s];
    const int end = (seq.first_position + seq.num_rows) / TILE;
    for (size_t tile = seq.first_position / TILE; tile < static_cast<size_t>(end); tile++)
      tiles.push_back({seq.tile_at(tile, step.tile_bytes) + layer.offset_bytes,
                       bounds.step.sequences[s].tile_at(tile, bounds.step.tile_bytes) + bounds.offset});
  }
  if (tiles.empty()) return;
  const HeadShape shape(layer);
  const BoundsShape bounds_shape(layer);
  const Tile* all = tiles.data();
  ms::Team::get().parallel(static_cast<int>(tiles.size()), [&](int i) {
    uint8_t* to = all[i].bounds;
    for (int h = 0; h < layer.num_kv_heads; h++) {
      auto* head = reinterpret_cast<int8_t*>(to + h * bounds_shape.head_bytes);
      bound_head(shape, all[i].keys + h * shape.bytes, head, reinterpret_cast<uint16_t*>(to + bounds_shape.scales) + h);
    }
  });
}

}  // namespace
}  // namespace MS_ISA
