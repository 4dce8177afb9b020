"""Decides which weights stay in memory, by a linear program that a greedy choice solves.

Let unit u have b bytes and be used in a share p of the steps, and let x, from 0 to 1, be the part
of it that is resident. A step reads sum(p b (1 - x)) bytes from the disk, beside which it computes;
the program is to minimize the longer of both times, subject to sum(b x) <= memory. It has one
constraint beside the bounds, so that it is a fractional knapsack: the best are the units of the
highest value per byte, which is p (Dantzig 1957), and only the last one is cut. Products of layers
have p = 1, so that all of them are equally good and are taken evenly spread, which keeps the disk
busy while resident layers compute; experts come after them, by how often they are used; rows of
tables that are looked up come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve.errors import ConfigError
from serve.units import format_memory

SHARE_OF_FREE = 0.75
"""Of the free memory, for weights that do not fit; the rest is for K/V and steps."""
LEAST_SHARE = 0.05
"""Of all weights that must fit for a start without weight_memory_bytes."""
MIN_HEAD_BYTES = 16 << 20
"""Of a part of the last product, where layers are smaller."""
MIN_BUFFERS, BUFFERS = 2, 3
"""Buffers of the ring: one to compute with, the others to read ahead."""


@dataclass(frozen=True, slots=True)
class Mixtures:
    """Experts that share slots. num_experts: of each mixture; top_k: of one row."""

    num_experts: tuple[int, ...]
    top_k: int
    slot_bytes: int

    @property
    def total(self) -> int:
        return sum(self.num_experts)

    @property
    def min_slots(self) -> int:
        """Those of a row and of what is read ahead meanwhile."""
        return min(self.total, 2 * self.top_k)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model is made of. fixed_bytes: what cannot be read in every step, such as norms.
    table_bytes: of tables that are looked up; row_bytes: the memory to read their rows into.
    units: bytes of the products of layers and parts of the head, in the order of a step."""

    fixed_bytes: int
    table_bytes: int
    row_bytes: int
    units: tuple[int, ...]
    mixtures: tuple[Mixtures, ...] = ()

    @property
    def total(self) -> int:
        experts = sum(each.total * each.slot_bytes for each in self.mixtures)
        return self.fixed_bytes + self.table_bytes + sum(self.units) + experts


@dataclass(frozen=True, slots=True)
class Placement:
    """What is resident. has_tables: whether tables are; is_resident: of each unit. buffers: of the
    ring, buffer_bytes each; slots: of each group of mixtures. num_bytes: all of them together.
    streamed_bytes: what a step reads beside experts."""

    has_tables: bool
    is_resident: tuple[bool, ...]
    buffers: int
    buffer_bytes: int
    slots: tuple[int, ...]
    num_bytes: int
    streamed_bytes: int


def is_large(table_bytes: int, row_bytes: int) -> bool:
    """Returns whether a table takes more memory than what its rows are read into. Others stay."""
    return table_bytes > 2 * row_bytes


