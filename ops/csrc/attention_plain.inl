// Decode attention over bf16 or fp32 K/V: one query row for each sequence, keys and values at any
// token and head stride. Included once per instruction set.
//
// The kernel takes sixteen tokens at a time: dot products in fp32, an online softmax in base 2, and
// the weighted sum of V. It computes all query heads of a K/V head together, so that each byte is
// read once. Each run of SPLIT tokens has its own sums, and these parts are merged in order: a row
// has the same bits in any batch.

namespace MS_ISA {
namespace {

template <DType TYPE>
MS_INLINE f32x16 plain_at(const void* p, size_t i) {
  return TYPE == DType::f32 ? load<f32x16>(static_cast<const float*>(p) + i)
                            : from_bf16(static_cast<const uint16_t*>(p) + i);
}

// Adds tokens [0, n) of one K/V head, n <= 16, for G query heads. q, acc: [G][dim]; m, l: [G].
// cap: the soft cap of scores; 0: none.
template <DType TYPE, int G>
MS_INLINE void plain_tokens(const char* k, const char* v, size_t token_bytes, int n, int dim,
                            float cap, const float* q, float* m, float* l, float* acc) {
  f32x16 score[G];
  unroll<G>([&](auto g) MS_LAMBDA { score[g] = splat(NOTHING); });
  for (int t = 0; t < n; t++) {
    const char* row = k + t * token_bytes;
    f32x16 sum[G];
    unroll<G>([&](auto g) MS_LAMBDA { sum[g] = splat(0.0f); });
    for (int d = 0; d < dim; d += 16) {
      const f32x16 x = plain_at<TYPE>(row, d);
      unroll<G>([&](auto g) MS_LAMBDA { sum[g] = fma(x, load<f32x16>(q + g * dim + d), sum[g]); });
    }
    // Prefetches the next tokens of K and V.
    for (int d = 0; d < dim; d += TYPE == DType::f32 ? 16 : 32) {
      const size_t ahead = 16 * token_bytes + d * (TYPE == DType::f32 ? 4 : 2);
      prefetch(row + ahead);
      prefetch(v + t * token_bytes + ahead);
    }
    unroll<G>([&](auto g) MS_LAMBDA { score[g] = select(LANES == t, sum_all(sum[g]), score[g]); });
  }
  if (cap > 0.0f)
    for (int g = 0; g < G; g++) score[g] = select(LANES < n, soft_capped(cap, score[g]), splat(NOTHING));
  f32x16 shrink[G];
  alignas(64) float weight[G][16];
  unroll<G>([&](auto g) MS_LAMBDA {
    const f32x16 now = max(max_all(score[g]), splat(m[g]));
    shrink[g] = exp2_neg(splat(m[g]) - now);
    const f32x16 w = select(LANES < n, exp2_neg(score[g] - now), splat(0.0f));
    store(weight[g], w);
    l[g] = l[g] * shrink[g][0] + reduce_add(w);
    m[g] = now[0];
  });
  for (int d = 0; d < dim; d += 16) {
    f32x16 sum[G];
    unroll<G>([&](auto g) MS_LAMBDA { sum[g] = load<f32x16>(acc + g * dim + d) * shrink[g]; });
    for (int t = 0; t < n; t++) {
      const f32x16 x = plain_at<TYPE>(v + t * token_bytes, d);
      unroll<G>([&](auto g) MS_LAMBDA { sum[g] = fma(splat(weight[g][t]), x, sum[g]); });
    }
    unroll<G>([&](auto g) MS_LAMBDA { store(acc + g * dim + d, sum[g]); });
  }
}

template <DType TYPE, int G>
__attribute__((noinline)) void plain_part(const char* k, const char* v, size_t token_bytes, int n,
                                          int dim, float cap, const float* q, float* m, float* l, float* acc) {
  for (int t = 0; t < n; t += 16)
    plain_tokens<TYPE, G>(k + t * token_bytes, v + t * token_bytes, token_bytes, n - t < 16 ? n - t : 16,
                          dim, cap, q, m, l, acc);
}

using PlainPart = void (*)(const char*, const char*, size_t, int, int, float, const float*, float*, float*, float*);
constexpr PlainPart PLAIN_PART[2][4] = {
    {plain_part<DType::f32, 1>, plain_part<DType::f32, 2>, plain_part<DType::f32, 3>, plain_part<DType::f32, 4>},
    {plain_part<DType::bf16, 1>, plain_part<DType::bf16, 2>, plain_part<DType::bf16, 3>, plain_part<DType::bf16, 4>},
};

struct PlainTask {
  int sequence, first, end, kv_head;
};

// The first phase ends before the run of 16 tokens that has the row's own key, the last one.
MS_INLINE int plain_begun_end(const PlainSequence& seq) { return (seq.length - 1) / 16 * 16; }

void decode_plain(const PlainSequence* sequences, int count, const PlainLayer& layer, const void* q,
                  size_t q_stride, DType q_type, float* out, float* lse, const Phased& phased) {
  const int dim = layer.head_dim, heads = layer.num_heads, per_kv = heads / layer.num_kv_heads;
  const size_t part_size = static_cast<size_t>(per_kv) * (dim + 2), item = layer.type == DType::f32 ? 4 : 2;
  static thread_local List<PlainTask> tasks;
  static thread_local List<float> parts;
  static thread_local List<int> firsts;  // first task of each sequence and K/V head
  tasks.clear(), firsts.clear();
  for (int s = 0; s < count; s++)
    for (int h = 0; h < layer.num_kv_heads; h++) {
      firsts.push_back(static_cast<int>(tasks.size()));
      const int length = sequences[s].length, begun = length ? plain_begun_end(sequences[s]) : 0;
      const int last = phased.phase == Phase::begin ? begun : length;
      for (int first = phased.phase == Phase::finish ? begun : 0; first < last; first = first / SPLIT * SPLIT + SPLIT)
        tasks.push_back({s, first, first / SPLIT * SPLIT + SPLIT < last ? first / SPLIT * SPLIT + SPLIT : last, h});
    }
  firsts.push_back(static_cast<int>(tasks.size()));
  parts.resize(tasks.size() * part_size);
  const PlainTask* all = tasks.data();
  float* all_parts = parts.data();
  // Part `which` of the sums that are kept between two phases, of pair i of a sequence and a K/V head.
  const auto kept = [&](int i, int which) {
    return phased.sums + (2 * (i / layer.num_kv_heads) + which) * layer.num_kv_heads * part_size +
           i % layer.num_kv_heads * part_size;
  };
  ms::Team::get().parallel(static_cast<int>(tasks.size()), [&](int i) {
    const PlainTask& task = all[i];
    const PlainSequence& seq = sequences[task.sequence];
    const int n = task.end - task.first;
    const size_t at = (task.first * seq.token_stride + task.kv_head * seq.head_stride) * item;
    float *m = all_parts + i * part_size, *l = m + per_kv, *acc = l + per_kv;
    static thread_local List<float> wide;
    wide.resize(per_kv * dim);
    const size_t row = task.sequence * q_stride + static_cast<size_t>(task.kv_head) * per_kv * dim;
    for (int d = 0; d < per_kv * dim; d += 16) {
      const f32x16 x = q_type == DType::f32 ? plain_at<DType::f32>(q, row + d) : plain_at<DType::bf16>(q, row + d);
      store(wide.data() + d, x * (layer.scale * LOG2E));
      store(acc + d, splat(0.0f));
    }
    for (int g = 0; g < per_kv; g++) m[g] = NOTHING, l[g] = 0.0f;
    if (phased.phase == Phase::finish)
      std::memcpy(m, kept(task.sequence * layer.num_kv_heads + task.kv_head, 1), sizeof(float) * part_size);
    const PlainPart* by_count = PLAIN_PART[static_cast<int>(layer.type)];
    for (int g = 0; g < per_kv; g += 4)
      by_count[(per_kv - g < 4 ? per_kv - g : 4) - 1](
          static_cast<const char*>(seq.k) + at, static_cast<const char*>(seq.v) + at, seq.token_stride * item, n, dim,
          layer.soft_cap, wide.data() + g * dim, m + g, l + g, acc + g * dim);
  });
  const int* starts = firsts.data();
  const auto merge_part = [&](float* total, const float* more) {
    for (int g = 0; g < per_kv; g++)
      merge(total[g], total[per_kv + g], total + 2 * per_kv + g * dim, more[g], more[per_kv + g],
            more + 2 * per_kv + g * dim, dim);
  };
  ms::Team::get().parallel(count * layer.num_kv_heads, [&](int i) {
    float* total = all_parts + starts[i] * part_size;
    const bool is_empty = starts[i] == starts[i + 1];
    const PlainSequence& seq = sequences[i / layer.num_kv_heads];
    const int own_split = seq.length ? (seq.length - 1) / SPLIT : 0;
    if (phased.phase == Phase::begin) {
      // The parts before the row's own split are whole.
      const int all_of = starts[i + 1] - starts[i], earlier = all_of < own_split ? all_of : own_split;
      for (int p = 1; p < earlier; p++) merge_part(total, total + p * part_size);
      if (earlier) std::memcpy(kept(i, 0), total, sizeof(float) * part_size);
      float* own = kept(i, 1);
      if (earlier < all_of) {
        std::memcpy(own, total + earlier * part_size, sizeof(float) * part_size);
      } else {
        std::memset(own, 0, sizeof(float) * part_size);
        for (int g = 0; g < per_kv; g++) own[g] = NOTHING;
      }
      return;
    }
    for (int p = starts[i] + 1; p < starts[i + 1]; p++) merge_part(total, all_parts + p * part_size);
    if (phased.phase == Phase::finish && own_split > 0) {
      merge_part(kept(i, 0), total);
      total = kept(i, 0);
    }
    for (int g = 0; g < per_kv; g++) {
      const size_t head = static_cast<size_t>(i / layer.num_kv_heads) * heads + i % layer.num_kv_heads * per_kv + g;
      if (is_empty) {
        std::memset(out + head * dim, 0, sizeof(float) * dim);
        lse[head] = layer.sinks ? layer.sinks[head % heads] : NO_KEYS;
        continue;
      }
      const float inverse = finish_row(layer.sinks, static_cast<int>(head % heads), total[g], total[per_kv + g], lse + head);
      for (int d = 0; d < dim; d += 16)
        store(out + head * dim + d, load<f32x16>(total + 2 * per_kv + g * dim + d) * inverse);
    }
  });
}

}  // namespace
}  // namespace MS_ISA
