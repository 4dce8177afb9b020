// One instruction set's kernels. The including file defines MS_ISA, MS_KERNELS and MS_NAME.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <vector>

#include "kernels.h"
#include "simd_math.h"
#include "states.h"
#include "team.h"

namespace MS_ISA {
using namespace ms;
}

#include "rows.inl"
#include "gemm.inl"
#include "gemm4.inl"
#include "gemm_superblocks.inl"
#include "pack.inl"
#include "rounding.inl"
#include "gemm_plain.inl"
#include "kv_shape.inl"
#include "kv_tiles4.inl"
#include "kv_tiles.inl"
#include "attention_common.inl"
#include "attention_stretch.inl"
#include "attention_decode4.inl"
#include "attention_decode.inl"
#include "attention_prefill.inl"
#include "attention_rows.inl"
#include "attention_call.inl"
#include "key_weights.inl"
#include "key_scores.inl"
#include "kv_bounds.inl"
#include "attention_select.inl"
#include "attention_share.inl"
#include "attention_plain.inl"
#include "key_scores_plain.inl"
#include "attention_plain_prefill.inl"
#include "attention_latent.inl"
#include "attention_latent_dot.inl"
#include "attention_latent_rows.inl"
#include "attention_latent_call.inl"
#include "partials.inl"
#include "experts.inl"
#include "heads.inl"
#include "router.inl"
#include "states_linear.inl"
#include "states_tasks.inl"
#include "states_rows.inl"
#include "ceilings.inl"
#include "logits.inl"
#include "sampling.inl"

namespace ms {
const Kernels* MS_KERNELS() {
  static const Kernels all = {MS_NAME,           MS_ISA::pack_int8, MS_ISA::quantize_rows,
                              MS_ISA::linear_int8, MS_ISA::rotate,  MS_ISA::append_kv,
                              MS_ISA::attend,  MS_ISA::read_bytes, MS_ISA::copy_bytes,
                              MS_ISA::multiply_i8, MS_ISA::multiply_bf16,
                              MS_ISA::argmax,  MS_ISA::sample, MS_ISA::describe_tokens, MS_ISA::linear_int4,
                              MS_ISA::decode_plain, MS_ISA::prefill_plain, MS_ISA::linear_plain,
                              MS_ISA::merge_partials, MS_ISA::quantize_heads, MS_ISA::dequantize_heads,
                              MS_ISA::pack_int4, MS_ISA::all_finite, MS_ISA::mix_experts, MS_ISA::route,
                              MS_ISA::append_latent, MS_ISA::attend_latent,
                              MS_ISA::linear_heads, MS_ISA::round_rows, MS_ISA::linear_superblocks,
                              MS_ISA::multiply_f32, MS_ISA::attend_linear, MS_ISA::convolve, MS_ISA::gate_and_norm,
                              MS_ISA::add_key_scores, MS_ISA::add_plain_key_scores, MS_ISA::gather_kv,
                              MS_ISA::bound_keys, MS_ISA::attend_selected,
                              MS_ISA::choose_tiles, MS_ISA::attend_chosen,
                              MS_ISA::list_tiles, MS_ISA::count_tiles, MS_ISA::attend_listed};
  return &all;
}
}  // namespace ms
