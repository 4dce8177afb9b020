"""Which experts are in a memory that has room for so many, while mixtures are used in turn.

`Lru` drops what was used least recently, `Oracle` what is used again last: no policy can beat it.
What is used now stays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

Access = tuple[int, list[int]]
Expert = tuple[int, int]


class Memory(Protocol):
    """hits: uses of what was there; uses: all."""

    hits: int
    uses: int

    def use(self, mixture: int, experts: Sequence[int]) -> None:
        """Notes an access: something may give way for it, which is no more in `kept`."""

    @property
    def kept(self) -> set[Expert]: ...


class Lru:
    def __init__(self, size: int, start: Iterable[Expert]) -> None:
        """start: what is there at first."""
        self._size = size
        self._kept: OrderedDict[Expert, None] = OrderedDict.fromkeys(list(start)[:size])
        self.hits = self.uses = 0

    @property
    def kept(self) -> set[Expert]:
        return set(self._kept)

    def use(self, mixture: int, experts: Sequence[int]) -> None:
        for expert in experts:
            self.hits += (mixture, expert) in self._kept
            self._kept[mixture, expert] = None
            self._kept.move_to_end((mixture, expert))
        self.uses += len(experts)
        while len(self._kept) > max(self._size, len(experts)):
            self._kept.popitem(last=False)


class Oracle:
    def __init__(self, size: int, start: Iterable[Expert], trace: Sequence[Access]) -> None:
        """trace: all accesses that will come."""
        self._size, self._now = size, -1
        self.kept = set(list(start)[:size])
        self._times: dict[Expert, list[int]] = {}
        for at, (mixture, experts) in enumerate(trace):
            for expert in experts:
                self._times.setdefault((mixture, expert), []).append(at)
        self.hits = self.uses = 0

    def use(self, mixture: int, experts: Sequence[int]) -> None:
        self._now += 1
        used = {(mixture, expert) for expert in experts}
        self.hits += len(used & self.kept)
        self.uses += len(used)
        self.kept |= used
        order = sorted(self.kept - used, key=self._next_use, reverse=True)
        self.kept -= set(order[: max(0, len(self.kept) - self._size)])

    def _next_use(self, name: Expert) -> float:
        times = self._times.get(name, [])
        found = bisect_right(times, self._now)
        return times[found] if found < len(times) else float("inf")
