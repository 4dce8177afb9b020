"""K/V memory that is only accounted for: the real `KVManager` over pages that are never mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memory.kv_manager import KVManager
from memory.pages.address_space import MappingStats
from memory.pages.layer_groups import LayerGroup


class NoMemory:
    """VirtualMemory that does nothing."""

    maps_during_kernels = True

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes

    def reserve(self, size_bytes: int) -> int:
        return 0

    def map(self, offset: int, first_page: int, num_pages: int) -> None:
        """Nothing is there."""

    def unmap(self, offset: int, num_pages: int) -> None:
        """Nothing is there."""

    def release(self, first_page: int, num_pages: int) -> None:
        """Nothing is there."""

    def prepare(self, first_page: int, num_pages: int) -> None:
        """Nothing is there."""

    def copy_page(self, source: int, target: int) -> None:
        """Nothing is there."""

    def close(self) -> None:
        """Nothing is there."""


@dataclass(slots=True)
class AssumedMapping(MappingStats):
    """A system call takes what is assumed, not what doing nothing takes on this machine: a hit of
    the prefix cache is weighed against it, and the same run must end the same way again."""

    call_s: float = 0.0

    def seconds_for(self, num_calls: int) -> float:
        return num_calls * self.call_s


def make_kv(
    groups: Sequence[LayerGroup],
    *,
    page_bytes: int,
    num_pages: int,
    num_ranges: int,
    max_model_len: int,
    max_rows: int,
    map_call_s: float = 0.0,
) -> KVManager:
    """The real K/V manager, over nothing. map_call_s: what mapping one run of pages would take."""
    kv = KVManager(
        NoMemory(page_bytes),
        num_pages=num_pages,
        num_ranges=num_ranges,
        max_model_len=max_model_len,
        groups=groups,
        max_rows=max_rows,
        in_background=False,
    )
    kv.space.stats = AssumedMapping(call_s=map_call_s)
    return kv