def head_cuts(num_bytes: int, panels: int, largest_layer: int) -> list[int]:
    """Returns where the last product is divided, in panels of its outputs: into parts as large as
    the largest layer, or MIN_HEAD_BYTES, at most, if a panel is not larger."""
    most = max(MIN_HEAD_BYTES, largest_layer, 1)
    count = min(panels, max(1, -(-num_bytes // most)))
    return [panels * i // count for i in range(count + 1)]


def least_bytes(needs: Needs) -> int:
    """Returns the least memory with which a model can be computed."""
    slots = sum(each.min_slots * each.slot_bytes for each in needs.mixtures)
    layers = min(sum(needs.units), MIN_BUFFERS * max(needs.units, default=0))
    return needs.fixed_bytes + needs.row_bytes + layers + slots


def too_little(budget: int, need: str) -> ConfigError:
    """Returns the error of too small a budget. need: the bytes that the model needs."""
    return ConfigError(
        f"weight_memory_bytes {format_memory(budget)} is too little: this model needs {need} for"
        f" what cannot be read in every step, {MIN_BUFFERS} layers and the experts of one row"
    )


def place(needs: Needs, budget: int) -> Placement:
    """Returns the placement that reads the least in a step. ConfigError if nothing fits."""
    if needs.total <= budget:
        return _placement(needs, True, (True,) * len(needs.units), 0, _all_slots(needs))
    least = least_bytes(needs)
    if budget < least:
        raise too_little(budget, format_memory(least))
    left = budget - needs.fixed_bytes - needs.row_bytes
    least_slots = sum(each.min_slots * each.slot_bytes for each in needs.mixtures)
    if sum(needs.units) + least_slots <= left:  # all layers, and as many experts as fit
        left -= sum(needs.units)
        slots = share_slots(needs.mixtures, left)
        left -= sum(n * each.slot_bytes for n, each in zip(slots, needs.mixtures, strict=True))
        has_tables = needs.table_bytes <= left + needs.row_bytes
        return _placement(needs, has_tables, (True,) * len(needs.units), 0, slots)
    left -= least_slots
    slots = tuple(each.min_slots for each in needs.mixtures)
    largest = max(needs.units)
    buffers = BUFFERS if BUFFERS * largest <= left else MIN_BUFFERS
    resident = spread(needs.units, left - buffers * largest)
    return _placement(needs, False, resident, buffers, slots)


def spread(sizes: Sequence[int], budget: int) -> tuple[bool, ...]:
    """Returns which units are resident: as many as fit, evenly spread over the step."""
    count = used = 0
    for size in sorted(sizes):
        if used + size > budget:
            break
        count, used = count + 1, used + size
    number = len(sizes)
    while count:
        chosen = {(2 * i + 1) * number // (2 * count) for i in range(count)}
        if sum(sizes[at] for at in chosen) <= budget:
            return tuple(at in chosen for at in range(number))
        count -= 1
    return (False,) * number


def share_slots(mixtures: Sequence[Mixtures], budget: int) -> tuple[int, ...]:
    """Divides memory between groups of mixtures by their bytes. Each gets its least."""
    counts = [each.min_slots for each in mixtures]
    left = budget - sum(n * each.slot_bytes for n, each in zip(counts, mixtures, strict=True))
    wanted = [(each.total - n) * each.slot_bytes for n, each in zip(counts, mixtures, strict=True)]
    for at, each in enumerate(mixtures):
        part = left * wanted[at] // max(1, sum(wanted[at:]))
        more = min(each.total - counts[at], part // each.slot_bytes)
        counts[at] += more
        left -= more * each.slot_bytes
    return tuple(counts)


def _all_slots(needs: Needs) -> tuple[int, ...]:
    return tuple(each.total for each in needs.mixtures)


def _placement(
    needs: Needs,
    has_tables: bool,
    is_resident: tuple[bool, ...],
    buffers: int,
    slots: tuple[int, ...],
) -> Placement:
    streamed = [size for size, stays in zip(needs.units, is_resident, strict=True) if not stays]
    size = max(streamed, default=0)
    buffers = min(buffers, len(streamed))
    num_bytes = needs.fixed_bytes + (needs.table_bytes if has_tables else needs.row_bytes)
    num_bytes += sum(needs.units) - sum(streamed) + buffers * size
    num_bytes += sum(n * each.slot_bytes for n, each in zip(slots, needs.mixtures, strict=True))
    return Placement(has_tables, is_resident, buffers, size, slots, num_bytes, sum(streamed))


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes a second. disk: read directly, several at a time; memory: read by all threads."""

    disk: float
    memory: float


def bytes_of_step(needs: Needs, placement: Placement, rows: int = 1) -> tuple[float, float]:
    """Returns the bytes that a step of so many decode rows reads from the disk, and those that it
    computes with. Experts count as if each were used equally often, which measured frequencies
    only better."""
    read = float(placement.streamed_bytes)
    used = float(needs.fixed_bytes + sum(needs.units))
    for slots, each in zip(placement.slots, needs.mixtures, strict=True):
        for count in each.num_experts:
            drawn = count * (1 - (1 - each.top_k / count) ** rows)
            read += drawn * each.slot_bytes * (1 - slots / each.total)
            used += drawn * each.slot_bytes
    return read, used


def expected_step_s(needs: Needs, placement: Placement, speeds: Speeds, rows: int = 1) -> float:
    """Returns the seconds of a step of so many decode rows."""
    read, used = bytes_of_step(needs, placement, rows)
    return max(read / speeds.disk, used / speeds.memory)
