"""The process of `serve front`."""

from __future__ import annotations

import asyncio
import signal

import uvloop

from serve.cluster.front.front import Front, FrontSettings

_POLL_S = 0.05


def run_front(settings: FrontSettings, *, drain_s: float) -> None:
    """Runs the hop until a signal, and then until no call is left, drain_s is over or a second
    signal comes. Raises OSError for the port."""
    uvloop.run(_run(settings, drain_s))


async def _run(settings: FrontSettings, drain_s: float) -> None:
    loop = asyncio.get_running_loop()
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    async with Front(settings) as front:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        ready, count = front.replicas.num_ready, len(settings.replicas)
        print(f"serving at {front.url}, before {count} replicas, {ready} of them ready", flush=True)
        await stopping.wait()
        deadline = loop.time() + drain_s
        while front.num_calls and loop.time() < deadline and not hurry.is_set():
            await asyncio.sleep(_POLL_S)
