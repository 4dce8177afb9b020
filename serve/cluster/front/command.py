"""The process of `serve front`."""

from __future__ import annotations

import asyncio
import signal

import uvloop

from serve.cluster.front.front import Front, FrontSettings
from serve.errors import ConfigError
from serve.http.edge.file_limit import raise_file_limit
from serve.http.edge.settings import HttpSettings

_POLL_S = 0.05


def run_front(settings: FrontSettings, http: HttpSettings) -> None:
    """Runs the hop until a signal, and then until no call is left, drain_s is over or a second
    signal comes. Raises OSError for the port, and ConfigError."""
    if not settings.replicas:
        raise ConfigError("replicas: name at least one server")
    raise_file_limit(2 * http.max_connections)  # each call has a connection to a replica
    uvloop.run(_run(settings, http))


async def _run(settings: FrontSettings, http: HttpSettings) -> None:
    loop = asyncio.get_running_loop()
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    async with Front(settings, http) as front:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        ready, count = front.replicas.num_ready, len(settings.replicas)
        print(f"serving at {front.url}, before {count} replicas, {ready} of them ready", flush=True)
        await stopping.wait()
        front.is_draining = True
        deadline = loop.time() + http.drain_s
        while front.num_calls and loop.time() < deadline and not hurry.is_set():
            await asyncio.sleep(_POLL_S)
