"""How llama.cpp's conversion writes each architecture: what it does to tensors, and its keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import gguf
import torch
from torch import Tensor

from tests.support.engine.variants.variant import Json

Named = tuple[str, Tensor]
Change = Callable[[Json, str, Tensor], Iterator[Named]]

# -- tensors


def head_dim(config: Json) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def as_it_is(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    yield name, tensor


def permuted(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Interleaves the halves of each head of q and k."""
    for module, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if name.endswith((f"{module}.weight", f"{module}.bias")):
            halves = tensor.unflatten(0, (config[key], 2, -1))
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
    yield name, tensor


def with_norms_plus_one(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def llama_extra(config: Json) -> Iterator[Named]:
    """Yields the divisors of the frequencies that Llama 3's scaling stands for."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), torch.device("cpu"))
    size = head_dim(config)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    yield "rope_freqs.weight", plain / scaled


def split_experts(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Yields gate and up of fused experts, [experts, 2 * size, hidden], apart."""
    if name.endswith("experts.gate_up_proj"):
        start = name.removesuffix("gate_up_proj")
        gate, up = tensor.chunk(2, 1)
        yield f"{start}gate_proj.weight", gate
        yield f"{start}up_proj.weight", up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


class Row:
    """How an architecture is written."""

    def __init__(
        self,
        arch: gguf.MODEL_ARCH,
        change: Change = as_it_is,
        keys: Callable[[gguf.GGUFWriter, Json], Any] = lambda writer, config: None,
        extra: Callable[[Json], Iterator[Named]] = lambda config: iter(()),
    ) -> None:
        self.arch = arch
        self.change = change
        self.keys = keys
        self.extra = extra


def _llama_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(head_dim(config))


def transposed_experts(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Yields gate and up of gpt-oss apart, which are stored in turn and [experts, in, out]."""
    start, _, ending = name.rpartition(".experts.")
    is_bias = ending.endswith("_bias")
    suffix = "bias" if is_bias else "weight"
    if start and not is_bias:
        tensor = tensor.transpose(1, 2)
    if ending.startswith("gate_up_proj"):
        yield f"{start}.experts.gate_proj.{suffix}", tensor[:, ::2]
        yield f"{start}.experts.up_proj.{suffix}", tensor[:, 1::2]
    elif start:
        yield f"{start}.experts.down_proj.{suffix}", tensor
    else:
        yield f"{name}.weight" if name.endswith("sinks") else name, tensor


def granite_experts(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    start = name.removesuffix("input_linear.weight")
    if start == name:
        yield from permuted(config, name, tensor)
        return
    gate, up = tensor.chunk(2, 1)
    layer = name.split(".layers.")[1].split(".")[0]
    yield f"model.layers.{layer}.mlp.experts.gate_proj.weight", gate
    yield f"model.layers.{layer}.mlp.experts.up_proj.weight", up


def mixtral_experts(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    for changed, value in permuted(config, name, tensor):
        yield from split_experts(config, changed, value)


def with_correction(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    yield from split_experts(config, name, tensor)


def split_expansion(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Yields the expansion of a latent apart: of keys, transposed, and of values."""
    start = name.removesuffix("kv_b_proj.weight")
    if start == name:
        yield from with_correction(config, name, tensor)
        return
    heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
    size = config["qk_nope_head_dim"]
    yield f"{start}k_b_proj.weight", heads[:, :size].transpose(1, 2)
    yield f"{start}v_b_proj.weight", heads[:, size:]


def without_head(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Yields the tensors of Gemma, whose head is always the embedding."""
    if name != "lm_head.weight":
        yield from with_norms_plus_one(config, name, tensor)


def phi3_extra(config: Json) -> Iterator[Named]:
    rope = config["rope_parameters"]
    for kind in ("long", "short"):
        if rope.get(f"{kind}_factor"):
            yield f"rope_factors_{kind}.weight", torch.tensor(rope[f"{kind}_factor"])


# -- keys of architectures


def _llama_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(head_dim(config))


def _moe_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _granite_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    _llama_keys(writer, config)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _gemma2_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _window(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_sliding_window(config["sliding_window"])


def _window_pattern(writer: gguf.GGUFWriter, config: Json) -> None:
    if config.get("sliding_window"):
        _window(writer, config)
        types = config["layer_types"]
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in types])


def _phi3_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    rope = config["rope_parameters"]
    dim = int(rope.get("partial_rotary_factor", 1.0) * head_dim(config))
    writer.add_rope_dimension_count(dim)
    pretrained = config["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(pretrained)
    writer.add_sliding_window(config.get("sliding_window") or 0)
    if rope.get("long_factor"):
        scale = config["max_position_embeddings"] / pretrained
        factor = math.sqrt(1 + math.log(scale) / math.log(pretrained)) if scale > 1 else 1.0
        writer.add_rope_scaling_attn_factors(factor)


def _gpt_oss_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    _window(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _glm_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    partial = config["rope_parameters"].get("partial_rotary_factor", 0.5)
    writer.add_rope_dimension_count(int(head_dim(config) * partial))


def _glm_moe_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    _glm_keys(writer, config)
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _dots_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _latent_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    """Writes the sizes of the latent, as one head of keys and values."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    for name in ("head_count_kv", "key_length", "value_length"):
        writer.kv_data[0].pop(f"{writer.arch}.attention.{name}", None)
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    _deepseek_keys(writer, config)


def _old_latent_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    """Writes the sizes of heads, as the first files had them."""
    for name in ("key_length", "value_length"):
        writer.kv_data[0].pop(f"{writer.arch}.attention.{name}", None)
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["v_head_dim"])
    _deepseek_keys(writer, config)


def _deepseek_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    scale = config["rope_parameters"].get("mscale_all_dim")
    if scale is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)


def _minimax_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    partial = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(config.get("rotary_dim", int(head_dim(config) * partial)))
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _mistral3_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    _llama_keys(writer, config)
    rope = config["rope_parameters"]
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _hunyuan_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    """Writes the stretched base of the rotary embedding, which is all that alpha means."""
    rope, dim = config["rope_parameters"], head_dim(config)
    base = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))
    writer.kv_data[0].pop(f"{writer.arch}.rope.freq_base")
    writer.add_rope_freq_base(base)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1)
    writer.add_rope_scaling_orig_ctx_len(config["max_position_embeddings"])


