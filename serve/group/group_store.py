"""The page store of a group: each rank keeps its part of a page, which is there if all have it.

Transfers are edits of memory like any other: every rank begins them between the same two steps, on
the disk tier of its own. Ranks report those that have ended, and the last report ends the future.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from memory.edit_recorder import EditRecorder, MemoryEditKind, store_edit
from memory.prefix.store_stats import StoreStats
from serve.group.group import Group
from transport.base import TransportError

_MAX_OPEN = 512
_LOOK_S = 0.001
_FLUSH_SHARE = 0.5  # of the time of `close`


@dataclass(slots=True)
class _Transfer:
    """A transfer of all ranks. waiting: ranks that have not reported its end."""

    kind: MemoryEditKind
    key: bytes
    future: Future[bool]
    waiting: set[int]
    works: bool = True


class GroupStore:
    """A PageStore whose addresses are numbers of pages. Only the compute thread calls it, except
    `stats`.

    The engine's own tier says which pages are probably there. Where another rank lacks one, as a
    rank does that begins with an empty folder, loading it is a miss, and all ranks drop it.
    """

    def __init__(self, group: Group, recorder: EditRecorder) -> None:
        tier = group.own.tier
        assert tier is not None, "with kv_cache_dir"
        self._group, self._recorder, self._tier = group, recorder, tier
        self._disk = tier.disk
        self._tickets = itertools.count(1)
        self._open: dict[int, _Transfer] = {}

    @property
    def room(self) -> int:
        if self._group.is_lost():
            return 0
        return max(0, min(_MAX_OPEN - len(self._open), self._disk.room))

    def store_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        return self._begin(MemoryEditKind.STORE, pages)

    def load_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        return self._begin(MemoryEditKind.LOAD, pages)

    def _begin(
        self, kind: MemoryEditKind, pages: Sequence[tuple[bytes, int]]
    ) -> list[Future[bool]]:
        edits, futures = [], []
        for key, page in pages:
            ticket, short = next(self._tickets), _short(key)
            future: Future[bool] = Future()
            future.set_running_or_notify_cancel()  # so that it cannot be cancelled
            ranks = {self._group.own.number, *self._group.links}
            self._open[ticket] = _Transfer(kind, short, future, ranks)
            edits.append(store_edit(kind, ticket, page, short))
            futures.append(future)
        self._recorder.add(edits)
        self._post()
        return futures

    def _post(self) -> None:
        """Sends the edits now if no step is in flight that they have to come after. Otherwise the
        next step has them, or they are sent after the last one."""
        if self._group.is_quiet:
            self._group.post_edits(self._recorder)

    def use(self, keys: Sequence[bytes]) -> int:
        found = [_short(key) for key in keys]
        self._recorder.add([store_edit(MemoryEditKind.USE, 0, 0, key) for key in found])
        return self._disk.use(found)

    def contains(self, key: bytes) -> bool:
        return self._disk.contains(_short(key))

    def discard(self, key: bytes) -> bool:
        short = _short(key)
        was_there = self._disk.contains(short)
        self._discard(short)
        return was_there

    def _discard(self, short: bytes) -> None:
        self._disk.discard(short)  # so that `contains` knows
        self._recorder.add([store_edit(MemoryEditKind.DISCARD, 0, 0, short)])
        self._post()

    def stats(self) -> StoreStats:
        """Returns the counters of the engine's rank."""
        return self._disk.stats()

    def wait_for(self, futures: Sequence[Future[bool]], timeout_s: float) -> None:
        """Ends the transfers that all ranks have reported, and waits for one of some futures."""
        end_s = time.monotonic() + timeout_s
        while self._open:
            self._collect()
            if time.monotonic() >= end_s or any(future.done() for future in futures):
                return
            time.sleep(_LOOK_S)

    def _collect(self) -> None:
        for rank, link in self._group.links.items():
            try:
                link.look(self._group.epoch)
            except TransportError:  # the group is lost, or soon is
                continue
            moved, link.moved = link.moved, []
            for ticket, works in moved:
                self._ended(rank, ticket, works=works is True)
        for ticket, works in self._tier.take_moved():
            self._ended(self._group.own.number, ticket, works=works)
        if self._group.is_lost():
            self._abandon()

    def _ended(self, rank: int, ticket: int, *, works: bool) -> None:
        transfer = self._open.get(ticket)
        if transfer is None:  # given up
            return
        transfer.waiting.discard(rank)
        transfer.works &= works
        if transfer.waiting:
            return
        del self._open[ticket]
        if not transfer.works and transfer.kind is not MemoryEditKind.FLUSH:
            self._discard(transfer.key)
        transfer.future.set_result(transfer.works)

    def _abandon(self) -> None:
        """Ends all transfers as failures, because ranks and their memory are gone."""
        found, self._open = list(self._open.values()), {}
        for transfer in found:
            transfer.future.set_result(False)

    def close(self, timeout_s: float) -> bool:
        """Has the ranks write their indices. Their tiers close when they end, which keeps memory
        that a disk may still use."""
        if not self._group.is_lost() and self._group.is_quiet:
            futures = self._begin(MemoryEditKind.FLUSH, [(b"", 0)])
            self.wait_for(futures, _FLUSH_SHARE * timeout_s)
        self._abandon()
        return True


def _short(key: bytes) -> bytes:
    """Returns the key of 16 bytes that edits have room for."""
    return hashlib.blake2b(key, digest_size=16).digest()
