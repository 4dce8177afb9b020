"""Products in the kinds of GGUF files, each chosen by the type of its tensor.

    NAME.weight     [out, in], in blocks along the inputs
    fused experts   NAME [experts, out, in], with the inputs last in every model

Q4_K, Q5_K, Q6_K and IQ4_XS are computed as they are stored, with both levels of their scales, where
the device has such products. Other kinds whose codes have at most 4 bits are computed as they are
stored, too; scales are rounded to 11 bits where they have more. The others become int8 with a scale
per output. Until then a weight is the file's own bytes, so that nothing unpacked waits in memory.
"""

from __future__ import annotations

import functools
import logging
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from ops.backend import NO_FUSION, TABLE_VALUES, Fusion, LinearOp, QuantizedLinears
from ops.cpu.native_quantized_linear import NATIVE
from ops.superblocks import SUPERBLOCK, SUPERBLOCK_KINDS, Superblocks
from quant.formats.base import (
    FLOATS,
    MAX_SCALE,
    CheckpointFormat,
    Config,
    Fetch,
    Header,
    TensorRule,
    joined,
)
from quant.formats.gguf.blocks import (
    LAYOUTS,
    SUPERBLOCKS,
    Groups,
    blocks_of,
    unpack,
    unpack_superblocks,
)
from quant.formats.gguf.kinds import BY_NAME, row_bytes
from quant.formats.weights import ROUNDED, Weight8
from quant.int4 import Int4Weight

logger = logging.getLogger(__name__)

Part = TypeVar("Part")

