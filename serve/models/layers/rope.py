"""Rotary position embedding: frequencies of every supported scaling, and the cos/sin tables.

Tables are fp32 and computed once per position, so a row's rotation does not depend on its step.
The back end rotates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from serve.models.families.rope_spec import RopeSpec

FIRST_ROWS = 4096


def inverse_frequencies(spec: RopeSpec, max_len: int = 0) -> Tensor:
    """Returns [dim / 2] fp32, computed in the same order of operations as in Transformers.

    max_len: the longest context that is served. LongRoPE uses its long factors for all positions if
    it is beyond pretrained_len, so that a row does not depend on the length of its sequence.
    """
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    plain = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, spec.theta**exponents)
    if spec.kind == "longrope":
        factors = spec.long_factors if max_len > spec.pretrained_len else spec.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * spec.theta**exponents)
    if spec.kind == "proportional":
        plain[spec.num_rotated :] = 0.0
        return plain / spec.factor
    return plain


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    wavelength = 2 * math.pi / plain
    longest = spec.pretrained_len / spec.low_freq_factor
    shortest = spec.pretrained_len / spec.high_freq_factor
    scaled = torch.where(wavelength > longest, plain / spec.factor, plain)
    if spec.high_freq_factor == spec.low_freq_factor:  # no wavelength is between the two
        return scaled
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
        self._frequencies = inverse_frequencies(spec, max_len)
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
