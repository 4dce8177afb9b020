"""Architectures of GGUF files with multi-head latent attention: DeepSeek V2 and V3, Kimi K2,
Moonlight, GLM-4.7-Flash, Mistral Small 4.

Newer files have the expansion of the latent in two tensors, the one of keys transposed, and say the
sizes of the latent where older ones say those of heads.
"""

from __future__ import annotations

from serve.models.families.fields import MAX_CONTEXT, MAX_HEADS, MAX_WIDTH
from serve.models.gguf.architecture import (
    MAX_MLP,
    SIGMOID,
    SOFTMAX,
    Architecture,
    Json,
)
from serve.models.gguf.keys import Keys
from serve.models.gguf.rope import original_length, rope_values

_V3_EXPERTS = 256  # those of DeepSeek V3 are in groups, which its first files do not say


def _deepseek2(keys: Keys) -> Json:
    kind = keys.integer("expert_gating_func", SIGMOID if _is_glm(keys) else SOFTMAX)
    if kind not in (SOFTMAX, SIGMOID):
        raise keys.fail("expert_gating_func", f"{kind} is not supported")
    is_v3 = kind == SIGMOID
    groups = _groups(keys, is_v3=is_v3)
    if not is_v3:
        keys.expect("expert_weights_norm", False)
        groups["topk_method"] = "group_limited_greedy" if groups["n_group"] > 1 else "greedy"
    return _latent(keys, "deepseek_v3" if is_v3 else "deepseek_v2") | groups


def _is_glm(keys: Keys) -> bool:
    """Returns whether the model is GLM-4.7-Flash, whose first files do not say that scores of
    experts are sigmoids."""
    return keys.num_blocks in (47, 48) and keys.vocab_size == 154_880


def _mistral4(keys: Keys) -> Json:
    """Reads Mistral Small 4. The factor of queries at long distances is a key that its files may
    lack; llama.cpp then computes without it, too."""
    keys.expect("expert_gating_func", SOFTMAX)
    values = _latent(keys, "mistral4") | _groups(keys, is_v3=False)
    rope = values["rope_parameters"]
    if keys.has("attention.temperature_scale"):
        rope["llama_4_scaling_beta"] = keys.number("attention.temperature_scale")
        rope.setdefault("original_max_position_embeddings", original_length(keys))
        keys.expect("attention.temperature_length", rope["original_max_position_embeddings"])
    return values


def _latent(keys: Keys, model_type: str) -> Json:
    return {
        "model_type": model_type,
        "vocab_size": keys.vocab_size,
        "hidden_size": keys.hidden_size,
        "num_hidden_layers": keys.num_layers,
        "max_position_embeddings": keys.integer("context_length", high=MAX_CONTEXT),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", high=1.0),
        "tie_word_embeddings": "output.weight" not in keys.tensors,
        "intermediate_size": keys.per_layer("feed_forward_length", high=MAX_MLP),
        "n_routed_experts": keys.num_experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "n_shared_experts": keys.integer("expert_shared_count", 0, low=0),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", high=MAX_MLP),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, low=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
        **_attention(keys),
    }


def _groups(keys: Keys, *, is_v3: bool) -> Json:
    if is_v3 and keys.num_experts == _V3_EXPERTS and not keys.has("expert_group_count"):
        raise keys.fail("expert_group_count", f"is missing, of {_V3_EXPERTS} experts")
    return {
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
    }


def _attention(keys: Keys) -> Json:
    rank = keys.integer("attention.kv_lora_rank", high=MAX_WIDTH)
    rotated = keys.integer("rope.dimension_count", high=MAX_HEADS)
    is_latent = keys.has("attention.key_length_mla")
    ending = "_length_mla" if is_latent else "_length"
    if is_latent:
        keys.expect("attention.head_count_kv", 1)
        keys.expect("attention.key_length", rank + rotated)
        keys.expect("attention.value_length", rank)
    else:
        keys.expect("attention.head_count_kv", keys.num_heads)
    key_size = keys.integer(f"attention.key{ending}", low=rotated + 1, high=MAX_HEADS)
    q_rank = None
    if keys.has("attention.q_lora_rank"):
        q_rank = keys.integer("attention.q_lora_rank", high=MAX_WIDTH)
    return {
        "num_attention_heads": keys.num_heads,
        "q_lora_rank": q_rank,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_size - rotated,
        "v_head_dim": keys.integer(f"attention.value{ending}", high=MAX_HEADS),
        "rope_interleave": True,
        "rope_parameters": _rope(keys),
    }


def _rope(keys: Keys) -> Json:
    """Returns the rotary embedding. A file has a tenth of YaRN's mscale_all_dim, which mscale is
    equal to in all models of the kind."""
    rope = rope_values(keys)
    scale = 10.0 * keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if rope["rope_type"] == "yarn":
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    return rope


ARCHITECTURES = {
    "deepseek2": Architecture(_deepseek2, is_latent=True),
    "mistral4": Architecture(_mistral4, is_latent=True),
}
