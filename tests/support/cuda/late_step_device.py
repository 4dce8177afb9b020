"""A step device that works later, in a thread of its own, so that memory that the host
overwrites or frees too early shows in the results."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from serve.runner.step_device import Event, Work


class LateEvent:
    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def complete(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        assert self._done.wait(30), "the device hangs"
        if self._error is not None:
            raise self._error


class LateStepDevice:
    """delay_s: delay before each piece of work. before: called in the device's thread with the
    number of the work; it may raise, as a device's error does."""

    device = torch.device("cpu")
    stream = 0

    def __init__(
        self, delay_s: float = 0.0, before: Callable[[int], None] = lambda number: None
    ) -> None:
        self.delay_s = delay_s
        self.before = before
        self.is_lost = False
        self.num_submitted = 0
        self.events: list[tuple[str, int, float]] = []
        self.submitted: list[LateEvent] = []
        self._work: queue.SimpleQueue[tuple[int, Work, LateEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> Event:
        event = LateEvent()
        self.submitted.append(event)
        self._note("submit", self.num_submitted)
        self._work.put((self.num_submitted, work, event))
        self.num_submitted += 1
        return event

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0x5A, dtype=torch.uint8)

    def capture(self, work: Work) -> Work:
        return work

    def peak_bytes(self, work: Work) -> int:
        work()
        return 0

    def free_bytes(self) -> int:
        return 64 << 20

    def wait(self) -> None:
        for event in self.submitted:
            assert event._done.wait(30), "the device hangs"

    def check(self) -> None:
        if self.is_lost:
            raise RuntimeError("the device is lost")

    def stop(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _note(self, what: str, number: int) -> None:
        self.events.append((what, number, time.perf_counter()))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            number, work, event = item
            time.sleep(self.delay_s)
            error: BaseException | None = None
            self._note("begin", number)
            try:
                self.before(number)
                work()
            except BaseException as raised:
                error = raised
            self._note("end", number)
            event.complete(error)
            del item, work
