"""Snapshots of the engine's work, a few times per second, for the page's live view.

All watchers share one snapshot; without watchers none is made and no step is traced. Snapshots have
sizes and counts only: no text, no request ids, no names of clients.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from serve.http.calls.context import ApiContext, ServerState
from serve.http.edge.errors import SERVER_ERROR, ApiError
from serve.http.edge.sse import EventStream
from serve.kept import Kept

if TYPE_CHECKING:
    from serve.engine.engine import Engine

logger = logging.getLogger(__name__)

PERIOD_S = 0.25
MAX_WATCHERS = 16
MAX_BEHIND = 8  # a watcher that lags by more snapshots is disconnected
MAX_STEPS = 64  # per snapshot: the last ones since the previous snapshot
MAX_SEQUENCES = 128


class Snapshots:
    """Takes snapshots of the engine's state and of what happened since the previous one. `close`
    ends the trace of steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._view = engine.loaded.core.view
        self._trace = self._view.traces.watch(MAX_STEPS)
        self._began_s = self._last_s = time.monotonic()
        self._counts = self._read_counts()
        self._numbers: dict[object, int] = {}
        self._num_seen = 0

    def close(self) -> None:
        self._view.traces.close(self._trace)

    def take(self) -> dict[str, Any]:
        """Returns a snapshot. It takes well under a millisecond."""
        now_s, stats = time.monotonic(), self._engine.stats()
        elapsed_s = max(1e-3, now_s - self._last_s)
        counts = self._read_counts()
        changes = {name: counts[name] - self._counts[name] for name in counts}
        self._last_s, self._counts = now_s, counts
        pools = self._view.pools()
        return {
            "time_s": round(now_s - self._began_s, 3),
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "unfinished": stats.num_unfinished,
            "num_steps": changes.pop("steps"),
            "steps": self._steps(),
            "per_s": {
                "generated": round(changes.pop("generated") / elapsed_s, 2),
                "prefill": round(changes.pop("prefill") / elapsed_s, 2),
            },
            "busy": {pool: round(min(1.0, s / elapsed_s), 3) for pool, s in changes.items()},
            "queued": {pool: waiting for pool, (waiting, _) in pools.items()},
            "pages": {
                "in_use": stats.pages_in_use,
                "cached": stats.pages_cached,
                "total": stats.pages_total,
                "bytes": stats.kv_page_bytes,
                "tokens": stats.kv_page_bytes // max(1, stats.kv_bytes_per_token),
            },
            "prefix": [stats.prefix_hit_tokens, stats.prefix_asked_tokens],
            "preemptions": stats.num_preemptions,
            "sequences": self._sequences(),
        }

    def _read_counts(self) -> dict[str, float]:
        view = self._view
        return {
            "steps": view.steps.num_steps,
            "generated": view.requests.num_generation_tokens,
            "prefill": view.steps.num_prefill_rows,
            **{pool: busy_s for pool, (_, busy_s) in view.pools().items()},
        }

    def _steps(self) -> list[tuple[float, int, int]]:
        """Returns (milliseconds, decode rows, prefill rows) of the last new steps."""
        steps, rows = self._trace.steps, []
        while steps:  # the compute thread may append meanwhile
            step = steps.popleft()
            work = step.work
            took_ms = round(1e3 * (step.ended_s - step.began_s), 2)
            rows.append((took_ms, work.num_decodes, work.num_rows - work.num_decodes))
        return rows[-MAX_STEPS:]

    def _sequences(self) -> list[list[int]]:
        """Returns [number, pages, tokens, prompt tokens, computed tokens] per running sequence,
        the oldest first."""
        numbers, self._numbers = self._numbers, {}
        listed = []
        for key, *sizes in self._view.sequences(MAX_SEQUENCES):
            if (number := numbers.get(key)) is None:
                number = self._num_seen = self._num_seen + 1
            self._numbers[key] = number
            listed.append([number, *sizes])
        return listed


class Watcher:
    """One reader of the feed. None in its queue marks the end of the feed."""

    def __init__(self, transport: asyncio.Transport | None) -> None:
        self.transport = transport
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_BEHIND)


class LiveFeed:
    """Sends snapshots to the watchers."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._watchers: set[Watcher] = set()
        self._num_bytes = 0  # of the last snapshot
        self._task: asyncio.Task[None] | None = None

    def kept(self) -> Kept:
        """Returns the size of the snapshots that wait for their readers. Any thread may call it."""
        waiting = [watcher.queue.qsize() for watcher in list(self._watchers)]
        return Kept(sum(waiting), sum(waiting) * self._num_bytes)

    async def serve(self, request: web.BaseRequest, events: EventStream) -> web.StreamResponse:
        """Sends snapshots until the client leaves or the server drains. Raises ApiError 429 if
        there are too many watchers."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise ApiError(
                429,
                f"there are already {MAX_WATCHERS} watchers, which is the limit",
                kind=SERVER_ERROR,
                code="too_many_watchers",
                headers={"Retry-After": "5"},
            )
        watcher = Watcher(request.transport)
        self._join(watcher)
        try:
            await events.start()
            while (data := await watcher.queue.get()) is not None:
                await events.send(data)
            return await events.finish()
        finally:
            self._leave(watcher)

    def _join(self, watcher: Watcher) -> None:
        self._watchers.add(watcher)
        self._context.counters.num_watchers = len(self._watchers)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def _leave(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        self._context.counters.num_watchers = len(self._watchers)
        if not self._watchers and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        snapshots = Snapshots(self._context.engine)
        try:
            while self._context.state is ServerState.READY and self._context.engine.is_ready:
                data = b"data: " + orjson.dumps(snapshots.take()) + b"\n\n"
                self._num_bytes = len(data)
                for watcher in list(self._watchers):
                    self._send(watcher, data)
                await asyncio.sleep(PERIOD_S)
        except Exception:
            logger.exception("the live view failed")
        finally:
            snapshots.close()
        for watcher in list(self._watchers):  # there are none after a cancellation
            self._send(watcher, None)

    def _send(self, watcher: Watcher, data: bytes | None) -> None:
        try:
            watcher.queue.put_nowait(data)
        except asyncio.QueueFull:
            # close() would wait for the reader
            if watcher.transport is not None:
                watcher.transport.abort()
            self._watchers.discard(watcher)
