"""The engine's threads: pool 1 prepares requests, pool 2 computes, pool 3 delivers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from time import monotonic
from typing import Any, TypeVar

from serve.engine.counters import PoolCounters
from serve.engine.output_processor import OutputProcessor, StepRecord
from serve.errors import OverloadedError

T = TypeVar("T")

MAX_COMPILING = 64
_MAX_RECORDS_BEHIND = 8  # steps by which pool 3 may be behind before the loop waits for it


class PromptPool:
    """Pool 1: threads that tokenize and check requests, and one that compiles grammars."""

    def __init__(self, num_threads: int, executor: Executor | None = None) -> None:
        """executor: runs all jobs instead of num_threads threads of this pool's own."""
        self.counters = PoolCounters()
        self._tokenizing = executor or ThreadPoolExecutor(num_threads, "mergestep-tokenize")
        # Compiling a grammar is slow: requests without a new grammar must not wait for it.
        self._compiling = executor or ThreadPoolExecutor(1, "mergestep-compile")
        self._num_compiling = 0  # jobs that wait for the compiling thread or run in it
        self._lock = threading.Lock()

    def check_compile_queue(self) -> None:
        """Raises OverloadedError when too many requests wait for their grammars."""
        if self._num_compiling >= MAX_COMPILING:
            raise OverloadedError(f"{self._num_compiling} requests wait for grammars")

    def submit(self, job: Callable[[], None], *, compiles: bool) -> None:
        """Queues a job; `compiles` sends it to the thread that compiles grammars."""
        self.counters.queued()
        if not compiles:
            self._tokenizing.submit(self._work, job)
            return
        with self._lock:
            self._num_compiling += 1
        self._compiling.submit(self._compile, job)

    def shutdown(self) -> None:
        """Waits until all submitted jobs have run, then ends the threads."""
        self._tokenizing.shutdown(wait=True)
        self._compiling.shutdown(wait=True)

    def _compile(self, job: Callable[[], None]) -> None:
        try:
            self._work(job)
        finally:
            with self._lock:
                self._num_compiling -= 1

    def _work(self, job: Callable[[], None]) -> None:
        with self.counters.working():
            job()


class ComputeThread:
    """Pool 2: the one thread that loads the model and then runs the engine's loop.

    OpenMP keeps a team of workers for every thread that ever started parallel work. When the
    teams together outnumber the cores, libgomp stops spinning at barriers and sleeps at each
    one; a decode step of a 1B model then takes 1.5 times as long. Loading is parallel work too,
    so it runs in the thread that later computes. The thread is a daemon, so an engine that was
    not shut down does not block the interpreter's exit.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name="mergestep-compute", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queues a job; the future gets its result or its exception."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def stop(self) -> None:
        """Ends the thread after the jobs queued so far, and waits for it."""
        self._jobs.put(None)
        self._thread.join()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                result = job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            # While it waits, the frame must not keep what the job returned or raised alive.
            del item, job, future


class OutputThread:
    """Pool 3: the one thread that turns step records into deltas for the clients.

    Records are held back until the next step has been launched (`flush`), so that the thread
    works beside the device and not between two steps. Only the loop's thread calls the methods,
    apart from `is_alive`, `num_waiting` and `busy_s` (seconds of work), which any thread reads.
    """

    def __init__(self, processor: OutputProcessor) -> None:
        self._processor = processor
        self.busy_s = 0.0
        self._pending: list[StepRecord] = []
        self._records: queue.Queue[StepRecord | None] = queue.Queue(_MAX_RECORDS_BEHIND)
        self._thread = threading.Thread(target=self._run, name="mergestep-output", daemon=True)
        self.add = self._pending.append
        self.start = self._thread.start
        self.is_alive = self._thread.is_alive

    def flush(self) -> None:
        """Passes the added records to the thread."""
        for record in self._pending:
            self._records.put(record)
        self._pending.clear()

    @property
    def num_waiting(self) -> int:
        """Steps that are not processed yet."""
        return len(self._pending) + self._records.qsize()

    def stop(self) -> None:
        """Ends the thread after the records that were flushed, and waits for it."""
        self._records.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            began_s = monotonic()
            self._processor.process(record)
            self.busy_s += monotonic() - began_s
