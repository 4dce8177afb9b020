"""The engine's side of a group: its own rank, its workers, and the epochs in which they compute.

An epoch begins when the group is formed and after each step that failed. Messages, barriers and
hidden states of an earlier epoch are dropped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from memory.edit_recorder import EditRecorder
from memory.nodes.errors import NodesLostError
from serve.group.errors import GroupLostError, StepLostError
from serve.group.grid import Grid
from serve.group.links import messages
from serve.group.links.messages import Kind, PlannedStep
from serve.group.links.stage_link import StageFailed, StageLink, StageLost
from serve.group.links.worker_link import WorkerFailed, WorkerLink, end_workers
from serve.group.rank import Rank
from serve.group.sizes import stage_window_bytes
from serve.group.stage_memory import StageMemory
from serve.group_stats import StageSeconds
from serve.loading.rank_memory import RankGeometry
from serve.runner.batch import Batch
from transport.arena import ExchangeError
from transport.base import LOST_AFTER_S, TransportError

logger = logging.getLogger(__name__)

_START_S = 60.0  # for workers to take memory and to connect
_RESET_S = 60.0  # for workers to end a step that failed
_WATCH_S = 0.05  # between two looks for lost workers
# After a step has failed, how long the engine waits to hear why: a lost host is noticed by several
# connections, one after the other.
_CAUSE_S = LOST_AFTER_S + 1.0
_LOOK_S = 0.002

STEP_ERRORS = (ExchangeError, StageFailed, TransportError)
"""What a step raises when another rank has no result."""


class PostedStep(NamedTuple):
    """A step in flight. message: what the other ranks of the last stage get of it later."""

    number: int
    step: PlannedStep
    message: bytes


class Group:
    """All ranks of a model. Only the compute thread calls it, except `lost` and counters."""

    def __init__(
        self,
        own: Rank,
        grid: Grid,
        links: Sequence[WorkerLink],
        key: bytes,
        note_silence: Callable[[float], object],
    ) -> None:
        """note_silence: called often with the longest silence of a worker that is not lost, in
        seconds."""
        self.own = own
        self.grid = grid
        self.links = {link.rank: link for link in links}
        self.epoch = 0
        self.geometry: RankGeometry | None = None
        self.num_steps = 0
        self.num_formed = 0
        self.seconds = StageSeconds()
        self._beside = grid.stage_ranks(grid.num_stages - 1)[1:]
        self._before = [rank for rank in self.links if rank not in self._beside]
        self._key = key
        self._note_silence = note_silence
        self._memory = StageMemory(own, grid)
        self._previous: StageLink | None = None
        self._is_broken = False  # a step failed, and no new epoch has begun
        self._is_formed = True  # False: to be formed anew, though no worker may be gone
        self._lost: set[int] = set()
        self._posted: deque[PostedStep] = deque()  # steps in flight that have not begun here
        self._lock = threading.Lock()  # guards links' places and _lost
        self._stop = threading.Event()
        self._watch = threading.Thread(
            target=self._watch_workers, name="mergestep-group", daemon=True
        )
        self._watch.start()

    # ---- forming

    def form(self, geometry: RankGeometry) -> None:
        """Begins an epoch with empty memory on all ranks. Raises GroupLostError, and OSError or
        ConfigError for the engine's own rank."""
        self.geometry = geometry
        self.epoch += 1
        self._close_epoch()
        self._posted.clear()
        source, grid = self.own.source, self.grid
        config, spec = source.config, source.spec
        self._memory.make(self.links, self.epoch)
        window = stage_window_bytes(config, spec, grid.num_stages)
        try:
            for rank, link in self.links.items():
                previous = grid.previous(rank)
                link.failure, link.has_lost_link = "", False
                link.post_json(
                    Kind.START,
                    self.epoch,
                    {
                        "geometry": geometry.to_json(),
                        **self._memory.content(rank, self.links),
                        "previous": None if previous is None else self.links[previous].url,
                        "window_bytes": window,
                    },
                )
            self.own.open(geometry, *self._memory.open_own(self.links, self._key, self.epoch))
            self.own.join(self.epoch)
            before = grid.previous(0)
            if before is not None:
                url = self.links[before].url
                self._previous = StageLink.connect(url, self._key, self.epoch, window)
            failure: ExchangeError | None = None
            try:
                self.own.prepare()
            except ExchangeError as error:
                failure = error
            self._await_started(_START_S)  # a rank that knows why says so
            if failure is not None:
                raise failure
        except (TransportError, WorkerFailed, ExchangeError) as error:
            raise self._loss(error) from error
        self._is_broken = False
        self._is_formed = True
        self.num_formed += 1

    def _await_started(self, timeout_s: float) -> None:
        for link in self.links.values():
            link.await_json(Kind.STARTED, timeout_s, epoch=self.epoch)

    def _close_epoch(self) -> None:
        self._memory.close()
        if self._previous is not None:
            self._previous.close()
            self._previous = None

    # ---- steps

    def post_step(
        self,
        recorder: EditRecorder,
        batch: Batch,
        places: npt.NDArray[np.int64] = messages.NO_PLACES,
    ) -> PostedStep:
        """Sends a step to the stages before the last one. places: as PlannedStep has them. Raises
        GroupLostError, and NodesLostError if a rank has lost a holder."""
        self.begin_epoch()
        if any(link.lost_holders for link in self.links.values()):
            raise NodesLostError("a rank has lost a holder of segments")
        self.num_steps += 1
        edits, step, ids = recorder.take(), batch.attention, batch.input_ids.numpy()
        message = messages.pack_step(self.epoch, self.num_steps, edits, step, ids, places)
        self._post_to(self._before, message)
        rows = (ids, batch.positions.numpy(), places)
        posted = PostedStep(
            self.num_steps, PlannedStep(messages.as_array(edits), step, *rows), message
        )
        self._posted.append(posted)
        return posted

    def post_edits(self, recorder: EditRecorder) -> None:
        """Sends edits that no step follows, and applies them. No step is in flight."""
        edits = recorder.take()
        if not edits or self.is_lost():
            return
        try:
            self._post_to(self.links, messages.pack_edits(self.epoch, edits))
            self._edit(messages.as_array(edits))
        except GroupLostError as error:  # noticed again at the next step, or while idle
            logger.warning("%s", error)

    @property
    def is_quiet(self) -> bool:
        """Whether no posted step has still to begin here, so that edits may be posted alone."""
        return not self._posted

    def _edit(self, edits: npt.NDArray[np.int64]) -> None:
        """Applies edits to this rank's memory. Raises GroupLostError if that failed, after which
        the memory is of no use."""
        try:
            self.own.edit(edits)
        except OSError as error:
            self._is_formed = False
            self._is_broken = True
            self._abort()
            raise GroupLostError(f"rank 0: editing memory failed: {error}") from error

    def begin(self, posted: PostedStep) -> None:
        """Applies a step's edits on this rank, and sends the step to the other ranks of the last
        stage. It must be called for every step, in order. Raises GroupLostError."""
        self._posted.popleft()
        # Only now, because the other ranks of this stage compute the logits of earlier steps first.
        self._post_to(self._beside, posted.message)
        self._edit(posted.step.edits)

    def compute(self, posted: PostedStep) -> Tensor:
        """Returns the last stage's result of a step, [T, hidden], after `begin`. Raises
        STEP_ERRORS."""
        step, hidden = posted.step, None
        if self._previous is not None:
            rows = len(step.input_ids)
            hidden = self._previous.receive(posted.number, rows, self.is_lost)
        return self.own.forward(step, hidden)

    def head(self, rows: Tensor) -> Tensor:
        """Computes logits, [R, vocab], for rows: [R, hidden]. Raises STEP_ERRORS."""
        message = messages.pack(Kind.HEAD, self.epoch, self.num_steps, len(rows))
        self._post_to(self._beside, message)
        return self.own.head(len(rows), rows)

    @property
    def waited_s(self) -> float:
        """The seconds of waiting for the stage before, since the group was formed."""
        return 0.0 if self._previous is None else self._previous.waited_s

    def failed(self, error: BaseException) -> Exception | None:
        """Ends the epoch after a step has raised; returns what to raise instead of an error that
        another rank has caused, None for one of this rank's own."""
        is_later = self._is_broken  # a step behind one that failed, in the same epoch
        self._is_broken = True
        self._abort()
        if self.is_lost():
            return self._loss(error)
        if not isinstance(error, STEP_ERRORS):
            return None
        if is_later:
            return StepLostError(f"the epoch was over: {error}")
        try:
            reason = self._await_reason(isinstance(error, StageFailed))
        except TransportError as lost:
            return self._loss(lost)
        if any(link.lost_holders for link in self.links.values()):
            return NodesLostError(reason or str(error))
        if isinstance(error, StageLost) or any(x.has_lost_link for x in self.links.values()):
            self._is_formed = False
            return self._loss(error)
        if reason or isinstance(error, StageFailed):
            return StepLostError(reason or str(error))
        # no rank has reported a failure, so one does not answer and is taken for lost
        return self._loss(error)

    def _await_reason(self, is_known: bool) -> str:
        """Returns what workers say of a step that has failed. is_known: not to wait for it. Raises
        TransportError."""
        end_s = time.monotonic() + _CAUSE_S
        while True:
            for link in self.links.values():
                link.look(self.epoch)
            texts = [f"rank {x.rank}: {x.failure}" for x in self.links.values() if x.failure]
            if texts or is_known or self.is_lost() or time.monotonic() > end_s:
                return "; ".join(texts)
            time.sleep(_LOOK_S)

    def begin_epoch(self) -> None:
        """Waits until all ranks have ended a step that failed, if one has. Raises
        GroupLostError."""
        if self.is_lost():
            raise self._loss(None)
        if not self._is_broken:
            return
        self.epoch += 1
        self._memory.reset(self.epoch)
        for link in self.links.values():
            link.failure, link.has_lost_link = "", False
        self._post_to(self.links, messages.pack(Kind.RESET, self.epoch))
        try:
            self._await_started(_RESET_S)
            self.own.join(self.epoch)
        except (TransportError, WorkerFailed, ExchangeError) as error:
            raise self._loss(error) from error
        if self._previous is not None:
            self._previous.epoch = self.epoch
        self._is_broken = False
        while self._posted:  # steps that were given up; those behind them need their edits
            edits = self._posted.popleft().step.edits
            self._post_to(self._beside, messages.pack_edits(self.epoch, edits))
            self._edit(edits)

    def _post_to(self, ranks: Iterable[int], message: bytes) -> None:
        """Posts to all of these ranks, also if one is lost: another may wait for what they send."""
        lost: TransportError | None = None
        for rank in ranks:
            try:
                self.links[rank].post(message)
            except TransportError as error:
                lost = error
        if lost is not None:
            raise self._loss(lost) from lost

    # ---- loss

    def is_lost(self) -> bool:
        """Returns whether a worker, a connection or this rank's memory is gone. Any thread may call
        it."""
        return bool(self._lost) or not self._is_formed

    def lost_links(self) -> list[WorkerLink]:
        """Returns the connections to workers that are gone."""
        return [self.links[rank] for rank in sorted(self._lost)]

    def replace(self, links: Sequence[WorkerLink]) -> None:
        """Takes new workers in the places of lost ones. `form` follows."""
        with self._lock:
            for link in links:
                self.links[link.rank] = link
                self._lost.discard(link.rank)

    def _loss(self, error: BaseException | None) -> GroupLostError:
        """Returns the error of a group that is no longer whole. A rank that cannot start counts as
        lost; if a rank does not answer and it is unknown which, all count as lost."""
        self._is_broken = True
        self._abort()
        end_s = time.monotonic() + _CAUSE_S
        is_known = error is None or isinstance(error, WorkerFailed)
        while not is_known and time.monotonic() < end_s:
            if any(link.is_lost for link in self.links.values()):
                break
            time.sleep(_WATCH_S / 5)
        lost = [link for link in self.links.values() if link.is_lost]
        if isinstance(error, WorkerFailed):
            lost.append(self.links[error.rank])
        elif not lost and error is not None and self._is_formed:
            lost = list(self.links.values())
        with self._lock:
            self._lost |= {link.rank for link in lost}
        names = ", ".join(f"rank {link.rank}: {link.state}" for link in lost)
        return GroupLostError(names if error is None else f"{names} ({error})")

    def _abort(self) -> None:
        self._memory.abort()
        self.own.abort()

    def _watch_workers(self) -> None:
        """Notices workers that are gone while the compute thread waits for them."""
        while not self._stop.wait(_WATCH_S):
            with self._lock:
                gone = {link.rank for link in self.links.values() if link.is_lost}
                here = [link for rank, link in self.links.items() if rank not in gone]
                silence_s = max((link.endpoint.silence_s for link in here), default=0.0)
                is_new = not gone <= self._lost
                self._lost |= gone
            try:
                self._note_silence(silence_s)
            except Exception:  # whatever it is, losses are still to be noticed
                logger.exception("preparing for a loss failed")
            if not is_new:
                continue
            self._memory.abort()
            self.own.abort_own()

    def close(self) -> None:
        """Ends the workers and frees all memory."""
        self._stop.set()
        self._watch.join()
        began_s = time.monotonic()
        with contextlib.ExitStack() as stack:  # each of them, whatever another raises
            stack.callback(self.own.end)
            stack.callback(end_workers, list(self.links.values()))
            stack.callback(self._close_epoch)
            self._abort()
        logger.debug("the group ended in %.2f s", time.monotonic() - began_s)
