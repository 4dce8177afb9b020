// The causal convolution and the gated norm of layers with a state (ops/states.py). Included once per instruction
// set.

namespace MS_ISA {
namespace {

MS_INLINE f32x16 silu(f32x16 x) { return x * sigmoid(x); }

// A range of channels of a convolution, for all rows of a sequence.
constexpr int MAX_CONV_CHANNELS = 512, LEAST_CONV_CHANNELS = 64;
struct ConvTask {
  int sequence, first, count;
};

// Some channels of an input.
struct ConvInput {
  const void* at;
  DType type;
};

template <int WIDTH>
class ConvBlock {
 public:
  ConvBlock(const CausalConv& call, const StateRecords& records, const StateSegments& segments, const ConvTask& task)
      : call_(call), records_(records), segments_(segments), task_(task) {
    const float* weight = call.weight + static_cast<size_t>(task.first) * WIDTH;
    for (int c = 0; c < task.count; c++)
      for (int i = 0; i < WIDTH; i++) weight_[i][c] = weight[c * WIDTH + i];
    for (int i = 0; i < WIDTH; i++)  // what the last vector reads beyond the channels
      for (int c = task.count; c % 16; c++) weight_[i][c] = 0.0f;
    for (int c = 0; c < (task.count + 15) / 16 * 16; c += 16)
      store(bias_ + c, call.bias ? some_of(call.bias + task.first, c, task.count - c) : splat(0.0f));
  }

  void run() const {
    for (int64_t s = segments_.sequences[task_.sequence]; s < segments_.sequences[task_.sequence + 1]; s++) {
      const int64_t first = segments_.firsts[s], end = segments_.firsts[s + 1];
      const float* before = segments_.sources[s] == NO_RECORD ? nullptr : records_.at(segments_.sources[s]);
      for (int64_t row = first; row < end; row++) {
        ConvInput inputs[WIDTH];
        for (int i = 0; i < WIDTH; i++) inputs[i] = input(row - WIDTH + 1 + i, first, before);
        if (row < first + WIDTH - 1) convolve<false, DType::f32>(inputs, row);
        else if (call_.x.type == DType::f32) convolve<true, DType::f32>(inputs, row);
        else convolve<true, DType::bf16>(inputs, row);
      }
      if (segments_.targets[s] != NO_RECORD) keep(first, end, before, records_.at(segments_.targets[s]));
    }
  }

 private:
  // Returns the input of a row, which may be one of the WIDTH - 1 before the segment.
  ConvInput input(int64_t row, int64_t first, const float* before) const {
    if (row >= first) {
      const size_t at = (static_cast<size_t>(row) * call_.x.stride + task_.first) * size_of(call_.x.type);
      return {static_cast<const char*>(call_.x.data) + at, call_.x.type};
    }
    static const float zeros[MAX_CONV_CHANNELS] = {};
    if (!before) return {zeros, DType::f32};
    return {before + (row - first + WIDTH - 1) * call_.channels + task_.first, DType::f32};
  }

  // IS_X: all inputs are rows of x, of type X.
  template <bool IS_X, DType X>
  __attribute__((noinline)) void convolve(const ConvInput* inputs, int64_t row) const {
    const size_t out = static_cast<size_t>(row) * call_.channels + task_.first;
    for (int c = 0; c < task_.count; c += 16) {
      f32x16 sum = load<f32x16>(bias_ + c);
      unroll<WIDTH>([&](auto i) MS_LAMBDA {
        const f32x16 x = row_at(inputs[i].at, IS_X ? X : inputs[i].type, c, task_.count - c);
        sum = fma(load<f32x16>(weight_[i] + c), x, sum);
      });
      put(call_.out, call_.x.type, out + c, call_.has_silu ? silu(sum) : sum, task_.count - c);
    }
  }

  // Writes the last WIDTH - 1 inputs. `to` may be `before`: each is read before it is overwritten.
  void keep(int64_t first, int64_t end, const float* before, float* to) const {
    for (int i = 0; i < WIDTH - 1; i++) {
      const ConvInput from = input(end - WIDTH + 1 + i, first, before);
      float* target = to + static_cast<size_t>(i) * call_.channels + task_.first;
      for (int c = 0; c < task_.count; c += 16)
        put(target, DType::f32, c, row_at(from.at, from.type, c, task_.count - c), task_.count - c);
    }
  }

