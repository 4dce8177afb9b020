// How K and V lie in a tile, for both storage formats (kv_tiles.inl, kv_tiles4.inl). Included once per
// instruction set.
//
// A range is a series of tiles of 16 tokens. A layer's part of a tile has for each K/V head:
//   scales of K, then of V, [2][D/group][16 tokens] fp16,
//   the values of K, then those of V, in the order of their format.
// All heads of a tile are one contiguous run.

namespace MS_ISA {
namespace {

struct HeadShape {
  int dim, group, num_groups, bits;
  size_t k_scales, v_scales, k, v, bytes;  // offsets in a head's part of a tile, and its size
  explicit HeadShape(const CacheLayer& c)
      : dim(c.head_dim), group(c.group), num_groups(c.head_dim / c.group), bits(c.bits) {
    k_scales = 0;
    v_scales = static_cast<size_t>(num_groups) * TILE * 2;
    k = 2 * v_scales;
    v = k + static_cast<size_t>(TILE) * dim * bits / 8;
    bytes = v + static_cast<size_t>(TILE) * (bits == 4 ? (dim + 31) / 32 * 16 : dim);
  }
};

// One token's K and V of one head, to be written to lane t of the tile at `at`.
struct Lane {
  const float *k, *v;
  uint8_t* at;
  int t, row;
  bool is_cold;  // the first lane of this tile in this task, whose lines are in no cache
};
constexpr int MAX_LANES = 16, MAX_LANE_FLOATS = 2048;

}  // namespace
}  // namespace MS_ISA
