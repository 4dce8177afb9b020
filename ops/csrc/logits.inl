// Passes over rows of logits: the maxima of groups and blocks, the sum of exp() in double, and the
// changes of logits by penalties, biases and masks. sampling.inl draws from what they return.
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

}  // namespace
}  // namespace MS_ISA
