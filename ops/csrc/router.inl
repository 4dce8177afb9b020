// The router of a mixture. Included once per instruction set.
//
// A logit is one chain of sums in sixteen lanes, folded in one order, whatever the number of rows and
// threads, so a row's experts and weights have the same bits in any batch.

namespace MS_ISA {
namespace {

// Rows and experts of the micro kernel, whose sums stay in registers.
constexpr int ROUTED_ROWS = HAS_32_REGISTERS ? 6 : 2, ROUTED_EXPERTS = HAS_32_REGISTERS ? 4 : 2;

template <DType TYPE, int ROWS>
__attribute__((noinline)) void add_logits(const Router& router, const float* x, size_t stride, int expert, float* logits) {
  const size_t num_in = router.num_in, item = TYPE == DType::f32 ? 4 : 2;
  const char* weight[ROUTED_EXPERTS];
  for (int e = 0; e < ROUTED_EXPERTS; e++) {  // the last expert again beyond the end
    const size_t at = expert + e < router.num_experts ? expert + e : router.num_experts - 1;
    weight[e] = static_cast<const char*>(router.weight) + at * num_in * item;
  }
  f32x16 sum[ROWS][ROUTED_EXPERTS] = {};
  auto add = [&](int k, int left) MS_LAMBDA {
    f32x16 w[ROUTED_EXPERTS];
    unroll<ROUTED_EXPERTS>([&](auto e) MS_LAMBDA {
      w[e] = row_at(weight[e], TYPE, k, left);
      prefetch(weight[e] + k * item + AHEAD);
    });
    unroll<ROWS>([&](auto m) MS_LAMBDA {
      const f32x16 xs = load<f32x16>(x + m * stride + k);
      unroll<ROUTED_EXPERTS>([&](auto e) MS_LAMBDA { sum[m][e] = fma(xs, w[e], sum[m][e]); });
    });
  };
  int k = 0;
  for (; k + 16 <= router.num_in; k += 16) add(k, 16);
  if (k < router.num_in) add(k, router.num_in - k);
  for (int m = 0; m < ROWS; m++)
    for (int e = 0; e < ROUTED_EXPERTS && expert + e < router.num_experts; e++) {
      const float y = reduce_add(sum[m][e]);
      logits[static_cast<size_t>(m) * router.num_experts + expert + e] =
          router.bias ? y + router.bias[expert + e] : y;
    }
}

using AddLogits = void (*)(const Router&, const float*, size_t, int, float*);
struct AddLogitsTable { AddLogits at[ROUTED_ROWS]; };
template <DType TYPE, size_t... I>
constexpr AddLogitsTable add_logits_table(std::index_sequence<I...>) {
  return {{add_logits<TYPE, static_cast<int>(I) + 1>...}};
}
constexpr AddLogitsTable ADD_LOGITS[2] = {
    add_logits_table<DType::f32>(std::make_index_sequence<ROUTED_ROWS>{}),
    add_logits_table<DType::bf16>(std::make_index_sequence<ROUTED_ROWS>{}),
};

// Computes the logits of rows for a few experts, in groups of rows of about one size.
void some_logits(const Router& router, const float* x, size_t stride, int rows, int expert, float* logits) {
  const AddLogitsTable& add = ADD_LOGITS[static_cast<int>(router.type)];
  const int groups = (rows + ROUTED_ROWS - 1) / ROUTED_ROWS;
  for (int g = 0, m = 0; g < groups; g++) {
    const int some = (rows - m + groups - g - 1) / (groups - g);
    add.at[some - 1](router, x + m * stride, stride, expert, logits + static_cast<size_t>(m) * router.num_experts);
    m += some;
  }
}

// Replaces logits by their scores.
void score(float* x, int n, bool is_sigmoid) {
  if (is_sigmoid) {
    for (int i = 0; i < n; i += 16) put(x, DType::f32, i, sigmoid(some_of(x, i, n - i)), n - i);
    return;
  }
  float top = x[0], sum = 0.0f;
  for (int i = 1; i < n; i++) top = x[i] > top ? x[i] : top;
  for (int i = 0; i < n; i += 16) put(x, DType::f32, i, exp(some_of(x, i, n - i) - top), n - i);
  for (int i = 0; i < n; i++) sum += x[i];
  for (int i = 0; i < n; i++) x[i] /= sum;
}

// Writes the indices of the k largest of n numbers, NaN first and the lower index first of equal ones.
void top_of(const float* x, int n, int k, int32_t* best) {
  auto precedes = [](float a, float b) { return a > b || (a != a && b == b); };
  int count = 0;
  for (int i = 0; i < n; i++) {
    if (count == k && !precedes(x[i], x[best[k - 1]])) continue;
    int at = count < k ? count++ : k - 1;
    for (; at > 0 && precedes(x[i], x[best[at - 1]]); at--) best[at] = best[at - 1];
    best[at] = i;
  }
}

// Sets the scores of all but the best groups to -infinity. memory: for num_groups numbers twice.
void keep_best_groups(const Router& router, float* choice, float* memory) {
  const int groups = router.num_groups, each = router.num_experts / groups;
  int32_t* top = reinterpret_cast<int32_t*>(memory + groups);
  int32_t* best = top + groups;
  for (int g = 0; g < groups; g++) {
    top_of(choice + g * each, each, router.group_best, best);
    memory[g] = 0.0f;
    for (int i = 0; i < router.group_best; i++) memory[g] += choice[g * each + best[i]];
  }
  top_of(memory, groups, router.num_top_groups, top);
  for (int g = 0; g < groups; g++) {
    bool is_kept = false;
    for (int i = 0; i < router.num_top_groups; i++) is_kept |= top[i] == g;
    for (int i = 0; !is_kept && i < each; i++) choice[g * each + i] = -__builtin_inff();
  }
}

// Chooses the experts of one row. memory: for num_experts numbers four times.
void choose_experts(const Router& router, float* scores, int32_t* experts, float* weights, float* memory) {
  const int n = router.num_experts, k = router.top_k;
  if (!router.is_after_top_k) score(scores, n, router.is_sigmoid);
  float* choice = scores;
  if (router.correction || router.num_groups > 1) {
    choice = memory;
    for (int i = 0; i < n; i++) choice[i] = router.correction ? scores[i] + router.correction[i] : scores[i];
  }
  if (router.num_groups > 1) keep_best_groups(router, choice, memory + n);
  top_of(choice, n, k, experts);
  for (int i = 0; i < k; i++) weights[i] = scores[experts[i]];
  if (router.is_after_top_k) score(weights, k, router.is_sigmoid);
  if (router.is_normalized) {
    float sum = 0.0f;
    for (int i = 0; i < k; i++) sum += weights[i];
    for (int i = 0; i < k; i++) weights[i] /= sum + router.sum_eps;
  }
  for (int i = 0; i < k; i++) {
    weights[i] *= router.scale;
    if (router.expert_scales) weights[i] *= router.expert_scales[experts[i]];
  }
}

void route(const Router& router, const Rows& x, int rows, int32_t* experts, float* weights) {
  ms::Team& team = ms::Team::get();
  const int n = router.num_experts, in = router.num_in, k = router.top_k;
  const size_t stride = (in + 15) / 16 * 16, row_bytes = x.stride * (x.type == DType::f32 ? 4 : 2);
  List<float> wide(rows * stride), logits(static_cast<size_t>(rows) * n);
  const int share = 1 + 16384 / in;
  team.parallel((rows + share - 1) / share, [&](int task) {
    for (int t = task * share; t < rows && t < (task + 1) * share; t++) {
      const char* row = static_cast<const char*>(x.data) + t * row_bytes;
      for (int i = 0; i < in; i += 16) store(wide.data() + t * stride + i, row_at(row, x.type, i, in - i));
    }
  });
  // A task is a few experts for some rows, which stay in cache for all of them.
  constexpr int TASK_ROWS = 32, TASK_EXPERTS = 2 * ROUTED_EXPERTS;
  const int parts = (n + TASK_EXPERTS - 1) / TASK_EXPERTS, blocks = (rows + TASK_ROWS - 1) / TASK_ROWS;
  team.parallel(parts * blocks, [&](int task) {
    const int first = task / parts * TASK_ROWS, count = rows - first < TASK_ROWS ? rows - first : TASK_ROWS;
    for (int e = task % parts * TASK_EXPERTS, end = e + TASK_EXPERTS; e < end && e < n; e += ROUTED_EXPERTS)
      some_logits(router, wide.data() + first * stride, stride, count, e, logits.data() + static_cast<size_t>(first) * n);
  });
  const int each = 1 + 1024 / n;
  team.parallel((rows + each - 1) / each, [&](int task) {
    List<float> memory(4 * static_cast<size_t>(n));
    for (int t = task * each; t < rows && t < (task + 1) * each; t++)
      choose_experts(router, logits.data() + static_cast<size_t>(t) * n, experts + t * k, weights + t * k, memory.data());
  });
}

}  // namespace
}  // namespace MS_ISA
