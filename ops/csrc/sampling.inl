// Samples tokens from rows of logits without sorting them.
//
// One pass writes the maximum of every group of 64 and of every block of 1024 logits. The k-th
// largest maximum is a value that at least k logits reach, so the candidates of top-k, top-p,
// min-p and of the log-probabilities are found in the few groups that reach it. Where the sum over
// the whole row is needed, a second pass adds up exp() block by block in double.
//
// A row is always cut into the same blocks and added up in the same order, whatever threads do it.
// Descending order means by scaled logit, and by ascending token id among equal ones.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

namespace MS_ISA {

namespace {

struct Candidate {
  double weight;
  float scaled;
  int32_t token;
};
using Candidates = List<Candidate>;

bool comes_before(const Candidate& a, const Candidate& b) {
  return a.scaled != b.scaled ? a.scaled > b.scaled : a.token < b.token;
}

// Collects the candidates whose scaled logit is at least `least` (never -inf), by token id.
void gather(const View& view, float least, Candidates& to) {
  least = std::max(least, LOWEST);
  const float top = top_of(view) / view.temperature;
  size_t count = 0;
  for (int group = 0; group < view.num_groups(); group++) {
    if (group % GROUPS == 0 && !(view.blocks[group / GROUPS] / view.temperature >= least)) {
      group += GROUPS - 1;
      continue;
    }
    if (!(view.groups[group] / view.temperature >= least)) continue;
    if (to.size() < count + GROUP) to.resize(2 * count + GROUP);
    for (int i = group * GROUP; i < std::min(view.size, (group + 1) * GROUP); i += 16) {
      const f32x16 scaled[1] = {scaled_at(view, i)};
      if (!any(scaled[0] >= least)) continue;
      f64x8 w[2];
      weigh(scaled, top, w);
      for (int j = 0; j < 16; j++) {
        to[count] = {w[j / 8][j % 8], scaled[0][j], i + j};
        count += scaled[0][j] >= least;
      }
    }
  }
  to.resize(count);
}

double total_of(const Candidates& all) {
  double total = 0.0;
  for (const Candidate& each : all) total += each.weight;
  return total;
}

struct FoundCandidate {
  Candidate candidate;
  double mass;  // sum of the weights up to and including the candidate
};

// Returns the first candidate, in the given order, at which the mass exceeds (or reaches) the target.
FoundCandidate find_by_mass(const Candidate* all, size_t count, double mass, double target, bool is_inclusive) {
  FoundCandidate last{all[0], mass};
  for (size_t i = 0; i < count; i++) {
    mass += all[i].weight;
    if (i == 0 || all[i].weight > 0.0) last = {all[i], mass};
    if (is_inclusive ? mass >= target : mass > target) break;
  }
  return last;
}

constexpr int BINS = 256;
constexpr size_t MAX_SORTED = 64;

// Sorts `all` into bins of equal width from the largest scaled logit down, and keeps only the bin in
// which the mass exceeds the target. Returns the mass of the bins before it.
double keep_bin(Candidates& all, float high, float low, double before, double target, bool is_inclusive) {
  double masses[BINS] = {};
  const double scale = (BINS - 1) / (static_cast<double>(high) - low);
  auto bin_of = [&](const Candidate& c) {
    return static_cast<int>((static_cast<double>(high) - c.scaled) * scale);
  };
  for (const Candidate& each : all) masses[bin_of(each)] += each.weight;
  int chosen = 0;
  double chosen_before = before;
  for (int bin = 0; bin < BINS; bin++) {
    if (masses[bin] == 0.0) continue;  // the rounded sum may stay below the target; the last bin is taken then
    chosen = bin, chosen_before = before;
    before += masses[bin];
    if (is_inclusive ? before >= target : before > target) break;
  }
  all.erase(std::remove_if(all.begin(), all.end(), [&](const Candidate& c) { return bin_of(c) != chosen; }),
            all.end());
  return chosen_before;
}

// As find_by_mass(), but in descending order; equal scaled logits in `all` must be ordered by token id.
FoundCandidate find_descending(const Candidates& all, double target, bool is_inclusive) {
  static thread_local Candidates left;
  left = all;
  double before = 0.0;
  while (left.size() > MAX_SORTED) {
    float high = left[0].scaled, low = high;
    for (const Candidate& each : left) high = std::max(high, each.scaled), low = std::min(low, each.scaled);
    if (high == low) return find_by_mass(left.data(), left.size(), before, target, is_inclusive);
    before = keep_bin(left, high, low, before, target, is_inclusive);
  }
  std::sort(left.begin(), left.end(), comes_before);
  return find_by_mass(left.data(), left.size(), before, target, is_inclusive);
}

void keep_best(Candidates& all, size_t k) {
  if (all.size() <= k) return;
  std::nth_element(all.begin(), all.begin() + k, all.end(), comes_before);
  all.resize(k);
  std::sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
}

// Collects all candidates that top-p can keep, and perhaps more, by ever lower bounds until their
// mass suffices.
void gather_mass(const View& view, double enough, Candidates& to) {
  for (int k : {view.num_blocks() / 2, view.num_groups() / 8, view.num_groups() / 2}) {
    if (k == 0) continue;
    gather(view, lower_bound_of(view, k) / view.temperature, to);
    if (total_of(to) >= enough) return;
  }
  gather(view, LOWEST, to);
}

uint64_t splitmix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}
double uniform(uint64_t seed, uint64_t position) {
  const uint64_t mixed = splitmix(splitmix(seed) ^ (position * 0x9E3779B97F4A7C15));
  return static_cast<double>(mixed >> 11) * 0x1p-53;
}

// Samples from the whole row, by token id, without top-k, top-p or min-p.
int sample_whole_row(const View& view, double u) {
  const double target = u * total_of(view);
  double before = 0.0;
  int block = 0, last = 0;
  double last_before = 0.0;
  for (; block < view.num_blocks(); block++) {
    if (view.sums[block] > 0.0) last = block, last_before = before;
    before += view.sums[block];
    if (before > target) break;
  }
  Candidate all[BLOCK];
  const double top = top_of(view) / view.temperature;
  const int begin = last * BLOCK, end = std::min(view.size, begin + BLOCK);
  for (int i = begin; i < end; i += 16) {
    const f32x16 scaled[1] = {scaled_at(view, i)};
    f64x8 w[2];
    weigh(scaled, top, w);
    for (int j = 0; j < 16; j++) all[i - begin + j] = {w[j / 8][j % 8], scaled[0][j], i + j};
  }
  return find_by_mass(all, end - begin, last_before, target, false).candidate.token;
}

// Returns whether probabilities are relative to the whole row, that is without min-p and top-k.
bool needs_whole_sum(const SamplingInputs& inputs, int size) {
  return inputs.temperature > 0.0f && !(inputs.min_p > 0.0f) && (inputs.top_k <= 0 || inputs.top_k >= size);
}

int sample_row(const View& view, const SamplingInputs& inputs) {
  static thread_local Candidates kept;
  const float top = top_of(view) / view.temperature;
  const double u = uniform(inputs.seed, inputs.position);
  const bool has_k = inputs.top_k > 0 && inputs.top_k < view.size, has_p = inputs.top_p < 1.0;
  const bool is_whole = needs_whole_sum(inputs, view.size);
  if (!(std::fabs(top) <= -LOWEST)) return first_top(view);
  if (is_whole && !has_p) return sample_whole_row(view, u);
  float least = LOWEST;
  if (inputs.min_p > 0.0f) least = top + static_cast<float>(std::log(static_cast<double>(inputs.min_p)));
  double total;
  if (is_whole) {
    total = total_of(view);
    gather_mass(view, inputs.top_p * total, kept);
  } else {
    if (has_k) least = std::max(least, lower_bound_of(view, inputs.top_k) / view.temperature);
    gather(view, least, kept);
    if (has_k) keep_best(kept, inputs.top_k);
    total = total_of(kept);
  }
  if (kept.empty()) return first_top(view);
  if (!has_p && !has_k) return find_by_mass(kept.data(), kept.size(), 0.0, u * total, false).candidate.token;
  if (!has_p) return find_descending(kept, u * total, false).candidate.token;
  const FoundCandidate last = find_descending(kept, inputs.top_p * total, true);
  const FoundCandidate chosen = find_descending(kept, u * last.mass, false);
  return (comes_before(last.candidate, chosen.candidate) ? last : chosen).candidate.token;
}

void describe(const View& view, int num_top, SampledRow& out) {
  static thread_local Candidates best;
  const double lse = static_cast<double>(top_of(view)) + std::log(total_of(view));
  const float chosen = view.x[out.token];
  out.logprob = static_cast<float>(chosen - lse);
  out.rank = 1;
  for (int group = 0; group < view.num_groups(); group++) {
    if (!(view.groups[group] > chosen)) continue;
    for (int i = group * GROUP; i < std::min(view.size, (group + 1) * GROUP); i++) out.rank += view.x[i] > chosen;
  }
  out.num_top = std::min(num_top, view.size);
  if (out.num_top == 0) return;
  gather(view, lower_bound_of(view, out.num_top), best);
  out.num_top = std::min(out.num_top, static_cast<int>(best.size()));
  std::partial_sort(best.begin(), best.begin() + out.num_top, best.end(), comes_before);
  for (int i = 0; i < out.num_top; i++) {
    out.top_tokens[i] = best[i].token;
    out.top_logprobs[i] = static_cast<float>(best[i].scaled - lse);
  }
}

// Returns whether each row is cut among the threads because there are too few rows.
bool are_cut(int rows, int shares) { return shares > 1 && rows < 2 * ms::Team::get().size(); }

// Calls f(row) for every row; a task has at least `share` logits.
template <class F>
void for_rows(int rows, int size, int share, F&& f) {
  const int group = std::max(1, share / size);
  ms::Team::get().parallel((rows + group - 1) / group, [&](int task) {
    for (int row = task * group; row < std::min(rows, (task + 1) * group); row++) f(row);
  });
}

void argmax(const float* logits, size_t stride, int rows, int size, int32_t* out) {
  const View shape{nullptr, size, 1.0f, false, false, nullptr, nullptr, nullptr};
  const int blocks = shape.num_blocks(), shares = shape.num_shares();
  List<float> maxima(static_cast<size_t>(rows) * blocks);
  auto view_of = [&](int row) {
    View view = shape;
    view.x = logits + row * stride, view.blocks = maxima.data() + static_cast<size_t>(row) * blocks;
    return view;
  };
  if (are_cut(rows, shares)) {
    ms::Team::get().parallel(rows * shares, [&](int task) { scan(view_of(task / shares), task % shares); });
    for (int row = 0; row < rows; row++) out[row] = first_top(view_of(row));
    return;
  }
  for_rows(rows, size, SHARE, [&](int row) {
    const View view = view_of(row);
    for (int share = 0; share < shares; share++) scan(view, share);
    out[row] = first_top(view);
  });
}

// The views of a call and their memory. Row i samples from view i. Its log-probabilities come from
// its raw view, which is the same one or one after the views of all rows.
class Views {
 public:
  Views(float* logits, size_t stride, int rows, int size, const SamplingInputs* all_inputs) : size_(size), raw_(rows) {
    for (int row = 0; row < rows; row++) {
      const SamplingInputs& inputs = all_inputs[row];
      const bool is_logged = inputs.num_logprobs >= 0;
      const float temperature = inputs.temperature > 0.0f ? inputs.temperature : 1.0f;
      const bool is_raw = is_logged && temperature == 1.0f && !is_adjusted(inputs);
      const bool is_whole = needs_whole_sum(inputs, size), is_cut = !is_whole || inputs.top_p < 1.0;
      add(logits + row * stride, temperature, is_raw || (inputs.temperature > 0.0f && is_cut), is_raw || is_whole);
      raw_[row] = is_raw ? row : -1;
    }
    for (int row = 0; row < rows; row++) {
      if (all_inputs[row].num_logprobs < 0 || raw_[row] >= 0) continue;
      raw_[row] = static_cast<int>(all_.size());
      add(logits + row * stride, 1.0f, true, true);
      if (is_adjusted(all_inputs[row])) copy(all_.back());
    }
    const size_t groups = all_[0].num_groups(), blocks = all_[0].num_blocks();
    maxima_.resize(all_.size() * (groups + blocks));
    sums_.resize(all_.size() * blocks);
    for (size_t i = 0; i < all_.size(); i++) {
      all_[i].groups = maxima_.data() + i * (groups + blocks);
      all_[i].blocks = all_[i].groups + groups;
      all_[i].sums = sums_.data() + i * blocks;
    }
  }

