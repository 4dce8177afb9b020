// Divides one layer's attention over int8 K/V into tasks. Included once per instruction set.

namespace MS_ISA {
namespace {

struct AttendTask {
  // A block of rows is query rows [from, to) of K/V head `at`; a single row's task is the split from
  // position `at` on of K/V heads [from, to).
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
class AttendPlan {
 public:
  AttendPlan(const AttendCall& call, AttendMemory& memory, int threads) : call_(call), memory_(memory) {
    const Step& step = call.step;
    const int kv_heads = call.layer.cache.num_kv_heads, dim = call.shape.dim;
    memory_.tasks.clear(), memory_.singles.clear(), memory_.first_parts.clear();
    int parts = 0;
    for (int s = 0; s < step.num_sequences; s++) {
      const SequenceRows& seq = step.sequences[s];
      const int splits = seq.num_rows == 1 ? num_splits(seq) : 0;
      if (splits) {
        memory_.singles.push_back(s);
        memory_.first_parts.push_back(parts);
        parts += splits;
        continue;
      }
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
    if (task.single < 0) return attend_rows(call_, seq, task.at, task.from, task.to);
    attend_part(call_, seq, task.at, task.from, task.to, memory_.parts.data() + task.part * part_size_);
    // The thread that computes the last part of these heads merges all parts in order.
    const int share = task.from * shares_ / call_.layer.cache.num_kv_heads;
    if (memory_.waiting[task.single * shares_ + share].fetch_sub(1) == 1) finish(task, seq);
  }

 private:
  // The splits of a single row, which may have no visible keys.
  int first_split(const SequenceRows& seq) const { return call_.low_of(seq.first_position) / SPLIT; }
  int num_splits(const SequenceRows& seq) const {
    const int low = call_.low_of(seq.first_position), high = call_.high_of(seq, seq.first_position);
    return low < high ? (high + SPLIT - 1) / SPLIT - low / SPLIT : 0;
  }

  void add_single(int i, int kv_heads) {
    const int sequence = memory_.singles[i], low = first_split(call_.step.sequences[sequence]);
    for (int share = 0; share < shares_; share++) {
      // run() recovers the share from `from`, which is ceil(kv_heads * share / shares).
      const int from = (kv_heads * share + shares_ - 1) / shares_;
      const int to = (kv_heads * (share + 1) + shares_ - 1) / shares_;
      memory_.waiting[i * shares_ + share] = memory_.first_parts[i + 1] - memory_.first_parts[i];
      for (int p = memory_.first_parts[i]; p < memory_.first_parts[i + 1]; p++)
        memory_.tasks.push_back({sequence, from, to, (low + p - memory_.first_parts[i]) * SPLIT, i, p});
    }
  }

  void finish(const AttendTask& task, const SequenceRows& seq) {
    const int dim = call_.shape.dim, heads = call_.layer.num_heads;
    for (int h = task.from * call_.per_kv; h < task.to * call_.per_kv; h++) {
      float* total = memory_.parts.data() + memory_.first_parts[task.single] * part_size_ + h * (dim + 2);
      float* more = total;
      for (int p = memory_.first_parts[task.single] + 1; p < memory_.first_parts[task.single + 1]; p++) {
        more += part_size_;
        merge(total[0], total[1], total + 2, more[0], more[1], more + 2, dim);
      }
      float* lse = call_.lse ? call_.lse + static_cast<size_t>(seq.first_row) * heads + h : nullptr;
      const float inverse = finish_row(call_.layer, h, seq.first_position < seq.kv_len, total[0], total[1], lse);
      float* out = call_.out + seq.first_row * call_.out_stride + h * dim;
      for (int d = 0; d < dim; d += 16) store(out + d, load<f32x16>(total + 2 + d) * inverse);
    }
  }

  const AttendCall& call_;
  AttendMemory& memory_;
  size_t part_size_ = 0;
  int shares_ = 1;
};

void attend(const Step& step, const AttentionLayer& layer, const float* q, size_t q_stride, float* out,
            size_t out_stride, float* lse) {
  ms::Team& team = ms::Team::get();
  const AttendCall call{step, layer, q, q_stride, out, out_stride, lse, HeadShape(layer.cache),
                        layer.num_heads / layer.cache.num_kv_heads};
  static thread_local AttendMemory memory;
  AttendPlan plan(call, memory, team.size());
  team.parallel(plan.size(), [&](int task) { plan.run(task); });
}

}  // namespace
}  // namespace MS_ISA
