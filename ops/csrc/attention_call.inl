// Divides one layer's attention over int8 or int4 K/V into tasks. Included once per instruction set.

namespace MS_ISA {
namespace {

struct AttendTask {
  // A block of rows is query rows [from, to) of K/V head `at`; a single row's task is the positions
  // from `at` to the end of their split, of K/V heads [from, to).
  int sequence, from, to, at;
  int single, part;  // the index of the single row and of its result's part; -1 for a block of rows
};

// Each thread keeps this memory between calls, so that a layer allocates nothing.
struct AttendMemory {
  List<AttendTask> tasks;
  List<float> parts;
  List<int> singles, first_parts;
  List<std::atomic<int>> waiting;  // number of unfinished parts for each share of a single row
};

// The tasks of one layer. A single row of a sequence is cut into splits and shares of the heads.
// recent: the same rows over the store of their own blocks, or null; then `call` has the earlier keys,
// and the last part of a single row is that of its block.
class AttendPlan {
 public:
  AttendPlan(const AttendCall& call, const AttendCall* recent, AttendMemory& memory, int threads, const Phased& phased)
      : call_(call), recent_(recent), memory_(memory), phase_(phased.phase), sums_(phased.sums) {
    const Step& step = call.step;
    const int kv_heads = call.layer.cache.num_kv_heads, dim = call.shape.dim;
    memory_.tasks.clear(), memory_.singles.clear(), memory_.first_parts.clear();
    int parts = 0;
    for (int s = 0; s < step.num_sequences; s++) {
      const SequenceRows& seq = step.sequences[s];
      const int splits = seq.num_rows == 1 ? num_splits(seq) + (recent_ ? 1 : 0) : 0;
      if (splits) {
        memory_.singles.push_back(s);
        memory_.first_parts.push_back(parts);
        parts += phase_ == Phase::whole ? splits : phase_ == Phase::begin ? num_begun(seq) : 1;
        continue;
      }
      if (phase_ == Phase::begin) continue;
      // The last rows have the most keys, so they start first.
      const int all = seq.num_rows * call.per_kv, share = rows_of_a_task(all, kv_heads, dim, threads);
      for (int end = all; end > 0; end -= share)
        for (int h = 0; h < kv_heads; h++) memory_.tasks.push_back({s, end > share ? end - share : 0, end, h, -1, -1});
    }
    memory_.first_parts.push_back(parts);
    part_size_ = static_cast<size_t>(call.layer.num_heads) * (dim + 2);
    if (memory_.parts.size() < parts * part_size_) memory_.parts.resize(parts * part_size_);
    const int most = parts ? (4 * threads + parts - 1) / parts : 1;
    shares_ = most > kv_heads ? kv_heads : most;
    if (memory_.waiting.size() < memory_.singles.size() * shares_)
      memory_.waiting = List<std::atomic<int>>(memory_.singles.size() * shares_);
    for (size_t i = 0; i < memory_.singles.size(); i++) add_single(static_cast<int>(i), kv_heads);
  }

  int size() const { return static_cast<int>(memory_.tasks.size()); }

  void run(int index) {
    const AttendTask& task = memory_.tasks[index];
    const SequenceRows& seq = call_.step.sequences[task.sequence];
    if (task.single < 0) return run_rows(task);
    if (is_recent(task.single, task.part)) {
      const SequenceRows& own = recent_->step.sequences[task.sequence];
      attend_part(*recent_, own, task.at, own.first_position + 1, task.from, task.to, nullptr, part(task.part));
      return end_part(task, seq);
    }
    int end = task.at / SPLIT * SPLIT + SPLIT;
    if (phase_ == Phase::begin && end > begun_end(seq)) end = begun_end(seq);
    const float* begun = phase_ == Phase::finish ? sums(task.single, 1) : nullptr;
    attend_part(call_, seq, task.at, end, task.from, task.to, begun, part(task.part));
    end_part(task, seq);
  }

