"""The experts of a layer in one piece of page-locked memory, each in a stretch of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from ops.backend import LinearOp
from ops.cpu.native_stored import restore, stored
from serve.loading.host_weights.device_form import ProductForm
from serve.loading.host_weights.link import Link


class ExpertMemory:
    """up, down: the forms of the two products. memory: [experts, bytes]; ups, downs: the products
    over it, which the CPU computes."""

    def __init__(
        self,
        up: ProductForm,
        down: ProductForm,
        ups: Sequence[LinearOp],
        downs: Sequence[LinearOp],
        link: Link,
        *,
        scales_input: bool,
    ) -> None:
        """The products, of these forms, are copied."""
        self.up, self.down, self.scales_input = up, down, scales_input
        size = up.host_bytes + down.host_bytes
        self.memory = link.pinned(len(ups) * size).view(len(ups), size)
        self.ups: list[LinearOp] = []
        self.downs: list[LinearOp] = []
        for row, one, other in zip(self.memory, ups, downs, strict=True):
            for form, op, made, at in (
                (up, one, self.ups, row),
                (down, other, self.downs, row[up.host_bytes :]),
            ):
                buffers = buffers_in(form, at)
                copy_buffers(op, buffers)
                made.append(restore(form.kind, buffers, form.fusion))

    def is_like(self, other: ExpertMemory) -> bool:
        """Returns whether slots of a device can have experts of both."""
        forms = self.up is other.up and self.down is other.down
        return forms and self.scales_input == other.scales_input


def is_of_form(op: LinearOp, form: ProductForm) -> bool:
    """Returns whether a product of the CPU has the form."""
    found = stored(op)
    if found is None:
        return False
    kind, buffers = found
    return kind == form.kind and tuple(each.num_bytes for each in buffers) == form.sizes


def buffers_in(form: ProductForm, memory: Tensor) -> list[Tensor]:
    """Returns the places of a product's buffers in memory: uint8."""
    starts = form.starts
    return [memory[at : at + size] for at, size in zip(starts, form.sizes, strict=False)]


def copy_buffers(op: LinearOp, targets: Sequence[Tensor]) -> None:
    """Copies the bytes of a product of the CPU."""
    found = stored(op)
    assert found is not None, "a product of the native library"
    for target, buffer in zip(targets, found[1], strict=True):
        if buffer.num_bytes:
            ctypes.memmove(target.data_ptr(), buffer.address, buffer.num_bytes)
