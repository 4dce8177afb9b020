"""What the device computes of the experts in host memory, and the device memory for it.

The results of all pairs of a row and an expert are collected on the device, wherever each was
computed, in the type that the device's kernels give, and are added in the order of the row's
choice. So an answer does not depend on what came first, and in int8 and 4 bits, whose products are
exact sums of integers, hardly on the place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ops.backend import ExpertsOp, Routing
from ops.cpu.native_stored import LayerKind
from serve.loading.host_weights.device_form import AT_ONCE
from serve.loading.host_weights.expert_memory import ExpertMemory
from serve.loading.host_weights.expert_ring import BUFFERS, GROUPS, ExpertRing
from serve.loading.host_weights.experts import HostExperts
from serve.loading.host_weights.hot_experts import HotExperts
from serve.loading.host_weights.link import Link
from serve.loading.host_weights.placement import DeviceNeeds
from serve.loading.host_weights.ring import ALIGNMENT
from serve.units import format_memory

logger = logging.getLogger(__name__)

MOST_COPIES = 4
"""The most experts that are copied to the device beside a step."""

_MOST_ROWS = 2048  # with which it is tried whether the CPU takes longer than copying


class DeviceExperts:
    """The slots of hot experts and the ring for steps of at least min_rows rows (None: there is no
    ring), each of which may be missing, but not both. Only the compute thread calls it."""

    def __init__(
        self, hot: HotExperts | None, ring: ExpertRing | None, min_rows: int | None, num_bytes: int
    ) -> None:
        """num_bytes: of the device."""
        self.hot, self.ring, self.num_bytes = hot, ring, num_bytes
        self.min_rows = min_rows
        either = hot or ring
        assert either is not None, "slots or a ring"
        self.op = either.op

    def begin_step(self) -> None:
        if self.hot is not None:
            self.hot.begin_step()

    def announce(self) -> None:
        logger.info(
            "weights: %s of the device are for experts of the CPU: %d slots for the hottest ones;"
            " steps of %s rows or more are computed there",
            format_memory(self.num_bytes),
            0 if self.hot is None else self.hot.num_slots,
            "no number of" if self.min_rows is None else self.min_rows,
        )

    @property
    def copied_bytes(self) -> int:
        hot = 0 if self.hot is None else self.hot.copied_bytes
        return hot + (0 if self.ring is None else self.ring.ring.copied_bytes)


class LayerOnDevice:
    """The part of one layer, by its number among those of `shared`."""

    def __init__(self, shared: DeviceExperts, layer: int) -> None:
        self._shared, self._layer = shared, layer

    def takes(self, num_rows: int) -> bool:
        """Returns whether all experts of such a step are copied and computed here."""
        least = self._shared.min_rows
        return self._shared.ring is not None and least is not None and num_rows >= least

    def compute_all(self, x: Tensor, routing: Routing, residual: Tensor | None) -> Tensor:
        """Computes an ExpertsOp."""
        ring = self._shared.ring
        assert ring is not None
        parts = self._parts(x, routing)
        ring.compute(self._layer, x, routing, parts)
        return self.total(x, routing, parts, residual)

    def begin(self, x: Tensor, routing: Routing) -> Tensor:
        """Starts to compute the pairs of hot experts. Returns the parts: [T, K, out], of which the
        others are not there yet."""
        parts = self._parts(x, routing)
        if self._shared.hot is not None:
            self._shared.hot.compute(self._layer, x, routing, parts)
        return parts

    def is_cold(self, experts: np.ndarray) -> np.ndarray:
        """Returns which of the experts of a step the CPU computes."""
        hot = self._shared.hot
        if hot is None:
            return np.ones(experts.shape, np.bool_)
        return hot.is_cold(self._layer, experts)

    def total(self, x: Tensor, routing: Routing, parts: Tensor, residual: Tensor | None) -> Tensor:
        """Returns the sums of the rows, whose parts are all there."""
        out = residual
        if out is None:
            out = torch.empty(len(x), parts.shape[2], dtype=x.dtype, device=x.device)
        self._shared.op.add_up(parts, routing, residual, out)
        return out

    def _parts(self, x: Tensor, routing: Routing) -> Tensor:
        op = self._shared.op
        shape = (*routing.experts.shape, op.num_out)
        return torch.empty(shape, dtype=op.part_dtype, device=x.device)


def give_room(
    experts: Mapping[int, HostExperts], needs: DeviceNeeds, room: int, link: Link, link_speed: float
) -> DeviceExperts | None:
    """Lets the device compute experts of these layers, with at most `room` bytes of its memory,
    and returns what does so; None if that is too little. Layers of other forms than the first one
    are left to the CPU. link_speed: bytes a second."""
    known = {number: each for number, each in experts.items() if each.memory is not None}
    if not known:
        return None
    number, first = next(iter(known.items()))
    assert first.memory is not None
    alike, memories = [], []
    for each in known.values():
        memory = each.memory
        if memory is not None and memory.is_like(first.memory):
            alike.append(each)
            memories.append(memory)
    top_k = max(1, round(needs.layers[number].used_share * first.num_experts))
    measure = seconds_of_rows(first.op, first.num_experts, top_k, first.memory.up.kind)
    min_rows = rows_worth_copying(first.memory.memory.nbytes / link_speed, measure)
    shared = share_room(memories, room, link, min_rows)
    if shared is not None:
        for at, each in enumerate(alike):
            each.on_device = LayerOnDevice(shared, at)
        shared.announce()
    return shared


def share_room(
    layers: Sequence[ExpertMemory],
    room: int,
    link: Link,
    min_rows: int | None,
) -> DeviceExperts | None:
    """Returns what the device takes of layers of one form, of at most `room` bytes of its memory;
    None if that is too little. min_rows: of a step that the device computes; None: of none."""
    up, down = layers[0].up, layers[0].down
    host, slot = up.host_bytes + down.host_bytes, up.device_bytes + down.device_bytes
    work = max(up.work_bytes, down.work_bytes)  # one side is filled at a time
    most = max(len(each.memory) for each in layers)

    def ring_bytes(count: int) -> int:
        return count * (BUFFERS * host + slot) + min(count, AT_ONCE) * work + BUFFERS * ALIGNMENT

    ring, used = None, 0
    if min_rows is not None:
        fitting = [n for n in range(1, -(-most // GROUPS) + 1) if ring_bytes(n) <= room]
        if fitting:
            ring, used = ExpertRing(layers, fitting[-1], link), ring_bytes(fitting[-1])
    copies = min(MOST_COPIES, max(1, most // 16))
    fixed = copies * host + work
    num_slots = min(sum(len(each.memory) for each in layers), (room - used - fixed) // slot)
    hot = None
    if num_slots > 0:
        hot = HotExperts(layers, num_slots, copies, link)
        used += fixed + num_slots * slot
    if hot is None and ring is None:
        return None
    return DeviceExperts(hot, ring, None if ring is None else min_rows, used)


def rows_worth_copying(copy_s: float, compute_s: Callable[[int], float]) -> int | None:
    """Returns the least power of two of rows that take longer to compute than copying takes; None
    if none up to 2,048 do."""
    rows = 1
    while rows <= _MOST_ROWS:
        if compute_s(rows) > copy_s:
            return rows
        rows *= 2
    return None


def seconds_of_rows(
    op: ExpertsOp, num_experts: int, top_k: int, kind: LayerKind
) -> Callable[[int], float]:
    """Returns what measures how long the CPU computes so many rows that use all experts alike.
    kind: of the first products."""
    dtype = torch.bfloat16 if kind.name == "bfloat16" else torch.float32

    def measure(rows: int) -> float:
        x = torch.randn(rows, kind.num_in).to(dtype)
        experts = torch.arange(rows * top_k, dtype=torch.int32).view(rows, top_k) % num_experts
        routing = Routing(experts, torch.full((rows, top_k), 1 / top_k))
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            op(x, routing)
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    return measure
