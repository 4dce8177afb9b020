"""One rank's part of the disk tier: its layers and heads of pages, in a folder of its own."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from itertools import groupby

from memory.edit_recorder import MemoryEditKind, StoreEdit, apply_edits, is_of_store
from memory.pages.linux_vmm import LinuxMemory
from memory.tiers.disk_tier import DiskTier
from serve.group.grid import Grid
from serve.loading.disk_store import DEFAULT_BYTES, open_kv_store
from serve.loading.model_source import ModelSource
from serve.loading.rank_memory import RankGeometry

logger = logging.getLogger(__name__)

_FLUSH_S = 5.0


class RankTier:
    """Executes the edits of a page store. The rank's thread calls it; transfers end in others."""

    def __init__(self, disk: DiskTier, secret: bytes) -> None:
        """secret: of page keys, if this is the engine's rank."""
        self.disk = disk
        self.secret = secret
        self._open: set[Future[bool]] = set()
        self._moved: deque[tuple[int, bool]] = deque()

    @property
    def is_moving(self) -> bool:
        """Whether transfers are in progress, or have ended and were not taken."""
        return bool(self._open or self._moved)

    def take_moved(self) -> list[tuple[int, bool]]:
        """Returns the transfers that have ended: their tickets, and whether they worked."""
        found = []
        while self._moved:
            found.append(self._moved.popleft())
        return found

    def apply(self, memory: LinuxMemory, edits: Sequence[Sequence[int]]) -> None:
        """Applies edits in their order. Transfers only begin. Raises OSError for edits of memory,
        which are then not all applied."""
        for is_store, part in groupby(edits, is_of_store):
            if not is_store:
                apply_edits(memory, ((a, b, c, d) for a, b, c, d in part))
                continue
            for kind, same in groupby(map(StoreEdit.of, part), lambda edit: edit.kind):
                self._execute(kind, list(same), memory)

    def _execute(self, kind: int, edits: list[StoreEdit], memory: LinuxMemory) -> None:
        if kind == MemoryEditKind.USE:
            self.disk.use([edit.key for edit in edits])
        elif kind == MemoryEditKind.DISCARD:
            for edit in edits:
                self.disk.discard(edit.key)
        elif kind == MemoryEditKind.FLUSH:
            self._moved.extend((edit.ticket, self.disk.flush(_FLUSH_S)) for edit in edits)
        else:
            move = self.disk.store_many if kind == MemoryEditKind.STORE else self.disk.load_many
            try:
                futures = move([(edit.key, memory.page_address(edit.page)) for edit in edits])
            except Exception:  # raised before a transfer has begun
                logger.exception("K/V on disk: transfers failed")
                self._moved.extend((edit.ticket, False) for edit in edits)
                return
            self._open.update(futures)
            for edit, future in zip(edits, futures, strict=True):
                future.add_done_callback(partial(self._ended, edit.ticket))

    def _ended(self, ticket: int, future: Future[bool]) -> None:
        self._moved.append((ticket, future.exception() is None and future.result()))
        self._open.discard(future)

    def is_quiet(self, timeout_s: float) -> bool:
        """Waits for transfers; returns whether they have ended, so that memory may go."""
        return not wait(list(self._open), timeout_s).not_done

    def close(self) -> None:
        self.disk.close()


def open_rank_tier(
    source: ModelSource, grid: Grid, number: int, geometry: RankGeometry
) -> RankTier | None:
    """Opens a rank's folder of kv_cache_dir; None without it. ConfigError names kv_cache_dir.

    What a rank stores depends on its layers and heads, and on how all ranks lay out pages. So its
    folder is not used by another rank, or in another grid.
    """
    config, _, precision, backend, converter, *_ = source
    if config.kv_cache_dir is None:
        return None
    share = (config.kv_disk_bytes or DEFAULT_BYTES) // grid.size
    kind = backend.name if converter is None else f"converter {backend.name}"
    disk, secret = open_kv_store(
        replace(config, kv_disk_bytes=share),
        precision,
        backend=f"{kind} rank {number} of {grid.to_json()}",
        groups=_groups(geometry),
        page_bytes=geometry.page_bytes,
        subfolder=f"rank-{number}-of-{grid.size}",
    )
    return RankTier(disk, secret)


def _groups(geometry: RankGeometry) -> list[tuple[int | None, int]]:
    pairs: Iterable[tuple[int | None, int]]
    pairs = zip(geometry.windows, geometry.token_bytes, strict=True)
    return list(pairs)
