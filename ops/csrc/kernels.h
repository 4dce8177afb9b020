// The functions of a set of kernels and the plain structures they work on. There is one Kernels
// table for each instruction set. Sizes are in elements unless the name or a comment says bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"

namespace ms {

// swiglu_oai exists only with gates.
enum class Activation : int { none, silu, gelu, gelu_tanh, relu, relu2, swiglu_oai };
enum class NormKind : int { none, rms, layer };

struct Rows {
  const void* data;
  size_t stride;
  DType type;
};

struct Norm {
  NormKind kind;
  const float* weight;
  const float* bias;  // or null
  float eps;
};

// Rows of signed bytes. Row m represents values[m] * scales[m]; sums[m] is the sum of its bytes.
// Rows are stored in slices of SLICE inputs, [slice][row][SLICE], so that neighbouring rows of a
// slice are contiguous.
constexpr int SLICE = 512;
struct Quantized {
  int8_t* values;
  size_t slice_stride;  // bytes
  int num_in_padded;
  float* scales;
  int32_t* sums;
};

// Weights [channels, K] in up to three parts, stacked by rows; part i ends before row ends[i].
constexpr int MAX_PARTS = 3;
struct PackSource {
  const void* parts[MAX_PARTS];
  size_t strides[MAX_PARTS];
  int ends[MAX_PARTS];
  DType type;

  const char* row(int channel) const {
    int part = 0;
    while (channel >= ends[part]) part++;
    const size_t at = (channel - (part ? ends[part - 1] : 0)) * strides[part];
    return static_cast<const char*>(parts[part]) + at * (type == DType::f32 ? 4 : 2);
  }
};

// Returns the weight row in lane c of a panel of 32 lanes, or -1. A panel of a gated layer has 16
// gates and then their factors.
inline int channel_at(int panel, int c, int num_out, bool is_gated) {
  const int n = is_gated ? panel * 16 + c % 16 : panel * 32 + c;
  if (n >= num_out) return -1;
  return is_gated && c >= 16 ? n + num_out : n;
}

struct LinearInt8 {
  const uint8_t* packed;
  const float* scales;
  const float* bias;  // or null
  int num_in, num_in_padded;
  int num_out;  // after gating
  int num_panels;
  bool is_gated;
  Activation activation;
};

// Weights in bf16 or fp32 (see gemm_plain.inl); rows and results have the same type.
struct LinearPlain {
  const uint8_t* packed;
  const float* bias;  // or null
  int num_in;
  int num_out;  // after gating
  int num_panels;
  bool is_gated;
  Activation activation;
  DType type;
};

// The value of a 4-bit code is code - 8, code - the zero point of its group, code, or a value of NF4,
// FP4 or IQ4_NL. The scaled codes of with_minimums have the minimum of their group subtracted.
enum class Codes : int { centred, with_zeros, with_minimums, nf4, fp4, iq4 };

// `packed` holds groups of inputs, each with its own scales (see gemm4.inl); base.scales holds one
// factor for each channel.
struct LinearInt4 {
  LinearInt8 base;
  int group;  // inputs: 16, 32, 64 or 128
  Codes codes;
};
constexpr size_t group_bytes(int group, Codes codes) {
  const bool has_offsets = codes == Codes::with_zeros || codes == Codes::with_minimums;
  return 64 + (has_offsets ? 64 : 0) + static_cast<size_t>(group) * 16;
}

// Weights of GGUF's k-quants and IQ4_XS. `packed` holds superblocks of inputs, each with groups of their own scales (see
// gemm_superblocks.inl); base.scales holds one factor for each channel.
constexpr int SUPERBLOCK = 256;
enum class Superblock : int { q4_k, q5_k, q6_k, iq4_xs };
constexpr int NUM_SUPERBLOCK_KINDS = 4;
struct SuperblockLayout {
  int bits, group;
  bool has_minimums, has_table;

