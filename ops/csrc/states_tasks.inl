// What rows become before linear attention (unit keys, decays, gains), and its division into tasks. Included
// once per instruction set.

namespace MS_ISA {
namespace {

constexpr int BLOCK_ROWS = 64;                       // computed for a head before its state goes on
constexpr size_t CARRIED_BYTES = size_t{256} << 10;  // of states that a task keeps between blocks

// log(1 + exp(x)), with a small relative error also where the result is small.
MS_INLINE f32x16 softplus(f32x16 x) {
  const f32x16 y = exp(-absolute(x)), s = y / (y + 2.0f), z = s * s;  // log(1 + y) = 2 artanh(s), s <= 1/3
  f32x16 series = splat(1.0f / 15);
  unroll<7>([&](auto i) MS_LAMBDA { series = fma(series, z, splat(1.0f / (13 - 2 * i))); });
  return max(splat(0.0f), x) + 2.0f * s * series;
}

// Writes a head's row in fp32, filled up with zeros, times `scale`, and divided by its norm for unit keys.
void read_head(const Rows& from, int64_t row, size_t column, int dim, bool is_unit, float scale, float* to) {
  const size_t at = (static_cast<size_t>(row) * from.stride + column) * size_of(from.type);
  const char* data = static_cast<const char*>(from.data) + at;
  const size_t ahead = NEXT_ROWS * from.stride * size_of(from.type);
  f32x16 squares[2] = {};
  for (int i = 0; i < dim; i += 16) {
    const f32x16 x = row_at(data, from.type, i, dim - i);
    f32x16& sum = squares[i / 16 % 2];
    sum = fma(x, x, sum);
    store(to + i, x);
    prefetch(data + ahead + i * size_of(from.type));
  }
  const float factor = is_unit ? scale / __builtin_sqrtf(reduce_add(squares[0] + squares[1]) + UNIT_KEY_EPS) : scale;
  for (int i = 0; i < dim; i += 16) store(to + i, load<f32x16>(to + i) * factor);
}

MS_INLINE float value_at(const Rows& rows, int64_t row, size_t column) {
  const size_t at = static_cast<size_t>(row) * rows.stride + column;
  if (rows.type == DType::f32) return static_cast<const float*>(rows.data)[at];
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(rows.data)[at]) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

MS_INLINE f32x16 step_sizes(const LinearAttention& call, f32x16 a) {
  return min(splat(call.dt_max), max(splat(call.dt_min), softplus(a)));
}

// Computes the decays and gains of a head in some rows: [count] each.
void gates(const LinearAttention& call, int64_t first, int count, int head, float* decay, float* gain) {
  alignas(64) float a[16] = {}, b[16] = {};
  for (int r = 0; r < count; r += 16) {
    const int some = count - r < 16 ? count - r : 16;
    for (int i = 0; i < some; i++) {
      if (!call.is_per_channel) a[i] = value_at(call.a, first + r + i, head);
      if (call.is_delta) b[i] = value_at(call.b, first + r + i, head);
    }
    if (call.is_delta) store(gain + r, sigmoid(load<f32x16>(b)) * call.beta_scale);
    if (call.is_per_channel) continue;
    const f32x16 dt = step_sizes(call, load<f32x16>(a) + call.bias[head]);
    store(decay + r, exp(-call.rates[head] * dt));
    if (!call.is_delta) store(gain + r, dt);
  }
}

// Computes the decays of a head's channels in some rows and the keys times them: [count][stride] each.
void channel_gates(const LinearAttention& call, int64_t first, int count, int head, const float* k, size_t stride,
                   float* decay, float* keys) {
  const int dim = call.key_dim;
  const size_t column = static_cast<size_t>(head) * dim, item = size_of(call.a.type);
  for (int r = 0; r < count; r++) {
    const char* a = static_cast<const char*>(call.a.data) + ((first + r) * call.a.stride + column) * item;
    for (int i = 0; i < dim; i += 16) {
      const f32x16 x = row_at(a, call.a.type, i, dim - i) + some_of(call.bias + column, i, dim - i);
      const f32x16 factor = exp(-call.rates[head] * step_sizes(call, x));
      store(decay + r * stride + i, factor);
      store(keys + r * stride + i, load<f32x16>(k + r * stride + i) * factor);
    }
  }
}

// The strips of a head's state.
struct Columns {
  int first, vectors;
};
List<Columns> strips_of(int value_dim, int most) {
  List<Columns> strips;
  for (int at = 0; at < value_dim;) {
    int vectors = most;
    while (vectors > 1 && vectors * 16 > value_dim - at) vectors /= 2;
    strips.push_back({at, vectors});
    at += vectors * 16;
  }
  return strips;
}

// Strips of a sequence's state, numbered head by head, for all its rows.
struct StateTask {
  int sequence, first, end;
};

class LinearAttentionRun {
 public:
  LinearAttentionRun(const LinearAttention& call, const StateRecords& records, const StateSegments& segments)
      : call_(call), records_(records), segments_(segments), stride_((call.key_dim + 15) / 16 * 16),
        shared_(call.heads / call.key_heads), wide_(strips_of(call.value_dim, SINGLE_VECTORS)),
        narrow_(strips_of(call.value_dim, PASS_VECTORS)) {}