  int count() const { return static_cast<int>(all_.size()); }
  const View& operator[](int i) const { return all_[i]; }
  int raw(int row) const { return raw_[row]; }  // index of its raw view

 private:
  void add(const float* x, float temperature, bool needs_groups, bool needs_sums) {
    all_.push_back({x, size_, temperature, needs_groups, needs_sums, nullptr, nullptr, nullptr});
  }
  void copy(View& view) {
    copies_.emplace_back(view.x, view.x + size_);
    view.x = copies_.back().data();
  }

  int size_;
  List<View> all_;
  List<int> raw_;
  List<List<float>> copies_;
  List<float> maxima_;
  List<double> sums_;
};

void finish(const Views& views, int row, const SamplingInputs& inputs, SampledRow& out) {
  out.token = inputs.temperature > 0.0f ? sample_row(views[row], inputs) : first_top(views[row]);
  out.num_top = 0;
  if (inputs.num_logprobs >= 0) describe(views[views.raw(row)], inputs.num_logprobs, out);
}

bool sample(float* logits, size_t stride, int rows, int size, const SamplingInputs* all_inputs, SampledRow* out) {
  const Views views(logits, stride, rows, size, all_inputs);
  auto& team = ms::Team::get();
  const int shares = views[0].num_shares();
  std::atomic<bool> is_good{true};
  team.parallel(std::any_of(all_inputs, all_inputs + rows, is_adjusted) ? rows : 0, [&](int row) {
    if (is_adjusted(all_inputs[row]) && !adjust(logits + row * stride, size, all_inputs[row])) is_good = false;
  });
  if (!is_good) return false;
  if (are_cut(rows, shares)) {
    const int tasks = views.count() * shares;
    team.parallel(tasks, [&](int task) { scan(views[task / shares], task % shares); });
    team.parallel(tasks, [&](int task) {
      if (views[task / shares].needs_sums) add_up(views[task / shares], task % shares);
    });
    team.parallel(rows, [&](int row) { finish(views, row, all_inputs[row], out[row]); });
    return true;
  }
  // Rows are processed one by one, so that the second pass finds a row in the cache.
  auto prepare = [&](const View& view) {
    for (int share = 0; share < shares; share++) scan(view, share);
    for (int share = 0; view.needs_sums && share < shares; share++) add_up(view, share);
  };
  for_rows(rows, size, SHARE / 8, [&](int row) {
    prepare(views[row]);
    if (all_inputs[row].num_logprobs >= 0 && views.raw(row) != row) prepare(views[views.raw(row)]);
    finish(views, row, all_inputs[row], out[row]);
  });
  return true;
}

// Writes the log-probability, rank and top tokens of tokens[i] in row i. Returns false and writes
// nothing if a token is not in the vocabulary.
bool describe_tokens(const float* logits, size_t stride, int rows, int size, const int32_t* tokens, int num_top,
                     SampledRow* out) {
  if (!are_tokens(tokens, rows, size)) return false;
  for_rows(rows, size, SHARE / 8, [&](int row) {
    static thread_local List<float> maxima;
    static thread_local List<double> sums;
    View view{logits + row * stride, size, 1.0f, true, true, nullptr, nullptr, nullptr};
    maxima.resize(view.num_groups() + view.num_blocks());
    sums.resize(view.num_blocks());
    view.groups = maxima.data(), view.blocks = view.groups + view.num_groups(), view.sums = sums.data();
    for (int share = 0; share < view.num_shares(); share++) scan(view, share);
    for (int share = 0; share < view.num_shares(); share++) add_up(view, share);
    out[row].token = tokens[row];
    describe(view, num_top, out[row]);
  });
  return true;
}

}  // namespace
}  // namespace MS_ISA
