"""The experts of host memory that are used most, in slots on the device beside the CPU's.

How often each is used is counted while serving, and counts for 5 % less with every step (as for
experts of the disk; PowerInfer, Song et al., SOSP 2024, places neurons so, but once). An expert
that has become hotter than the coldest one on the device is copied there beside a step and takes
its slot when the next one begins, so that within a step every expert has one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.backend import Routing
from ops.cuda.experts import CudaExperts
from serve.loading.host_weights.device_form import SlotProducts
from serve.loading.host_weights.expert_memory import ExpertMemory
from serve.loading.host_weights.link import Link, Wait
from serve.loading.streaming.experts import DECAY

_MARGIN = 1.0  # uses by which an expert is hotter than the one whose slot it takes

Ints = np.ndarray


class _Coming(NamedTuple):
    """An expert on its way into a slot."""

    slot: int
    layer: int
    expert: int
    wait: Wait


class HotExperts:
    """The slots, shared by the layers of one form. Only the compute thread calls it. A layer is
    named by its number among them."""

    def __init__(
        self, layers: Sequence[ExpertMemory], num_slots: int, copies: int, link: Link
    ) -> None:
        """copies: the most experts that are copied beside a step."""
        up, down = layers[0].up, layers[0].down
        self._layers, self._link, self._up_bytes = layers, link, up.host_bytes
        self._ups, self._downs = SlotProducts(up, num_slots), SlotProducts(down, num_slots)
        self.op = CudaExperts(self._ups.ops, self._downs.ops, layers[0].scales_input)
        size = up.host_bytes + down.host_bytes
        self._raw = torch.empty(copies, size, dtype=torch.uint8, device=link.device)
        shape = len(layers), max(len(each.memory) for each in layers)
        self.slot_of = np.full(shape, -1, np.int32)
        self._table = torch.full(shape, -1, dtype=torch.int32, device=link.device)
        self._exists = np.zeros(shape, np.bool_)
        for row, layer in zip(self._exists, layers, strict=True):
            row[: len(layer.memory)] = True
        self._owner = np.full((num_slots, 2), -1, np.int64)
        self._heat, self._is_used = np.zeros(shape, np.float64), False
        self._coming: list[_Coming] = []
        self.copied_bytes = self.hits = 0

    @property
    def num_slots(self) -> int:
        return len(self._owner)

    def begin_step(self) -> None:
        """Gives slots to the experts that have come, and starts to copy the next ones."""
        for at, coming in enumerate(self._coming):
            coming.wait()
            self._land(coming, self._raw[at : at + 1])
        self._coming.clear()
        if self._is_used:
            self._is_used = False
            self._heat *= DECAY
        for slot, layer, expert in self._wanted():
            at = len(self._coming)
            source = self._layers[layer].memory[expert]
            wait = self._link.fetch(self._raw[at], source)
            self.copied_bytes += source.nbytes
            self._coming.append(_Coming(slot, layer, expert, wait))

    def compute(self, layer: int, x: Tensor, routing: Routing, parts: Tensor) -> None:
        """Computes the pairs whose expert is on the device: `CudaExperts.compute_some`."""
        known = len(self._layers[layer].memory)
        # rows of no sequence, as a warm-up has, may have any number of an expert
        experts = routing.experts.clamp(0, known - 1).long()
        slots = self._table[layer][experts]
        self.op.compute_some(x, Routing(slots, routing.weights), parts)

    def is_cold(self, layer: int, experts: Ints) -> Ints:
        """Returns which of a step's experts, of any shape, are not on the device, and counts how
        often each is used."""
        used = np.unique(experts)
        self._heat[layer, used] += 1
        self._is_used = True
        self.hits += int((self.slot_of[layer, used] >= 0).sum())
        is_cold: Ints = self.slot_of[layer, experts] < 0
        return is_cold

    def _wanted(self) -> list[tuple[int, int, int]]:
        """Returns the slots and the experts that take them, hottest first."""
        heat = np.where(self._exists & (self.slot_of < 0), self._heat, 0.0).reshape(-1)
        hottest = _smallest(-heat, len(self._raw))
        layers, experts = self._owner.T
        held = np.where(layers < 0, -np.inf, self._heat[layers, experts])
        coldest = _smallest(held, len(self._raw))
        width = self._heat.shape[1]
        return [
            (int(slot), int(new) // width, int(new) % width)
            for new, slot in zip(hottest, coldest, strict=False)
            if heat[new] > 0 and heat[new] > held[slot] + _MARGIN
        ]

    def _land(self, coming: _Coming, raw: Tensor) -> None:
        """Puts an expert that was copied to raw: [1, bytes] into its slot."""
        slot, layer, expert, _ = coming
        before, old = map(int, self._owner[slot])
        if before >= 0:
            self.slot_of[before, old] = -1
            self._table[before, old].fill_(-1)
        self._ups.fill(slot, raw[:, : self._up_bytes])
        self._downs.fill(slot, raw[:, self._up_bytes :])
        self._owner[slot] = layer, expert
        self.slot_of[layer, expert] = slot
        self._table[layer, expert].fill_(slot)


def _smallest(values: np.ndarray, count: int) -> Ints:
    """Returns the places of the smallest values, in order, without sorting all experts."""
    some = np.argpartition(values, count)[:count] if count < len(values) else np.arange(len(values))
    order: Ints = some[np.argsort(values[some], kind="stable")]
    return order