  void run() {
    const int64_t rows = segments_.rows();
    if (!rows) return;
    ms::Team& team = ms::Team::get();
    const int64_t some = team.parts_for(rows * call_.heads * call_.key_dim * call_.value_dim * 4);
    for (int s = 0; s < segments_.num_sequences; s++) {
      // Memory is read ahead within a task, so single rows have longer ones.
      const int64_t own = segments_.num_rows(s), wanted = (own == 1 ? 4 : 8) * some;
      const int64_t units = call_.heads * static_cast<int64_t>(strips(own).size());
      int64_t parts = (wanted * own + rows - 1) / rows;
      if (own > BLOCK_ROWS) {
        const int64_t bytes = units * strip_bytes(), least = (bytes + CARRIED_BYTES - 1) / CARRIED_BYTES;
        parts = parts < least ? least : parts;
      }
      parts = parts > units ? units : parts;
      for (int64_t p = 0; p < parts; p++)
        tasks_.push_back({s, static_cast<int>(units * p / parts), static_cast<int>(units * (p + 1) / parts)});
    }
    team.parallel(static_cast<int>(tasks_.size()), [&](int task) { compute(tasks_[task]); });
  }

 private:
  const List<Columns>& strips(int64_t rows) const { return rows == 1 ? wide_ : narrow_; }
  size_t strip_floats(int vectors) const { return static_cast<size_t>(call_.key_dim) * 16 * vectors; }
  size_t strip_bytes() const { return 4 * strip_floats(PASS_VECTORS); }

  void compute(const StateTask& task) const {
    static thread_local List<float> memory;
    static thread_local List<RowPlace> places;
    const int64_t first = segments_.first_row(task.sequence), rows = segments_.num_rows(task.sequence);
    const int block = static_cast<int>(rows < BLOCK_ROWS ? rows : BLOCK_ROWS);
    const size_t strip = strip_floats(rows == 1 ? SINGLE_VECTORS : PASS_VECTORS);
    const size_t kept = rows > BLOCK_ROWS ? task.end - task.first : 1;
    const size_t array = (block + 1) * stride_;  // a row more, since the last one has a next
    const size_t need = kept * strip + 4 * array + 2 * (block + 16) + 16;
    if (memory.size() < need) memory.resize(need);
    if (places.size() < static_cast<size_t>(block)) places.resize(block);
    float* own = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    float* arrays = own + kept * strip;
    int64_t segment = segments_.sequences[task.sequence];
    for (int64_t done = 0; done < rows; done += block) {
      const int count = static_cast<int>(rows - done < block ? rows - done : block);
      place_rows(first + done, count, segment, places.data());
      compute_block(task, rows, first + done, count, places.data(), own, kept > 1 ? strip : 0, arrays, array);
    }
  }

  // Writes where the states of some rows come from and go to. segment: that of the first row; it becomes that
  // of the row after the last one.
  void place_rows(int64_t first, int count, int64_t& segment, RowPlace* places) const {
    for (int r = 0; r < count; r++) {
      const bool begins = first + r == segments_.firsts[segment], ends = first + r + 1 == segments_.firsts[segment + 1];
      places[r] = {begins ? segments_.sources[segment] : OWN, ends ? segments_.targets[segment] : OWN, !ends};
      if (ends) segment++;
      if (r > 0 && begins) places[r - 1].goes_on = places[r].source >= 0 && places[r].source == places[r - 1].target;
    }
    places[count - 1].goes_on = false;
  }

  void compute_block(const StateTask& task, int64_t rows, int64_t first, int count, const RowPlace* places, float* own,
                     size_t own_stride, float* arrays, size_t array) const {
    float *q = arrays, *k = q + array, *decay = k + array, *keys = decay + array;
    float *head_decay = keys + array, *gain = head_decay + count + 16;
    HeadBlock block{call_, records_, first, count, places, q, k, k, stride_, head_decay, gain, 1, -1};
    if (call_.is_per_channel) block.keys = keys, block.decay = decay, block.decay_stride = stride_;
    const List<Columns>& strips = this->strips(rows);
    const int each = static_cast<int>(strips.size());
    for (int unit = task.first, key_head = -1; unit < task.end; unit++) {
      const int head = unit / each;
      if (head / shared_ != key_head) {
        key_head = head / shared_;
        read_key_head(first, count, key_head, q, k);
      }
      if (head != block.head) {
        block.head = head;
        gates(call_, first, count, head, head_decay, gain);
        if (call_.is_per_channel) channel_gates(call_, first, count, head, k, stride_, decay, keys);
      }
      const Columns& columns = strips[unit % each];
      Strip ahead{own, 0};
      if (unit + 1 < task.end && places[0].source >= 0) {
        HeadBlock next = block;
        next.head = (unit + 1) / each;
        ahead = next.strip(places[0].source, strips[(unit + 1) % each].first);
      }
      block_function(call_, columns.vectors)(block, columns.first, own + (unit - task.first) * own_stride, ahead);
    }
  }

  void read_key_head(int64_t first, int count, int key_head, float* q, float* k) const {
    const size_t column = static_cast<size_t>(key_head) * call_.key_dim;
    for (int r = 0; r < count; r++) {
      read_head(call_.q, first + r, column, call_.key_dim, call_.has_unit_keys, call_.scale, q + r * stride_);
      read_head(call_.k, first + r, column, call_.key_dim, call_.has_unit_keys, 1.0f, k + r * stride_);
    }
  }

  const LinearAttention& call_;
  const StateRecords& records_;
  const StateSegments& segments_;
  const size_t stride_;
  const int shared_;  // heads of a key head
  const List<Columns> wide_, narrow_;
  List<StateTask> tasks_;
};

void attend_linear(const LinearAttention& call, const StateRecords& records, const StateSegments& segments) {
  LinearAttentionRun(call, records, segments).run();
}

}  // namespace
}  // namespace MS_ISA
