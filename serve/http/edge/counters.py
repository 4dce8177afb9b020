"""Counters of the HTTP server: answers, refusals, connections and event loop lag."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from serve.histogram import Histogram
from serve.kept import Kept, size_of

LAG_POLL_S = 0.02
LAG_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))
CLIENT_LEFT = 499
MAX_REASONS = 64


class HttpCounters:
    """The event loop writes them. answers: by (route's path, method, status class such as "2xx").
    refused: by the error's code."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, str, str]] = Counter()
        self.refused: Counter[str] = Counter()
        self.lag_s = Histogram(LAG_SECONDS)
        self.num_watchers = 0
        self.num_connections: Callable[[], int] = lambda: 0
        self._timer: asyncio.TimerHandle | None = None

    def answered(self, handler: str, method: str, status: int) -> None:
        name = method if method in METHODS else "other"
        self.answers[handler, name, f"{status // 100}xx"] += 1

    def refuse(self, code: str | None) -> None:
        reason = code or "invalid_request"
        if reason not in self.refused and len(self.refused) >= MAX_REASONS:
            reason = "other"
        self.refused[reason] += 1

    def kept(self) -> Kept:
        """Returns the size of the tables of labels. Any thread may call it."""
        return size_of(self.answers, self.refused)

    def start(self, num_connections: Callable[[], int]) -> None:
        """Starts to measure the lag of the running event loop. num_connections: returns how many
        connections are open."""
        self.num_connections = num_connections
        self._measure_lag(None)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _measure_lag(self, due_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if due_s is not None:
            self.lag_s.observe(max(0.0, now_s - due_s))
        next_s = now_s + LAG_POLL_S
        self._timer = loop.call_at(next_s, self._measure_lag, next_s)
