"""Forms a group again after workers were lost: the others keep their weights, and the K/V of all
sequences is computed again, with the same tokens."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from memory.edit_recorder import EditRecorder
from memory.kv_manager import KVManager
from memory.nodes.errors import NodesLostError
from serve.errors import GROUP_LOST, MergestepError
from serve.group.errors import GroupLostError
from serve.group.group import Group
from serve.group.links.worker_link import WorkerLink
from serve.group.stats import group_stats
from serve.group_stats import GroupStats
from serve.request import FinishReason
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence as Running

logger = logging.getLogger(__name__)

_RETRY_S = 1.0  # between two attempts to start workers

StartWorkers = Callable[[Sequence[int], Callable[[], object]], list[WorkerLink]]
"""Starts workers of these ranks and loads their weights; calls the function while it waits."""


class GroupRecovery:
    """Implements Recovery (serve/engine/node_recovery.py) for a group."""

    def __init__(
        self,
        group: Group,
        kv: KVManager,
        recorder: EditRecorder,
        start: StartWorkers,
        restart_s: float,
        scheduler: Scheduler,
        end: Callable[[Running, FinishReason, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """start: starts and loads workers in the places of lost ones. restart_s: how long requests
        wait for them before they end with an error. end: ends a sequence with an error."""
        self.num_recomputed = 0
        self.nodes = None
        self.is_short = False
        self._group = group
        self._kv = kv
        self._recorder = recorder
        self._restarter = Restarter(group, start)
        self._restart_s = restart_s
        self._scheduler = scheduler
        self._end = end
        self._clock = clock
        self._lost_at: float | None = None

    @property
    def group(self) -> GroupStats:
        return group_stats(self._group)

    def handle_loss(self, error: NodesLostError) -> None:
        logger.warning("%s", error)
        num_lost = self._scheduler.preempt_lost(lambda target: True)
        self.num_recomputed += num_lost
        self._kv.prefixes.poll()  # ends transfers of pages
        self._kv.reset(0)
        self._recorder.take()
        if num_lost:
            logger.info("K/V of %d sequences is computed again", num_lost)
        if self._lost_at is None:
            self._lost_at = self._clock()
        self._restarter.begin()

    def update_nodes(self) -> bool:
        if self._lost_at is None:
            # steps in flight meet the loss themselves, and are then taken back
            if not self._group.is_lost() or self._scheduler.launched:
                return True
            self.handle_loss(GroupLostError("a rank was lost while the engine was idle"))
        if self._restarter.is_done and self._form():
            return True
        now_s = self._clock()
        assert self._lost_at is not None
        if now_s >= self._lost_at + self._restart_s:
            for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
                self._end(sequence, FinishReason.ERROR, GROUP_LOST)
        return False

    def _form(self) -> bool:
        """Forms the group with its new workers; returns whether it is whole."""
        self._group.replace(self._restarter.take())
        geometry = self._group.geometry
        assert geometry is not None
        try:
            self._group.form(geometry)
        except (NodesLostError, OSError, MergestepError) as error:
            logger.warning("forming the group failed: %s", error)
            self._restarter.begin(_RETRY_S)
            return False
        self._kv.reset(geometry.num_pages)
        self._recorder.take()
        assert self._lost_at is not None
        logger.info("the group is whole again after %.1f s", self._clock() - self._lost_at)
        self._lost_at = None
        return True

    def interrupt(self) -> None:
        """A step waits for no rank longer than the watch on workers takes."""

    def close(self) -> None:
        self._restarter.close()


class Restarter:
    """A thread that starts workers in the places of lost ones."""

    def __init__(self, group: Group, start: StartWorkers) -> None:
        self._group = group
        self._start = start
        self._links: list[WorkerLink] | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def begin(self, pause_s: float = 0.0) -> None:
        """Starts the thread, unless it runs. pause_s: what it waits first."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._links = None
        self._thread = threading.Thread(
            target=self._run, args=(pause_s,), name="mergestep-restart", daemon=True
        )
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return self._links is not None

    def take(self) -> list[WorkerLink]:
        """Returns the new workers."""
        assert self._thread is not None
        self._thread.join()  # it ends now; `begin` could not start another before
        links, self._links = self._links, None
        assert links is not None
        return links

    def _run(self, pause_s: float) -> None:
        self._stop.wait(pause_s)
        lost = self._group.lost_links()
        for link in lost:
            link.close()
        while not self._stop.is_set():
            try:
                links = self._start([link.rank for link in lost], self._check)
            except _Stopped:
                return
            except Exception as error:
                logger.warning("starting workers failed: %s", error)
                self._stop.wait(_RETRY_S)
                continue
            self._links = links
            return

    def _check(self) -> None:
        if self._stop.is_set():
            raise _Stopped

    def close(self) -> None:
        """Ends the thread, and workers that it has started."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for link in self._links or []:
            link.close()


class _Stopped(Exception):
    pass
