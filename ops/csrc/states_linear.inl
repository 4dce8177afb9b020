// Linear attention: heads with a state [key_dim][value_dim] (ops/states.py). Included once per instruction set.
//
// Rows are applied one after another, and the sums over key_dim are two chains, of even and odd i, in each
// column, so a row's bits depend neither on how the columns are cut into strips nor on the rows beside it.

namespace MS_ISA {
namespace {

constexpr float UNIT_KEY_EPS = 1e-6f;
// The widest strips, in vectors: of a pass over several rows, whose strip should stay in L1 and whose sums
// for this row and the next should stay in registers; and of a single row, which should read whole lines in order.
constexpr int PASS_VECTORS = HAS_32_REGISTERS ? 2 : 1, SINGLE_VECTORS = HAS_32_REGISTERS ? 8 : 2;

constexpr size_t NEXT_ROWS = 4;  // so far ahead rows are prefetched

// Returns *x in all lanes. splat() adds zero to it, which costs as much as a multiply-add.
MS_INLINE f32x16 broadcast(const float* x) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_set1_ps(*x);
#elif defined(__AVX2__)
  const auto piece = (f32x16::Piece)_mm256_broadcast_ss(x);
  return {{piece, piece}};
#else
  return splat(*x);
#endif
}

// Columns of a head's state; `stride` is from one i to the next.
struct Strip {
  float* at;
  size_t stride;
};

// One row as one head sees it, in fp32. next: the keys by which the next row reads the new state.
struct HeadRow {
  const float *q, *k, *decay, *next;
};

// Computes the sums over i of keys[i] times the columns.
template <int N>
MS_INLINE void recall(const float* keys, int dim, Strip state, f32x16 (&known)[N]) {
  f32x16 sum[2][N] = {};
  auto step = [&](int i, auto chain) MS_LAMBDA {
    const f32x16 k = broadcast(keys + i);
    const float* from = state.at + i * state.stride;
    unroll<N>([&](auto n) MS_LAMBDA { sum[chain][n] = fma(k, load<f32x16>(from + 16 * n), sum[chain][n]); });
  };
  constexpr std::integral_constant<int, 0> even{};
  constexpr std::integral_constant<int, 1> odd{};
  int i = 0;
  for (; i + 2 <= dim; i += 2) step(i, even), step(i + 1, odd);
  if (i < dim) step(i, even);
  unroll<N>([&](auto n) MS_LAMBDA { known[n] = sum[0][n] + sum[1][n]; });
}

// Decays the columns, adds k times `added`, and computes the sums of q times the new columns; with HAS_NEXT
// also those that recall() would compute of them. `to` may be `from`. ahead: the strip that is read next.
template <int N, bool PER_CHANNEL, bool HAS_NEXT>
MS_INLINE void apply(const HeadRow& row, int dim, Strip from, Strip to, const f32x16 (&added)[N], f32x16 (&sums)[N],
                     f32x16 (&known)[N], Strip ahead) {
  f32x16 sum[2][N] = {}, seen[2][HAS_NEXT ? N : 1] = {};
  const float *const ks = row.k, *const qs = row.q, *const decays = row.decay, *const nexts = row.next;
  auto step = [&](int i, auto chain) MS_LAMBDA {
    const f32x16 k = broadcast(ks + i), q = broadcast(qs + i), next = HAS_NEXT ? broadcast(nexts + i) : f32x16{};
    const f32x16 decay = broadcast(PER_CHANNEL ? decays + i : decays);
    const float* old = from.at + i * from.stride;
    float* state = to.at + i * to.stride;
    unroll<N>([&](auto n) MS_LAMBDA {
      const f32x16 s = fma(k, added[n], decay * load<f32x16>(old + 16 * n));
      store(state + 16 * n, s);
      sum[chain][n] = fma(q, s, sum[chain][n]);
      if constexpr (HAS_NEXT) seen[chain][n] = fma(next, s, seen[chain][n]);
      else prefetch(ahead.at + i * ahead.stride + 16 * n);
    });
  };
  constexpr std::integral_constant<int, 0> even{};
  constexpr std::integral_constant<int, 1> odd{};
  int i = 0;
  for (; i + 2 <= dim; i += 2) step(i, even), step(i + 1, odd);
  if (i < dim) step(i, even);
  unroll<N>([&](auto n) MS_LAMBDA {
    sums[n] = sum[0][n] + sum[1][n];
    if constexpr (HAS_NEXT) known[n] = seen[0][n] + seen[1][n];
  });
}

// Where the state of a row comes from and goes to: records, or the strip's own memory. goes_on: the state
// is that of the block's next row, too.
constexpr int64_t OWN = -2;
struct RowPlace {
  int64_t source, target;
  bool goes_on;
};

// Rows of a sequence with what their key head, and the head in turn, makes of them.
struct HeadBlock {
  const LinearAttention& call;
  const StateRecords& records;
  int64_t first;
  int count;
  const RowPlace* places;
  const float *q, *k;      // [count][key_stride]
  const float* keys;       // the same, of which the state's columns are recalled
  size_t key_stride;
  const float *decay, *gain;  // [count][decay_stride], [count]
  size_t decay_stride;
  int head;

