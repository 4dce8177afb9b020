// The storage format of int8 K/V, and the kernel that writes K/V of either format. Included once per
// instruction set.
//
// After its scales (kv_shape.inl), a head's part of a tile has
//   K [D/4][16 tokens][4] unsigned bytes (value + 128),
//   V [8 pairs of tokens][D][2] signed bytes.
// In this order a register holds 16 tokens of K or 16 dimensions of V, ready for the 8-bit and
// 16-bit dot product instructions.
//
// The kernel rotates, quantizes and writes several lanes at a time, where a lane is one token's K and
// V of one head. A lane's bytes do not depend on the other lanes.

namespace MS_ISA {
namespace {

// Writes N dimensions (16 or 8) from d on to a lane of K.
template <int N>
MS_INLINE void store_k(const HeadShape& shape, const Lane& lane, int d, i32x16 x) {
  alignas(16) int8_t bytes[16];
  store_i8(bytes, x ^ 128);
  uint8_t* to = lane.at + shape.k + d * TILE + 4 * lane.t;
  unroll<N / 4>([&](auto i) MS_LAMBDA { std::memcpy(to + i * 4 * TILE, bytes + 4 * i, 4); });
}

// Writes N dimensions from d on to a lane of V: every other byte of a pair of tokens.
template <int N>
MS_INLINE void store_v(const HeadShape& shape, const Lane& lane, int d, i32x16 x) {
  uint8_t* to = lane.at + shape.v + 2 * ((lane.t / 2) * shape.dim + d);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if (N == 16) {
    const __m256i wide = _mm512_cvtepi32_epi16((__m512i)x);
    if (lane.t % 2) _mm256_mask_storeu_epi8(to, 0xaaaaaaaau, _mm256_slli_epi16(wide, 8));
    else _mm256_mask_storeu_epi8(to, 0x55555555u, wide);
    return;
  }
#endif
  alignas(16) int8_t bytes[16];
  store_i8(bytes, x);
  for (int i = 0; i < N; i++) to[2 * i + lane.t % 2] = static_cast<uint8_t>(bytes[i]);
}

// Quantizes x[i], the [dim] numbers of lane i, to bytes and one fp16 scale for each group, N at a time.
template <int N, bool IS_K>
MS_INLINE void store_lanes(const HeadShape& shape, const Lane* lanes, int count, const float* const* x) {
  alignas(64) float top[MAX_LANES] = {};
  uint16_t halves[MAX_LANES];
  for (int g = 0; g < shape.num_groups; g++) {
    const int first = g * shape.group, end = first + shape.group;
    for (int i = 0; i < count; i++) {
      f32x16 largest = {};
      for (int d = first; d < end; d += N) largest = max_magnitude(largest, row_at(x[i], DType::f32, d, N));
      top[i] = reduce_magnitude(largest);
    }
    scales_to_half(halves, load<f32x16>(top) / 127.0f);
    const f32x16 scale = from_half(halves), inverse = select(scale > 0.0f, 1.0f / scale, splat(0.0f));
    alignas(64) float steps[MAX_LANES];
    store(steps, inverse);
    for (int i = 0; i < count; i++) {
      const f32x16 step = splat(steps[i]);
      for (int d = first; d < end; d += N) {
        f32x16 v = row_at(x[i], DType::f32, d, N) * step;
        v = max(min(v, splat(127.0f)), splat(-127.0f));
        if (IS_K) store_k<N>(shape, lanes[i], d, to_int_nearest(v));
        else store_v<N>(shape, lanes[i], d, to_int_nearest(v));
      }
      uint8_t* scales = lanes[i].at + (IS_K ? shape.k_scales : shape.v_scales);
      std::memcpy(scales + 2 * (g * TILE + lanes[i].t), halves + i, 2);
    }
  }
}

template <int N>
__attribute__((noinline)) void store_block(const HeadShape& shape, const Lane* lanes, int count, const Rotation& by) {
  alignas(64) float rotated[MAX_LANE_FLOATS];
  const float* x[MAX_LANES];
  for (int i = 0; i < count; i++) {
    x[i] = lanes[i].k;
    if (!by.cos) continue;
    const size_t at = static_cast<size_t>(lanes[i].row) * by.half;
    float* to = rotated + i * shape.dim;
    rotate_head(to, x[i], by.cos + at, by.sin + at, by.half);
    std::memcpy(to + 2 * by.half, x[i] + 2 * by.half, sizeof(float) * (shape.dim - 2 * by.half));
    x[i] = to;
  }
  store_lanes<N, true>(shape, lanes, count, x);
  for (int i = 0; i < count; i++) x[i] = lanes[i].v;
  store_lanes<N, false>(shape, lanes, count, x);
}

// Prefetches the lines that a lane reads and writes.
MS_INLINE void touch_lane(const HeadShape& shape, const Lane& lane) {
  for (int d = 0; d < shape.dim; d += 16) prefetch(lane.k + d), prefetch(lane.v + d);
  if (!lane.is_cold) return;
  if (shape.bits == 4) return touch_lane4(shape, lane);
  for (size_t line = 0; line < shape.k; line += 64) __builtin_prefetch(lane.at + line, 1, 3);
  for (int d = 0; d < shape.dim; d += 4) __builtin_prefetch(lane.at + shape.k + d * TILE, 1, 3);
  for (int d = 0; d < 2 * shape.dim; d += 64)
    __builtin_prefetch(lane.at + shape.v + (lane.t / 2) * 2 * shape.dim + d, 1, 3);
}

// Iterates over the lanes of rows [first, end), row by row and head by head, in blocks.
class LaneBlocks {
 public:
  LaneBlocks(const Step& step, const CacheLayer& layer, const HeadShape& shape, const float* k, const float* v,
             size_t stride, int first, int end)
      : step_(step), layer_(layer), shape_(shape), k_(k), v_(v), stride_(stride), row_(first), end_(end) {
    locate_row(true);
  }