  const CausalConv& call_;
  const StateRecords& records_;
  const StateSegments& segments_;
  const ConvTask& task_;
  alignas(64) float weight_[WIDTH][MAX_CONV_CHANNELS], bias_[MAX_CONV_CHANNELS];
};

template <int WIDTH>
void convolve_task(const CausalConv& call, const StateRecords& records, const StateSegments& segments,
                   const ConvTask& task) {
  ConvBlock<WIDTH>(call, records, segments, task).run();
}
using ConvolveTask = void (*)(const CausalConv&, const StateRecords&, const StateSegments&, const ConvTask&);
constexpr ConvolveTask CONVOLVE_TASK[MAX_CONV_WIDTH - 1] = {convolve_task<2>, convolve_task<3>, convolve_task<4>,
                                                            convolve_task<5>, convolve_task<6>, convolve_task<7>,
                                                            convolve_task<8>};

void convolve(const CausalConv& call, const StateRecords& records, const StateSegments& segments) {
  ms::Team& team = ms::Team::get();
  const int sequences = segments.num_sequences;
  if (!sequences) return;
  const int wanted = 4 * team.parts_for(segments.rows() * call.channels * call.width);
  const int least = (call.channels + MAX_CONV_CHANNELS - 1) / MAX_CONV_CHANNELS;
  const int most = (call.channels + LEAST_CONV_CHANNELS - 1) / LEAST_CONV_CHANNELS;
  int parts = (wanted + sequences - 1) / sequences;
  parts = parts < least ? least : parts > most ? most : parts;
  const int each = ((call.channels + parts - 1) / parts + 31) / 32 * 32;
  parts = (call.channels + each - 1) / each;
  team.parallel(sequences * parts, [&](int task) {
    const int first = task % parts * each, left = call.channels - first;
    CONVOLVE_TASK[call.width - 2](call, records, segments, {task / parts, first, left < each ? left : each});
  });
}

MS_INLINE f32x16 activated(f32x16 gate, bool is_silu) {
  return is_silu ? silu(gate) : sigmoid(gate);
}

// Computes the columns `first` to first + group - 1 of a row, which are normalized together. memory: for
// `group` numbers.
void gated_group(const GatedNorm& call, int64_t row, int first, int group, float* memory) {
  const size_t x_item = size_of(call.x.type), gate_item = size_of(call.gate.type);
  const char* x = static_cast<const char*>(call.x.data) + (row * call.x.stride + first) * x_item;
  const char* gate = static_cast<const char*>(call.gate.data) + (row * call.gate.stride + first) * gate_item;
  f32x16 squares[2] = {};
  for (int i = 0; i < group; i += 16) {
    const int left = group - i;
    f32x16 value = row_at(x, call.x.type, i, left);
    f32x16& sum = squares[i / 16 % 2];
    const f32x16 opening = activated(row_at(gate, call.gate.type, i, left), call.is_silu);
    if (call.gates_first) value *= opening;
    sum = fma(value, value, sum);
    f32x16 factor = call.weight ? some_of(call.weight + first, i, left) : splat(1.0f);
    if (!call.gates_first) factor *= opening;
    put(memory, DType::f32, i, value * factor, left);
  }
  const float mean = reduce_add(squares[0] + squares[1]) / static_cast<float>(group);
  const float inverse = call.weight ? 1.0f / __builtin_sqrtf(mean + call.eps) : 1.0f;
  const size_t at = static_cast<size_t>(row) * call.num_in + first;
  for (int i = 0; i < group; i += 16)
    put(call.out, call.x.type, at + i, some_of(memory, i, group - i) * inverse, group - i);
}

void gate_and_norm(const GatedNorm& call) {
  const int groups = call.num_in / call.group;
  const int64_t all = static_cast<int64_t>(call.rows) * groups;
  const int share = 1 + 4096 / call.group;
  ms::Team::get().parallel(static_cast<int>((all + share - 1) / share), [&](int task) {
    static thread_local List<float> memory;
    if (memory.size() < static_cast<size_t>(call.group)) memory.resize(call.group);
    for (int64_t i = static_cast<int64_t>(task) * share; i < all && i < (task + int64_t{1}) * share; i++)
      gated_group(call, i / groups, static_cast<int>(i % groups) * call.group, call.group, memory.data());
  });
}

}  // namespace
}  // namespace MS_ISA
