"""The load of apart.py: calls of one length, sent at given times, and what their clients saw."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp

from bench.simulate.fleet import FleetCall

PATH = "/v1/completions"
_ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


class Mix(NamedTuple):
    """Tokens of each prompt and of each answer."""

    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.prompt}/{self.output}"


class Seen(NamedTuple):
    """One call, in seconds. gap_s: its longest gap."""

    ttft_s: float
    tpot_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class Slo:
    """The longest time to the first token, and between tokens on average."""

    ttft_s: float
    tpot_s: float

    def is_kept(self, seen: Seen) -> bool:
        return seen.ttft_s <= self.ttft_s and seen.tpot_s <= self.tpot_s


class Figures(NamedTuple):
    """Of one run: milliseconds, and calls a second that kept the SLO."""

    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    gap_p99: float
    qps: float


def figures(seen: Sequence[Seen], slo: Slo, seconds: float) -> Figures:
    """seconds: in which the calls arrived."""

    def of(values: list[float], share: float) -> float:
        return 1e3 * sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]

    ttft, tpot = [one.ttft_s for one in seen], [one.tpot_s for one in seen]
    kept = sum(slo.is_kept(one) for one in seen)
    gaps = [one.gap_s for one in seen]
    return Figures(
        of(ttft, 0.5),
        of(ttft, 0.99),
        of(tpot, 0.5),
        of(tpot, 0.99),
        of(gaps, 0.99),
        kept / seconds,
    )


def poisson(mix: Mix, qps: float, seconds: float, seed: int) -> list[FleetCall]:
    """Returns as many calls as the rate gives in that time, the first one at once."""
    rng = random.Random(seed)
    count = max(2, round(qps * seconds))
    times = [rng.expovariate(1.0) for _ in range(count)]
    scale, at_s, calls = seconds / sum(times), 0.0, []
    for gap in times:
        calls.append(FleetCall(at_s, *mix))
        at_s += scale * gap
    return calls


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
