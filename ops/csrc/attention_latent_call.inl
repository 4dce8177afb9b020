// Divides one layer's attention over int8 latents into tasks. Included once per instruction set.

namespace MS_ISA {
namespace {

// Rows [from, to) of a sequence. A single token's task has splits [split, split_end), whose sums it
// writes to parts; another one has all splits.
struct LatentTask {
  int sequence, from, to, split, split_end, single;
};

// A token that is alone in its sequence: its splits are divided among tasks, and then merged.
struct LatentSingle {
  int sequence, splits;
  size_t parts;  // its first part, of all heads
};

class LatentPlan {
 public:
  LatentPlan(const LatentCall& call, int threads) : call_(call), width_(call.shape.value_dim + 2) {
    static thread_local List<LatentTask> tasks;
    static thread_local List<LatentSingle> singles;
    static thread_local List<float> parts;
    tasks.clear(), singles.clear();
    const int heads = call.layer.num_heads;
    size_t count = 0;
    for (int s = 0; s < call.step.num_sequences; s++) {
      const SequenceRows& seq = call.step.sequences[s];
      if (seq.num_rows > 1) {
        add_rows(tasks, s, seq, threads);
        continue;
      }
      const int high = call.high_of(seq, seq.first_position), splits = (high + LATENT_SPLIT - 1) / LATENT_SPLIT;
      singles.push_back({s, splits, count});
      count += static_cast<size_t>(splits) * heads;
    }
    // A task has several splits of a token where there are enough, as it then reads ahead; where there
    // are few, the heads are divided too, into half blocks where some threads had nothing to do.
    const int all = static_cast<int>(count / heads), each = all / (4 * threads) > 1 ? all / (4 * threads) : 1;
    const int whole = (heads + LATENT_ROWS - 1) / LATENT_ROWS, rows = LATENT_ROWS / (all * whole < threads ? 2 : 1);
    const int blocks = (heads + rows - 1) / rows, most = all ? (2 * threads + all - 1) / all : 1;
    const int shares = most < blocks ? most : blocks;
    for (size_t i = 0; i < singles.size(); i++)
      for (int split = 0; split < singles[i].splits; split += each)
        for (int share = 0; share < shares; share++) {
          const int from = blocks * share / shares * rows, to = blocks * (share + 1) / shares * rows;
          const int end = split + each < singles[i].splits ? split + each : singles[i].splits;
          tasks.push_back({singles[i].sequence, from, to < heads ? to : heads, split, end, static_cast<int>(i)});
        }
    if (parts.size() < count * width_) parts.resize(count * width_);
    tasks_ = &tasks, singles_ = &singles, parts_ = parts.data();
  }

  int size() const { return static_cast<int>(tasks_->size()); }
  int num_merges() const { return static_cast<int>(singles_->size()) * shares_of_merge(); }

  void run(int index) const {
    const LatentTask& task = (*tasks_)[index];
    const SequenceRows& seq = call_.step.sequences[task.sequence];
    LatentRows rows(call_, seq, task.from, task.to);
    const int high = rows.max_high(), splits = (high + LATENT_SPLIT - 1) / LATENT_SPLIT;
    const bool is_single = task.single >= 0;
    const int last = is_single ? task.split_end : splits, goes_to = last * LATENT_SPLIT;
    for (int split = task.split; split < last; split++) {
      const int first = split * LATENT_SPLIT, end = first + LATENT_SPLIT;
      rows.add_split(first, end < high ? end : high, goes_to < high ? goes_to : high);
      if (is_single) rows.keep(part((*singles_)[task.single], split, task.from));
      else rows.end_split(split == 0);
    }
    if (is_single) return;
    rows.for_totals([&](int row, float m, float l, const float* acc) {
      finish(seq, row, splits ? m : NOTHING, splits ? l : 0.0f, acc);
    });
  }

  // Merges the splits of some heads of a single token.
  void merge_some(int index) const {
    const int heads = call_.layer.num_heads, shares = shares_of_merge();
    const LatentSingle& single = (*singles_)[index / shares];
    const SequenceRows& seq = call_.step.sequences[single.sequence];
    for (int h = heads * (index % shares) / shares; h < heads * (index % shares + 1) / shares; h++) {
      float nothing[2] = {NOTHING, 0.0f}, *total = single.splits ? part(single, 0, h) : nothing;
      for (int split = 1; split < single.splits; split++) {
        const float* more = part(single, split, h);
        merge(total[0], total[1], total + 2, more[0], more[1], more + 2, call_.shape.value_dim);
      }
      finish(seq, h, total[0], total[1], total + 2);
    }
  }

 private:
  int shares_of_merge() const { return call_.layer.num_heads < 8 ? call_.layer.num_heads : 8; }

  // The last rows have the most keys, so they start first.
  void add_rows(List<LatentTask>& tasks, int s, const SequenceRows& seq, int threads) const {
    const int all = seq.num_rows * call_.layer.num_heads, fair = all / (4 * threads);
    const int most = 128 * 1024 / call_.shape.value_dim;  // their sums stay in the second-level cache
    const int share = ((fair < most ? fair : most) + LATENT_ROWS - 1) / LATENT_ROWS * LATENT_ROWS;
    for (int end = all, step = share > 0 ? share : LATENT_ROWS; end > 0; end -= step)
      tasks.push_back({s, end > step ? end - step : 0, end, 0, 0, -1});
  }

  float* part(const LatentSingle& single, int split, int head) const {
    return parts_ + (single.parts + static_cast<size_t>(split) * call_.layer.num_heads + head) * width_;
  }

  // Writes the result of a row of a sequence. A row without keys has l = 0, and acc is not read.
  void finish(const SequenceRows& seq, int row, float m, float l, const float* acc) const {
    const size_t at = static_cast<size_t>(seq.first_row) * call_.layer.num_heads + row;
    const int dim = call_.shape.value_dim;
    const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
    float* out = call_.out + at * dim;
    for (int d = 0; d < dim; d += 16) store(out + d, l == 0.0f ? f32x16{} : load<f32x16>(acc + d) * inverse);
    if (call_.lse) call_.lse[at] = l == 0.0f ? NO_KEYS : (m + __builtin_log2f(l)) * LN2;
  }

  const LatentCall& call_;
  const size_t width_;
  const List<LatentTask>* tasks_;
  const List<LatentSingle>* singles_;
  float* parts_;
};

void attend_latent(const Step& step, const LatentLayer& layer, const float* q, size_t q_stride, float* out, float* lse,
                   bool with_matrix) {
  ms::Team& team = ms::Team::get();
  const LatentCall call{step, layer, q, q_stride, out, lse, LatentShape(layer), HAS_MATRIX && with_matrix};
  int64_t pairs = 0;
  for (int s = 0; s < step.num_sequences; s++)
    if (step.sequences[s].num_rows > 1) pairs += static_cast<int64_t>(step.sequences[s].num_rows) * step.sequences[s].kv_len;
  const LatentPlan plan(call, team.parts_for(2 * pairs * layer.num_heads * layer.value_dim));
  team.parallel(plan.size(), [&](int task) {
    plan.run(task);
    if (call.has_matrix) release_matrix();
  });
  team.parallel(plan.num_merges(), [&](int task) { plan.merge_some(task); });
}

}  // namespace
}  // namespace MS_ISA
