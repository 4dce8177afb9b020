"""/sleep, /wake_up and /is_sleeping in vLLM's form: a model gives its memory back for a while.

The process, its listener and stored responses stay. Weights are read again from the packed cache,
and cached prefixes from the disk tier, if there is one.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time

from aiohttp import web

from serve.http.calls.context import ApiContext, Call, Route, ServerState
from serve.http.edge.errors import ApiError, common_headers, json_response, quoted
from serve.http.schema.describe import Operation
from serve.machine import process_bytes, trim_heap
from serve.units import format_memory

logger = logging.getLogger(__name__)
_LEVELS = ("1", "2")
_PARTS = {"weights", "kv_cache"}
_SLEEPING = {"type": "object", "properties": {"is_sleeping": {"type": "boolean"}}}


class Sleeper:
    """Unloads and loads the engine of a server. Calls at the same time take their turns."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._turn = asyncio.Lock()
        self._waking: asyncio.Task[None] | None = None

    @property
    def is_asleep(self) -> bool:
        return self._context.state is ServerState.ASLEEP or self._waking is not None

    async def sleep(self) -> None:
        """Returns when the memory is free. Running requests end first, or after drain_s."""
        context = self._context
        async with self._turn:
            if context.state is ServerState.ASLEEP:
                return
            context.check_ready()
            context.state = ServerState.ASLEEP  # new calls are refused from now on
            before = process_bytes()
            await context.engine.unload(drain_s=context.settings.drain_s)
            await asyncio.to_thread(_free)
            after = process_bytes()
            logger.info("asleep: %s of %s are left", format_memory(after), format_memory(before))

    async def wake(self) -> None:
        """Returns when requests are answered. A client that leaves does not end it."""
        async with self._turn:
            if self._context.state is ServerState.ASLEEP and self._waking is None:
                self._waking = asyncio.create_task(self._wake())
        if self._waking is not None:
            await asyncio.shield(self._waking)

    async def _wake(self) -> None:
        context, began_s = self._context, time.monotonic()
        context.state = ServerState.LOADING
        try:
            await context.engine.start()
            if context.state is ServerState.LOADING:
                context.state = ServerState.READY
        finally:
            self._waking = None
            if context.state is ServerState.LOADING:
                context.state = ServerState.ASLEEP
        gc.freeze()  # the model stays until the next sleep
        logger.info("awake after %.2f s", time.monotonic() - began_s)


def sleep_routes(context: ApiContext) -> list[Route]:
    if not context.settings.enable_sleep_mode:
        return []
    sleeper = Sleeper(context)

    async def sleep(call: Call) -> web.Response:
        level = call.request.rel_url.query.get("level", "1")
        if level not in _LEVELS:
            raise _wrong("level", f"1 or 2, not {quoted(level)}")
        await sleeper.sleep()
        return web.Response(headers=common_headers(call.request_id))

    async def wake_up(call: Call) -> web.Response:
        tags = call.request.rel_url.query.getall("tags", [])
        if not set(tags) <= _PARTS:
            raise _wrong("tags", f"weights or kv_cache, not {quoted(', '.join(tags))}")
        await sleeper.wake()
        return web.Response(headers=common_headers(call.request_id))

    async def is_sleeping(call: Call) -> web.Response:
        return json_response({"is_sleeping": sleeper.is_asleep}, call.request_id)

    asked = Operation("Whether the model sleeps", _SLEEPING)
    return [
        Route("/sleep", {"POST": sleep}, describe={"POST": Operation("Put the model to sleep")}),
        Route("/wake_up", {"POST": wake_up}, describe={"POST": Operation("Wake the model")}),
        Route("/is_sleeping", {"GET": is_sleeping}, describe={"GET": asked}),
    ]


def _free() -> None:
    """Frees what only garbage cycles hold, frozen ones included, and returns it to the system."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim_heap()


def _wrong(name: str, must_be: str) -> ApiError:
    return ApiError(400, f"{name} must be {must_be}", param=name, code="invalid_value")
