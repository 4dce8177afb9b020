"""Native linear layers as the bytes of their packed weights, and layers made over such bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.backend import INT4_GROUPS, MAX_INT8_INPUTS, Fusion, LinearOp
from ops.cpu.native_fusion import ACTIVATIONS
from ops.cpu.native_library import TYPES, library
from ops.cpu.native_plain_linear import PlainLinear
from ops.cpu.native_quantized_linear import NativeLinear
from ops.superblocks import SUPERBLOCK, SUPERBLOCK_KINDS

NUM_BUFFERS = 3
"""Of a layer: packed weights, scales and bias, the latter two perhaps empty."""
_MAX_SIZE = 1 << 26  # of inputs and outputs
_NUM_CODES = 6  # of the library's enumeration Codes
_PLAIN_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LayerKind(NamedTuple):
    """What a layer's packed bytes mean. name: "int8", "int4", a plain type or one of
    SUPERBLOCK_KINDS; num_out: outputs after gating; group, codes: of int4 (ops/csrc/kernels.h),
    else 0."""

    name: str
    num_in: int
    num_out: int
    group: int = 0
    codes: int = 0


class Buffer(NamedTuple):
    """Memory of a layer; the layer keeps it."""

    address: int
    num_bytes: int


def stored(op: LinearOp) -> tuple[LayerKind, tuple[Buffer, ...]] | None:
    """Returns a layer's kind and its NUM_BUFFERS buffers, None if it is not the library's."""
    found = _kind(op)
    if found is None:
        return None
    kind, packed = found
    spans = packed.buffers
    return kind, tuple(Buffer(*spans[i : i + 2]) for i in range(0, 2 * NUM_BUFFERS, 2))


def restore(kind: LayerKind, buffers: Sequence[Tensor], fusion: Fusion) -> LinearOp:
    """Makes a layer over the NUM_BUFFERS buffers, uint8 at multiples of 64, which it keeps alive.

    fusion: that with which the layer was packed. ValueError if kind or buffers do not fit it.
    """
    name, num_in, num_out, group, codes = kind
    sizes = num_in, num_out
    if not all(type(n) is int and 0 < n <= _MAX_SIZE for n in sizes) or len(buffers) != NUM_BUFFERS:
        raise ValueError(f"a stored layer of {num_in} inputs and {num_out} outputs")
    spans = [n for part in buffers for n in (part.data_ptr() if len(part) else 0, len(part))]
    last = spans, ACTIVATIONS[fusion.activation], fusion.is_gated
    op: NativeLinear | PlainLinear
    if name == "int8" and num_in <= MAX_INT8_INPUTS:
        packed = library().Int8Linear.restore(*sizes, *last)
        op = NativeLinear(packed, num_in, num_out, fusion)
    elif name == "int4" and group in INT4_GROUPS and codes in range(_NUM_CODES):
        packed = library().Int4Linear.restore(*sizes, group, codes, *last)
        op = NativeLinear(packed, num_in, num_out, fusion)
    elif name in SUPERBLOCK_KINDS and num_in % SUPERBLOCK == 0:
        number = list(SUPERBLOCK_KINDS).index(name)
        packed = library().SuperblockLinear.restore(*sizes, number, *last)
        op = NativeLinear(packed, num_in, num_out, fusion)
    elif name in _PLAIN_TYPES:
        dtype = _PLAIN_TYPES[name]
        packed = library().PlainLinear.restore(*sizes, TYPES[dtype], *last)
        op = PlainLinear.over(packed, dtype, num_in, num_out, fusion)
    else:
        raise ValueError(f"a stored layer of kind {name!r}, group {group}, codes {codes}")
    op.memory = tuple(buffers)
    return op


def _kind(op: LinearOp) -> tuple[LayerKind, Any] | None:
    if isinstance(op, PlainLinear):
        name = str(op.dtype).removeprefix("torch.")
        return LayerKind(name, op.num_in, op.num_out), op.packed
    if not isinstance(op, NativeLinear):
        return None
    packed = op.packed
    if type(packed) is library().Int8Linear:
        return LayerKind("int8", op.num_in, op.num_out), packed
    if type(packed) is library().Int4Linear:
        return LayerKind("int4", op.num_in, op.num_out, packed.group, packed.codes), packed
    if type(packed) is library().SuperblockLinear:
        name = list(SUPERBLOCK_KINDS)[packed.kind]
        return LayerKind(name, op.num_in, op.num_out), packed
    return None