def _cohere_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    _window(writer, config)


_ARCH = gguf.MODEL_ARCH
ROWS = {
    "llama": Row(_ARCH.LLAMA, permuted, _llama_keys, llama_extra),
    "mistral": Row(_ARCH.LLAMA, permuted, _llama_keys, llama_extra),
    "mixtral": Row(_ARCH.LLAMA, mixtral_experts, _llama_keys, llama_extra),
    "qwen2": Row(_ARCH.QWEN2),
    "qwen3": Row(_ARCH.QWEN3),
    "qwen2_moe": Row(_ARCH.QWEN2MOE, split_experts, _moe_keys),
    "qwen3_moe": Row(_ARCH.QWEN3MOE, split_experts, _moe_keys),
    "olmo2": Row(_ARCH.OLMO2),
    "olmo3": Row(_ARCH.OLMO2, keys=_window_pattern),
    "olmoe": Row(_ARCH.OLMOE, split_experts),
    "gemma2": Row(_ARCH.GEMMA2, without_head, _gemma2_keys),
    "gemma3_text": Row(_ARCH.GEMMA3, without_head, _window),
    "phi3": Row(_ARCH.PHI3, keys=_phi3_keys, extra=phi3_extra),
    "granite": Row(_ARCH.GRANITE, permuted, _granite_keys, llama_extra),
    "granitemoe": Row(_ARCH.GRANITE_MOE, granite_experts, _granite_keys, llama_extra),
    "gpt_oss": Row(_ARCH.GPT_OSS, transposed_experts, _gpt_oss_keys),
    "glm4": Row(_ARCH.GLM4, keys=_glm_keys),
    "glm4_moe": Row(_ARCH.GLM4_MOE, with_correction, _glm_moe_keys),
    "dots1": Row(_ARCH.DOTS1, with_correction, _dots_keys),
    "deepseek_v2": Row(_ARCH.DEEPSEEK2, with_correction, _old_latent_keys),
    "deepseek_v3": Row(_ARCH.DEEPSEEK2, split_expansion, _latent_keys),
    "minimax_m2": Row(_ARCH.MINIMAXM2, with_correction, _minimax_keys),
    "ministral3": Row(_ARCH.MISTRAL3, permuted, _mistral3_keys),
    "hunyuan_v1_dense": Row(_ARCH.HUNYUAN_DENSE, keys=_hunyuan_keys),
    "smollm3": Row(_ARCH.SMOLLM3, permuted, _llama_keys, llama_extra),
    "cohere2": Row(_ARCH.COHERE2, keys=_cohere_keys),
    "starcoder2": Row(_ARCH.STARCODER2),
    "seed_oss": Row(_ARCH.SEED_OSS),
    "arcee": Row(_ARCH.ARCEE, permuted, _llama_keys, llama_extra),
    "exaone4": Row(_ARCH.EXAONE4, keys=_window_pattern, extra=llama_extra),
    "ernie4_5": Row(_ARCH.ERNIE4_5),
}
