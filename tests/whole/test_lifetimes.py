"""Servers that start, answer and stop a hundred times in one process leave no resources behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path
from typing import NamedTuple

import aiohttp
import numpy as np
import pytest
import uvloop

from serve import Engine
from serve.http import HttpServer, HttpSettings
from tests.support.engine.checkpoints import checkpoint

pytestmark = pytest.mark.process

NUM_SERVERS = 100
WARM = 20  # servers after which the caches of libraries are full
# A server allocates megabytes; its objects without weights would be 280 KiB.
MOST_BYTES_A_SERVER = 32 << 10


class Resources(NamedTuple):
    """Resources of a process. mappings: in its address space; rss: resident bytes."""

    files: int
    threads: int
    tasks: int
    mappings: int
    rss: int


def resources() -> Resources:
    gc.collect()
    return Resources(
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        len(asyncio.all_tasks()),
        len(Path("/proc/self/maps").read_text().splitlines()),
        int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


async def run_server() -> None:
    engine = Engine(str(checkpoint("llama")), served_model_name="m", max_num_seqs=4)
    async with (
        HttpServer(engine, HttpSettings(port=0)) as server,
        aiohttp.ClientSession(server.url) as session,
    ):
        for stream in (False, True):
            body = {"model": "m", "prompt": "the fox", "max_tokens": 3, "stream": stream}
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200
                await response.read()
        # this request is still running when the server stops
        body = {"model": "m", "prompt": [5, 6], "max_tokens": 200, "stream": True}
        response = await session.post("/v1/completions", json={**body, "ignore_eos": True})
        await response.content.readany()
    response.close()


def test_a_hundred_servers_leave_nothing() -> None:
    async def main() -> list[Resources]:
        samples = []
        for _ in range(NUM_SERVERS):
            await run_server()
            samples.append(resources())
        return samples

    samples = uvloop.run(main())[WARM:]
    first, last = samples[0], samples[-1]
    assert (last.files, last.threads, last.tasks) == (first.files, first.threads, first.tasks)
    slope = {
        name: float(
            np.polyfit(range(len(samples)), [getattr(each, name) for each in samples], 1)[0]
        )
        for name in ("mappings", "rss")
    }
    assert slope["mappings"] < 0.1, slope
    assert slope["rss"] < MOST_BYTES_A_SERVER, slope
