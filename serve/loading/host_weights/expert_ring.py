"""All experts of a layer, copied to the device for a step of many rows and computed there.

Such a step, as of prompts, uses nearly all experts, and the CPU takes longer to multiply its rows
than the link to bring the weights. They come in groups through a ring of raw bytes, are put in the
device's form one group after the other, and are gone after the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.backend import Routing
from ops.cuda.experts import CudaExperts
from serve.loading.host_weights.device_form import SlotProducts
from serve.loading.host_weights.expert_memory import ExpertMemory
from serve.loading.host_weights.link import Link
from serve.loading.host_weights.ring import DeviceRing
from serve.loading.streaming.units import Unit

BUFFERS = 2
GROUPS = 8
"""Into how many groups the experts of a layer are divided, if the memory allows."""


class ExpertGroup:
    """Neighbouring experts of a layer. memory: [bytes] in host memory; raw: [experts, bytes], their
    place in a buffer of the device."""

    unit: Unit | None = None  # it is not on the disk

    def __init__(self, memory: Tensor, first: int) -> None:
        self.first, self.count = first, len(memory)
        self.memory, self.num_bytes = memory.reshape(-1), memory.nbytes
        self.raw = memory

    def place(self, buffer: Tensor) -> None:
        self.raw = buffer[: self.num_bytes].view(self.count, -1)


class ExpertRing:
    """Computes layers of one form, named by their numbers among them, in this order."""

    def __init__(self, layers: Sequence[ExpertMemory], at_once: int, link: Link) -> None:
        """at_once: experts of a group."""
        up, down = layers[0].up, layers[0].down
        self._up_bytes = up.host_bytes
        self._ups, self._downs = SlotProducts(up, at_once), SlotProducts(down, at_once)
        self.op = CudaExperts(self._ups.ops, self._downs.ops, layers[0].scales_input)
        groups: list[ExpertGroup] = []
        self._groups: list[range] = []
        for layer in layers:
            begin = len(groups)
            for first in range(0, len(layer.memory), at_once):
                groups.append(ExpertGroup(layer.memory[first : first + at_once], first))
            self._groups.append(range(begin, len(groups)))
        self.ring = DeviceRing(groups, min(BUFFERS, len(groups)), link)
        self._all = groups
        self.copied_experts = 0

    def compute(self, layer: int, x: Tensor, routing: Routing, parts: Tensor) -> None:
        """Computes all pairs: `CudaExperts.compute_some`."""
        for number in self._groups[layer]:
            group = self._all[number]
            self.ring.enter(number)
            self._ups.fill(0, group.raw[:, : self._up_bytes])
            self._downs.fill(0, group.raw[:, self._up_bytes :])
            self.ring.leave(number)  # its buffer is free for the group after the next one
            self.copied_experts += group.count
            own = routing.experts - group.first
            is_here = (own >= 0) & (own < group.count)
            slots = torch.where(is_here, own, torch.full_like(own, -1))
            self.op.compute_some(x, Routing(slots, routing.weights), parts)
