"""Products that the native kernels have packed, brought into the form of a device.

Host memory has each expert once, in the panels of the CPU's kernels (ops/csrc/pack.inl, gemm4.inl,
gemm_plain.inl). Its bytes are copied to the device as they are and are put in the device's order
there: codes, scales and biases are the same numbers in both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from ops.backend import TABLES, Fusion, LinearOp
from ops.cpu.native_stored import LayerKind
from ops.cuda.linear import Int4Linear, PlainLinear, ScaledLinear

LINE = 64
"""Buffers of packed products begin at multiples of it."""
AT_ONCE = 8
"""The most products that are put in the device's form at once, which bounds the memory for it."""

_HALF = 16  # of the outputs of a panel
_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_, _ZEROS, _MINIMUMS = range(3)  # of the library's enumeration Codes


def padded(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE


@dataclass(frozen=True)
class ProductForm:
    """The form of products that are alike. sizes: bytes of the buffers as the CPU has them;
    device: one of them on the device, whose own weights are not used."""

    kind: LayerKind
    sizes: tuple[int, ...]
    fusion: Fusion
    device: LinearOp

    @property
    def starts(self) -> list[int]:
        """Where each buffer begins, and the end."""
        return [0, *accumulate(map(padded, self.sizes))]

    @property
    def host_bytes(self) -> int:
        return self.starts[-1]

    @property
    def device_bytes(self) -> int:
        return sum(each.nbytes for each in _tensors(self.device))

    @property
    def work_bytes(self) -> int:
        """The most memory that `SlotProducts.fill` takes beside its slots, for each of AT_ONCE."""
        if self.kind.name == "int4":
            return 4 * self.host_bytes
        # unless outputs or inputs are padded, they are written where they belong at once
        return 0 if _tensors(self.device)[0].nbytes == self.sizes[0] else self.host_bytes

    @property
    def is_known(self) -> bool:
        """Whether the bytes of the one form can become those of the other."""
        kind, op = self.kind, self.device
        if kind.name == "int8":
            return isinstance(op, ScaledLinear) and op.dtype == torch.int8
        if kind.name == "int4":
            table = TABLES[max(0, kind.codes - _MINIMUMS)]
            return isinstance(op, Int4Linear) and (op.weight.group, op.weight.table) == (
                kind.group,
                table,
            )
        return isinstance(op, PlainLinear) and op.weight.dtype == _PLAIN.get(kind.name)


def _tensors(op: Any) -> list[Tensor]:
    """Returns the tensors of a product in the order of `_with_tensors`."""
    if isinstance(op, PlainLinear):
        return [each for each in (op.weight, op.bias) if each is not None]
    return [each for each in op.weight if isinstance(each, Tensor)]


def _with_tensors(op: Any, tensors: Sequence[Tensor]) -> LinearOp:
    """Returns the product over other tensors."""
    made, left = copy(op), iter(tensors)
    if isinstance(op, PlainLinear):
        made.weight, made.bias = next(left), None if op.bias is None else next(left)
    else:
        made.weight = type(op.weight)(
            *(next(left) if isinstance(each, Tensor) else each for each in op.weight)
        )
    found: LinearOp = made
    return found


class SlotProducts:
    """Slots on a device for products of one form. ops: a product over each."""

    def __init__(self, form: ProductForm, count: int) -> None:
        self._form = form
        like = _tensors(form.device)
        self._memory = [torch.zeros(count, *x.shape, dtype=x.dtype, device=x.device) for x in like]
        self.ops = [
            _with_tensors(form.device, [memory[slot] for memory in self._memory])
            for slot in range(count)
        ]

    def fill(self, first: int, raw: Tensor) -> None:
        """Puts products into the slots from `first` on. raw: [products, bytes] uint8 on the device,
        the buffers of each as the CPU has them."""
        for at in range(0, len(raw), AT_ONCE):
            self._fill(first + at, raw[at : at + AT_ONCE])

    def _fill(self, first: int, raw: Tensor) -> None:
        form, count = self._form, len(raw)
        targets = [memory[first : first + count] for memory in self._memory]
        parts = [
            raw[:, start : start + size]
            for start, size in zip(form.starts, form.sizes, strict=False)
        ]
        packed, scales, bias = parts
        if form.kind.name == "int8":
            self._fill_int8(targets[0], packed)
        elif form.kind.name == "int4":
            self._fill_int4(targets[0], targets[1], packed)
        else:
            self._fill_plain(targets[0], packed)
        rest = [each for each in (scales, bias) if each.shape[1]]
        for target, source in zip(targets[len(targets) - len(rest) :], rest, strict=True):
            self._put(target, source.view(torch.float32).view(count, -1, 2, _HALF))

    def _put(
        self,
        target: Tensor,
        source: Tensor,
        write: Callable[[Tensor, Tensor], object] = Tensor.copy_,
    ) -> None:
        """Writes source: [products, panels, 2, 16, ...], a row for each output, to target:
        [products, outputs, ...] in the device's order of outputs."""
        rest, is_gated = list(range(4, source.dim())), self._form.fusion.is_gated
        if is_gated and self._form.kind.name in _PLAIN:  # gates, then up factors
            source, lead = source.permute(0, 2, 1, 3, *rest), 2
        elif is_gated:  # a gate, an up factor, and so on
            source, lead = source.permute(0, 1, 3, 2, *rest), 1
        else:
            lead = 1
        if target.numel() == source.numel():
            write(target.view(source.shape), source)
            return
        flat = source.reshape(len(source), lead, prod(source.shape[1:4]) // lead, -1)
        outputs, inputs = target.shape[1] // lead, target[0, 0].numel()
        write(target.view(len(target), lead, outputs, inputs), flat[:, :, :outputs, :inputs])

    def _fill_int8(self, target: Tensor, packed: Tensor) -> None:
        quads = -(-self._form.kind.num_in // 64) * 16
        codes = packed.view(len(packed), -1, quads, 2, _HALF, 4).permute(0, 1, 3, 4, 2, 5)

        def write(to: Tensor, source: Tensor) -> None:
            torch.bitwise_xor(source, 128, out=to)

        self._put(target.view(torch.uint8), codes, write)

    def _fill_plain(self, target: Tensor, packed: Tensor) -> None:
        values = packed.view(target.dtype)
        each = 4 // target.dtype.itemsize
        steps = -(-self._form.kind.num_in // each)
        found = values.view(len(packed), -1, steps, 2, _HALF, each).permute(0, 1, 3, 4, 2, 5)
        self._put(target, found)

    def _fill_int4(self, target: Tensor, words: Tensor, packed: Tensor) -> None:
        kind = self._form.kind
        offset = 64 if kind.codes in (_ZEROS, _MINIMUMS) else 0
        size = 64 + offset + kind.group * _HALF
        width = -(-kind.num_in // max(64, kind.group)) * max(64, kind.group)
        groups = packed.view(len(packed), -1, width // kind.group, size)
        found = groups[..., :64].view(torch.int16).int() & 0xFFFF
        if kind.codes == _MINIMUMS:
            found |= groups[..., 64:128].view(torch.int16).int() << 16
        elif kind.codes == _ZEROS:  # 16 minus each, twice: [lanes, halves, 2]
            both = groups[..., 64:128].view(*groups.shape[:3], _HALF, 2, 2)[..., 0]
            found |= (16 - both.int()).transpose(-1, -2).flatten(-2) << 16
        else:
            found |= 8 << 16
        found = found.view(*found.shape[:3], 2, _HALF).permute(0, 1, 3, 4, 2)
        self._put(words.transpose(1, 2), found)
        self._put_nibbles(target, groups[..., 64 + offset :])

    def _put_nibbles(self, target: Tensor, groups: Tensor) -> None:
        """groups: [products, panels, groups, bytes]: four inputs of 16 lanes, and so on."""
        count, panels, num_groups, size = groups.shape
        group, chunk = size // _HALF, max(64, size // _HALF)
        codes = groups.view(count, panels, num_groups, group // 4, _HALF, 4).permute(
            0, 1, 4, 2, 3, 5
        )
        codes = codes.reshape(count, panels, _HALF, num_groups * group // chunk, 2, chunk // 2)
        first, second = codes.unbind(4)
        both = torch.stack(
            [first & 15 | (second & 15) << 4, first >> 4 | second & 0xF0], 2
        )  # [products, panels, 2, 16, chunks, half a chunk]
        if self._form.fusion.is_gated:
            both = both.transpose(2, 3)
        both = both.reshape(count, 2 * panels, _HALF, *both.shape[4:]).transpose(2, 3)
        target.view(torch.uint8).copy_(both[:, : target.shape[1]])
