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

constexpr int GROUP = 64, GROUPS = 16, BLOCK = GROUP * GROUPS, SHARE = 16 * BLOCK;
constexpr float LOWEST = -std::numeric_limits<float>::max();
constexpr double LOG2E_DOUBLE = 1.4426950408889634;

template <size_t I>
MS_INLINE f64x8 eight_of(f32x16 v) {
#if defined(__AVX512DQ__)
  return (f64x8)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, I));
#else
  float half[16];
  store(half, v);
  return MS_WIDEN(f64x8, f32x8, half + 8 * I);
#endif
}

// Computes y = y * r + c for all N vectors.
template <size_t N>
MS_INLINE void step(f64x8 (&y)[N], const f64x8 (&r)[N], double c) {
  unroll<N>([&](auto i) MS_LAMBDA { y[i] = fma(y[i], r[i], f64x8{} + c); });
}

// Computes x = 2^x for x < 1023 with a relative error below 6e-11; the result is 0 below -1021 and for
// NaN. The N vectors are interleaved, since a processor's window is too short to overlap one chain of
// multiplications with the next.
template <size_t N>
MS_INLINE void exp2_all(f64x8 (&x)[N]) {
  constexpr double MAGIC = 6755399441055744.0;  // 1.5 * 2^52: the sum ends in the nearest integer
  f64x8 shifted[N], r[N], y[N];
  unroll<N>([&](auto i) MS_LAMBDA { shifted[i] = x[i] + MAGIC; });
  unroll<N>([&](auto i) MS_LAMBDA { r[i] = shifted[i] - MAGIC; });
  unroll<N>([&](auto i) MS_LAMBDA { r[i] = x[i] - r[i]; });
  unroll<N>([&](auto i) MS_LAMBDA { y[i] = f64x8{} + 1.5303699001378845e-05; });
  step(y, r, 0.00015469729140704658);  // Chebyshev interpolation on [-1/2, 1/2]
  step(y, r, 0.0013333478480888061);
  step(y, r, 0.009618025613598036);
  step(y, r, 0.055504109063177154);
  step(y, r, 0.24022651213495422);
  step(y, r, 0.6931471805568341);
  step(y, r, 0.9999999999595622);
  unroll<N>([&](auto i) MS_LAMBDA {
    x[i] = (f64x8)(((i64x8)y[i] + ((i64x8)shifted[i] << 52)) & (shifted[i] > MAGIC - 1021.0));
  });
}

// Computes w = exp(s - top), eight numbers at a time.
template <size_t N>
MS_INLINE void weigh(const f32x16 (&s)[N], double top, f64x8 (&w)[2 * N]) {
  const f64x8 scale = f64x8{} + LOG2E_DOUBLE, shift = f64x8{} - top * LOG2E_DOUBLE;
  unroll<N>([&](auto i) MS_LAMBDA {
    w[2 * i] = fma(eight_of<0>(s[i]), scale, shift);
    w[2 * i + 1] = fma(eight_of<1>(s[i]), scale, shift);
  });
  exp2_all(w);
}

MS_INLINE bool any(i32x16 mask) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#else
  int64_t parts[8];
  store(parts, mask);
  return (parts[0] | parts[1] | parts[2] | parts[3] | parts[4] | parts[5] | parts[6] | parts[7]) != 0;
#endif
}

// One row of logits and the results of the passes over it.
struct View {
  const float* x;
  int size;
  float temperature;
  bool needs_groups, needs_sums;
  float *groups, *blocks;  // maxima
  double* sums;            // of exp(x / temperature - top), per block

  int num_groups() const { return (size + GROUP - 1) / GROUP; }
  int num_blocks() const { return (size + BLOCK - 1) / BLOCK; }
  int num_shares() const { return (size + SHARE - 1) / SHARE; }
};

MS_INLINE f32x16 logits_at(const View& view, int i) {
  if (view.size - i >= 16) return load<f32x16>(view.x + i);
  f32x16 v = splat(-std::numeric_limits<float>::infinity());
  for (int j = i; j < view.size; j++) v[j - i] = view.x[j];
  return v;
}