METHOD = "gguf"
_PLAIN = (*FLOATS, "F64")
_PIECE_WEIGHTS = 1 << 20  # what is unpacked at a time; torch's threads share 32 Ki of them
_LARGE_BYTES = 256 << 20
# What weights lose by shorter scales (tests/quant/formats/gguf measures it).
_SHORTER = {
    kind: f"{kind} {what} are rounded to 11 bits, which changes weights by about {percent} % (root "
    "mean square, of normal weights)"
    for kind, what, percent in (
        ("Q2_K", "scales and minimums", 0.05),
        ("Q3_K", "scales", 0.02),
        ("Q4_K", "scales and minimums", 0.06),
        ("IQ4_XS", "scales", 0.02),
    )
}


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """Rows of a kind as they are stored: in each of the parts, [rows, bytes of a row] uint8."""

    kind: str
    parts: tuple[Tensor, ...]
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        size = BY_NAME[self.kind]
        num_in = self.parts[0].shape[1] // size.num_bytes * size.weights
        return sum(len(part) for part in self.parts), num_in

    def linear(
        self, bias: Tensor | None, fusion: Fusion = NO_FUSION, linears: QuantizedLinears = NATIVE
    ) -> LinearOp:
        if self.kind in SUPERBLOCKS:
            if linears.has_superblocks:
                return linears.superblocks(self._superblocks(), bias, fusion, factor=self.factor)
            _warn_of_loss(self.kind)
        if LAYOUTS[self.kind].bits == 4:
            return self._int4().linear(bias, fusion, linears)
        codes, scales = self._int8()
        return linears.int8([codes], bias, fusion, scales=scales * self.factor)

    def plain(self) -> Tensor:
        out = torch.empty(self.shape)
        for rows, groups in self._pieces():
            out[rows] = _values(self.kind, groups)
        return out if self.factor == 1.0 else out.mul_(self.factor)

    def scaled(self, factor: float) -> BlockWeight:
        return replace(self, factor=self.factor * factor)

    def rows(self, order: Tensor) -> BlockWeight:
        return replace(self, parts=(joined(self.parts)[order],))

    def _superblocks(self) -> Superblocks:
        """Returns the weights of a kind of SUPERBLOCKS, without the factor."""
        layout = SUPERBLOCK_KINDS[self.kind.lower()]
        num_out, num_in = self.shape
        halves, groups = (num_out, num_in // SUPERBLOCK), (num_out, num_in // layout.group)
        whole = Superblocks(
            self.kind.lower(),
            _buffer(self.shape, torch.uint8),
            torch.empty(halves, dtype=torch.float16),
            torch.empty(groups, dtype=torch.int8),
            torch.empty(halves, dtype=torch.float16) if layout.has_minimums else None,
            torch.empty(groups, dtype=torch.uint8) if layout.has_minimums else None,
        )
        for rows, part in self._unpacked(unpack_superblocks):
            for to, some in zip(whole[1:], part[1:], strict=True):
                if to is not None and some is not None:
                    to[rows] = some
        return whole

    def _int4(self) -> Int4Weight:
        layout = LAYOUTS[self.kind]
        num_out, num_in = self.shape
        codes = _buffer(self.shape, torch.uint8)
        scales = torch.empty(num_out, num_in // layout.group)
        minimums = torch.empty_like(scales) if layout.has_minimums else None
        for rows, groups in self._pieces():
            codes[rows], scales[rows] = groups.codes, groups.scales
            if minimums is not None and groups.minimums is not None:
                minimums[rows] = groups.minimums
        channels = None if self.factor == 1.0 else torch.full((num_out,), self.factor)
        return Int4Weight(
            codes, scales, None, layout.group, layout.table, minimums, channel_scales=channels
        )

    def _int8(self) -> tuple[Tensor, Tensor]:
        """Returns codes and steps, to be multiplied by the factor."""
        codes, steps = _buffer(self.shape, torch.int8), torch.empty(self.shape[0])
        for rows, groups in self._pieces():
            codes[rows], steps[rows] = _with_zeros(groups, LAYOUTS[self.kind].group).rounded()
        return codes, steps

    def _pieces(self) -> Iterator[tuple[slice, Groups]]:
        return self._unpacked(unpack)

    def _unpacked(self, how: Callable[[str, Tensor], Part]) -> Iterator[tuple[slice, Part]]:
        """Yields slices of outputs and what they unpack to."""
        size = max(1, _PIECE_WEIGHTS // self.shape[1])
        end = 0
        for part in self.parts:
            for at in range(0, len(part), size):
                piece = part[at : at + size]
                start, end = end, end + len(piece)
                yield slice(start, end), how(self.kind, piece)


@functools.cache
def _warn_of_loss(kind: str) -> None:
    """Says once what the weights of a kind of SUPERBLOCKS lose without products of them."""
    logger.warning("%s", _SHORTER.get(kind, f"{kind} weights {ROUNDED}"))


def _buffer(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor for codes until they are packed. A large one goes back to the system when it
    is dropped, while the heap may keep what is freed (ops/cpu/heap.py), such as half a gigabyte of
    the last product."""
    size = prod(shape) * dtype.itemsize
    if size < _LARGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _values(kind: str, groups: Groups) -> Tensor:
    """Returns the plain weights, [rows, in] fp32."""
    layout = LAYOUTS[kind]
    if layout.table == "int4":
        values = groups.codes.float()
    else:
        table = torch.tensor(TABLE_VALUES[layout.table], dtype=torch.float32)
        values = table[groups.codes.int()]
    parts = values.view(*groups.scales.shape, layout.group)
    if layout.offset:
        parts -= layout.offset
    parts *= groups.scales[..., None]
    if groups.minimums is not None:
        parts -= groups.minimums[..., None]
    return values


def _with_zeros(groups: Groups, group: int) -> Weight8:
    """Returns rows with zero points instead of minimums."""
    codes, scales, minimums = groups
    if minimums is None:
        return Weight8(codes, scales, group)
    # A group of one value has no step. With one that is 2^40 times smaller than the value, the
    # zero point is so large that fp32 ignores the codes.
    scales = torch.where(scales == 0, minimums * 2.0**-40, scales)
    zeros = torch.where(scales == 0, 0.0, minimums / scales)
    return Weight8(codes, scales, group, zeros)


def dequantized(kind: str, stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weights of rows, [.., bytes of a row] uint8, in a float type, [.., in]."""
    rows = stored.flatten(0, -2)
    size = BY_NAME[kind]
    num_in = rows.shape[1] // size.num_bytes * size.weights
    out = torch.empty(len(rows), num_in, dtype=dtype)
    count = max(1, _PIECE_WEIGHTS // num_in)
    for start in range(0, len(rows), count):
        some = slice(start, start + count)
        out[some] = _values(kind, unpack(kind, rows[some]))
    return out.view(*stored.shape[:-1], num_in)


def check_blocks(kind: str, name: str, stored: Tensor) -> None:
    """Raises ValueError if the blocks of rows, [.., bytes of a row] uint8, hold NaN or infinity, or
    scales that no product takes, or if nothing unpacks their kind."""
    if kind not in LAYOUTS:
        raise _unsupported(name, kind)
    blocks = blocks_of(kind, stored)
    if kind == "MXFP4":
        largest = int(blocks[..., 0].max())
        if largest == 255:
            raise ValueError(f"tensor {name} holds NaN")
        if 2.0 ** (largest - 127) > MAX_SCALE:
            raise ValueError(
                f"tensor {name} holds a scale of 2^{largest - 127}; {MAX_SCALE:g} is the most"
            )
    for at in LAYOUTS[kind].halves:
        # the numbers of fp16 with the highest exponent are none
        bits = blocks.view(torch.int16)[..., at // 2] & 0x7C00
        if bool((bits == 0x7C00).any()):
            raise ValueError(f"tensor {name} holds NaN or infinity")


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Products of one kind."""

    kind: str
    markers: tuple[str, ...] = ("weight",)
    expert_markers: tuple[str, ...] = ("",)
    ignored: tuple[str, ...] = ()

    @property
    def bits(self) -> int:
        return LAYOUTS[self.kind].bits

    @property
    def loss(self) -> str | None:
        if self.kind in SUPERBLOCKS:
            return None  # on a device without such products BlockWeight.linear says it
        return f"{self.kind} weights {ROUNDED}" if self.bits == 8 else _SHORTER.get(self.kind)

    @property
    def unit(self) -> int:
        return 1

    def tensors(self, num_in: int, num_out: int) -> dict[str, TensorRule]:
        row_bytes(BY_NAME[self.kind], num_in)
        return {"weight": TensorRule(((num_out, num_in),), (self.kind,))}

    def load(self, fetch: Fetch, parts: Sequence[str]) -> BlockWeight:
        return BlockWeight(self.kind, tuple(self._read(fetch, f"{part}.weight") for part in parts))

    def cut(self, ending: str, stored: Tensor, outputs: slice) -> Tensor:
        return stored[outputs]

    def expert_tensors(
        self, num_experts: int, num_in: int, num_out: int, *, is_transposed: bool = False
    ) -> dict[str, TensorRule]:
        row_bytes(BY_NAME[self.kind], num_in)
        return {"": TensorRule(((num_experts, num_out, num_in),), (self.kind,))}

    def load_expert(
        self, fetch: Fetch, name: str, expert: int, *, is_transposed: bool = False
    ) -> BlockWeight:
        return BlockWeight(self.kind, (self._read(fetch, name, expert),))

    def memory_bytes(self, num_weights: int, *, has_superblocks: bool) -> float:
        """Returns what weights take when they are packed; scales per output are negligible."""
        if has_superblocks and self.kind in SUPERBLOCKS:
            return num_weights * SUPERBLOCK_KINDS[self.kind.lower()].bits_in_memory() / 8
        layout = LAYOUTS[self.kind]
        if layout.bits == 8:
            return num_weights
        halves = 4 if layout.has_minimums else 2
        return num_weights / 2 + num_weights / layout.group * halves

    def _read(self, fetch: Fetch, name: str, index: int | None = None) -> Tensor:
        stored = fetch(name, index)
        check_blocks(self.kind, name, stored)
        return stored


FORMATS = {kind: BlockFormat(kind) for kind in LAYOUTS}


@dataclass(frozen=True, slots=True)
class GgufFormats(CheckpointFormat):
    """All kinds. A header's types are their names, and those of safetensors for plain tensors."""

    method: str = METHOD
    formats: tuple[BlockFormat, ...] = tuple(FORMATS.values())

    def has(self, header: Header, name: str) -> bool:
        found = header.get(f"{name}.weight") or header.get(name)
        return found is not None and found.dtype not in _PLAIN

    def of(self, header: Header, product: str, num_in: int, num_out: int) -> BlockFormat | None:
        return _format_of(header, f"{product}.weight")

    def of_experts(
        self,
        header: Header,
        name: str,
        num_experts: int,
        num_in: int,
        num_out: int,
        *,
        is_transposed: bool = False,
    ) -> BlockFormat | None:
        return _format_of(header, name)


def _format_of(header: Header, name: str) -> BlockFormat | None:
    """Returns the format of a tensor, None if it is plain or missing. ValueError for a type that no
    product can have."""
    stored = header.get(name)
    if stored is None or stored.dtype in _PLAIN:
        return None
    if stored.dtype not in FORMATS:
        raise _unsupported(name, stored.dtype)
    return FORMATS[stored.dtype]


def _unsupported(name: str, kind: str) -> ValueError:
    known = ", ".join((*LAYOUTS, *_PLAIN))
    return ValueError(f"tensor {name} has type {kind}, which is not supported; only {known}")


GGUF = GgufFormats()


def read_gguf(config: Config) -> CheckpointFormat:
    """Reads quant_method gguf, which says nothing more: each tensor has its kind."""
    return GGUF
