"""The thread that maps pages ahead of need."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from dataclasses import dataclass

from memory.pages.virtual_memory import VirtualMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MapJob:
    index: int
    slot: int
    offset: int
    first_page: int
    length: int
    stale: list[int]  # pages mapped there until the job is done


class MapWorker:
    """The thread that maps ahead of need. It starts with the first jobs."""

    def __init__(self, memory: VirtualMemory) -> None:
        self.done: deque[MapJob] = deque()
        self._memory = memory
        self._pending: deque[MapJob] = deque()
        self._current: MapJob | None = None
        self._is_stopping = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        with self._changed:  # with the lock, a job is either pending or current
            return bool(self._pending) or self._current is not None

    def put(self, jobs: list[MapJob]) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="mergestep-map", daemon=True)
            thread.start()
            self._thread = thread
        with self._changed:
            self._pending.extend(jobs)
            self._changed.notify_all()

    def settle(self) -> tuple[bool, list[MapJob]]:
        """Drops the jobs that have not begun and waits for the one that has. Returns whether there
        was one, and the dropped jobs.

        If all cores compute, the thread may run late. To map a page in the step is then faster than
        to wait for the thread.
        """
        if not self.is_busy:
            return False, []
        with self._changed:
            dropped = list(self._pending)
            self._pending.clear()
            has_begun = self._current is not None
            self._changed.wait_for(lambda: self._current is None)
        return has_begun, dropped

    def stop(self) -> None:
        if self._thread is not None:
            with self._changed:
                self._is_stopping = True
                self._changed.notify_all()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._current = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._pending or self._is_stopping)
                if self._is_stopping:
                    return
                job = self._current = self._pending.popleft()
            try:
                self._do(job)
            except OSError as error:  # the step that needs the page maps it, or fails, itself
                logger.warning("mapping ahead failed: %s", error)
                self._undo(job)
            except Exception:  # a bug here must not end the thread, which `settle` waits for
                logger.exception("mapping ahead failed")
                self._undo(job)

    def _undo(self, job: MapJob) -> None:
        """Unmaps the job's slots, part of which may be mapped: they are recorded as unmapped. Pages
        that were only prepared are mapped nowhere, and their slots must not be touched."""
        if self._memory.maps_during_kernels:
            with contextlib.suppress(OSError):
                self._memory.unmap(job.offset, job.length)

    def _do(self, job: MapJob) -> None:
        if self._memory.maps_during_kernels:
            self._memory.map(job.offset, job.first_page, job.length)
            self.done.append(job)
        else:
            self._memory.prepare(job.first_page, job.length)
