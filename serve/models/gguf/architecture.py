"""What a row of the table of architectures is, and the values of config.json that many share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serve.models.families.fields import FULL, MAX_CONTEXT, MAX_WIDTH, SLIDING
from serve.models.gguf.keys import Keys
from serve.models.gguf.rope import check_rotated, rope_values

Json = dict[str, Any]
MAX_MLP = MAX_WIDTH * 8
# llama.cpp's numbers of the functions that make scores of experts
SOFTMAX, SIGMOID = 1, 2
QKV, JOINED_QKV = ("attn_q", "attn_k", "attn_v"), "attn_qkv"


class Constant(NamedTuple):
    """A tensor whose elements are all one number."""

    shape: tuple[int, ...]
    value: float


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table.

    values: makes the values of config.json, with its model_type. is_permuted: the rows of q and k
    are those of an interleaved rotary embedding. norm_offset: what the conversion adds to the
    weights of norms. is_latent: its attention is over latents. modules: the names of tensors that
    differ from `names.py`, by their fields in WeightNames. tensors: further tensors, with their
    names behind the family's prefix and {} for a layer's number. constants: tensors of fp32 that
    the file has as keys, by their names behind the prefix. unused: tensors that files may have and
    that no model computes with.
    """

    values: Callable[[Keys], Json]
    is_permuted: bool = False
    norm_offset: float = 0.0
    is_latent: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    constants: Callable[[Keys], Mapping[str, Constant]] = lambda keys: {}
    unused: Callable[[Keys], Collection[str]] = lambda keys: ()


def sizes(keys: Keys, *, eps: str = "rms_norm_eps") -> Json:
    """Returns what all models have, but for the rotary embedding."""
    if not keys.num_experts:
        keys.expect("expert_used_count", 0)
    ending = "layer_norm_rms_epsilon" if eps == "rms_norm_eps" else "layer_norm_epsilon"
    return {
        "vocab_size": keys.vocab_size,
        "hidden_size": keys.hidden_size,
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": keys.num_heads,
        "num_key_value_heads": keys.num_kv_heads,
        "head_dim": keys.head_dim,
        "max_position_embeddings": keys.integer("context_length", high=MAX_CONTEXT),
        eps: keys.number(f"attention.{ending}", high=1.0),
        "tie_word_embeddings": "output.weight" not in keys.tensors,
    }


def llama_like(keys: Keys, model_type: str, **more: Any) -> Json:
    """Returns the values of a model whose heads rotate whole."""
    check_rotated(keys, keys.head_dim)
    return (
        sizes(keys)
        | {
            "model_type": model_type,
            "intermediate_size": keys.per_layer("feed_forward_length", high=MAX_MLP),
            "rope_parameters": rope_values(keys),
        }
        | more
    )


def has_biases(keys: Keys, *stems: str) -> bool:
    """Returns whether the products have biases: all of them or none."""
    joined = keys.has_tensor(f"{JOINED_QKV}.weight")
    found = {
        keys.has_tensor(f"{JOINED_QKV if joined and stem in QKV else stem}.bias") for stem in stems
    }
    if len(found) > 1:
        raise keys.fail("block_count", f"some of {', '.join(stems)} have a bias, and others none")
    return found.pop()


def expert_size(keys: Keys) -> int:
    """Returns the size of an expert, which older files do not say."""
    if keys.has_tensor("ffn_gate_up_exps.weight"):
        rows = keys.rows("ffn_gate_up_exps.weight") // 2
    else:
        rows = keys.rows("ffn_gate_exps.weight")
    return keys.integer("expert_feed_forward_length", rows, high=MAX_MLP)


def local_experts(keys: Keys, scores: int = SOFTMAX) -> Json:
    keys.expect("expert_gating_func", scores)
    return {
        "num_local_experts": keys.num_experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


def attention_bias(keys: Keys) -> bool:
    return has_biases(keys, "attn_q", "attn_k", "attn_v", "attn_output")


def layer_types(keys: Keys, period: int) -> list[str]:
    """Returns the kind of each layer: from a key, or all but each period-th have a window."""
    key = "attention.sliding_window_pattern"
    count = keys.num_layers
    if keys.has(key) and isinstance(keys.values[key], list):
        given = keys.values[key]
        if len(given) < count or not all(isinstance(item, bool) for item in given):
            raise keys.fail(key, f"must say true or false for each of {count} layers")
        return [SLIDING if item else FULL for item in given[:count]]
    period = keys.integer(key, period, low=1)
    return [SLIDING if (number + 1) % period else FULL for number in range(count)]


def partly_rotated(keys: Keys, *, eps: str = "rms_norm_eps") -> Json:
    dim = keys.head_dim
    rotated = keys.integer("rope.dimension_count", low=2, high=dim)
    return sizes(keys, eps=eps) | {
        "intermediate_size": keys.per_layer("feed_forward_length", high=MAX_MLP),
        "rope_parameters": rope_values(keys) | {"partial_rotary_factor": rotated / dim},
    }
