"""The quantized products of a checkpoint: which there are, their tensors, and loading them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from quant.formats.base import (
    FLOATS,
    CheckpointFormat,
    CutFormat,
    ExpertsFormat,
    Fetch,
    PackedWeight,
    ProductFormat,
    SizedFormat,
    TensorRule,
)
from serve.errors import ModelLoadError
from serve.models.checkpoint import Checkpoint, TensorEntry
from serve.models.parts import Part

Runs = Sequence[tuple[ProductFormat | None, Sequence[Part]]]
"""A product's parts, those of one format together; None: they are plain."""


class PackedProducts:
    """Products of a checkpoint in its quantized formats. Errors are ModelLoadErrors."""

    def __init__(self, packed: CheckpointFormat | None, checkpoint: Checkpoint) -> None:
        self._packed = packed
        self._checkpoint = checkpoint

    def has_weight(self, name: str) -> bool:
        """Returns whether a product's weight, or that of fused experts, is stored in any form."""
        entries, packed = self._checkpoint.entries, self._packed
        if name in entries or f"{name}.weight" in entries:
            return True
        return packed is not None and packed.has(entries, name)

    def runs(self, parts: Sequence[Part], num_in: int) -> Runs:
        runs = groupby(parts, lambda part: self.format_of(part, num_in))
        return [(form, list(run)) for form, run in runs]

    def format_of(self, part: Part, num_in: int) -> ProductFormat | None:
        """Returns the format of one part, None if it is plain."""
        if self._packed is None:
            return None
        entries = self._checkpoint.entries
        with self.naming([part]):
            if part.is_fused:
                size = part.num_experts, num_in, part.num_rows
                return self._packed.of_experts(
                    entries, part.module, *size, is_transposed=part.is_transposed
                )
            return self._packed.of(entries, part.module, num_in, part.num_rows)

    def rules(self, form: ProductFormat, part: Part, num_in: int) -> dict[str, TensorRule]:
        """Returns the tensors of one part by name."""
        with self.naming([part]):
            if part.is_fused:
                fused = _as_fused(form).expert_tensors(
                    part.num_experts, num_in, part.num_rows, is_transposed=part.is_transposed
                )
                return {part.module + ending: rule for ending, rule in fused.items()}
            rules = form.tensors(num_in, part.num_rows)
            return {f"{part.module}.{ending}": rule for ending, rule in rules.items()}

    def load(
        self, form: ProductFormat, parts: Sequence[Part], num_in: int, scale: float
    ) -> PackedWeight:
        """Loads the rows of the parts, times scale. Of a format that can be cut, it reads no more
        than the units of outputs that hold them."""
        read = {part.module: slice(0, part.num_rows) for part in parts}
        packed = None
        if isinstance(form, CutFormat) and not parts[0].is_transposed:
            fewer = _outputs_of(parts, form.unit)
            if fewer != read:
                # what is wrong with a whole product is said by the attempt to load that
                with suppress(ValueError):
                    packed = self._unpack(form, parts, _CutFetch(self._checkpoint, form, fewer))
                    read = fewer
        path = self._checkpoint.path
        try:
            packed = packed or self._unpack(form, parts, self._checkpoint.fetch)
        except ValueError as error:
            raise ModelLoadError(f"{path}: {error}") from error
        if packed.shape != (sum(rows.stop - rows.start for rows in read.values()), num_in):
            raise ModelLoadError(
                f"{path}: {parts[0].module} unpacks to another shape than config.json asks for"
            )
        if any(part.rows is not None for part in parts):
            packed = packed.rows(_rows_of(parts, read))
        return packed if scale == 1.0 else packed.scaled(scale)

    def _unpack(self, form: ProductFormat, parts: Sequence[Part], fetch: Fetch) -> PackedWeight:
        first, modules = parts[0], list(dict.fromkeys(part.module for part in parts))
        if first.expert is None or not first.is_fused:
            return form.load(fetch, modules)
        if len(modules) > 1:
            raise ValueError(f"{first.module}: several fused tensors are not supported")
        fused = _as_fused(form)
        return fused.load_expert(
            fetch, first.module, first.expert, is_transposed=first.is_transposed
        )

    @contextmanager
    def naming(self, parts: Sequence[Part]) -> Iterator[None]:
        """Turns a ValueError into a ModelLoadError that names the product."""
        try:
            yield
        except ValueError as error:
            raise ModelLoadError(f"{self._checkpoint.path}: {parts[0].module}: {error}") from error


def bytes_in_memory(
    form: ProductFormat, name: str, stored: TensorEntry, *, has_superblocks: bool = True
) -> int:
    """Returns the bytes that one tensor of a quantized product takes when it is packed: codes stay,
    scales of 4 bits and their offsets are fp16, and the order of inputs is negligible.
    has_superblocks: as the device's `QuantizedLinears` has it."""
    if isinstance(form, SizedFormat):
        num_weights = prod(stored.shape)
        return round(form.memory_bytes(num_weights, has_superblocks=has_superblocks))
    ending, num_bytes = name.rpartition(".")[2], stored.end - stored.start
    if len(stored.shape) < 2 and "absmax" not in ending:
        return 0
    is_offset = "zero" in ending
    if not is_offset and "scale" not in ending and "absmax" not in ending:
        return num_bytes
    if form.bits == 8 or (is_offset and getattr(form, "is_symmetric", False)):
        return 0
    is_packed = is_offset and stored.dtype not in FLOATS  # two zero points a byte
    return 4 * num_bytes if is_packed else 2 * prod(stored.shape)


def _as_fused(form: ProductFormat) -> ExpertsFormat:
    assert hasattr(form, "load_expert"), "the format of fused experts"
    return form  # type: ignore[return-value]


class _CutFetch:
    """Reads the tensors of products for some of their outputs."""

    def __init__(
        self, checkpoint: Checkpoint, form: CutFormat, outputs: Mapping[str, slice]
    ) -> None:
        self._checkpoint = checkpoint
        self._form = form
        self._outputs = outputs

    def __call__(self, name: str, index: int | None = None) -> Tensor:
        module = max((each for each in self._outputs if name.startswith(each)), key=len)
        ending = name[len(module) :].removeprefix(".")
        outputs = self._outputs[module]
        return self._checkpoint.fetch(
            name, index, cut=lambda stored: self._form.cut(ending, stored, outputs)
        )


def _outputs_of(parts: Sequence[Part], unit: int) -> dict[str, slice]:
    """Returns the units of outputs that hold the rows of the parts, for each module."""
    found: dict[str, slice] = {}
    for part in parts:
        taken = torch.arange(part.num_rows)
        if part.rows is not None:
            taken = taken[part.rows]
        first, end = (int(taken.min()), int(taken.max()) + 1) if len(taken) else (0, 1)
        known = found.get(part.module)
        if known is not None:
            first, end = min(first, known.start), max(end, known.stop)
        found[part.module] = slice(first // unit * unit, min(part.num_rows, -(-end // unit) * unit))
    return found


def _rows_of(parts: Sequence[Part], read: Mapping[str, slice]) -> Tensor:
    """Returns the rows of the parts as indexes into what was read of their modules, which is
    concatenated."""
    starts: dict[str, int] = {}
    end = 0
    for module, outputs in read.items():
        starts[module] = end - outputs.start
        end += outputs.stop - outputs.start
    taken = []
    for part in parts:
        rows = torch.arange(part.num_rows)
        taken.append(starts[part.module] + (rows if part.rows is None else rows[part.rows]))
    return torch.cat(taken)
