"""K/V memory that exists only in the accounting: the real `KVManager` with pages never mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memory.kv_manager import KVManager
from memory.pages.address_space import MappingStats
from memory.pages.layer_groups import LayerGroup


class NoMemory:
    """A VirtualMemory that does nothing."""

    maps_during_kernels = True

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes

    def reserve(self, size_bytes: int) -> int:
        return 0

    def map(self, offset: int, first_page: int, num_pages: int) -> None:
        """Does nothing."""

    def unmap(self, offset: int, num_pages: int) -> None:
        """Does nothing."""

    def release(self, first_page: int, num_pages: int) -> None:
        """Does nothing."""

    def prepare(self, first_page: int, num_pages: int) -> None:
        """Does nothing."""

    def copy_page(self, source: int, target: int) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


@dataclass(slots=True)
class AssumedMapping(MappingStats):
    """Assumes call_s for a mapping call instead of measuring it. The scheduler weighs prefix hits
    against this time, and a run must be repeatable."""

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
    """Returns the real K/V manager without memory. map_call_s are the assumed seconds of a system
    call that maps a run of pages."""
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