MS_INLINE f32x16 scaled_at(const View& view, int i) { return logits_at(view, i) / view.temperature; }

// max() returns its second argument where one is NaN, so the maximum so far must be that one.
MS_INLINE f32x16 max_of_group(const View& view, int begin) {
  const float* x = view.x + begin;
  f32x16 largest = splat(-std::numeric_limits<float>::infinity());
  if (view.size - begin >= GROUP) {
    const f32x16 other = max(load<f32x16>(x + 32), max(load<f32x16>(x + 48), largest));
    return max(max(load<f32x16>(x), max(load<f32x16>(x + 16), largest)), other);
  }
  for (int i = begin; i < view.size; i += 16) largest = max(logits_at(view, i), largest);
  return largest;
}

MS_INLINE f32x16 max_of_block(const float* x) {
  const f32x16 nothing = splat(-std::numeric_limits<float>::infinity());
  f32x16 largest[8];
  unroll<8>([&](auto j) MS_LAMBDA { largest[j] = max(load<f32x16>(x + 16 * j), nothing); });
  for (int i = 128; i < BLOCK; i += 128)
    unroll<8>([&](auto j) MS_LAMBDA {
      largest[j] = max(load<f32x16>(x + i + 16 * j), largest[j]);
      prefetch(x + i + 16 * j + BLOCK);
    });
  return max(max(max(largest[0], largest[4]), max(largest[1], largest[5])),
             max(max(largest[2], largest[6]), max(largest[3], largest[7])));
}

MS_INLINE void scan_block(const View& view, int block) {
  const int first = block * BLOCK, end = std::min(view.size, first + BLOCK);
  if (!view.needs_groups && end == first + BLOCK) {
    view.blocks[block] = reduce_max(max_of_block(view.x + first));
    return;
  }
  f32x16 largest = splat(-std::numeric_limits<float>::infinity());
  for (int begin = first; begin < end; begin += GROUP) {
    const f32x16 here = max_of_group(view, begin);
    if (view.needs_groups) view.groups[begin / GROUP] = reduce_max(here);
    largest = max(here, largest);
  }
  view.blocks[block] = reduce_max(largest);
}

void scan(const View& view, int share) {
  const int end = std::min(view.num_blocks(), (share + 1) * (SHARE / BLOCK));
  for (int block = share * (SHARE / BLOCK); block < end; block++) scan_block(view, block);
}

float top_of(const View& view) {
  float top = view.blocks[0];
  for (int block = 1; block < view.num_blocks(); block++) top = std::max(top, view.blocks[block]);
  return top;
}

// Returns the index of the first of the largest logits.
int first_top(const View& view) {
  const float top = top_of(view);
  int block = 0;
  while (block < view.num_blocks() && view.blocks[block] != top) block++;
  int i = block * BLOCK;
  while (i + 16 <= view.size && !any(load<f32x16>(view.x + i) == top)) i += 16;
  for (; i < view.size; i++)
    if (view.x[i] == top) return i;
  return 0;  // NaN
}

void add_up(const View& view, int share) {
  const double top = top_of(view) / view.temperature;
  const int last = std::min(view.num_blocks(), (share + 1) * (SHARE / BLOCK));
  for (int block = share * (SHARE / BLOCK); block < last; block++) {
    const int begin = block * BLOCK, end = std::min(view.size, begin + BLOCK);
    f64x8 sum[4] = {};
    auto add = [&](const f32x16(&scaled)[2]) MS_LAMBDA {
      f64x8 w[4];
      weigh(scaled, top, w);
      unroll<4>([&](auto j) MS_LAMBDA { sum[j] += w[j]; });
    };
    int i = begin;
    for (; i + 32 <= end; i += 32)
      add({load<f32x16>(view.x + i) / view.temperature, load<f32x16>(view.x + i + 16) / view.temperature});
    for (; i < end; i += 32) add({scaled_at(view, i), scaled_at(view, i + 16)});
    const f64x8 all = (sum[0] + sum[2]) + (sum[1] + sum[3]);
    view.sums[block] = ((all[0] + all[1]) + (all[2] + all[3])) + ((all[4] + all[5]) + (all[6] + all[7]));
  }
}

