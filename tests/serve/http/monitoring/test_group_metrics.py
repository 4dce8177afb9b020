"""/metrics of a model on several ranks, which are threads here."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from ops.cpu import native_library
from serve import Engine
from serve.http import HttpServer, HttpSettings
from tests.support.engine.checkpoints import checkpoint
from tests.support.group.thread_workers import thread_workers  # noqa: F401

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
GROUP = {
    "group_ranks",
    "stage_busy_seconds_total",
    "stage_wait_seconds_total",
    "exchange_seconds_total",
    "group_restarts_total",
    "steps_in_flight",
}
BODY = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 9, "ignore_eos": True}


async def read(session: aiohttp.ClientSession) -> dict[tuple[str, ...], float]:
    """Returns the group's values by name and labels (host, stage, state, tp)."""
    async with session.get("/metrics") as response:
        text = await response.text()
    return {
        (name, *[sample.labels[key] for key in sorted(sample.labels) if key != "model_name"]): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if (name := sample.name.removeprefix("mergestep:")) in GROUP
    }


async def complete(session: aiohttp.ClientSession) -> None:
    async with session.post("/v1/completions", json=BODY) as response:
        assert response.status == 200, await response.text()


def run(check, **settings) -> None:
    async def main() -> None:
        engine = Engine(str(checkpoint("llama")), served_model_name="m", max_num_seqs=4, **settings)
        async with (
            HttpServer(engine, HttpSettings(port=0)) as server,
            aiohttp.ClientSession(server.url) as session,
            asyncio.timeout(60),
        ):
            await check(session)

    uvloop.run(main())


def test_metrics_know_the_ranks_and_a_loss(thread_workers):  # noqa: F811
    here = socket.gethostname()

    async def check(session: aiohttp.ClientSession) -> None:
        await complete(session)
        values = await read(session)
        assert {key for key in values if key[0] == "group_ranks"} == {
            ("group_ranks", here, stage, "up", tensor) for stage in "01" for tensor in "01"
        }
        for name in ("stage_busy_seconds_total", "stage_wait_seconds_total"):
            assert 0 < values[name, "1"] < 30
        assert 0 < values["exchange_seconds_total",] < 30
        assert values["group_restarts_total",] == 0
        assert values["steps_in_flight",] == 0
        thread_workers[0].workers[2]._engine.close()
        while not (await read(session))["group_restarts_total",]:
            await asyncio.sleep(0.05)
        await complete(session)
        after = await read(session)
        assert after["group_restarts_total",] == 1
        for name in ("stage_busy_seconds_total", "stage_wait_seconds_total"):
            assert after[name, "1"] > values[name, "1"]
        assert {key[3] for key in after if key[0] == "group_ranks"} == {"up"}

    run(check, tensor_parallel_size=2, pipeline_parallel_size=2)


def test_one_rank_has_no_values_of_a_group():
    async def check(session: aiohttp.ClientSession) -> None:
        await complete(session)
        assert await read(session) == {}

    run(check)
