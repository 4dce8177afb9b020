"""Mutated bodies against every POST route of a real server over a real engine.

No answer may be a 5xx, and every refusal has the documented error body. Afterwards the engine
runs, holds no page and gives the same answer as before.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter

import aiohttp

from bench.soak.bodies import SEEDS
from bench.soak.mutate import mutate
from serve import Engine
from serve.http import HttpServer, HttpSettings
from tests.support.engine.checkpoints import checkpoint

MODEL = "m"
REFERENCE = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0}
NUM_CLIENTS = 16


async def fuzz_server(*, seconds: float, most: int, seed: int) -> Counter[int]:
    """Sends mutated bodies; returns the number of answers of each status."""
    statuses: Counter[int] = Counter()
    settings = {"served_model_name": MODEL, "max_model_len": 64, "max_num_seqs": 32}
    engine = Engine(str(checkpoint("llama")), **settings)
    async with HttpServer(engine, HttpSettings(port=0)) as server:
        connector = aiohttp.TCPConnector(limit=NUM_CLIENTS)
        async with aiohttp.ClientSession(server.url, connector=connector) as session:
            before = await _reference(session)
            until_s = time.monotonic() + seconds

            async def client(rng: random.Random, num_cases: int) -> None:
                for _ in range(num_cases):
                    if time.monotonic() > until_s:
                        return
                    path = rng.choice(list(SEEDS))
                    data = mutate(rng, rng.choice(SEEDS[path]))
                    statuses[await _send(session, path, data)] += 1

            share = most // NUM_CLIENTS + 1
            await asyncio.gather(
                *(client(random.Random(f"{seed}-{i}"), share) for i in range(NUM_CLIENTS))
            )
            assert await _reference(session) == before
            assert (await session.get("/health")).status == 200
            assert engine.is_ready
            while engine.stats().num_unfinished:
                await asyncio.sleep(0.01)
            assert engine.stats().pages_in_use == 0
    return statuses


async def _reference(session: aiohttp.ClientSession) -> str:
    async with session.post("/v1/completions", json=REFERENCE) as response:
        assert response.status == 200, await response.text()
        text: str = (await response.json())["choices"][0]["text"]
        return text


async def _send(session: aiohttp.ClientSession, path: str, data: bytes) -> int:
    headers = {"Content-Type": "application/json"}
    async with session.post(path, data=data, headers=headers) as response:
        body = await response.read()
        assert response.status < 500, (response.status, path, data[:4000], body[:1000])
        assert b'"code":"internal_error"' not in body, (path, data[:4000], body[-1000:])
        if response.status != 200:
            error = json.loads(body)["error"]
            assert {"message", "type"} <= set(error), body
        return response.status
