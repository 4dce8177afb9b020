"""A device that computes later than it is asked to, and its memory."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tests.support.engine.fakes import FakeMemory


class LateDevice:
    """Runs queued work in order: in virtual time, when the host waits for it, or in a thread. Each
    piece takes `seconds` in each of `num_stages` stages; the next piece follows in the stage that a
    piece leaves.

    events: ("launch" | "begin" | "end", number). faults: errors that a step found. idle_s: time
    between steps in the first stage, in virtual time.
    """

    def __init__(self, seconds: float = 0.0, *, num_stages: int = 1, thread: bool = False) -> None:
        self.seconds = seconds
        self._free_at_s = [0.0] * num_stages
        self.now_s = 0.0
        self.idle_s = 0.0
        self.events: list[tuple[str, int]] = []
        self.faults: list[str] = []
        self.num_launched = 0
        self._queue: deque[Job] = deque()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._last: Job | None = None
        self._thread = threading.Thread(target=self._work) if thread else None
        if self._thread is not None:
            self._thread.start()

    def submit(self, work: Callable[[], list[int]], more_s: float = 0.0) -> Job:
        """Queues work that takes more_s longer than usual in each stage."""
        job = Job(self.num_launched, work)
        self.num_launched += 1
        self.events.append(("launch", job.number))
        if job.number:
            self.idle_s += max(0.0, self.now_s - self._free_at_s[0])
        job.ends_s = self.now_s
        for stage, free_at_s in enumerate(self._free_at_s):
            self._free_at_s[stage] = job.ends_s = max(job.ends_s, free_at_s) + self.seconds + more_s
        self._last = job
        if self._thread is None:
            self._queue.append(job)
        else:
            self._jobs.put(job)
        return job

    @property
    def is_idle(self) -> bool:
        return self._last is None or self._last.done.is_set()

    def wait(self, job: Job) -> list[int]:
        while self._thread is None and not job.done.is_set():
            self._run(self._queue.popleft())
        job.done.wait()
        self.now_s = max(self.now_s, job.ends_s)
        if job.error is not None:
            raise job.error
        return job.tokens

    def run_some(self, number: int) -> None:
        """Lets the device run up to `number` pieces of work."""
        for _ in range(min(number, len(self._queue))):
            self._run(self._queue.popleft())

    def synchronize(self) -> None:
        self.run_some(len(self._queue))
        if self._last is not None:
            self._last.done.wait()

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            time.sleep(self.seconds)
            self._run(job)

    def _run(self, job: Job) -> None:
        self.events.append(("begin", job.number))
        try:
            job.tokens = job.work()
        except Exception as error:
            job.error = error
        self.events.append(("end", job.number))
        job.done.set()


@dataclass
class Job:
    number: int
    work: Callable[[], list[int]]
    ends_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


class LateMemory(FakeMemory):
    """Behaves as CudaMemory does: the device finishes its work before mappings change or pages
    are copied."""

    def __init__(self, page_bytes: int, device: LateDevice) -> None:
        super().__init__(page_bytes)
        self.device = device

    def map(self, offset: int, first_page: int, num_pages: int) -> None:
        if any(offset + i * self.page_bytes in self.mapped for i in range(num_pages)):
            self.device.synchronize()
        super().map(offset, first_page, num_pages)

    def unmap(self, offset: int, num_pages: int) -> None:
        self.device.synchronize()
        super().unmap(offset, num_pages)

    def copy_page(self, source: int, target: int) -> None:
        self.device.synchronize()
        super().copy_page(source, target)

    def release(self, first_page: int, num_pages: int) -> None:
        if not self.device.is_idle:
            self.device.faults.append("memory is given back under a step in flight")
        super().release(first_page, num_pages)

    @property
    def mapped_for_step(self) -> dict[int, int]:
        """The mappings that the step that now runs sees."""
        return self.mapped

    def take_edits(self) -> list[Callable[[], None]]:
        """Returns what a stage has to do to its memory before it runs the step that is launched."""
        return []


class PipelineMemory(LateMemory):
    """Behaves as the memory of a pipeline's stages do: what the host does to its accounting is an
    edit that a stage makes when it runs the step that was launched after it.

    As all stages run the same steps in the same order, one stage stands for all.
    """

    def __init__(self, page_bytes: int, device: LateDevice) -> None:
        super().__init__(page_bytes, device)
        self._stage = FakeMemory(page_bytes)
        self.content = self._stage.content
        self._edits: list[Callable[[], None]] = []

    def map(self, offset: int, first_page: int, num_pages: int) -> None:
        FakeMemory.map(self, offset, first_page, num_pages)
        self._edits.append(partial(self._stage.map, offset, first_page, num_pages))

    def unmap(self, offset: int, num_pages: int) -> None:
        FakeMemory.unmap(self, offset, num_pages)
        self._edits.append(partial(self._stage.unmap, offset, num_pages))

    def copy_page(self, source: int, target: int) -> None:
        self._edits.append(partial(self._stage.copy_page, source, target))

    @property
    def mapped_for_step(self) -> dict[int, int]:
        return self._stage.mapped

    def take_edits(self) -> list[Callable[[], None]]:
        edits, self._edits = self._edits, []
        return edits