 private:
  void run_rows(const AttendTask& task) {
    const SequenceRows& seq = call_.step.sequences[task.sequence];
    if (!recent_) return attend_rows(call_, seq, task.at, task.from, task.to, nullptr);
    static thread_local List<float> sums;
    const size_t need = 2 * static_cast<size_t>(task.to - task.from);
    if (sums.size() < need) sums.resize(need);
    const int last = seq.first_position + (task.to - 1) / call_.per_kv;
    const bool has_earlier = call_.low_of(seq.first_position + task.from / call_.per_kv) < call_.high_of(seq, last);
    if (has_earlier) attend_rows(call_, seq, task.at, task.from, task.to, sums.data());
    attend_rows(*recent_, recent_->step.sequences[task.sequence], task.at, task.from, task.to,
                has_earlier ? sums.data() : nullptr);
  }

  bool is_recent(int single, int number) const { return recent_ && number + 1 == memory_.first_parts[single + 1]; }

  void end_part(const AttendTask& task, const SequenceRows& seq) {
    // The thread that computes the last part of these heads merges all parts in order.
    const int share = task.from * shares_ / call_.layer.cache.num_kv_heads;
    if (memory_.waiting[task.single * shares_ + share].fetch_sub(1) != 1) return;
    if (phase_ == Phase::begin) keep(task.single, task.from, task.to);
    else finish(task, seq);
  }

  // The splits of a single row, which may have no visible keys.
  int first_split(const SequenceRows& seq) const { return call_.low_of(seq.first_position) / SPLIT; }
  int num_splits(const SequenceRows& seq) const {
    const int low = call_.low_of(seq.first_position), high = call_.high_of(seq, seq.first_position);
    return low < high ? (high + SPLIT - 1) / SPLIT - low / SPLIT : 0;
  }

  // `begin` computes the stretches before the one of the row's own key.
  static int begun_end(const SequenceRows& seq) { return seq.first_position / STRETCH * STRETCH; }
  int num_begun(const SequenceRows& seq) const {
    const int end = begun_end(seq);
    return call_.low_of(seq.first_position) < end ? (end + SPLIT - 1) / SPLIT - first_split(seq) : 0;
  }
  static int own_split(const SequenceRows& seq) { return seq.first_position / SPLIT; }

  void add_single(int i, int kv_heads) {
    const int sequence = memory_.singles[i];
    const SequenceRows& seq = call_.step.sequences[sequence];
    const int low = first_split(seq);
    if (phase_ == Phase::begin && num_begun(seq) == 0) keep(i, 0, kv_heads);
    for (int share = 0; share < shares_; share++) {
      // run() recovers the share from `from`, which is ceil(kv_heads * share / shares).
      const int from = (kv_heads * share + shares_ - 1) / shares_;
      const int to = (kv_heads * (share + 1) + shares_ - 1) / shares_;
      memory_.waiting[i * shares_ + share] = memory_.first_parts[i + 1] - memory_.first_parts[i];
      for (int p = memory_.first_parts[i]; p < memory_.first_parts[i + 1]; p++) {
        int at = phase_ == Phase::finish ? begun_end(seq) : (low + p - memory_.first_parts[i]) * SPLIT;
        if (is_recent(i, p)) at = first_recent(seq.first_position);
        memory_.tasks.push_back({sequence, from, to, at, i, p});
      }
    }
  }

  float* part(int number) { return memory_.parts.data() + number * part_size_; }
  float* sums(int single, int which) { return sums_ + (2 * single + which) * part_size_; }

  // Merges parts [first, end) of a query head in order; returns the total, which is the first part.
  float* merged(int first, int end, int h) {
    const int dim = call_.shape.dim;
    float* total = part(first) + h * (dim + 2);
    for (int p = first + 1; p < end; p++) merge_part(total, part(p) + h * (dim + 2));
    return total;
  }
  void merge_part(float* total, const float* more) const {
    merge(total[0], total[1], total + 2, more[0], more[1], more + 2, call_.shape.dim);
  }

  // Multiplies sums over int4 values back, so that sums over int8 values can be added.
  static void turn_back(float* x, int dim) {
    const float factor = 1.0f / static_cast<float>(hadamard_block(dim));
    for (int d = 0; d < dim; d += 16) store(x + d, load<f32x16>(x + d) * factor);
    hadamard(x, dim);
  }

