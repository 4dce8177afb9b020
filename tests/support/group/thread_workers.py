"""Workers that are threads of the test's process, in place of processes."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve.group.links.worker_link import WorkerLink
from serve.group.worker import Worker
from transport import connect, listen
from transport.base import Endpoint

_WINDOW_BYTES = 16 << 20
_numbers = itertools.count()


class ThreadWorkers:
    """Replaces serve.group.launch.LocalWorkers."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)
        self.workers: dict[int, Worker] = {}
        self.num_started = 0
        self._threads: list[threading.Thread] = []
        url = f"inproc://group-{next(_numbers)}"
        self._listener = listen(url, key=self.key, window_bytes=_WINDOW_BYTES)

    def start(self, ranks: Iterable[int], check: Callable[[], object] = object) -> list[WorkerLink]:
        links = []
        for rank in ranks:
            ends, engine = self._connected(rank)
            worker = Worker(engine, self.key, {})
            self.workers[rank] = worker
            thread = threading.Thread(target=worker.serve, name=f"rank-{rank}", daemon=True)
            thread.start()
            self._threads.append(thread)
            self.num_started += 1
            links.append(WorkerLink(rank, ends, None))
        return links

    def _connected(self, rank: int) -> tuple[Endpoint, Endpoint]:
        """Returns the engine's and the worker's end of a connection."""
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(self._listener.accept, 5.0)
            info = {"rank": rank}
            url, window = self._listener.url, _WINDOW_BYTES
            engine = connect(url, key=self.key, info=info, window_bytes=window)
            end = accepted.result()
        assert end is not None
        return end, engine

    def note_silence(self, silence_s: float) -> None:
        pass

    def stage_url(self, rank: int) -> str:
        return f"inproc://stage-{rank}-{next(_numbers)}"

    def close(self) -> None:
        self._listener.close()
        for thread in self._threads:
            thread.join(10.0)
            assert not thread.is_alive(), "a worker does not end"


@pytest.fixture
def thread_workers(monkeypatch):
    """Makes groups start threads; returns the list of their ThreadWorkers."""
    made: list[ThreadWorkers] = []

    def make() -> ThreadWorkers:
        made.append(ThreadWorkers())
        return made[-1]

    monkeypatch.setattr("serve.group.start.LocalWorkers", make)
    return made
