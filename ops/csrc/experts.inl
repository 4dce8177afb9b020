// The experts of a mixture in one call: gate and up, activation, down, and the weighted sum.
// Included once per instruction set.
//
// A pair is a row with one of its experts. The pairs are sorted by expert, so that an expert's rows
// are neighbours and its weights are read once. A row is quantized once and copied to its pairs.
// The products' tasks are panels of blocks of an expert's rows, taken by cost, so that the threads
// are busy to the end whatever the experts' rows. Each pair goes through the functions of gemm.inl,
// gemm4.inl, gemm_superblocks.inl or gemm_plain.inl with the bits of a layer called alone, and a row's sum is in the order
// of its k in fp32.

namespace MS_ISA {
namespace {

constexpr int MAX_PAIRS = 8192;                   // of one pass; bounds the memory
constexpr size_t PART_BYTES = size_t{4} << 20;    // results of all pairs that wait for their sum
constexpr int ROWS_OF_A_READ = 12;  // multiplying so many rows takes about the time of reading the weights

// Returns memory of the calling thread, kept between calls; WHICH tells the uses apart.
template <int WHICH>
char* kept_memory(size_t bytes) {
  static thread_local List<char> memory;
  if (memory.size() < bytes + 64) memory.resize(bytes + 64);
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

// The rows of a product of all pairs with quantized weights.
class QuantizedPairs {
 public:
  template <int WHICH>
  static QuantizedPairs in_memory(const ProductList& products, int pairs) {
    QuantizedPairs made;
    made.products_ = products;
    const LinearInt8& op = made.base();
    made.num_sums_ = products.kind == WeightKind::int4          ? op.num_in_padded / made.int4(0).group
                     : products.kind == WeightKind::superblocks ? sums_of_a_row(made.superblocks(0))
                                                                : 0;
    const size_t slices = (op.num_in_padded + SLICE - 1) / SLICE, slice_stride = size_t{SLICE} * pairs;
    char* memory = kept_memory<WHICH>(slices * slice_stride + size_t{4} * pairs * (2 + made.num_sums_) + 64);
    auto* scales = reinterpret_cast<float*>(memory + slices * slice_stride);
    auto* sums = reinterpret_cast<int32_t*>(scales + pairs);
    made.x_ = {reinterpret_cast<int8_t*>(memory), slice_stride, op.num_in_padded, scales, sums};
    made.group_sums_ = sums + pairs;
    return made;
  }

  int num_in() const { return base().num_in; }
  int num_out() const { return base().num_out; }
  int num_panels() const { return base().num_panels; }
  // What the products write; a result that is quantized next is kept in bf16.
  DType out_type() const { return base().activation == Activation::none ? DType::f32 : DType::bf16; }

  void put(const void* row, DType type, int at) const {
    constexpr Norm NONE{NormKind::none, nullptr, nullptr, 0.0f};
    QUANTIZE_ROW[static_cast<int>(type)][0](row, 0, num_in(), NONE, x_, at);
    int32_t* sums = group_sums_ + static_cast<size_t>(at) * num_sums_;
    if (products_.kind == WeightKind::int4) sum_row_groups(int4(0), x_, at, sums);
    if (products_.kind == WeightKind::superblocks) sum_row_superblocks(superblocks(0), x_, at, sums);
  }

  void copy(int from, int to) const {
    for (int k = 0; k < x_.num_in_padded; k += SLICE) {
      int8_t* slice = x_.values + k / SLICE * x_.slice_stride;
      const int left = x_.num_in_padded - k;
      std::memcpy(slice + to * SLICE, slice + from * SLICE, left < SLICE ? left : SLICE);
    }
    x_.scales[to] = x_.scales[from];
    x_.sums[to] = x_.sums[from];
    const size_t sums = num_sums_;
    std::memcpy(group_sums_ + to * sums, group_sums_ + from * sums, 4 * sums);
  }

  void multiply(int expert, int panel, int first, int rows, void* out, size_t stride) const {
    if (products_.kind == WeightKind::superblocks)
      panel_rows_superblocks(superblocks(expert), panel, first, rows, x_, group_sums_, out, stride, out_type(), false);
    else if (products_.kind == WeightKind::int4)
      panel_rows4(int4(expert), panel, first, rows, x_, group_sums_, out, stride, out_type(), false);
    else
      panel_rows(*static_cast<const LinearInt8*>(products_.ops[expert]), panel, first, rows, x_, out, stride,
                 out_type(), false);
  }

 private:
  const LinearInt4& int4(int expert) const { return *static_cast<const LinearInt4*>(products_.ops[expert]); }
  const LinearSuperblocks& superblocks(int expert) const {
    return *static_cast<const LinearSuperblocks*>(products_.ops[expert]);
  }
  const LinearInt8& base() const {
    if (products_.kind == WeightKind::superblocks) return superblocks(0).base;
    return products_.kind == WeightKind::int4 ? int4(0).base : *static_cast<const LinearInt8*>(products_.ops[0]);
  }

  ProductList products_;
  Quantized x_;
  int32_t* group_sums_;
  int num_sums_;  // of a row, beside the sum of all
};

// The rows of a product of all pairs with plain weights.
template <class S>
class PlainPairs {
 public:
  template <int WHICH>
  static PlainPairs in_memory(const ProductList& products, int pairs) {
    PlainPairs made;
    made.products_ = products;
    const size_t slice_inputs = SLICE_STEPS * S::INPUTS, slice_stride = size_t{S::ROW_BYTES} * pairs;
    made.slices_ = (made.num_in() + slice_inputs - 1) / slice_inputs;
    made.x_ = {kept_memory<WHICH>(made.slices_ * slice_stride + 64), slice_stride};
    return made;
  }

  int num_in() const { return op(0).num_in; }
  int num_out() const { return op(0).num_out; }
  int num_panels() const { return op(0).num_panels; }
  DType out_type() const { return S::TYPE; }

  void put(const void* row, DType, int at) const {
    constexpr Norm NONE{NormKind::none, nullptr, nullptr, 0.0f};
    pack_row<S, NormKind::none>(row, 0, num_in(), NONE, at_row(at), x_.slice_stride);
  }

  void copy(int from, int to) const {
    for (size_t s = 0; s < slices_; s++)
      std::memcpy(at_row(to) + s * x_.slice_stride, at_row(from) + s * x_.slice_stride, S::ROW_BYTES);
  }

  void multiply(int expert, int panel, int first, int rows, void* out, size_t stride) const {
    plain_panel<S>(op(expert), panel, first, rows, x_, static_cast<char*>(out), stride * size_of(S::TYPE), false);
  }

 private:
  const LinearPlain& op(int expert) const { return *static_cast<const LinearPlain*>(products_.ops[expert]); }
  char* at_row(int at) const { return x_.values + static_cast<size_t>(at) * S::ROW_BYTES; }

  ProductList products_;
  PackedRows x_;
  size_t slices_;
};

// Neighbouring pairs of one expert, at most MAX_BLOCK_ROWS.
struct PairBlock {
  int expert, first, rows;
};

// The pairs of some rows, sorted by expert and then by row.
struct SortedPairs {
  List<int> places;  // of each row's pairs, [rows][top_k]
  List<PairBlock> blocks;

  SortedPairs(const int32_t* experts, int pairs, int num_experts) : places(pairs) {
    List<int> at(num_experts);
    for (int i = 0; i < pairs; i++) at[experts[i]]++;
    int first = 0;
    for (int e = 0; e < num_experts; e++) {
      const int rows = at[e], parts = (rows + MAX_BLOCK_ROWS - 1) / MAX_BLOCK_ROWS;
      for (int p = 0; p < parts; p++) {
        const int from = rows * p / parts;
        blocks.push_back({e, first + from, rows * (p + 1) / parts - from});
      }
      at[e] = first;
      first += rows;
    }
    for (int i = 0; i < pairs; i++) places[i] = at[experts[i]]++;
  }
};

// Calls f(block, panel) for all panels of all blocks on all threads of the team. A thread takes runs of
// consecutive panels, which are one stream of memory, and shorter runs towards the end.
template <class F>
void for_blocks(const List<PairBlock>& blocks, int panels, F&& f) {
  ms::Team& team = ms::Team::get();
  const int count = static_cast<int>(blocks.size()), threads = team.size();
  List<int64_t> before(count + 1);  // the cost of a panel is that of reading it and of its rows
  auto cost = [&](int b) { return ROWS_OF_A_READ + blocks[b].rows; };
  for (int b = 0; b < count; b++) before[b + 1] = before[b] + static_cast<int64_t>(panels) * cost(b);
  std::atomic<int> taken{0};
  const int all = count * panels;
  team.parallel(threads, [&](int) {
    for (int first = taken.load(); first < all;) {
      int b = first / panels;
      const int64_t begin = before[b] + static_cast<int64_t>(first % panels) * cost(b);
      const int64_t end = begin + (before[count] - begin) / (2 * threads);
      while (before[b + 1] < end) b++;
      int next = b * panels + static_cast<int>((end - before[b]) / cost(b));
      if (next <= first) next = first + 1;
      if (!taken.compare_exchange_weak(first, next)) continue;
      for (int item = first; item < next; item++) f(blocks[item / panels], item % panels);
      first = taken.load();
    }
  });
}

// Writes columns `from` to `end` of the weighted sum of a row's parts. places, weights: [top_k];
// parts: [pairs][end - from]; weights may be null.
void sum_parts(const RoutedRows& call, int row, const int* places, const float* weights, const void* parts,
               DType part_type, int from, int end) {
  const size_t width = static_cast<size_t>(end - from) * size_of(part_type);
  char* out = static_cast<char*>(call.out) + (row * call.out_stride + from) * size_of(call.out_type);
  for (int n = 0; n < end - from; n += 16) {
    const int left = end - from - n;
    f32x16 total{};
    for (int k = 0; k < call.top_k; k++) {
      f32x16 part = row_at(static_cast<const char*>(parts) + places[k] * width, part_type, n, left);
      if (weights) part = part * weights[k];
      total = k ? total + part : part;
    }
    if (call.add) {
      if (call.out_type == DType::bf16) total = round_bf16(total);
      total = row_at(out, call.out_type, n, left) + total;
    }
    put(out, call.out_type, n, total, left);
  }
}

// Writes a row times its weight, in the row's type, to `to`.
void scale_row(const void* row, DType type, int n, float weight, void* to) {
  if (type == DType::bf16) weight = round_bf16(splat(weight))[0];
  for (int k = 0; k < n; k += 16) put(to, type, k, row_at(row, type, k, n - k) * weight, n - k);
}

// The results of gate and up, which down reads: a row for each of the sorted pairs, `stride` numbers apart.
struct Between {
  char* rows;
  size_t stride;
};

// Computes gate, up and the activation of at most MAX_PAIRS pairs.
template <class P>
void up_rows(const Experts& layer, const RoutedRows& call, const SortedPairs& sorted, const P& up, Between between) {
  const int top_k = call.top_k;
  const size_t row_bytes = call.x.stride * size_of(call.x.type);
  ms::Team::get().parallel(call.rows, [&](int t) {
    const char* row = static_cast<const char*>(call.x.data) + t * row_bytes;
    const int* places = sorted.places.data() + t * top_k;
    if (!layer.scales_input) {
      up.put(row, call.x.type, places[0]);
      for (int k = 1; k < top_k; k++) up.copy(places[0], places[k]);
      return;
    }
    static thread_local List<float> scaled;
    if (static_cast<int>(scaled.size()) < up.num_in()) scaled.resize(up.num_in());
    for (int k = 0; k < top_k; k++) {
      scale_row(row, call.x.type, up.num_in(), call.weights[t * top_k + k], scaled.data());
      up.put(scaled.data(), call.x.type, places[k]);
    }
  });
  for_blocks(sorted.blocks, up.num_panels(), [&](const PairBlock& block, int panel) {
    up.multiply(block.expert, panel, block.first, block.rows, between.rows, between.stride);
  });
}

// Computes down and the weighted sums of at most MAX_PAIRS pairs.
template <class P>
void down_rows(const Experts& layer, const RoutedRows& call, const SortedPairs& sorted, const P& down, Between between,
               DType between_type) {
  ms::Team& team = ms::Team::get();
  const int top_k = call.top_k, pairs = call.rows * top_k;
  const size_t row_bytes = between.stride * size_of(between_type);
  const int share = 1 + 4096 / down.num_in();
  team.parallel((pairs + share - 1) / share, [&](int task) {
    for (int p = task * share; p < pairs && p < (task + 1) * share; p++)
      down.put(between.rows + p * row_bytes, between_type, p);
  });
  // As many columns at a time as let the results of all pairs stay in cache until they are summed.
  const size_t item = size_of(down.out_type());
  const int fitting = static_cast<int>(PART_BYTES / (pairs * item * PANEL)), panels = fitting > 0 ? fitting : 1;
  const size_t width = static_cast<size_t>(panels) * PANEL;
  for (int from = 0; from < down.num_panels(); from += panels) {
    const int first = from * PANEL, end = first + static_cast<int>(width);
    const int last = end < down.num_out() ? end : down.num_out(), columns = last - first;
    char* parts = kept_memory<3>(pairs * columns * item + 64);
    for_blocks(sorted.blocks, (columns + PANEL - 1) / PANEL, [&](const PairBlock& block, int panel) {
      down.multiply(block.expert, from + panel, block.first, block.rows, parts - first * item, columns);
    });
    team.parallel(call.rows, [&](int t) {
      const float* weights = layer.scales_input ? nullptr : call.weights + t * top_k;
      sum_parts(call, t, sorted.places.data() + t * top_k, weights, parts, down.out_type(), first, last);
    });
  }
}

// Computes a part of the mixture for at most MAX_PAIRS pairs.
template <class P>
void mix_rows(const Experts& layer, const RoutedRows& call, ExpertsPart part) {
  const int pairs = call.rows * call.top_k;
  const SortedPairs sorted(call.experts, pairs, layer.num_experts);
  if (part == ExpertsPart::down) {
    char* rows = const_cast<char*>(static_cast<const char*>(call.x.data));
    down_rows(layer, call, sorted, P::template in_memory<1>(layer.downs, pairs), {rows, call.x.stride}, call.x.type);
    return;
  }
  const P up = P::template in_memory<0>(layer.ups, pairs);
  if (part == ExpertsPart::up) {
    up_rows(layer, call, sorted, up, {static_cast<char*>(call.out), call.out_stride});
    return;
  }
  const P down = P::template in_memory<1>(layer.downs, pairs);
  const size_t hidden = up.num_out();
  const Between between{kept_memory<2>(pairs * hidden * size_of(up.out_type()) + 64), hidden};
  up_rows(layer, call, sorted, up, between);
  down_rows(layer, call, sorted, down, between, up.out_type());
}

void mix_experts(const Experts& layer, const RoutedRows& call, ExpertsPart part) {
  auto mix = mix_rows<QuantizedPairs>;
  if (layer.ups.kind == WeightKind::plain) {
    mix = mix_rows<PlainPairs<StepWide>>;
    if (static_cast<const LinearPlain*>(layer.ups.ops[0])->type == DType::f32) mix = mix_rows<PlainPairs<StepF32>>;
#if defined(__AVX512BF16__)
    else if (__builtin_cpu_supports("avx512bf16")) mix = mix_rows<PlainPairs<StepPairs>>;
#endif
  }
  const int all = call.top_k < MAX_PAIRS ? MAX_PAIRS / call.top_k : 1;
  for (int t = 0; t < call.rows; t += all) {
    RoutedRows some = call;
    some.rows = call.rows - t < all ? call.rows - t : all;
    // the pairs of a row are neighbours in what lies between up and down
    const size_t x_rows = part == ExpertsPart::down ? call.top_k : 1, out_rows = part == ExpertsPart::up ? call.top_k : 1;
    some.x.data = static_cast<const char*>(call.x.data) + t * x_rows * call.x.stride * size_of(call.x.type);
    some.experts += t * call.top_k;
    some.weights += t * call.top_k;
    some.out = static_cast<char*>(call.out) + t * out_rows * call.out_stride * size_of(call.out_type);
    mix(layer, some, part);
  }
}

}  // namespace
}  // namespace MS_ISA
