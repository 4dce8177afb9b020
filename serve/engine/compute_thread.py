"""The one thread of pool 2: loads the model, then runs the loop, and nobody else computes.

OpenMP keeps a team of threads for every thread that ever started parallel work, and as soon as
the teams together outnumber the cores, libgomp stops spinning at barriers and sleeps at each
one: measured here, a decode step of a 1B model then takes 1.5 times as long. So loading, which
is parallel work too, happens in the thread that later computes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class ComputeThread:
    """Runs jobs one after the other. A daemon: a forgotten engine does not block the exit."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name="mergestep-compute", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; its result or exception is in the future."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def stop(self) -> None:
        """End the thread when the jobs queued so far are done; waits for that."""
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
            # the frame must not keep what the job returned or raised alive while it waits
            del item, job, future
