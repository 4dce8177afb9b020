"""/metrics on a real engine."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import uvloop
from checkpoints import checkpoint
from prometheus_client.parser import text_string_to_metric_families

from serve import Engine
from serve.http import HttpServer, HttpSettings


async def _figures(session: aiohttp.ClientSession) -> dict[Any, float]:
    async with session.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain")
        assert response.headers["x-request-id"]
        text = await response.text()
    return {
        (sample.name, *(value for key, value in sample.labels.items() if key != "model_name")): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["model_name"] == 'a "name"'
    }


def test_figures_follow_the_engine() -> None:
    async def main() -> None:
        engine = Engine(str(checkpoint("llama")), served_model_name='a "name"', max_num_seqs=4)
        async with (
            HttpServer(engine, HttpSettings(port=0)) as server,
            aiohttp.ClientSession(server.url) as session,
        ):
            while (await session.get("/ready")).status != 200:
                await asyncio.sleep(0.01)
            before = await _figures(session)
            assert before["mergestep:step_rows_total", "decode"] == 0
            assert before["vllm:num_requests_running",] == 0
            body = {"model": 'a "name"', "prompt": [5, 6, 7], "max_tokens": 9, "ignore_eos": True}
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200
            after = await _figures(session)
            assert after["mergestep:step_rows_total", "prefill"] == 3
            assert after["mergestep:step_rows_total", "decode"] == 8
            assert after["mergestep:sequences_finished_total",] == 1
            assert after["mergestep:kv_pages", "in_use"] == 0
            assert after["mergestep:kv_pages", "total"] > 0
            assert after["vllm:kv_cache_usage_perc",] == 0
            assert after["vllm:prefix_cache_queries_total",] == 3

    uvloop.run(main())
