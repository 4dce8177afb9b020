"""The thread of the host tier. Only this thread uses the arena, the copier and the store below.

Other threads leave messages for it, and so does the store below when a transfer has ended. So only
this thread waits for copies, and the steps of a page's transfer need no lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from memory.prefix.page_store import PageStore
from memory.tiers.host_arena import HostArena, HostCounters, HostEntry, TransferRequest
from memory.tiers.page_copy import PageCopier

logger = logging.getLogger(__name__)

_READY_SHARE = 0.25  # of the slots are kept reusable, ahead of need
_MAX_WRITES = 64  # at once, to the store below
_MAX_BATCH, _BATCH_BYTES = 64, 32 << 20  # pages, bytes of one copy batch


_Entry = HostEntry[TransferRequest]


class HostWorker:
    """The host tier's thread and its state. The thread starts with the object; `stop` ends it."""

    def __init__(
        self,
        page_bytes: int,
        num_slots: int,
        base: int,
        copier: PageCopier,
        below: PageStore | None,
    ) -> None:
        """base: the address of the first slot."""
        self.arena: HostArena[TransferRequest] = HostArena(num_slots, self._evicted)
        self._page_bytes = page_bytes
        self._base = base
        self._copier = copier
        self._below = below
        self._batch = min(_MAX_BATCH, max(1, _BATCH_BYTES // page_bytes))
        self.changed = threading.Condition()  # guards the following
        self.open: set[TransferRequest] = set()
        self.stats = HostCounters()
        self.is_closing = False
        self.is_broken = False  # all requests are misses; slots may still be in use
        self._inbox: list[Callable[[], None]] = []
        self._flushes: list[Future[bool]] = []
        self._num_below = 0  # transfers to and from the store below
        # Only the thread uses the following.
        self._loads: deque[TransferRequest] = deque()  # that wait for a slot
        self._stores: deque[TransferRequest] = deque()
        self._to_device: deque[tuple[TransferRequest, _Entry]] = deque()
        self._to_host: deque[tuple[TransferRequest, _Entry]] = deque()
        self._in_copy: list[TransferRequest] = []  # loads whose page the device may be writing
        self._reads: list[_Entry] = []  # to request from the store below
        self._writes: list[_Entry] = []
        self._num_writes = 0
        self._thread = threading.Thread(target=self._run, name="mergestep-host", daemon=True)
        self._thread.start()

    # ---- for other threads

    @property
    def is_over(self) -> bool:
        return self.is_closing or self.is_broken

    def contains(self, key: bytes) -> bool:
        return not self.is_over and (key in self.arena.entries or self._is_below(key))

    def take(self, requests: Sequence[TransferRequest], max_requests: int) -> None:
        """Begins requests up to max_requests in all; the futures of the others are False at
        once."""
        for request in requests:
            request.future.set_running_or_notify_cancel()  # so that it cannot be cancelled
        with self.changed:
            room = 0 if self.is_over else max(0, max_requests - len(self.open))
            taken, refused = requests[:room], requests[room:]
            self.open.update(requests)
            self._inbox.extend(partial(self._begin, request) for request in taken)
            self.stats.refused += len(refused)
            self.changed.notify_all()
        for request in refused:
            self._end(request, False)

    def discard(self, key: bytes) -> bool:
        """Drops the key. Pages that are being stored under it may change from now on."""
        with self.changed:
            stores = [request for request in self.open if request.is_store and request.key == key]
            for request in stores:
                request.is_discarded = True
            self._inbox.append(partial(self._forget, key))
            self.changed.notify_all()
        return bool(stores) or key in self.arena.entries

    def flush(self) -> Future[bool]:
        """Returns a future: whether the store below has all pages that are here when it ends."""
        future: Future[bool] = Future()
        with self.changed:
            if not self.is_over:
                self._flushes.append(future)
                self._inbox.append(self._try_again)
                self.changed.notify_all()
                return future
        future.set_result(False)
        return future

    def stop(self, timeout_s: float) -> bool:
        """Ends the transfers, the thread and all futures, except those of loads that may still be
        copied. Returns False, and the tier is broken, if a copy or the store below did not end in
        time, or if that is unknown."""
        until = time.monotonic() + timeout_s
        with self.changed:
            self.is_closing = True
            self.changed.notify_all()
        self._thread.join(timeout_s)
        with self.changed:
            left = max(0.0, until - time.monotonic())
            is_quiet = self.changed.wait_for(lambda: not self._num_below, left)
            is_quiet &= not self._thread.is_alive()
            self.is_broken |= not is_quiet
            self.changed.notify_all()
        self._end_all()
        return not self.is_broken

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._receive():
                self._copy_some()
                if not self.is_closing:
                    self._age()
                self._give_slots()
                self._ask_below()
                self._answer_flushes()
        except OSError as error:  # it is unknown which slots are still in use
            self._break(error)
        except BaseException as error:
            self._break(error)
            raise
        finally:
            self._end_all()

    def _break(self, error: BaseException) -> None:
        logger.error("K/V in host memory: out of order (%s)", error)
        with self.changed:
            self.is_broken = True

    def _receive(self) -> bool:
        """Waits for work and handles the messages. Returns False if the thread must end."""
        with self.changed:
            self.changed.wait_for(self._has_work)
            if self.is_broken:
                return False
            inbox, self._inbox = self._inbox, []
        for message in inbox:
            message()
        if not self.is_closing:
            return True
        for queue in (self._loads, self._stores):
            while queue:
                self._end(queue.popleft(), False)
        with self.changed:
            return bool(self._to_device or self._to_host or self._num_below or self._inbox)

    def _has_work(self) -> bool:
        if self.is_broken or self._inbox or self._to_device or self._to_host:
            return True
        return self.is_closing and bool(self._loads or self._stores or not self._num_below)

    def _forget(self, key: bytes) -> None:
        entry = self.arena.entries.get(key)
        if entry is not None:
            self.arena.use(entry, is_wanted=False)
            self.arena.drop(entry)
            self.arena.release(entry)

    def _begin(self, request: TransferRequest) -> None:
        if self._join(request):
            return
        if request.is_store:
            self._stores.append(request)
        elif self._is_below(request.key):
            self._loads.append(request)
        else:
            self._end(request, False)

    def _join(self, request: TransferRequest) -> bool:
        """Returns whether the request needs no slot: the page has one, where the request continues,
        or the request was discarded."""
        if request.is_discarded:
            self._end(request, False)
            return True
        entry = self.arena.entries.get(request.key)
        if entry is None:
            return False
        if not entry.is_there:
            entry.waiting.append(request)
        elif request.is_store:
            self._end(request, True)
        else:
            self.arena.use(entry, is_wanted=True)
            self._to_device.append((request, entry))
        return True

    def _copy_some(self) -> None:
        queue = self._to_device or self._to_host  # loads first: a sequence waits for them
        if not queue:
            return
        to_host = queue is self._to_host
        batch = [queue.popleft() for _ in range(min(len(queue), self._batch))]
        places = [(request.address, self._address(entry)) for request, entry in batch]
        if to_host:
            places = [(slot, page) for page, slot in places]
        self._in_copy = [] if to_host else [request for request, _ in batch]
        is_right = self._copier.copy(places, self._page_bytes, to_host=to_host)
        self._in_copy = []
        self._count_copies(len(batch), is_right, to_host)
        for request, entry in batch:
            is_good = is_right and not request.is_discarded  # checked after the copy
            if to_host:
                self._complete_arrival(entry, is_good)
            else:
                self.arena.release(entry)
            self._end(request, is_good)

    def _count_copies(self, count: int, is_right: bool, to_host: bool) -> None:
        with self.changed:
            if not is_right:
                self.stats.copy_errors += 1
            elif to_host:
                self.stats.stores += count
                self.stats.bytes_in += count * self._page_bytes
            else:
                self.stats.bytes_out += count * self._page_bytes

    def _complete_arrival(self, entry: _Entry, is_right: bool) -> None:
        """Completes the transfer of a page into its slot. is_right: it succeeded."""
        waiting, entry.waiting = entry.waiting, []
        entry.is_there = is_right
        if not is_right and self.arena.entries.get(entry.key) is entry:
            self.arena.drop(entry)
        self.arena.release(entry)
        for request in waiting:
            if is_right or request.is_store:
                self._begin(request)
            else:
                self._end(request, False)

    def _age(self) -> None:
        """Makes the oldest pages ready, and writes them to the store below if it lacks them."""
        want = max(1, int(_READY_SHARE * self.arena.num_slots))
        want = max(want, len(self._loads) + len(self._stores))
        if self._flushes and self._below is not None:
            want = self.arena.num_slots
        while self._num_writes < _MAX_WRITES:
            if self.arena.num_reusable + self._num_writes >= want:
                return
            entry = self.arena.age()
            if entry is None:
                return
            if self._below is None or self._below.contains(entry.key):
                self.arena.release(entry)
            else:
                self._num_writes += 1
                self._writes.append(entry)

    def _give_slots(self) -> None:
        for queue in (self._loads, self._stores):
            while queue:
                if self._join(queue[0]):
                    queue.popleft()
                    continue
                entry = self.arena.add(queue[0].key)
                if entry is None:
                    break
                request = queue.popleft()
                if request.is_store:
                    self._to_host.append((request, entry))
                else:
                    entry.waiting.append(request)
                    self._reads.append(entry)

    def _evicted(self, key: bytes) -> None:
        is_lost = not self._is_below(key)
        with self.changed:
            self.stats.lost += is_lost

    # ---- the store below

    def _is_below(self, key: bytes) -> bool:
        return self._below is not None and self._below.contains(key)

    def _ask_below(self) -> None:
        if self._below is None:
            return
        reads, self._reads = self._reads, []
        writes, self._writes = self._writes, []
        if reads:
            self._await(reads, self._below.load_many(self._places(reads)), self._read)
        if writes:
            self._await(writes, self._below.store_many(self._places(writes)), self._written)

    def _places(self, entries: list[_Entry]) -> list[tuple[bytes, int]]:
        return [(entry.key, self._address(entry)) for entry in entries]

    def _address(self, entry: _Entry) -> int:
        return self._base + entry.slot * self._page_bytes

    def _await(
        self,
        entries: list[_Entry],
        futures: list[Future[bool]],
        done: Callable[[_Entry, bool], None],
    ) -> None:
        with self.changed:
            self._num_below += len(entries)

        def on_done(entry: _Entry, future: Future[bool]) -> None:
            is_right = not future.cancelled() and not future.exception() and future.result()
            with self.changed:
                self._num_below -= 1
                self._inbox.append(partial(done, entry, is_right))
                self.changed.notify_all()

        for entry, future in zip(entries, futures, strict=True):
            future.add_done_callback(partial(on_done, entry))

    def _read(self, entry: _Entry, is_right: bool) -> None:
        for request in entry.waiting:
            request.is_from_below = True
        self._complete_arrival(entry, is_right)

    def _written(self, entry: _Entry, is_right: bool) -> None:
        """Completes a write. The page is ready even if the write failed, because its slot is
        needed."""
        self._num_writes -= 1
        with self.changed:
            self.stats.pushed_down += is_right
        self.arena.release(entry)

    def _try_again(self) -> None:
        """Lets pages that could not be written be written again."""
        if self._below is not None:
            self.arena.age_again(lambda key: not self._is_below(key))

    def _answer_flushes(self) -> None:
        if not self._flushes or self._stores or self._to_host or self._num_writes:
            return
        if self._below is not None and self.arena.has_young:
            return
        is_down = all(self._is_below(key) for key in self.arena.entries)
        with self.changed:
            if self._inbox:  # there are messages from before the flush, or a transfer has failed
                return
            flushes, self._flushes = self._flushes, []
        for future in flushes:
            future.set_result(is_down)

    # ---- the end of a request

    def _end(self, request: TransferRequest, is_right: bool) -> None:
        with self.changed:
            if request not in self.open:  # `stop` has ended it already
                return
            self.open.remove(request)
            if not request.is_store:
                self.stats.misses += not is_right
                self.stats.hits += is_right and not request.is_from_below
                self.stats.hits_below += is_right and request.is_from_below
        request.future.set_result(is_right)

    def _end_all(self) -> None:
        with self.changed:
            left = list(self.open)
            flushes, self._flushes = self._flushes, []
        in_copy = self._in_copy
        for request in left:
            if request not in in_copy:  # the device may still write its page
                self._end(request, False)
        for future in flushes:
            future.set_result(False)