  Strip strip(int64_t record, int column) const {
    const size_t width = call.value_dim;
    return {records.at(record) + head * width * call.key_dim + column, width};
  }
};

MS_INLINE void copy_columns(Strip from, Strip to, int dim, int columns) {
  for (int i = 0; i < dim; i++) std::memcpy(to.at + i * to.stride, from.at + i * from.stride, 4 * columns);
}

// Applies a block's rows to the columns from `column` on. own: memory for the state between records;
// ahead: the strip that will be read after them.
template <int N, bool PER_CHANNEL, bool IS_DELTA>
void apply_block(const HeadBlock& block, int column, float* own, Strip ahead) {
  const LinearAttention& call = block.call;
  const int dim = call.key_dim, width = call.value_dim, left = width - column;
  const bool is_partial = left < 16 * N;
  const Strip mine{own, 16 * N};
  const float skip = call.skip ? call.skip[block.head] : 0.0f;
  f32x16 known[N] = {};
  bool is_known = false;
  for (int r = 0; r < block.count; r++) {
    const RowPlace& place = block.places[r];
    Strip from = mine, to = mine;
    if (place.source >= 0) from = block.strip(place.source, column);
    else if (place.source == NO_RECORD) std::memset(own, 0, sizeof(float) * 16 * N * dim);
    if (place.target >= 0) to = block.strip(place.target, column);
    const Strip target = to;
    if (is_partial && place.source >= 0) copy_columns(from, mine, dim, left), from = mine;
    if (is_partial) to = mine;

    const float* decay = block.decay + r * block.decay_stride;
    const float *keys = block.keys + r * block.key_stride, gain = block.gain[r];
    if (IS_DELTA && !is_known) recall<N>(keys, dim, from, known);
    const size_t at = (block.first + r) * call.heads * width + static_cast<size_t>(block.head) * width + column;
    const size_t v_at = (block.first + r) * call.v.stride + static_cast<size_t>(block.head) * width + column;
    const char* v = static_cast<const char*>(call.v.data) + v_at * size_of(call.v.type);
    const float factor = PER_CHANNEL ? 1.0f : decay[0];
    f32x16 value[N], added[N], sums[N];
    const size_t next_v = NEXT_ROWS * call.v.stride * size_of(call.v.type);
    unroll<N>([&](auto n) MS_LAMBDA {
      prefetch(v + next_v + n * 16 * size_of(call.v.type));
      value[n] = row_at(v, call.v.type, 16 * n, left - 16 * n);
      added[n] = (IS_DELTA ? fma(splat(-factor), known[n], value[n]) : value[n]) * gain;
    });
    const HeadRow row{block.q + r * block.key_stride, block.k + r * block.key_stride, decay, keys + block.key_stride};
    is_known = IS_DELTA && place.goes_on;
    if (is_known) apply<N, PER_CHANNEL, IS_DELTA>(row, dim, from, to, added, sums, known, ahead);
    else apply<N, PER_CHANNEL, false>(row, dim, from, to, added, sums, known, ahead);
    if (is_partial && place.target >= 0) copy_columns(mine, target, dim, left);
    unroll<N>([&](auto n) MS_LAMBDA {
      const f32x16 y = call.skip ? fma(splat(skip), value[n], sums[n]) : sums[n];
      put(call.out, call.v.type, at + 16 * n, y, left - 16 * n);
    });
  }
}

using ApplyBlock = void (*)(const HeadBlock&, int column, float* own, Strip ahead);
template <int N>
constexpr ApplyBlock APPLY_BLOCK[3] = {apply_block<N, false, false>, apply_block<N, false, true>,
                                       apply_block<N, true, true>};

ApplyBlock block_function(const LinearAttention& call, int vectors) {
  const int kind = !call.is_delta ? 0 : call.is_per_channel ? 2 : 1;
  if constexpr (HAS_32_REGISTERS) {
    if (vectors == 8) return APPLY_BLOCK<8>[kind];
    if (vectors == 4) return APPLY_BLOCK<4>[kind];
  }
  return vectors == 2 ? APPLY_BLOCK<2>[kind] : APPLY_BLOCK<1>[kind];
}

}  // namespace
}  // namespace MS_ISA
