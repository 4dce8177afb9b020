"""Rotary position embedding: frequencies of every supported scaling, and the cos/sin tables.

Tables are fp32 and computed once per position, so a row's rotation does not depend on its step.
The back end rotates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from serve.models.config_file import ConfigReader

FIRST_ROWS = 4096
DEFAULT_THETA = 10000.0
PRETRAINED_LEN = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The frequencies of a rotary embedding.

    kind: default, linear, llama3 or yarn. The first `dim` values of a head are rotated. Comments
    name the kinds that use a field.
    """

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0  # linear, llama3, yarn
    pretrained_len: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    is_truncated: bool = True  # yarn: whole-numbered ramp ends


def read_rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    """Reads `rope_parameters` (Transformers 5), or `rope_theta` and `rope_scaling` (older)."""
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    raw = config.values.get(key) or {}
    if not isinstance(raw, dict) or any(isinstance(item, dict) for item in raw.values()):
        raise config.fail(key, "must be one flat object; per-layer-type RoPE is not supported")
    rope = ConfigReader(raw, f"{config.source}: {key}")
    theta = rope.number(
        "rope_theta", config.number("rope_theta", DEFAULT_THETA, low=1.0), low=1.0, high=1e15
    )
    if head_dim % 2:
        raise config.fail("head_dim", f"is {head_dim}; RoPE needs an even number")
    for reader in (config, rope):
        if reader.number("partial_rotary_factor", 1.0, high=1.0) != 1.0:
            raise reader.fail("partial_rotary_factor", "other than 1 is not supported")
    kind = rope.text("rope_type", rope.text("type", "default"))
    max_len = config.integer("max_position_embeddings")
    pretrained_len = config.integer(PRETRAINED_LEN, rope.integer(PRETRAINED_LEN, max_len))
    if kind in ("default", "dynamic"):
        # Dynamic NTK only changes positions beyond max_position_embeddings, which are not served.
        return RopeSpec(dim=head_dim, theta=theta)
    if kind == "linear":
        factor = rope.number("factor", low=1e-3)
        return RopeSpec(dim=head_dim, theta=theta, kind=kind, factor=factor)
    if kind == "llama3":
        low = rope.number("low_freq_factor", low=1e-6)
        high = rope.number("high_freq_factor", low=1e-6)
        if high <= low:
            raise rope.fail("high_freq_factor", f"is {high}; it must be above low_freq_factor")
        return RopeSpec(
            dim=head_dim,
            theta=theta,
            kind=kind,
            factor=rope.number("factor", low=1e-3),
            pretrained_len=pretrained_len,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "yarn":
        return _read_yarn(rope, head_dim, theta, pretrained_len, max_len)
    raise rope.fail(
        "rope_type", f"{kind!r} is not supported; known: default, dynamic, linear, llama3, yarn"
    )


def _read_yarn(
    rope: ConfigReader, head_dim: int, theta: float, pretrained_len: int, max_len: int
) -> RopeSpec:
    if theta <= 1.0:
        raise rope.fail("rope_theta", "must be above 1 for yarn")
    factor = rope.number("factor", max_len / pretrained_len, low=1e-3)
    mscale = rope.number("mscale", 0.0)
    mscale_all = rope.number("mscale_all_dim", 0.0)
    if mscale and mscale_all:
        attention = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
    else:
        attention = _yarn_mscale(factor, 1.0)
    return RopeSpec(
        dim=head_dim,
        theta=theta,
        kind="yarn",
        factor=factor,
        pretrained_len=pretrained_len,
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        attention_factor=rope.number("attention_factor", attention),
        is_truncated=rope.boolean("truncate", True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Returns [dim / 2] fp32, computed in the same order of operations as in Transformers."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    plain = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, spec.theta**exponents)
    return plain


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    wavelength = 2 * math.pi / plain
    longest = spec.pretrained_len / spec.low_freq_factor
    shortest = spec.pretrained_len / spec.high_freq_factor
    scaled = torch.where(wavelength > longest, plain / spec.factor, plain)
    smooth = (spec.pretrained_len / wavelength - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    between = (1 - smooth) * scaled / spec.factor + smooth * scaled
    is_between = ~(wavelength < shortest) & ~(wavelength > longest)
    return torch.where(is_between, between, scaled)


def _yarn(spec: RopeSpec, periods: Tensor) -> Tensor:
    def dim_of(num_rotations: float) -> float:
        ratio = spec.pretrained_len / (num_rotations * 2 * math.pi)
        return (spec.dim * math.log(ratio)) / (2 * math.log(spec.theta))

    low, high = dim_of(spec.beta_fast), dim_of(spec.beta_slow)
    if spec.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (spec.factor * periods) * (1 - kept) + 1.0 / periods * kept


class RotaryTable:
    """Tables of cos and sin by position.

    On a CPU they grow by doubling. On other devices they are complete from the start, because
    reading the largest position would wait for the device.
    """

    def __init__(self, spec: RopeSpec, max_len: int, device: torch.device) -> None:
        self._spec = spec
        self._max_len = max_len
        self._frequencies = inverse_frequencies(spec)
        self._device = device
        num_rows = min(FIRST_ROWS, max_len) if device.type == "cpu" else max_len
        self._cos, self._sin = self._rows(0, num_rows)

    def lookup(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos, sin: [T, dim / 2] fp32 for positions: [T]."""
        num_rows = self._cos.shape[0]
        if num_rows < self._max_len and positions.numel():
            needed = int(positions.max()) + 1
            if needed > num_rows:
                self._grow(needed)
        return self._cos[positions], self._sin[positions]

    def _grow(self, needed: int) -> None:
        num_rows = self._cos.shape[0]
        target = num_rows
        while target < needed:
            target *= 2
        cos, sin = self._rows(num_rows, target)
        self._cos = torch.cat((self._cos, cos))
        self._sin = torch.cat((self._sin, sin))

    def _rows(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(start, end, dtype=torch.float32), self._frequencies)
        factor = self._spec.attention_factor
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return cos.to(self._device), sin.to(self._device)