  // Writes at most `most` next lanes to `to`; returns their number.
  int take(Lane* to, int most) {
    int count = 0;
    while (count < most && row_ < end_) {
      const size_t at = row_ * stride_ + head_ * shape_.dim;
      to[count] = {k_ + at, v_ + at, tile_ + head_ * shape_.bytes, t_, row_, is_cold_};
      touch_lane(shape_, to[count++]);
      if (++head_ < layer_.num_kv_heads) continue;
      head_ = 0;
      if (++row_ < end_) locate_row(false);
    }
    return count;
  }

 private:
  void locate_row(bool is_first) {
    while (row_ >= step_.sequences[sequence_].first_row + step_.sequences[sequence_].num_rows) sequence_++;
    const SequenceRows& seq = step_.sequences[sequence_];
    const int position = seq.first_position + row_ - seq.first_row;
    t_ = position % TILE;
    is_cold_ = is_first || t_ % 2 == 0 || row_ == seq.first_row;
    tile_ = seq.tile_at(static_cast<size_t>(position / TILE), step_.tile_bytes) + layer_.offset_bytes;
  }

  const Step& step_;
  const CacheLayer& layer_;
  const HeadShape& shape_;
  const float *k_, *v_;
  size_t stride_;
  int row_, end_, head_ = 0, sequence_ = 0, t_ = 0;
  bool is_cold_ = true;
  uint8_t* tile_ = nullptr;
};

// Returns the first row from `row` on that begins a sequence or a tile. Two threads that write to one
// tile would take its cache lines from each other at every token.
int next_tile(const Step& step, int row, int rows) {
  if (row >= rows) return rows;
  const SequenceRows* seq = step.sequences;
  while (row >= seq->first_row + seq->num_rows) seq++;
  if (row == seq->first_row) return row;
  const int past = (seq->first_position + row - seq->first_row) % TILE;
  const int next = past ? row + TILE - past : row, end = seq->first_row + seq->num_rows;
  return next < end ? next : end;
}

void append_kv(const Step& step, const CacheLayer& layer, const float* k, const float* v,
               size_t stride, const Rotation& by) {
  const HeadShape shape(layer);
  int rows = 0;
  for (int s = 0; s < step.num_sequences; s++) rows += step.sequences[s].num_rows;
  const int most = MAX_LANE_FLOATS / shape.dim < MAX_LANES ? MAX_LANE_FLOATS / shape.dim : MAX_LANES;
  const int share = 1 + 4096 / (layer.num_kv_heads * shape.dim);
  const auto store_some = shape.bits == 4 ? store_block4 : shape.group >= 16 ? store_block<16> : store_block<8>;
  ms::Team::get().parallel((rows + share - 1) / share, [&](int task) {
    const int first = next_tile(step, task * share, rows), end = next_tile(step, (task + 1) * share, rows);
    if (first >= end) return;
    LaneBlocks blocks(step, layer, shape, k, v, stride, first, end);
    Lane lanes[2][MAX_LANES];
    int count = blocks.take(lanes[0], most);
    for (int turn = 0; count; turn ^= 1) {
      const int next = blocks.take(lanes[turn ^ 1], most);
      store_some(shape, lanes[turn], count, by);
      count = next;
    }
  });
}

}  // namespace
}  // namespace MS_ISA
