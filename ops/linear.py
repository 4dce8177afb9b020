"""Shared parts of linear layers: the unfused layer, rounding to 4 bits and its scales' format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from ops.backend import INT4_GROUPS, NF4_VALUES, TABLES, Backend, Fusion, LinearOp, Norm

# The kernels' values are whole numbers: a table's values times this.
_UNITS = {"int4": 1, "nf4": 127, "fp4": 2, "iq4": 1}
MAX_ZERO = 16  # of 4-bit codes
HEADROOM = 15  # of the scales of FP4 and of minimums; fp16 ends at 2^16
# A searched scale makes a group's largest magnitude about minus this many steps. The first two are
# those of weights that lie on a grid already.
SEARCHED_STEPS = (8.0, 7.0, 8.5, 8.25, 7.75)
_SEARCHED_AT_ONCE = 1 << 20  # weights, of which the search keeps ten copies


class PlainLinear:
    """A LinearOp that calls norm, product, activation and residual one after the other.

    Fused kernels must equal it.
    """

    def __init__(
        self, backend: Backend, product: Callable[[Tensor], Tensor], fusion: Fusion
    ) -> None:
        self._backend = backend
        self._product = product
        self._fusion = fusion

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        norm, activation, is_gated = self._fusion
        if norm is not None:
            x = apply_norm(self._backend, x, norm)
        y = self._product(x)
        if activation is not None:
            act = self._backend.gated_activation if is_gated else self._backend.activation
            y = act(y, activation)
        return y if residual is None else residual + y


class SideBySide(PlainLinear):
    """A LinearOp of several, whose results are concatenated before the activation.

    Each of them has the norm, and the fusion has the rest.
    """

    def __init__(self, backend: Backend, ops: Sequence[LinearOp], fusion: Fusion) -> None:
        self.ops = list(ops)
        super().__init__(backend, self._all, fusion._replace(norm=None))

    def _all(self, x: Tensor) -> Tensor:
        return torch.cat([op(x) for op in self.ops], 1)


def apply_norm(backend: Backend, x: Tensor, norm: Norm) -> Tensor:
    """Normalizes x: [T, N]."""
    if norm.kind == "rms":
        return backend.rms_norm(x, norm.weight, norm.eps)
    return backend.layer_norm(x, norm.weight, norm.bias, norm.eps)


def split_scales(scales: Tensor, headroom: int = 0) -> tuple[Tensor, Tensor]:
    """Splits scales: [out, groups] into fp16 [out, groups] and fp32 powers of two [out].

    The largest fp16 of a channel is below 2^headroom and not below half of that.
    """
    largest = scales.float().abs().amax(1)
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent + (mantissa * 2048 >= 2047.5)  # fp16 rounds it to the next power of two
    exponent = (exponent - headroom).clamp(-126, 127)  # normal fp32
    channels = torch.ldexp(torch.ones_like(largest), exponent)
    return (scales.float() / channels[:, None]).half().contiguous(), channels.contiguous()


class Stored4(NamedTuple):
    """What the kernels keep of 4-bit weights beside the codes.

    scales, minimums: [out, groups] fp16; channels: [out] fp32, the factors of both.
    """

    scales: Tensor
    minimums: Tensor | None
    channels: Tensor


def stored4(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    group: int,
    table: str,
    minimums: Tensor | None,
    channel_scales: Tensor | None,
) -> Stored4:
    """Returns what the kernels keep for the arguments of `QuantizedLinears.int4`.

    ValueError for scales of fp4 that fp16 times a power of two does not hold exactly.
    """
    shape = (codes.shape[0], -(-codes.shape[1] // group))
    assert group in INT4_GROUPS and table in TABLES and codes.dtype == torch.uint8
    assert (zeros is None and minimums is None) or table == "int4", "only int4 has an offset"
    assert zeros is None or minimums is None, "zero points or minimums"
    for each in (scales, zeros, minimums):
        assert each is None or each.shape == shape, f"{each.shape} for {shape}"
    assert int(codes.max()) < 16, "codes of 4 bits"
    assert zeros is None or int(zeros.max()) <= MAX_ZERO, f"zero points of at most {MAX_ZERO}"
    halves = None
    if table == "fp4":
        scales = torch.where(_has_values(codes, group), scales.float(), 0.0)
        kept, channels = split_scales(scales, HEADROOM)
        _check_exact(scales, kept.float() * channels[:, None])
    elif minimums is not None:
        both = torch.cat([scales.float(), minimums.float()], 1)
        both, channels = split_scales(both, HEADROOM)
        kept, halves = (each.contiguous() for each in both.chunk(2, 1))
    else:
        kept, channels = split_scales(scales)
    channels = channels / _UNITS[table]
    if channel_scales is not None:
        assert channel_scales.shape == channels.shape, f"{channel_scales.shape}"
        channels = channels * channel_scales.float()
    return Stored4(kept, halves, channels)


def _has_values(codes: Tensor, group: int) -> Tensor:
    """Returns which groups of FP4 codes have a value other than zero, [out, groups] bool."""
    magnitudes = functional.pad(codes & 7, (0, -codes.shape[1] % group))
    return magnitudes.reshape(len(codes), -1, group).amax(2) > 0


def _check_exact(scales: Tensor, kept: Tensor) -> None:
    wrong = (scales != kept).any(1).nonzero()
    if len(wrong):
        some = scales[wrong[0, 0]].abs()
        least, most = float(some[some > 0].min()), float(some.max())
        raise ValueError(
            f"the FP4 scales of output {int(wrong[0, 0])}, {least:.4g} to {most:.4g}, cannot be "
            "stored exactly: they need at most 11 bits each and a range of 1 : 2^38"
        )


def nf4_bounds() -> Tensor:
    """Returns the 15 numbers half way between neighbouring NF4 values."""
    values = torch.tensor(NF4_VALUES)
    return (values[1:] + values[:-1]) / 2


def round_to_4_bits(
    weight: Tensor, group: int, *, is_nf4: bool, is_searched: bool = False
) -> tuple[Tensor, Tensor]:
    """Rounds weight: [out, in] in any float type to codes: [out, in] uint8, scales: [out, groups].

    int4: the nearest of 16 even steps, of which the first is the group's largest magnitude;
    is_searched: of which the scale is that of `searched_scales`. NF4: the nearest of NF4_VALUES
    times the group's largest magnitude; of two equally near ones the smaller. Codes are rounded
    with the scales as they are stored.
    """
    assert not (is_nf4 and is_searched), "only the scales of int4 are searched"
    padded = functional.pad(weight.float(), (0, -weight.shape[1] % group))
    parts = padded.reshape(len(weight), -1, group)
    if is_nf4:
        scales = _as_stored(parts.abs().amax(2))
        codes = torch.bucketize(parts / _nonzero(scales)[..., None], nf4_bounds().to(weight.device))
    else:
        scales = _as_stored(searched_scales(parts) if is_searched else _extremes(parts) / -8)
        codes = ((parts / _nonzero(scales)[..., None]).round() + 8).clamp(0, 15)
    return codes.to(torch.uint8).flatten(1)[:, : weight.shape[1]].contiguous(), scales


def searched_scales(parts: Tensor, importance: Tensor | None = None) -> Tensor:
    """Returns the scales of int4, [out, groups] fp32, for parts: [out, groups, group] fp32.

    For each of SEARCHED_STEPS the weights are rounded, and the least squares give the scale that
    fits these codes best; the one with the least error wins, as llama.cpp's k-quants do it. Errors
    are weighted by importance, positive and with the last dimensions of parts; without it by the
    magnitude of the weight. The operations and the order of sums are those of ops/csrc/pack.inl, so
    that the bits are the same.
    """
    rows = max(1, _SEARCHED_AT_ONCE // max(1, parts.shape[1] * parts.shape[2]))
    return torch.cat([_search(some, importance) for some in torch.split(parts, rows)])


def _search(parts: Tensor, importance: Tensor | None) -> Tensor:
    extreme = _extremes(parts)
    x = parts / _nonzero(extreme)[..., None]
    weight = x.abs() if importance is None else importance
    best, scales = torch.full_like(extreme, -1.0), torch.zeros_like(extreme)
    for steps in SEARCHED_STEPS:
        codes = (x * -steps).clamp(-8, 7).round()
        weighted = weight * codes
        along, length = _sum_in_order(weighted * x), _sum_in_order(weighted * codes)
        gain = along * along / length
        is_better = gain > best
        best = torch.where(is_better, gain, best)
        scales = torch.where(is_better, along / length, scales)
    return torch.where(extreme == 0, 0.0, extreme * scales)


def _extremes(parts: Tensor) -> Tensor:
    """Returns each group's value of the largest magnitude, of equal ones the first."""
    return parts.gather(2, parts.abs().argmax(2, keepdim=True))[..., 0]


def _sum_in_order(values: Tensor) -> Tensor:
    """Returns the sums over the last dimension, in the order of the kernels: sixteen at a time,
    then the halves of sixteen."""
    first, *others = torch.split(values, 16, -1)
    for each in others:
        first = first + each
    while first.shape[-1] > 1:
        first = torch.add(*first.chunk(2, -1))
    return first[..., 0]


def _as_stored(scales: Tensor) -> Tensor:
    halves, channels = split_scales(scales)
    return halves.float() * channels[:, None]


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)
