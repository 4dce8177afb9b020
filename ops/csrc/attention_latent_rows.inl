// Attention over int8 latents: blocks of rows over stretches of tokens. Included once per instruction set.
//
// The arithmetic is that of attention_decode.inl (flash attention in base 2, exact integer products,
// own sums for each split, merged in order) with other sizes: a stretch has 256 tokens and a split
// 1024. All query heads of a token read the same latents, so they are rows of one product, for
// a single token as for many. A stretch's values are laid out again once for all rows of a task.
// A row has the same bits in any batch, however the prompt is cut, with any number of threads.

namespace MS_ISA {
namespace {

constexpr int LATENT_SPLIT = 1024;  // tokens with sums of their own

struct LatentCall {
  const Step& step;
  const LatentLayer& layer;
  const float* q;
  size_t q_stride;
  float* out;
  float* lse;  // [rows][heads], or null
  LatentShape shape;
  bool has_matrix;

  const uint8_t* tile_at(const SequenceRows& seq, int tile) const {
    return seq.base + static_cast<size_t>(tile) * step.tile_bytes + layer.offset_bytes;
  }
  static int high_of(const SequenceRows& seq, int position) {
    return position < seq.kv_len ? position + 1 : seq.kv_len;
  }
};

// Rounds numbers [from, to) of a query to signed bytes; returns the value of one step.
MS_INLINE float round_part(const float* q, int from, int to, int8_t* high, int8_t* low) {
  f32x16 largest = {};
  for (int d = from; d < to; d += 16) largest = max_magnitude(largest, load<f32x16>(q + d));
  const float top = reduce_magnitude(largest), step = top > 0.0f ? QUERY_STEPS / top : 0.0f;
  for (int d = from; d < to; d += 16) {
    const i32x16 x = to_int_nearest(load<f32x16>(q + d) * step);
    store_i8(high + d, x >> 7), store_i8(low + d, x & 127);
  }
  return top / QUERY_STEPS;
}

// Computes the weights of a row over a stretch.
void latent_softmax(const LatentBlock& block, const LatentStretch& at, const LatentBuffers& buffers, int row) {
  float* x = buffers.scores + row * LATENT_STRETCH;
  const int seen = block.high[row] - at.first, end = at.runs() * RUN;
  f32x16 top = splat(NOTHING), sum = {};
  for (int t = 0; t < end; t += TILE) {
    f32x16 score = load<f32x16>(x + t) + load<f32x16>(at.order + t);
    if (t + TILE > seen) score = select(LANES + t < seen, score, splat(NOTHING));
    top = max(top, score);
    store(x + t, score);
  }
  top = max_all(top);
  for (int t = 0; t < end; t += TILE) {
    f32x16 weight = exp2_neg(load<f32x16>(x + t) - top);
    if (t + TILE > seen) weight = select(LANES + t < seen, weight, splat(0.0f));
    sum += weight * load<f32x16>(at.order_factor + t);
    store(x + t, weight);
  }
  const f32x16 before = splat(block.m[row]), now = max(before, top);
  const float shrink = exp2_neg(before - now)[0], gain = exp2_neg(top - now)[0];
  block.m[row] = now[0];
  block.l[row] = block.l[row] * shrink + reduce_add(sum) * gain;
  buffers.shrink[row] = shrink, buffers.gain[row] = gain;
}

// Returns the largest of the first n scales of V.
MS_INLINE float largest_scale(const float* scale, int n) {
  f32x16 largest = {};
  for (int t = 0; t < n; t += TILE)
    largest = max_magnitude(largest, select(LANES + t < n, load<f32x16>(scale + t), splat(0.0f)));
  return reduce_magnitude(largest);
}

// Rounds the weights of a row times the scales of group g to bytes. IS_EDGE: the row does not see all
// tokens; `largest` is the largest scale that it sees.
template <bool IS_EDGE>
MS_INLINE void round_weights(const LatentBlock& block, const LatentStretch& at, const LatentBuffers& buffers, int g, int row,
                             float largest) {
  const float *x = buffers.scores + row * LATENT_STRETCH, step = steps_of(largest);
  const float* scale = (IS_EDGE ? at.v_scale : at.v_weight) + g * LATENT_STRETCH;
  uint8_t* to = buffers.weights + row * LATENT_STRETCH;
  const int seen = block.high[row] - at.first;
  for (int run = 0; run < at.runs() * RUN; run += RUN) {
    i32x16 p[4];
    unroll<4>([&](auto j) MS_LAMBDA {
      const int t = run + j * TILE;
      const f32x16 steps = IS_EDGE ? load<f32x16>(scale + t) * step : load<f32x16>(scale + t);
      p[j] = to_int_nearest(load<f32x16>(x + t) * steps);
      if (IS_EDGE) p[j] = p[j] & (LANES + t < seen);
    });
    store_weight_bytes(to + run, to + LATENT_ROWS * LATENT_STRETCH + run, p);
  }
  buffers.unit[row] = largest * (1.0f / WEIGHT_STEPS) * buffers.gain[row];
}

// Adds a stretch to a block's rows.
void add_latents(const LatentCall& call, const LatentBlock& block, const LatentStretch& at, const LatentBuffers& buffers,
                 Ahead& ahead) {
  const LatentShape& shape = call.shape;
  if (call.has_matrix) scores_by_matrix(shape, block, at, buffers, ahead);
  else scores_by_vectors(shape, block, at, buffers, ahead);
  for (int row = 0; row < block.rows; row++) {
    ahead.take(Ahead::SOFTMAX);
    latent_softmax(block, at, buffers, row);
  }
  if (call.has_matrix) begin_values_matrix(shape);
  for (int g = 0; g < shape.value_groups; g++) {
    float largest = at.v_top[g];
    for (int row = 0, known = at.tokens; row < block.rows; row++) {
      ahead.take(Ahead::WEIGHTS);
      const int seen = block.high[row] - at.first;
      if (seen >= at.tokens) {
        round_weights<false>(block, at, buffers, g, row, at.v_top[g]);
        continue;
      }
      if (seen != known) largest = largest_scale(at.v_scale + g * LATENT_STRETCH, known = seen);
      round_weights<true>(block, at, buffers, g, row, largest);
    }
    if (call.has_matrix) values_by_matrix(shape, block, at, buffers, g, ahead);
    else values_by_vectors(shape, block, at, buffers, g, ahead);
  }
}

// Memory of a thread for rows [from, to) of a sequence, which are pairs of a token and a query head.
class LatentRows {
 public:
  LatentRows(const LatentCall& call, const SequenceRows& seq, int from, int to)
      : call_(call), seq_(seq), from_(from), shape_(call.shape), count_((to - from + LATENT_ROWS - 1) / LATENT_ROWS),
        num_rows_(to - from) {
    static thread_local List<char> memory;
    static thread_local List<LatentBlock> blocks;
    lay_out(blocks, to);  // at address 0, to count the bytes
    if (memory.size() < at_ + 64) memory.resize(at_ + 64);
    at_ = (reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64;
    lay_out(blocks, to);
    blocks_ = blocks.data();
    for (int i = 0; i < count_; i++) begin_block(blocks_[i], from + i * LATENT_ROWS);
  }

  int max_high() const { return blocks_[count_ - 1].max_high; }

  // Computes the sums of positions [first, end), a split or the begin of one. `next` is the position
  // where the task goes on, or the end of what this task reads.
  void add_split(int first, int end, int next_end) {
    for (int i = 0; i < count_; i++) clear(blocks_[i]);
    for (; first < end; first += LATENT_STRETCH) {
      prepare(first, end);
      Ahead ahead;
      const int next = first + LATENT_STRETCH;
      ahead.lines = static_cast<int>((shape_.bytes + 63) / 64);
      for (int t = next; t < next_end && t < next + LATENT_STRETCH; t += TILE)
        ahead.tile[ahead.tiles++] = call_.tile_at(seq_, t / TILE);
      ahead.divide(shape_, num_rows_);
      for (int i = 0; i < count_; i++)
        if (blocks_[i].max_high > first) add_latents(call_, blocks_[i], stretch_, buffers_, ahead);
    }
  }

  // Makes the sums of the first split the totals, or merges those of a later one into them.
  void end_split(bool is_first) {
    for (int i = 0; i < count_; i++) {
      LatentBlock& b = blocks_[i];
      if (is_first) {
        std::swap(b.m, b.total_m), std::swap(b.l, b.total_l), std::swap(b.acc, b.total);
        continue;
      }
      for (int row = 0; row < b.rows; row++)
        merge(b.total_m[row], b.total_l[row], b.total + row * shape_.value_dim, b.m[row], b.l[row],
              b.acc + row * shape_.value_dim, shape_.value_dim);
    }
  }

  // Copies the sums of the split, (m, l, acc) of each row.
  void keep(float* to) const {
    for (int i = 0; i < count_; i++)
      for (int row = 0; row < blocks_[i].rows; row++, to += shape_.value_dim + 2) {
        to[0] = blocks_[i].m[row], to[1] = blocks_[i].l[row];
        std::memcpy(to + 2, blocks_[i].acc + row * shape_.value_dim, sizeof(float) * shape_.value_dim);
      }
  }

  template <class F>
  void for_totals(F&& f) const {
    for (int i = 0; i < count_; i++)
      for (int row = 0; row < blocks_[i].rows; row++)
        f(from_ + i * LATENT_ROWS + row, blocks_[i].total_m[row], blocks_[i].total_l[row],
          blocks_[i].total + row * shape_.value_dim);
  }

 private:
  template <class T>
  T* take(size_t count) {
    T* taken = reinterpret_cast<T*>(at_);
    at_ += (count * sizeof(T) + 63) / 64 * 64;
    return taken;
  }

  void lay_out(List<LatentBlock>& blocks, int to) {
    const size_t sums = static_cast<size_t>(LATENT_ROWS) * shape_.value_dim;
    buffers_.scores = take<float>(LATENT_ROWS * LATENT_STRETCH);
    buffers_.weights = take<uint8_t>(2 * LATENT_ROWS * LATENT_STRETCH);
    buffers_.sums = take<int32_t>(8 * 256);
    for (float** each : {&buffers_.shrink, &buffers_.gain, &buffers_.unit}) *each = take<float>(LATENT_ROWS);
    stretch_.v = take<int8_t>(static_cast<size_t>(shape_.value_dim / 16) * VALUE_BYTES);
    stretch_.k_scale = take<float>(shape_.num_groups * LATENT_STRETCH);
    stretch_.v_scale = take<float>(shape_.value_groups * LATENT_STRETCH);
    stretch_.v_weight = take<float>(shape_.value_groups * LATENT_STRETCH);
    stretch_.v_top = take<float>(shape_.value_groups);
    stretch_.order = take<float>(LATENT_STRETCH), stretch_.order_factor = take<float>(LATENT_STRETCH);
    blocks.resize(count_);
    for (int i = 0; i < count_; i++) {
      LatentBlock& b = blocks[i];
      b.q = take<int8_t>(static_cast<size_t>(2 * LATENT_ROWS) * shape_.dim);
      b.offsets = take<int32_t>(shape_.num_groups * LATENT_ROWS);
      b.q_scale = take<float>(2 * LATENT_ROWS);
      b.m = take<float>(LATENT_ROWS), b.l = take<float>(LATENT_ROWS), b.acc = take<float>(sums);
      b.total_m = take<float>(LATENT_ROWS), b.total_l = take<float>(LATENT_ROWS), b.total = take<float>(sums);
      b.high = take<int>(LATENT_ROWS);
      const int left = to - from_ - i * LATENT_ROWS;
      b.rows = left < LATENT_ROWS ? left : LATENT_ROWS;
    }
  }

  void begin_block(LatentBlock& b, int first) {
    const int heads = call_.layer.num_heads, dim = shape_.dim;
    const float to_base_2 = call_.layer.scale * LOG2E;
    b.max_high = 0;
    for (int i = 0; i < b.rows; i++) {
      const int token = (first + i) / heads;
      const float* q = call_.q + (seq_.first_row + token) * call_.q_stride + static_cast<size_t>((first + i) % heads) * dim;
      int8_t *high = b.q + i * dim, *low = high + LATENT_ROWS * dim;
      b.q_scale[i] = round_part(q, 0, shape_.value_dim, high, low) * to_base_2;
      b.q_scale[LATENT_ROWS + i] = round_part(q, shape_.value_dim, dim, high, low) * to_base_2;
      for (int g = 0; g < shape_.num_groups; g++) {
        i32x16 sum = {};
        for (int d = shape_.first_of(g), end = d + shape_.size_of(g); d < end; d += 16)
          sum += (from_i8(high + d) << 7) + from_i8(low + d);
        b.offsets[g * LATENT_ROWS + i] = 128 * static_cast<int>(reduce_add(to_float(sum)));  // exact: below 2^24
      }
      b.high[i] = call_.high_of(seq_, seq_.first_position + token);
      if (b.high[i] > b.max_high) b.max_high = b.high[i];
    }
  }

  void clear(const LatentBlock& b) const {
    for (int i = 0; i < LATENT_ROWS; i++) b.m[i] = NOTHING, b.l[i] = 0.0f;
    std::memset(b.acc, 0, sizeof(float) * LATENT_ROWS * shape_.value_dim);
  }

  // Loads scales and lays out values of the tokens from `first` on, up to `end`.
  void prepare(int first, int end) {
    LatentStretch& s = stretch_;
    s.first = first;
    s.tokens = end - first < LATENT_STRETCH ? end - first : LATENT_STRETCH;
    const int tiles = (s.tokens + TILE - 1) / TILE, all = s.runs() * (RUN / TILE);
    for (int t = 0; t < LATENT_TILES; t++) s.tile[t] = call_.tile_at(seq_, first / TILE + (t < tiles ? t : tiles - 1));
    s.has_values = count_ > 2;
    if (s.has_values) s.turn(0, shape_.value_dim / 16, s.v);
    for (int t = 0; t < all; t++) prepare_scales(t);
    for (int g = 0; g < shape_.value_groups; g++) {
      const float* scale = s.v_scale + g * LATENT_STRETCH;
      s.v_top[g] = largest_scale(scale, s.tokens);
      const float step = steps_of(s.v_top[g]);
      for (int t = 0; t < all * TILE; t += TILE)
        store(s.v_weight + g * LATENT_STRETCH + t, load<f32x16>(scale + t) * step);
    }
  }

  // The scales of tokens that no row sees are zero in v_scale, and anything in k_scale.
  void prepare_scales(int t) {
    const LatentStretch& s = stretch_;
    const uint16_t* from = reinterpret_cast<const uint16_t*>(s.tile[t] + shape_.scales);
    const i32x16 is_seen = LANES + t * TILE < s.tokens;
    f32x16 largest = {};
    for (int g = 0; g < shape_.num_groups; g++) {
      const f32x16 scale = select(is_seen, from_half(from + g * TILE), splat(0.0f));
      store(s.k_scale + g * LATENT_STRETCH + t * TILE, scale);
      if (g < shape_.value_groups) largest = max_magnitude(largest, scale);
    }
    const f32x16 order = binary_order(largest), factor = power_of_two(-order);
    store(s.order + t * TILE, order), store(s.order_factor + t * TILE, factor);
    for (int g = 0; g < shape_.value_groups; g++) {
      const int at = g * LATENT_STRETCH + t * TILE;
      store(s.v_scale + at, load<f32x16>(s.k_scale + at) * factor);
    }
  }

  const LatentCall& call_;
  const SequenceRows& seq_;
  const int from_;
  const LatentShape& shape_;
  const int count_, num_rows_;
  uintptr_t at_ = 0;
  LatentBlock* blocks_;
  LatentStretch stretch_;
  LatentBuffers buffers_;
};

}  // namespace
}  // namespace MS_ISA