  // Keeps the sums of K/V heads [from, to) of a single row for the call with `finish`.
  void keep(int single, int from, int to) {
    const SequenceRows& seq = call_.step.sequences[memory_.singles[single]];
    const int width = call_.shape.dim + 2, first = memory_.first_parts[single], count = num_begun(seq);
    const int before = own_split(seq) - first_split(seq), earlier = count < before ? count : before;
    for (int h = from * call_.per_kv; h < to * call_.per_kv; h++) {
      float *whole = sums(single, 0) + h * width, *own = sums(single, 1) + h * width;
      if (earlier) std::memcpy(whole, merged(first, first + earlier, h), sizeof(float) * width);
      if (earlier < count) std::memcpy(own, part(first + earlier) + h * width, sizeof(float) * width);
      else own[0] = NOTHING, std::memset(own + 1, 0, sizeof(float) * (width - 1));
    }
  }

  void finish(const AttendTask& task, const SequenceRows& seq) {
    const int dim = call_.shape.dim, heads = call_.layer.num_heads, first = memory_.first_parts[task.single];
    const int end = memory_.first_parts[task.single + 1], last = recent_ ? end - 1 : end;
    const bool is_turned = call_.shape.bits == 4 && !recent_;
    for (int h = task.from * call_.per_kv; h < task.to * call_.per_kv; h++) {
      float* total = first < last ? merged(first, last, h) : part(first) + h * (dim + 2);
      if (recent_ && first < last) {
        if (call_.shape.bits == 4) turn_back(total + 2, dim);
        merge_part(total, part(last) + h * (dim + 2));
      }
      if (phase_ == Phase::finish && own_split(seq) > first_split(seq)) {
        float* earlier = sums(task.single, 0) + h * (dim + 2);
        merge_part(earlier, total);
        total = earlier;
      }
      float* lse = call_.lse ? call_.lse + static_cast<size_t>(seq.first_row) * heads + h : nullptr;
      float inverse = finish_row(call_.sinks_of(seq, seq.first_position), h, total[0], total[1], lse);
      if (is_turned) inverse /= static_cast<float>(hadamard_block(dim));
      float* out = call_.out + seq.first_row * call_.out_stride + h * dim;
      for (int d = 0; d < dim; d += 16) store(out + d, load<f32x16>(total + 2 + d) * inverse);
      if (is_turned) hadamard(out, dim);
    }
  }

  const AttendCall& call_;
  const AttendCall* const recent_;
  AttendMemory& memory_;
  const Phase phase_;
  float* const sums_;
  size_t part_size_ = 0;
  int shares_ = 1;
};

// Those of the blocks of rows, at most; single rows have short tasks anyway.
int64_t multiplications(const AttendCall& call) {
  int64_t sum = 0;
  for (int s = 0; s < call.step.num_sequences; s++) {
    const SequenceRows& seq = call.step.sequences[s];
    if (seq.num_rows > 1) sum += static_cast<int64_t>(seq.num_rows) * seq.kv_len;
  }
  return 2 * sum * call.layer.num_heads * call.shape.dim;
}

void attend(const Step& step, const AttentionLayer& layer, const float* q, size_t q_stride, float* out,
            size_t out_stride, float* lse, const Phased& phased, const RecentStore* recent) {
  ms::Team& team = ms::Team::get();
  const int per_kv = layer.num_heads / layer.cache.num_kv_heads;
  AttentionLayer own = layer;
  if (recent) own.cache = recent->cache;
  const AttendCall call{step, layer, q, q_stride, out, out_stride, lse, HeadShape(layer.cache), per_kv,
                        recent ? Keys::earlier : Keys::all};
  const AttendCall of_block{recent ? recent->step : step, own, q, q_stride, out, out_stride, lse, HeadShape(own.cache),
                            per_kv, Keys::recent};
  static thread_local AttendMemory memory;
  AttendPlan plan(call, recent ? &of_block : nullptr, memory, team.parts_for(multiplications(call)), phased);
  team.parallel(plan.size(), [&](int task) { plan.run(task); });
}

}  // namespace
}  // namespace MS_ISA
