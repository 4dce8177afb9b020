"""The rotary embedding of a GGUF model, as the rope_parameters of a config.json.

llama.cpp stores Llama 3's scaling as one divisor of each frequency (tensor rope_freqs.weight).
LongRoPE (arXiv 2402.13753) with these divisors and no factor of its own computes the same.
"""

from __future__ import annotations

from typing import Any

from serve.errors import ModelLoadError
from serve.models.families.fields import MAX_CONTEXT
from serve.models.gguf.keys import Keys

FREQUENCIES = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (FREQUENCIES, _SHORT, _LONG)
Json = dict[str, Any]


def check_rotated(keys: Keys, size: int) -> None:
    """Raises ModelLoadError unless `size` values of a head rotate."""
    keys.expect("rope.dimension_count", size)


def base_of(keys: Keys) -> float:
    return keys.number("rope.freq_base", 10000.0, low=1.0, high=1e15)


def rope_values(keys: Keys) -> Json:
    """Returns rope_parameters of a model with one rotary embedding. ModelLoadError for a kind that
    is not supported."""
    plain: Json = {"rope_type": "default", "rope_theta": base_of(keys)}
    kind, factor = _kind_and_factor(keys)
    pretrained = original_length(keys)
    divisors = keys.factors(FREQUENCIES)
    if keys.factors(_LONG) is not None:
        return plain | _longrope(keys)
    for key in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor"):
        keys.expect(f"rope.scaling.{key}", 1.0)
    if divisors is not None:
        if factor != 1.0:
            raise ModelLoadError(f"{keys.source}: {FREQUENCIES} beside a scaling factor")
        return plain | {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "factor": 1.0,
            "attention_factor": 1.0,
        }
    if kind == "longrope":
        raise ModelLoadError(f"{keys.source}: tensor {_LONG} is missing")
    if kind == "none" or factor == 1.0:
        return plain
    if kind == "linear":
        return plain | {"rope_type": "linear", "factor": factor}
    return plain | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": pretrained,
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0, low=1e-3),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0, low=1e-3),
    }


def _kind_and_factor(keys: Keys) -> tuple[str, float]:
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise keys.fail("rope.scaling.type", f"{kind!r:.40} is not supported")
    old = keys.number("rope.scale_linear", 0.0)
    factor = keys.number("rope.scaling.factor", old)
    return kind, factor or 1.0  # 0 stands for no factor


def original_length(keys: Keys) -> int:
    """Returns the context of the model before its positions were stretched."""
    length = keys.integer("context_length", high=MAX_CONTEXT)
    return keys.integer("rope.scaling.original_context_length", length, high=MAX_CONTEXT)


def _longrope(keys: Keys) -> Json:
    short, long = keys.factors(_SHORT), keys.factors(_LONG)
    if short is None:
        raise ModelLoadError(f"{keys.source}: tensor {_SHORT} is missing")
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original_length(keys),
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0, high=1e3),
    }
