"""The load of apart.py: calls of one length, sent at given times, and what their clients saw."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp

from bench.simulate.fleet import FleetCall
from bench.simulate.fleet_figures import Mix, Seen

PATH = "/v1/completions"
_ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


class Client:
    """Asks servers for answers to prompts that no other call has."""

    def __init__(self, session: aiohttp.ClientSession, model: str) -> None:
        self._session = session
        self._model = model
        self._random = random.Random(7)

    def body(self, mix: Mix) -> dict[str, Any]:
        prompt = [self._random.randrange(100, 1000) for _ in range(mix.prompt)]
        common = {"model": self._model, "temperature": 0, "ignore_eos": True, "stream": True}
        return common | {"prompt": prompt, "max_tokens": mix.output}

    async def ask(self, url: str, mix: Mix) -> Seen:
        """Asks the hop, or one server."""
        return await self._read(url, self.body(mix), asyncio.get_running_loop().time())

    async def ask_apart(
        self, prefill: str, decode: str, mix: Mix, *, at_once: bool = False
    ) -> tuple[Seen, float]:
        """Has one server compute the prompt and another one answer: one after the other, as routers
        of vLLM's engines do, or at once. Returns also the seconds from the first one's answer to
        the second one's first token."""
        loop = asyncio.get_running_loop()
        began_s, body = loop.time(), self.body(mix)
        computing = asyncio.create_task(self._compute(prefill, body))
        given = {"do_remote_prefill": True} if at_once else (await computing)[1]
        seen = await self._read(decode, body | {"kv_transfer_params": given}, began_s)
        computed_s, _ = await computing
        return seen, seen.ttft_s - (computed_s - began_s)

    async def _compute(self, url: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """Has a server compute a prompt; returns when it has, and what the next one needs."""
        asked = body | {"stream": False, "max_tokens": 1, "kv_transfer_params": _ASKED}
        async with self._session.post(url + PATH, json=asked) as response:
            answer = await response.json()
            assert response.status == 200, answer
        return asyncio.get_running_loop().time(), answer["kv_transfer_params"]

    async def _read(self, url: str, body: dict[str, Any], began_s: float) -> Seen:
        loop = asyncio.get_running_loop()
        times: list[float] = []
        async with self._session.post(url + PATH, json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    times.append(loop.time())
        assert len(times) > 1, "no tokens"
        longest = max(after - before for before, after in itertools.pairwise(times))
        tpot_s = (times[-1] - times[0]) / max(1, body["max_tokens"] - 1)
        return Seen(times[0] - began_s, tpot_s, longest)

    async def load(
        self, calls: Sequence[FleetCall], ask: Callable[[Mix], Awaitable[Seen]]
    ) -> list[Seen]:
        """Sends calls when they are due, and waits for their ends."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()

        async def one(call: FleetCall) -> Seen:
            await asyncio.sleep(max(0.0, began_s + call.at_s - loop.time()))
            return await ask(Mix(call.num_prompt, call.num_output))

        return await asyncio.gather(*map(one, calls))


def median_seen(seen: Sequence[Seen]) -> Seen:
    return Seen(*(statistics.median(values) for values in zip(*seen, strict=True)))
