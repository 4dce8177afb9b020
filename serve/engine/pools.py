"""The engine's threads: pool 1 prepares requests, pool 2 computes, pool 3 delivers."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from time import monotonic
from typing import Any, TypeVar

from serve.engine.counters import PoolCounters
from serve.engine.output_processor import OutputProcessor, StepRecord
from serve.errors import OverloadedError

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_COMPILING = 64
_MAX_RECORDS_BEHIND = 8  # steps by which pool 3 may be behind before the loop waits for it


class JobThreads:
    """Threads that run jobs in their order.

    Submitting takes no lock, unlike that of ThreadPoolExecutor: a thread that holds one may have to
    wait for the interpreter, and the event loop would wait with it. The threads are daemons.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        """The number of jobs that have not begun."""
        return self._jobs.qsize()

    def submit(self, job: Callable[..., object], *arguments: Any) -> None:
        self._jobs.put((job, arguments))

    def shutdown(self, wait: bool = True) -> None:
        """Ends the threads after the jobs queued so far, and waits for them."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, arguments = item
            try:
                job(*arguments)
            except BaseException:
                logger.exception("a job of %s failed", threading.current_thread().name)
            # While it waits, the frame must not keep what the job refers to alive.
            del item, job, arguments


class PromptPool:
    """Pool 1: threads that tokenize and check requests, one for those with large texts, and one
    that compiles grammars."""

    def __init__(self, num_threads: int, executor: Executor | None = None) -> None:
        """executor: runs all jobs instead of num_threads threads of this pool's own."""
        self._tokenizing: Executor | JobThreads
        self._encoding: Executor | JobThreads
        self._compiling: Executor | JobThreads
        if executor is not None:
            self._tokenizing = self._encoding = self._compiling = executor
            self.counters = PoolCounters()
        else:
            tokenizing = self._tokenizing = JobThreads(num_threads, "mergestep-tokenize")
            # Compiling a grammar is slow: requests without a new grammar must not wait for it.
            compiling = self._compiling = JobThreads(1, "mergestep-compile")
            # Large texts take one child process seconds: requests without one must not wait.
            encoding = self._encoding = JobThreads(1, "mergestep-encode")
            threads = tokenizing, encoding, compiling
            self.counters = PoolCounters(lambda: sum(each.num_waiting for each in threads))
        self._num_compiling = 0  # jobs that wait for the compiling thread or run in it
        self._lock = threading.Lock()

    def check_compile_queue(self) -> None:
        """Raises OverloadedError when too many requests wait for their grammars."""
        if self._num_compiling >= MAX_COMPILING:
            raise OverloadedError(f"{self._num_compiling} requests wait for grammars")

    def submit(self, job: Callable[[], None], *, compiles: bool, is_large: bool = False) -> None:
        """Queues a job. compiles: it compiles a grammar. is_large: it has a large text, and goes
        to the thread for these even if it compiles a grammar, too."""
        if is_large or not compiles:
            threads = self._encoding if is_large else self._tokenizing
            threads.submit(self._work, job)
            return
        with self._lock:
            self._num_compiling += 1
        self._compiling.submit(self._compile, job)

    def shutdown(self) -> None:
        """Waits until all submitted jobs have run, then ends the threads."""
        for threads in (self._tokenizing, self._encoding, self._compiling):
            threads.shutdown(wait=True)

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
