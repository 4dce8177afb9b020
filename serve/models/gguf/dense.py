"""Dense architectures of GGUF files."""

from __future__ import annotations

from serve.models.families.fields import FULL, MAX_CONTEXT, SLIDING
from serve.models.gguf.architecture import (
    MAX_MLP,
    QKV,
    Architecture,
    Constant,
    Json,
    attention_bias,
    has_biases,
    layer_types,
    llama_like,
    local_experts,
    partly_rotated,
    sizes,
)
from serve.models.gguf.keys import Keys
from serve.models.gguf.rope import base_of, check_rotated, original_length, rope_values


def _llama(keys: Keys) -> Json:
    values = llama_like(keys, "llama")
    if keys.num_experts:
        return values | {"model_type": "mixtral", "sliding_window": None} | local_experts(keys)
    return values | {
        "attention_bias": has_biases(keys, "attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": has_biases(keys, "ffn_gate", "ffn_up", "ffn_down"),
    }


def _qwen2(keys: Keys) -> Json:
    return llama_like(keys, "qwen2")


def _qwen3(keys: Keys) -> Json:
    return llama_like(keys, "qwen3", attention_bias=attention_bias(keys))


def _gemma2(keys: Keys) -> Json:
    return _gemma(keys, "gemma2", period=2, large=46) | {
        "rope_parameters": rope_values(keys),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> Json:
    local = keys.number("rope.freq_base_swa", 10000.0, low=1.0, high=1e15)
    return _gemma(keys, "gemma3_text", period=6, large=62) | {
        "rope_parameters": {
            FULL: rope_values(keys),
            SLIDING: {"rope_type": "default", "rope_theta": local},
        },
        "sliding_window": keys.integer("attention.sliding_window"),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0),
    }


def _gemma(keys: Keys, model_type: str, *, period: int, large: int) -> Json:
    """large: the layers of the largest model, whose queries are scaled by the width of a head's
    part of the hidden state and not by that of its values."""
    check_rotated(keys, keys.head_dim)
    scaled_by = keys.head_dim
    if keys.num_layers == large:
        scaled_by = keys.hidden_size // keys.num_heads
    return sizes(keys) | {
        "model_type": model_type,
        "intermediate_size": keys.per_layer("feed_forward_length", high=MAX_MLP),
        "query_pre_attn_scalar": scaled_by,
        "layer_types": layer_types(keys, period),
    }


def _phi3(keys: Keys) -> Json:
    dim = keys.head_dim
    rotated = keys.integer("rope.dimension_count", dim, low=2, high=dim)
    window = keys.integer("attention.sliding_window", 0, low=0)
    return sizes(keys) | {
        "model_type": "phi3",
        "intermediate_size": keys.per_layer("feed_forward_length", high=MAX_MLP),
        "rope_parameters": rope_values(keys) | {"partial_rotary_factor": rotated / dim},
        "sliding_window": window or None,
    }


def _olmo2(keys: Keys) -> Json:
    window = keys.integer("attention.sliding_window", 0, low=0)
    values = llama_like(keys, "olmo2", attention_bias=attention_bias(keys))
    if not window:
        return values
    base = keys.number("rope.freq_base_swa", base_of(keys), low=1.0, high=1e15)
    plain = {"rope_type": "default", "rope_theta": base}
    return values | {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": layer_types(keys, 4),
        "rope_parameters": {FULL: rope_values(keys), SLIDING: plain},
    }


def _granite(keys: Keys) -> Json:
    return llama_like(keys, "granite", attention_bias=attention_bias(keys)) | granite_scales(keys)


def granite_scales(keys: Keys) -> Json:
    keys.expect("rope.scaling.finetuned", True)  # false stands for no rotary embedding
    return {
        "embedding_multiplier": keys.number("embedding_scale", 1.0, high=1e4),
        "residual_multiplier": keys.number("residual_scale", 1.0, high=1e4),
        "attention_multiplier": keys.number("attention.scale", high=1e4),
        "logits_scaling": keys.number("logit_scale", 1.0, low=1e-6),
    }


def _glm4(keys: Keys) -> Json:
    values = partly_rotated(keys) | {"model_type": "glm4"}
    return values | {"attention_bias": has_biases(keys, "attn_q", "attn_k", "attn_v")}


def _mistral3(keys: Keys) -> Json:
    values = llama_like(keys, "ministral3", sliding_window=None)
    rope = values["rope_parameters"]
    if keys.has("attention.temperature_scale"):
        rope["llama_4_scaling_beta"] = keys.number("attention.temperature_scale")
        rope.setdefault("original_max_position_embeddings", original_length(keys))
    if rope["rope_type"] == "yarn":
        rope["mscale"] = 1.0
        rope["mscale_all_dim"] = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    return values


def _hunyuan(keys: Keys) -> Json:
    return llama_like(keys, "hunyuan_v1_dense", attention_bias=attention_bias(keys))


def _smollm3(keys: Keys) -> Json:
    return llama_like(
        keys,
        "smollm3",
        no_rope_layer_interval=4,
        attention_bias=attention_bias(keys),
        mlp_bias=has_biases(keys, "ffn_gate", "ffn_up", "ffn_down"),
    )


def _cohere2(keys: Keys) -> Json:
    check_rotated(keys, keys.head_dim)
    return sizes(keys, eps="layer_norm_eps") | {
        "model_type": "cohere2",
        "intermediate_size": keys.per_layer("feed_forward_length", high=MAX_MLP),
        "rope_parameters": rope_values(keys),
        "logit_scale": keys.number("logit_scale", high=1e4),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": layer_types(keys, 4),
    }


def _starcoder2(keys: Keys) -> Json:
    check_rotated(keys, keys.head_dim)
    products = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
    return sizes(keys, eps="norm_epsilon") | {
        "model_type": "starcoder2",
        "intermediate_size": keys.per_layer("feed_forward_length", high=MAX_MLP),
        "rope_parameters": rope_values(keys),
        "use_bias": has_biases(keys, *products),
        "sliding_window": None,
    }


def _seed_oss(keys: Keys) -> Json:
    return llama_like(
        keys,
        "seed_oss",
        attention_bias=has_biases(keys, "attn_q", "attn_k", "attn_v"),
        attention_out_bias=keys.has_tensor("attn_output.bias"),
    )


def _arcee(keys: Keys) -> Json:
    return llama_like(
        keys,
        "arcee",
        attention_bias=attention_bias(keys),
        mlp_bias=has_biases(keys, "ffn_up", "ffn_down"),
    )


def _exaone4(keys: Keys) -> Json:
    window = keys.integer("attention.sliding_window", 0, low=0)
    values = llama_like(keys, "exaone4", sliding_window=window or None)
    types = layer_types(keys, 4) if window else [FULL] * keys.num_layers
    return values | {"layer_types": types}


def _ernie4_5(keys: Keys) -> Json:
    products = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    return llama_like(keys, "ernie4_5", use_bias=has_biases(keys, *products))


def _chatglm(keys: Keys) -> Json:
    values = partly_rotated(keys) | {"model_type": "glm"}
    return values | {"attention_bias": has_biases(keys, *QKV)}


def _stablelm(keys: Keys) -> Json:
    """Reads StableLM. As in llama.cpp, a block without a second norm is a parallel one; what the
    key says is a default of the conversion where the original said nothing."""
    keys.has("use_parallel_residual")
    return partly_rotated(keys, eps="layer_norm_eps") | {
        "model_type": "stablelm",
        "use_qkv_bias": has_biases(keys, "attn_q", "attn_k", "attn_v"),
        "qk_layernorm": keys.has_tensor("attn_q_norm.weight"),
        "use_parallel_residual": not keys.has_tensor("ffn_norm.weight"),
    }


def _apertus(keys: Keys) -> Json:
    return llama_like(keys, "apertus", attention_bias=attention_bias(keys))


def _xielu(keys: Keys) -> dict[str, Constant]:
    """Returns the learned numbers of the activations, which are keys without the architecture."""
    shapes: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    return {
        f"layers.{layer}.mlp.act_fn.{name}": Constant(shape, value)
        for name, shape in shapes.items()
        for layer, value in enumerate(keys.shared_numbers(f"xielu.{name}"))
    }


def _gpt2(keys: Keys) -> Json:
    return {
        "model_type": "gpt2",
        "vocab_size": keys.vocab_size,
        "n_embd": keys.hidden_size,
        "n_layer": keys.num_layers,
        "n_head": keys.num_heads,
        "n_positions": keys.integer("context_length", high=MAX_CONTEXT),
        "n_inner": keys.per_layer("feed_forward_length", high=MAX_MLP),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon", high=1.0),
        "tie_word_embeddings": "output.weight" not in keys.tensors,
    }


ARCHITECTURES = {
    "llama": Architecture(_llama, is_permuted=True),
    "qwen2": Architecture(_qwen2),
    "qwen3": Architecture(_qwen3),
    "qwen2vl": Architecture(_qwen2),
    "qwen3vl": Architecture(_qwen3),
    "gemma2": Architecture(_gemma2, norm_offset=1.0),
    "gemma3": Architecture(_gemma3, norm_offset=1.0),
    "phi3": Architecture(_phi3),
    "mistral3": Architecture(_mistral3, is_permuted=True),
    "olmo2": Architecture(_olmo2),
    "granite": Architecture(_granite, is_permuted=True),
    "glm4": Architecture(_glm4),
    "smollm3": Architecture(_smollm3, is_permuted=True),
    "cohere2": Architecture(_cohere2),
    "starcoder2": Architecture(_starcoder2),
    "seed_oss": Architecture(_seed_oss, modules={"post_attention_norm": "mlp_in"}),
    "arcee": Architecture(_arcee, is_permuted=True),
    "exaone4": Architecture(_exaone4),
    "ernie4_5": Architecture(_ernie4_5),
    "hunyuan-dense": Architecture(_hunyuan),
    "chatglm": Architecture(_chatglm),
    "stablelm": Architecture(_stablelm),
    "apertus": Architecture(_apertus, constants=_xielu),
    "gpt2": Architecture(_gpt2, tensors={"position_embd.weight": "wpe.weight"}),
}