double total_of(const View& view) {
  double total = 0.0;
  for (int block = 0; block < view.num_blocks(); block++) total += view.sums[block];
  return total;
}

// Returns a value near the k-th largest that at least k logits reach; LOWEST if k is too large.
float lower_bound_of(const View& view, int k) {
  static thread_local List<float> copy;
  const bool coarse = k <= view.num_blocks();
  if (!coarse && k > view.num_groups()) return LOWEST;
  const float* maxima = coarse ? view.blocks : view.groups;
  copy.assign(maxima, maxima + (coarse ? view.num_blocks() : view.num_groups()));
  std::nth_element(copy.begin(), copy.begin() + (k - 1), copy.end(),
                   [](float a, float b) { return a > b; });
  return std::max(copy[k - 1], LOWEST);
}

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

// Sets x[tokens[i]] = change(x[tokens[i]], i), only once for a token that occurs several times.
template <class Token, class F>
void change_each(float* x, const Token* tokens, int count, F&& change) {
  static thread_local List<float> values;
  values.resize(count);
  for (int i = 0; i < count; i++) values[i] = change(x[tokens[i]], i);
  for (int i = 0; i < count; i++) x[tokens[i]] = values[i];
}

template <class Token>
bool are_tokens(const Token* tokens, int count, int size) {
  for (int i = 0; i < count; i++)
    if (tokens[i] < 0 || tokens[i] >= size) return false;
  return true;
}

bool is_adjusted(const SamplingInputs& inputs) {
  return inputs.num_tokens || inputs.num_biases || inputs.num_forbidden || inputs.mask;
}

// Sets logits to minus infinity where the mask has no bit. Most words are all zeros or all ones.
void apply_mask(float* x, int size, const uint32_t* mask) {
  constexpr float NEVER = -std::numeric_limits<float>::infinity();
  for (int begin = 0; begin < size; begin += 32) {
    const uint32_t word = mask[begin / 32];
    if (word == ~0u) continue;
    const int count = std::min(32, size - begin);
    if (word == 0) {
      std::fill_n(x + begin, count, NEVER);
      continue;
    }
    for (int i = 0; i < count; i++) x[begin + i] = word >> i & 1 ? x[begin + i] : NEVER;
  }
}

// Applies penalties, biases, forbidden tokens and the mask. Returns false and changes nothing if a
// token is not in the vocabulary.
bool adjust(float* x, int size, const SamplingInputs& inputs) {
  const int num_output = inputs.num_tokens ? inputs.num_tokens - inputs.num_prompt : 0;
  const int64_t* output = num_output ? inputs.tokens + inputs.num_prompt : nullptr;
  if (!are_tokens(inputs.tokens, inputs.num_tokens, size) || !are_tokens(inputs.bias_tokens, inputs.num_biases, size) ||
      !are_tokens(inputs.forbidden, inputs.num_forbidden, size))
    return false;
  if (inputs.repetition != 1.0f)
    change_each(x, inputs.tokens, inputs.num_tokens,
                [&](float v, int) { return v > 0.0f ? v / inputs.repetition : v * inputs.repetition; });
  if (inputs.presence != 0.0f)
    change_each(x, output, num_output, [&](float v, int) { return v - inputs.presence; });
  if (inputs.frequency != 0.0f)
    for (int i = 0; i < num_output; i++) x[output[i]] -= inputs.frequency;
  change_each(x, inputs.bias_tokens, inputs.num_biases, [&](float v, int i) { return v + inputs.biases[i]; });
  for (int i = 0; i < inputs.num_forbidden; i++) x[inputs.forbidden[i]] = -std::numeric_limits<float>::infinity();
  if (inputs.mask) apply_mask(x, size, inputs.mask);
  return true;
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
