"""What each layer of a model takes on a device, noted while the model is built over nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from ops.backend import NO_FUSION, Fusion
from quant.formats.base import CheckpointFormat
from serve.loading.host_weights.placement import DeviceNeeds, LayerNeeds
from serve.models import ModelSpec, ParameterCounts
from serve.models.checkpoint import Checkpoint
from serve.models.parts import Part
from serve.models.tensors import ExpectedTensors

Noted = tuple[ParameterCounts, ParameterCounts, ParameterCounts]

_MARGIN = 1.02  # for what is not counted
# of 4-bit products of a checkpoint, whose groups have scales of 32 bits on a device
_MARGIN_OF_4_BITS = 1.12
_CHANNEL_BYTES = 4  # the scale of an output of a quantized product
_WIDTH = 16  # inputs of int8 products are padded to multiples of it
_WIDTH4, _ROWS4 = 64, 16  # those of 4-bit products, or to groups, and their outputs
_SCALE_BYTES = 2  # of a group with 4 bits: of 4 bytes, as many are counted as on a CPU


class LayerNotes(ExpectedTensors):
    """Notes the weights of each layer apart, those of experts as `experts` of ParameterCounts."""

    def __init__(
        self, checkpoint: Checkpoint, packed: CheckpointFormat | None, group: int | None
    ) -> None:
        """group: inputs that share a scale, where products are rounded to 4 bits."""
        super().__init__(checkpoint, packed, has_superblocks=False)
        self._group = group
        # what was noted of products that can leave the device, when the first layer began and when
        # each ended
        self.ends: list[Noted] = []
        self._extra = ParameterCounts()  # bytes of scales and padding
        self._of_heads = ParameterCounts(), ParameterCounts()  # which are in counts, packed_bytes

    @property
    def noted(self) -> Noted:
        return replace(self.counts), replace(self.packed_bytes), replace(self._extra)

    def product(
        self,
        parts: Sequence[Part],
        num_in: int,
        *,
        has_bias: bool = False,
        fusion: Fusion = NO_FUSION,
        scale: float = 1.0,
        is_head: bool = False,
    ) -> Any:
        if not self.ends and is_of_layer(parts, 0):
            self.ends.append(self._leaving)
        kind = "head" if is_head else "blocks" if parts[0].expert is None else "experts"
        rows = sum(part.num_taken for part in parts)
        self._extra.add(kind, self._extra_bytes(rows, num_in, is_head=is_head))
        return super().product(
            parts, num_in, has_bias=has_bias, fusion=fusion, scale=scale, is_head=is_head
        )

    def _extra_bytes(self, rows: int, num_in: int, *, is_head: bool) -> int:
        """Returns what a quantized product takes beside the bits of its weights."""
        if self._group is None or is_head:
            return rows * (_CHANNEL_BYTES + -num_in % _WIDTH)
        wide = num_in + -num_in % max(_WIDTH4, self._group)
        padded = (rows + -rows % _ROWS4) * wide - rows * num_in
        scales = rows * wide // self._group * _SCALE_BYTES
        return padded // 2 + padded // self._group * _SCALE_BYTES + scales + rows * _CHANNEL_BYTES

    def matrix(self, part: Part, num_in: int, *, stays_plain: bool = False) -> Any:
        """What is not plain becomes the products of latents' heads, which stay on the device."""
        counts, packed = replace(self.counts), replace(self.packed_bytes)
        found = super().matrix(part, num_in, stays_plain=stays_plain)
        if not stays_plain:
            self._of_heads[0].blocks += self.counts.blocks - counts.blocks
            self._of_heads[1].blocks += self.packed_bytes.blocks - packed.blocks
        return found

    @property
    def _leaving(self) -> Noted:
        counts, packed, extra = self.noted
        counts.blocks -= self._of_heads[0].blocks
        packed.blocks -= self._of_heads[1].blocks
        return counts, packed, extra

    def end_layer(self) -> None:
        self.ends.append(self._leaving)


def is_of_layer(parts: Sequence[Part], layer: int) -> bool:
    """Returns whether a product is one of the layer's; others come before the first layer or behind
    the last one."""
    return f".{layer}." in f".{parts[0].module}."


@dataclass(frozen=True, slots=True)
class PackedSizes:
    """How large products become. of: returns the bytes of products of layers, of experts and of
    the rest for counts, and for bytes of what is kept as a checkpoint has it. is_quantized: whether
    products have scales; group: inputs that share one, where they are rounded to 4 bits."""

    of: Callable[[ParameterCounts, ParameterCounts], tuple[float, float, float]]
    is_quantized: bool
    group: int | None


def needs_of(notes: LayerNotes, spec: ModelSpec, sizes: PackedSizes) -> DeviceNeeds:
    """Returns the needs of the model that was noted."""

    def size(noted: Noted) -> tuple[float, float, float]:
        counts, packed, extra = noted
        blocks, experts, rest = sizes.of(counts, packed)
        if not sizes.is_quantized:
            return blocks, experts, rest
        return blocks + extra.blocks, experts + extra.experts, rest + extra.head

    is_4_bits = sizes.is_quantized and spec.packed is not None and spec.packed.bits < 8
    margin = _MARGIN_OF_4_BITS if is_4_bits else _MARGIN
    layers, mixtures = [], iter(spec.mixtures)
    for before, after in pairwise(notes.ends):
        counts, packed, extra = map(_difference, after, before)
        products, experts, _ = size((counts, packed, extra))
        share = 0.0
        if experts:
            mixture = next(mixtures)
            share = mixture.router.top_k / mixture.num_experts
        layers.append(LayerNeeds(int(margin * products), int(margin * experts), share))
    all_layers = sum(each.products + each.experts for each in layers)
    return DeviceNeeds(max(0, int(margin * sum(size(notes.noted))) - all_layers), tuple(layers))


def _difference(after: ParameterCounts, before: ParameterCounts) -> ParameterCounts:
    names = [each.name for each in fields(after)]
    return ParameterCounts(**{name: getattr(after, name) - getattr(before, name) for name in names})
