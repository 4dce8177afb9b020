// Products of their own for each head in one call. Included once per instruction set.
//
// A pair is a row with one of the heads. The pairs are sorted by head, so that a head's weights are
// read once for all its rows; the tasks are those of experts.inl. Each pair goes through the functions
// of gemm.inl, gemm4.inl, gemm_superblocks.inl or gemm_plain.inl with the bits of a layer called alone.

namespace MS_ISA {
namespace {

// Computes heads `first` to first + heads - 1.
template <class P>
void multiply_heads(const ProductList& products, const HeadRows& call, int first, int heads) {
  ms::Team& team = ms::Team::get();
  const int rows = call.rows, pairs = rows * heads;
  const P x = P::template in_memory<0>(products, pairs);
  const size_t item = size_of(call.type);
  const int share = 1 + 8192 / x.num_in();
  team.parallel((pairs + share - 1) / share, [&](int task) {
    for (int p = task * share; p < pairs && p < (task + 1) * share; p++) {
      const size_t at = p % rows * call.stride + (first + p / rows) * call.head_stride;
      x.put(static_cast<const char*>(call.x) + at * item, call.type, p);
    }
  });
  List<PairBlock> blocks;
  const int parts = (rows + MAX_BLOCK_ROWS - 1) / MAX_BLOCK_ROWS;
  for (int h = 0; h < heads; h++)
    for (int p = 0; p < parts; p++) {
      const int from = static_cast<int>(static_cast<int64_t>(rows) * p / parts);
      const int end = static_cast<int>(static_cast<int64_t>(rows) * (p + 1) / parts);
      blocks.push_back({first + h, h * rows + from, end - from});
    }
  const size_t out_stride = static_cast<size_t>(call.heads) * x.num_out();
  for_blocks(blocks, x.num_panels(), [&](const PairBlock& block, int panel) {
    // where pair 0 would be if all pairs were of this head
    const ptrdiff_t row = static_cast<ptrdiff_t>(block.expert - first) * rows;
    const ptrdiff_t at = static_cast<ptrdiff_t>(block.expert) * x.num_out() - row * static_cast<ptrdiff_t>(out_stride);
    char* out = static_cast<char*>(call.out) + at * static_cast<ptrdiff_t>(size_of(x.out_type()));
    x.multiply(block.expert, panel, block.first, block.rows, out, out_stride);
  });
}

void linear_heads(const ProductList& products, const HeadRows& call) {
  auto multiply = multiply_heads<QuantizedPairs>;
  if (products.kind == WeightKind::plain) {
    multiply = multiply_heads<PlainPairs<StepWide>>;
    if (static_cast<const LinearPlain*>(products.ops[0])->type == DType::f32)
      multiply = multiply_heads<PlainPairs<StepF32>>;
#if defined(__AVX512BF16__)
    else if (__builtin_cpu_supports("avx512bf16")) multiply = multiply_heads<PlainPairs<StepPairs>>;
#endif
  }
  const int most = call.rows < MAX_PAIRS ? MAX_PAIRS / call.rows : 1;
  for (int h = 0; h < call.heads; h += most) multiply(products, call, h, call.heads - h < most ? call.heads - h : most);
}

}  // namespace
}  // namespace MS_ISA
