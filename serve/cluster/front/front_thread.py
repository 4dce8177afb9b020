"""A hop that runs in a thread of its own, for a process that does other things."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import uvloop

from serve.cluster.front.front import Front, FrontSettings
from serve.http.edge.settings import HttpSettings

_STOP_S = 10.0


class FrontThread:
    """Start it, tell it the servers as they come and go, and stop it. Any thread may call it."""

    def __init__(self, settings: FrontSettings, http: HttpSettings) -> None:
        self._front = Front(settings, http)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="mergestep-front", daemon=True
        )

    @property
    def url(self) -> str:
        return self._front.url

    @property
    def num_calls(self) -> int:
        """The calls that are being answered."""
        return self._front.num_calls

    @property
    def queue_s(self) -> float:
        """The mean wait that the ready servers predict; 0 if there is none."""
        waits = [r.queue_s for r in self._front.replicas.replicas if r.is_ready]
        return sum(waits) / len(waits) if waits else 0.0

    def start(self) -> None:
        """Opens the listener. Raises OSError for the port."""
        self._thread.start()
        try:
            self._run(self._front.start())
        except BaseException:
            self.stop()
            raise

    def use(self, urls: list[str]) -> None:
        """Sends calls to these servers from now on."""
        self._loop.call_soon_threadsafe(self._front.replicas.use, urls)

    def drain(self) -> None:
        """Refuses new calls from now on."""
        self._front.is_draining = True

    def stop(self) -> None:
        self._run(self._front.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_STOP_S)
