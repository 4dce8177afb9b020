"""RopeSpec: a rotary position embedding as a checkpoint describes it, and its reader."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from serve.checkpoint_json import ConfigReader

DEFAULT_THETA = 10000.0
PRETRAINED_LEN = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The frequencies of a rotary embedding.

    kind: default, linear, llama3, yarn, longrope or proportional. The first `dim` values of a head
    are rotated. is_interleaved: pairs are (2i, 2i + 1) in the checkpoint; the loader reorders the
    rows of q and k, so that they become (i, i + dim / 2). Comments name the kinds that use a field.
    """

    dim: int
    theta: float
    kind: str = "default"
    is_interleaved: bool = False
    factor: float = 1.0  # linear, llama3, yarn, proportional
    pretrained_len: int = 0  # llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    is_truncated: bool = True  # yarn: the ends of the ramp are rounded to whole numbers
    short_factors: tuple[float, ...] = ()  # longrope: within pretrained_len
    long_factors: tuple[float, ...] = ()  # longrope: for longer contexts
    num_rotated: int = 0  # proportional: pairs that rotate; the others have frequency 0


def read_rope(
    config: ConfigReader,
    head_dim: int,
    *,
    layer_type: str | None = None,
    theta: float = DEFAULT_THETA,
    partial: float | None = None,
    is_interleaved: bool = False,
) -> RopeSpec:
    """Reads `rope_parameters` (Transformers 5), or `rope_theta` and `rope_scaling` (older).

    layer_type: the key of an object for each type of layer, where there is one. theta, partial: the
    family's defaults of rope_theta and partial_rotary_factor; None: the family rotates all values.
    """
    rope = rope_parameters(config, layer_type)
    theta = rope.number(
        "rope_theta", config.number("rope_theta", theta, low=1.0), low=1.0, high=1e15
    )
    kind = rope.text("rope_type", rope.text("type", "default"))
    partial = _read_partial(config, rope, partial)
    dim = head_dim if kind == "proportional" else int(head_dim * partial)
    if dim % 2 or dim == 0:
        raise config.fail("head_dim", f"is {head_dim}; RoPE needs an even number of rotated values")
    plain = RopeSpec(dim=dim, theta=theta, is_interleaved=is_interleaved)
    max_len = config.integer("max_position_embeddings")
    pretrained_len = config.integer(PRETRAINED_LEN, rope.integer(PRETRAINED_LEN, max_len))
    if kind in ("default", "dynamic", "mrope"):
        # Dynamic NTK only changes positions beyond max_position_embeddings, which are not served.
        # The three positions of mrope are equal in text.
        return plain
    if kind == "linear":
        return replace(plain, kind=kind, factor=rope.number("factor", low=1e-3))
    if kind == "proportional":
        factor = rope.number("factor", 1.0, low=1e-3)
        return replace(plain, kind=kind, factor=factor, num_rotated=int(partial * head_dim // 2))
    if kind == "llama3":
        return _read_llama3(rope, plain, pretrained_len)
    if kind == "yarn":
        return _read_yarn(rope, plain, pretrained_len, max_len)
    if kind in ("longrope", "su"):
        return _read_longrope(config, rope, plain, pretrained_len, max_len)
    raise rope.fail(
        "rope_type",
        f"{kind!r} is not supported; known: default, dynamic, linear, llama3, yarn, longrope, "
        "proportional",
    )


def _read_partial(config: ConfigReader, rope: ConfigReader, default: float | None) -> float:
    """Returns the rotated part of a head's values."""
    key = "partial_rotary_factor"
    if default is None:
        for reader in (config, rope):
            if reader.number(key, 1.0, high=1.0) != 1.0:
                raise reader.fail(key, "other than 1 is not supported for this model_type")
        return 1.0
    return rope.number(key, config.number(key, default, high=1.0), high=1.0)


def rope_parameters(config: ConfigReader, layer_type: str | None) -> ConfigReader:
    """Returns the reader of the object with the parameters, which may be empty."""
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    raw = config.values.get(key) or {}
    if isinstance(raw, dict) and layer_type is not None and isinstance(raw.get(layer_type), dict):
        key, raw = f"{key}.{layer_type}", raw[layer_type]
    if not isinstance(raw, dict) or any(isinstance(item, dict) for item in raw.values()):
        raise config.fail(key, "must be one flat object; this family has one RoPE for all layers")
    return ConfigReader(raw, f"{config.source}: {key}")


def _read_llama3(rope: ConfigReader, plain: RopeSpec, pretrained_len: int) -> RopeSpec:
    low = rope.number("low_freq_factor", low=1e-6)
    high = rope.number("high_freq_factor", low=1e-6)
    if high < low:
        raise rope.fail("high_freq_factor", f"is {high}; it must not be below low_freq_factor")
    return replace(
        plain,
        kind="llama3",
        factor=rope.number("factor", low=1e-3),
        pretrained_len=pretrained_len,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_longrope(
    config: ConfigReader, rope: ConfigReader, plain: RopeSpec, pretrained_len: int, max_len: int
) -> RopeSpec:
    """Reads LongRoPE (arXiv 2402.13753) as Phi-3 publishes it."""
    factor = rope.number("factor", max_len / pretrained_len, low=1e-3)
    attention = 1.0
    if factor > 1.0 and not rope.has("attention_factor"):
        if pretrained_len == 1:
            raise rope.fail("attention_factor", f"is missing, and {PRETRAINED_LEN} is 1")
        attention = math.sqrt(1 + math.log(factor) / math.log(pretrained_len))
    return replace(
        plain,
        kind="longrope",
        pretrained_len=pretrained_len,
        attention_factor=rope.number("attention_factor", attention),
        short_factors=_factors(rope, "short_factor", plain.dim // 2),
        long_factors=_factors(rope, "long_factor", plain.dim // 2),
    )


def _factors(rope: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    values = rope.values.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise rope.fail(key, f"must list {count} numbers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
            raise rope.fail(key, f"holds {value!r}, which is not a positive number")
    return tuple(map(float, values))


def _read_yarn(rope: ConfigReader, plain: RopeSpec, pretrained_len: int, max_len: int) -> RopeSpec:
    if plain.theta <= 1.0:
        raise rope.fail("rope_theta", "must be above 1 for yarn")
    factor = rope.number("factor", max_len / pretrained_len, low=1e-3)
    mscale = rope.number("mscale", 0.0)
    mscale_all = rope.number("mscale_all_dim", 0.0)
    if mscale and mscale_all:
        attention = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
    else:
        attention = _yarn_mscale(factor, 1.0)
    return replace(
        plain,
        kind="yarn",
        factor=factor,
        pretrained_len=pretrained_len,
        beta_fast=_read_beta(rope, "beta_fast", 32.0),
        beta_slow=_read_beta(rope, "beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", attention),
        is_truncated=rope.boolean("truncate", True),
    )


def _read_beta(rope: ConfigReader, key: str, default: float) -> float:
    """Returns a number of rotations; 0 stands for the default, as in Transformers."""
    if rope.number(key, default) == 0.0:
        return default
    return rope.number(key, default, low=1e-3)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
