"""A server with K/V of running sequences on the disk: what it says, measures and gives back."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ops.cpu import native_library
from serve import Engine
from serve.cli.start_summary import engine_lines
from serve.config import DEFAULT_MODEL
from serve.http import HttpServer, HttpSettings
from tests.whole.test_recent_tokens import prompt

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
SETTINGS: dict[str, Any] = {
    "dtype": "int8",
    "served_model_name": "m",
    "max_num_seqs": 4,
    "max_model_len": 640,
    "kv_policy": "quest:budget=64",
    "kv_cache_bytes": 2 << 20,
    "kv_offload_bytes": 4 << 20,
}


async def metrics(session: aiohttp.ClientSession) -> dict[tuple[str, ...], float]:
    async with session.get("/metrics") as response:
        text = await response.text()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            _, is_ours, name = sample.name.partition("mergestep:kv_offload_")
            labels = [value for label, value in sample.labels.items() if label != "model_name"]
            if is_ours:
                found[(name, *labels)] = sample.value
    return found


async def complete(session: aiohttp.ClientSession, seed: int) -> None:
    body = {"model": "m", "prompt": prompt(500, seed), "max_tokens": 20, "ignore_eos": True}
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()


def open_files(folder: Path) -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this listing
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [link for link in found if str(folder) in link]


@pytest.mark.exhaustive
def test_a_server_says_what_is_where_and_gives_it_back_when_it_sleeps(tmp_path: Path) -> None:
    async def main() -> None:
        engine = Engine(DEFAULT_MODEL, kv_offload_dir=tmp_path, **SETTINGS)
        async with (
            HttpServer(engine, HttpSettings(port=0, enable_sleep_mode=True)) as server,
            aiohttp.ClientSession(server.url) as session,
            asyncio.timeout(300),
        ):
            (memory,) = (text for name, text in engine_lines(engine, 1.0) if name == "memory")
            assert memory.startswith("K/V 5.94 MiB, 1.7 MiB of it in memory: "), memory
            ahead, first = 0.0, 0
            while ahead == 0:  # on a busy machine layers may always ask before
                await asyncio.gather(*(complete(session, first + i) for i in range(4)))
                found, first = await metrics(session), first + 4
                ahead = found["moved_bytes_total", "ahead"]
            assert found["units_total", "memory"] > 0
            assert found["moved_bytes_total", "fetched"] >= ahead
            assert found["moved_bytes_total", "written"] > 0
            assert found["waited_seconds_total",] > 0
            assert 0 < found["resident_bytes",] <= 2 << 20
            assert open_files(tmp_path)
            async with session.post("/sleep") as response:
                assert response.status == 200
            assert not open_files(tmp_path), "its space is free"
            async with session.post("/wake_up") as response:
                assert response.status == 200
            await complete(session, 0)

    asyncio.run(main())