  constexpr int groups() const { return SUPERBLOCK / group; }
  // The binary order of what the factors of codes without minimums have in excess.
  constexpr int offset_bits() const { return has_table ? 7 : bits - 1; }
  // Bytes of 32 outputs: of scales, minimums, and their steps, and with the codes.
  constexpr size_t head_bytes() const { return (has_minimums ? 2 : 1) * (64 + size_t{32} * groups()); }
  constexpr size_t bytes() const { return head_bytes() + SUPERBLOCK * 4 * bits; }
  // Numbers of 32 bits that the kernel takes of a row's sums.
  constexpr int sums() const { return has_minimums ? groups() / 2 : groups(); }
};
constexpr SuperblockLayout layout_of(Superblock kind) {
  if (kind == Superblock::q6_k) return {6, 16, false, false};
  if (kind == Superblock::iq4_xs) return {4, 32, false, true};
  return {kind == Superblock::q5_k ? 5 : 4, 32, true, false};
}
struct LinearSuperblocks {
  LinearInt8 base;
  Superblock kind;
};

// Products of one kind and shape, of a mixture's experts or of heads: addresses of LinearInt8, LinearInt4,
// LinearPlain or LinearSuperblocks.
enum class WeightKind : int { int8, int4, plain, superblocks };
struct ProductList {
  const void* const* ops;
  WeightKind kind;
};
struct Experts {
  ProductList ups, downs;
  int num_experts;
  bool scales_input;  // a weight multiplies an expert's input instead of its output
};
// What is computed of a mixture: all, or the results of gate and up, which are the rows of down:
// [rows * top_k][columns], in an order that the experts of the rows decide.
enum class ExpertsPart : int { all, up, down };
// The rows of a step and the experts of each, [rows][top_k]. x and out are what the part reads and writes.
struct RoutedRows {
  Rows x;
  int rows, top_k;
  const int32_t* experts;
  const float* weights;
  void* out;
  size_t out_stride;
  DType out_type;
  bool add;  // to what out holds
};

// Rows of each head, [rows][heads][inputs], and the dense results, [rows][heads][outputs].
struct HeadRows {
  const void* x;
  size_t stride, head_stride;
  DType type;
  int rows, heads;
  void* out;
};

// Rows of 8-bit codes with `group` inputs that share a scale and perhaps a zero (see rounding.inl).
enum class ByteCodes : int { e4m3, int8, uint8 };
struct CodedRows {
  const uint8_t* codes;
  size_t stride;
  ByteCodes kind;
  int num_in, group;
  const float* scales;  // [rows][groups]
  const float* zeros;   // the same, or null
};

// A router (see Router and RouterKind in ops/backend.py). weight: [num_experts][num_in], dense; the
// arrays after it may be null.
struct Router {
  const void* weight;
  DType type;
  const float *bias, *correction, *expert_scales;
  int num_experts, num_in, top_k;
  bool is_sigmoid, is_after_top_k, is_normalized;
  float sum_eps, scale;
  int num_groups, num_top_groups, group_best;
};

// The sampling parameters of one row, as ops/cpu/sampling.py packs them.
struct SamplingInputs {
  uint64_t seed, position;
  double top_p;
  const int64_t* tokens;  // prompt and output, for the penalties
  const int32_t* bias_tokens;
  const float* biases;
  const int32_t* forbidden;
  const uint32_t* mask;  // one bit for each allowed token; null allows all
  float temperature;  // 0 selects the largest logit
  float min_p, repetition, presence, frequency;
  int32_t top_k;
  int32_t num_logprobs;  // -1 means none
  int32_t num_tokens, num_prompt, num_biases, num_forbidden;
};

constexpr int MAX_TOP = 20;
struct SampledRow {
  int32_t token, rank, num_top;
  float logprob;
  int32_t top_tokens[MAX_TOP];
  float top_logprobs[MAX_TOP];
};

// See states.h.
struct StateSegments;
struct StateRecords;
struct LinearAttention;
struct CausalConv;
struct GatedNorm;

struct Kernels {
  const char* name;
  void (*pack_int8)(const PackSource&, const LinearInt8&, uint8_t* packed, float* scales);
  void (*quantize_rows)(const Rows&, int rows, int num_in, const Norm&, const Quantized&);
  void (*linear_int8)(const LinearInt8&, const Quantized&, int rows, void* out, size_t out_stride,
                      DType, bool add);
  void (*rotate)(float* x, size_t stride, int rows, int heads, int head_dim, const Rotation&);
  void (*append_kv)(const Step&, const CacheLayer&, const float* k, const float* v, size_t stride,
                    const Rotation&);
  // recent: the store of each row's own block, or null where the layer has one store. With it, `begin`
  // is not supported.
  void (*attend)(const Step&, const AttentionLayer&, const float* q, size_t q_stride, float* out,
                 size_t out_stride, float* lse, const Phased&, const RecentStore* recent);
  int64_t (*read_bytes)(const void*, size_t bytes);
  void (*copy_bytes)(void* to, const void* from, size_t bytes);
  double (*multiply_i8)(int64_t rounds);    // returns the number of operations
  double (*multiply_bf16)(int64_t rounds);  // returns 0 without such an instruction
  void (*argmax)(const float* logits, size_t stride, int rows, int size, int32_t* out);
  // Adjusts the logits in place; returns false if a plan names a token outside [0, size).
  bool (*sample)(float* logits, size_t stride, int rows, int size, const SamplingInputs*, SampledRow* out);
  bool (*describe_tokens)(const float* logits, size_t stride, int rows, int size, const int32_t* tokens,
                          int num_top, SampledRow* out);
  void (*linear_int4)(const LinearInt4&, const Quantized&, int rows, void* out, size_t out_stride,
                      DType, bool add);
  void (*decode_plain)(const PlainSequence*, int count, const PlainLayer&, const void* q, size_t q_stride, DType q_type,
                       float* out, float* lse, const Phased&);
  void (*prefill_plain)(const PlainSequence&, const PlainLayer&, const PrefillRows&);
  void (*linear_plain)(const LinearPlain&, const Rows&, int rows, const Norm&, void* out, size_t out_stride, bool add);
  // Merges part's row i into row rows[i] of total, or into row i where rows is null.
  void (*merge_partials)(const PartialRows& total, const PartialRows& part, const int64_t* rows, int count, int heads,
                         int dim);
  // Converts rows of [heads][dim] to [rows][heads][dim] signed bytes and [rows][heads] scales, and back.
  void (*quantize_heads)(const Rows&, int rows, int heads, int dim, int8_t* values, float* scales);
  void (*dequantize_heads)(const int8_t* values, const float* scales, int rows, int heads, int dim, void* out, DType);
  void (*pack_int4)(const PackSource&, const LinearInt4&, const float* bounds, bool is_searched, uint8_t* packed,
                    float* factors);
  bool (*all_finite)(const void*, size_t bytes, uint32_t low, uint32_t high);
  void (*mix_experts)(const Experts&, const RoutedRows&, ExpertsPart);
  // Writes the experts of each row and their weights, [rows][top_k].
  void (*route)(const Router&, const Rows&, int rows, int32_t* experts, float* weights);
  void (*append_latent)(const Step&, const LatentLayer&, const float* k, size_t stride, const Rotation&);
  // out: [rows][heads][value_dim]; lse: [rows][heads], or null. with_matrix: whether to use matrix instructions.
  void (*attend_latent)(const Step&, const LatentLayer&, const float* q, size_t q_stride, float* out, float* lse,
                        bool with_matrix);
  void (*linear_heads)(const ProductList&, const HeadRows&);
  // Rounds rows to int8, [rows][num_in], with a scale for each.
  void (*round_rows)(const CodedRows&, int rows, int8_t* to, float* steps);
  void (*linear_superblocks)(const LinearSuperblocks&, const Quantized&, int rows, void* out, size_t out_stride,
                             DType, bool add);
  double (*multiply_f32)(int64_t rounds);  // as multiply_i8
  void (*attend_linear)(const LinearAttention&, const StateRecords&, const StateSegments&);
  void (*convolve)(const CausalConv&, const StateRecords&, const StateSegments&);
  void (*gate_and_norm)(const GatedNorm&);
  // Adds the weights of rows of some sequences; number: the layer's, whose K/V has 8 bits.
  void (*add_key_scores)(const ScoredRows*, int count, size_t tile_bytes, const AttentionLayer&, int number,
                         const float* q, size_t q_stride);
  void (*add_plain_key_scores)(const ScoredRows*, int count, size_t token_bytes, const PlainKeys&, int number,
                               const float* q, size_t q_stride);
  // Copies the tokens `kept`, [kv_heads][count], which rise, to the first places of target, perhaps in place.
  void (*gather_kv)(const CacheLayer&, size_t tile_bytes, const uint8_t* source, uint8_t* target, const int32_t* kept,
                    int count);
  // Writes the bounds of the tiles that the rows of the step complete, after append_kv.
  void (*bound_keys)(const Step&, const CacheLayer&, const KeyBounds&);
  // The same as `attend`, but some rows read a part of their tiles. The layer has neither a window nor slopes. In
  // two phases all sequences have one row, and one thread makes both calls.
  void (*attend_selected)(const Step&, const AttentionLayer&, const float* q, size_t q_stride, float* out,
                          size_t out_stride, float* lse, const RecentStore* recent, const Selection&, const Phased&);
  // attend_selected in two calls of one thread, between which the tiles can be brought to memory. The first writes
  // which tiles of each sequence the rows read, a byte for each of its tiles, one sequence after the other. The
  // second returns false unless the thread's last choice was for this step and layer.
  void (*choose_tiles)(const Step&, const AttentionLayer&, const float* q, size_t q_stride, const RecentStore* recent,
                       const Selection&, uint8_t* is_read);
  bool (*attend_chosen)(const Step&, const AttentionLayer&, const float* q, size_t q_stride, float* out,
                        size_t out_stride, float* lse, const RecentStore* recent);
  // What attend_selected does where other machines have tiles of the sequences, too, in three calls (see
  // attention_share.inl). Each sequence of the step has one row, which comes after its keys here: its `num_tiles` first
  // tiles, and keys of its own tile. The first call writes the lists of these tiles, [rows][kv_heads], each as long
  // as it has to be. The second reads the lists of all machines. The third attends to the tiles chosen here and to
  // the keys of the own tile; q, out and lse are dense.
  void (*list_tiles)(const Step&, const AttentionLayer&, const float* q, size_t q_stride, const KeyBounds&,
                     const TileShares&, int32_t* lists);
  void (*count_tiles)(const ListedPart* parts, int num_parts, int rows, int kv_heads);
  void (*attend_listed)(const Step&, const AttentionLayer&, const float* q, const TileShares&, const int32_t* lists,
                        const int32_t* counts, float* out, float* lse);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();    // null if it was not built
const Kernels* avxvnni_kernels();
const Kernels* avx512_kernels();

}  // namespace ms
