"""Prefill apart from decoding against merged steps, on the same two servers, beside what the
simulator predicts.

    python -m bench.cluster.apart --mixes 1024/32,512/256,128/256 --seconds 20

Two servers with one thread each, which are K/V peers, get the same Poisson arrivals in three ways:

    merged    `serve front --prefill-apart off`: each call at one server
    apart     all prompts at the first server, all answers at the second one; with --at-once, which
              gets each call while the first one still computes
    auto      `serve front --prefill-apart auto`: call by call

Rates are shares of what merged servers can do, by the simulator. Its step costs come from two
engines side by side (step_costs.py), hand-overs and delays from single calls, and what passing
tokens on takes on the same cores from 16 equal streams; nothing is fitted to the loads. "in SLO"
are the calls a second that kept both objectives, which are multiples of the times of a single call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from bench.cluster.apart_load import Client, median_seen
from bench.cluster.servers import Server, start_front, until_ready
from bench.cluster.step_costs import TracedEngine, traced
from bench.common.checkpoints import model_directory
from bench.plan.calibrate import FittedCost
from bench.simulate.fleet import FleetCall, FleetRecord, FleetSimulation, HandOver, Way
from bench.simulate.fleet_figures import Figures, Mix, Seen, Slo, figures, poisson, seen_of
from bench.simulate.noise import NoisyCost
from bench.simulate.settings import PoolDelays
from serve.cluster.front.replicas import JOURNAL, LOAD_HEADER
from serve.machine import free_port
from serve.scheduler.step_time import StepWork

WAYS: tuple[Way, ...] = ("merged", "apart", "auto")
TTFT_TIMES, TPOT_TIMES = 4.0, 2.0
WITHIN = 0.25
_HOPS: dict[Way, str] = {"merged": "off", "auto": "auto"}
_CROWD = Mix(128, 64)
_CROWD_CALLS = 16
_ALONE = 3  # single calls of each kind
_COMPARED = ("ttft_p99", "tpot_p99", "qps")


@dataclass(frozen=True, slots=True)
class ServedCost:
    """Adds to each decode row of a step what passing its token on takes on the same cores."""

    fitted: FittedCost
    token_s: float = 0.0

    def seconds(self, work: StepWork) -> float:
        return self.fitted.seconds(work) + self.token_s * work.num_decodes


@dataclass(frozen=True, slots=True)
class Planner:
    """Predicts runs. config: of the servers' engines."""

    cost: ServedCost
    engine: TracedEngine
    config: dict[str, Any]
    hand_over: HandOver = field(default_factory=HandOver)
    delays: PoolDelays = field(default_factory=PoolDelays)

    def run(self, calls: Sequence[FleetCall], way: Way) -> list[FleetRecord]:
        settings = self.engine.settings(self.config, self.delays)
        kinds = dict.fromkeys((call.num_prompt, call.num_output) for call in calls)
        warm_up = [FleetCall(0.0, prompt, min(32, output)) for prompt, output in kinds]
        fitted = self.cost.fitted
        cost = NoisyCost(self.cost, fitted.median_error, fitted.p90_error)
        simulation = FleetSimulation(cost, settings, self.hand_over, way, warm_up=warm_up)
        return simulation.run(calls)

    def seen(self, calls: Sequence[FleetCall], way: Way) -> list[Seen]:
        return [seen_of(record) for record in self.run(calls, way)]

    def capacity(self, mix: Mix) -> float:
        """Returns the calls a second that merged servers end when many wait."""
        calls = [FleetCall(0.0, *mix)] * 64
        return len(calls) / max(record.times[-1] for record in self.run(calls, "merged"))


class Rig:
    """The servers and the hops. ask: by way, how a call is sent."""

    def __init__(self, client: Client, servers: list[str], *, at_once: bool = False) -> None:
        self.client = client
        self.servers = servers
        self.at_once = at_once
        self._hops: dict[Way, str] = {}

    async def start_hops(self, stack: AsyncExitStack) -> None:
        """Starts hops that have seen no call."""
        for way, setting in _HOPS.items():
            front, self._hops[way] = await start_front(self.servers, "--prefill-apart", setting)
            stack.callback(front.kill)

    def ask(self, way: Way) -> Callable[[Mix], Awaitable[Seen]]:
        if way != "apart":
            return lambda mix: self.client.ask(self._hops[way], mix)

        async def apart(mix: Mix) -> Seen:
            asked = self.client.ask_apart(*self.servers, mix, at_once=self.at_once)
            return (await asked)[0]

        return apart

    async def health(self) -> dict[str, Any]:
        url = self._hops["auto"] + "/health"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            found: dict[str, Any] = (await response.json())["prefill_apart"]
            return found


async def started(
    stack: AsyncExitStack, model: str, config: dict[str, Any], *, at_once: bool = False
) -> Rig:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mergestep-apart-")))
    key = folder / "key"
    key.write_text("a key for a measurement")
    key.chmod(0o600)
    ports = [free_port(), free_port()]
    peers = ",".join(f"tcp://127.0.0.1:{port}" for port in ports)
    given = {f"--{name.replace('_', '-')}": str(value) for name, value in config.items()}
    model_path = given.pop("--model")
    servers = []
    for port in ports:
        options = (model_path, *(text for pair in given.items() for text in pair))
        kv = ("--kv-listen", f"tcp://127.0.0.1:{port}", "--kv-peers", peers)
        more = ("--kv-peer-key-file", str(key), "--served-model-name", model)
        server = Server(free_port(), (*options, *kv, *more))
        await server.start()
        stack.callback(server.kill)
        servers.append(server)
    for server in servers:
        await until_ready(server.url)
    urls = [server.url for server in servers]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    session = aiohttp.ClientSession(connector=connector, timeout=timeout)
    await stack.enter_async_context(session)
    await _until_peers(session, urls)
    return Rig(Client(session, model), urls, at_once=at_once)


async def _until_peers(session: aiohttp.ClientSession, urls: list[str]) -> None:
    for url in urls:
        for _ in range(300):
            async with session.get(url + "/ready", headers=JOURNAL) as response:
                load = orjson.loads(response.headers.get(LOAD_HEADER, "{}"))
            if load.get("pulls_from"):
                break
            await asyncio.sleep(0.1)
        else:
            raise RuntimeError(f"{url} is connected to no peer")


async def crowded(rig: Rig, planner: Planner) -> Planner:
    """Returns the planner with what a token of many streams takes beside its steps."""
    calls = [FleetCall(0.0, *_CROWD)] * _CROWD_CALLS
    seen = median_seen(await rig.client.load(calls, rig.ask("merged")))
    expected = median_seen(planner.seen(calls, "merged"))
    token_s = max(0.0, seen.tpot_s - expected.tpot_s) / (_CROWD_CALLS / len(rig.servers))
    return replace(planner, cost=ServedCost(planner.cost.fitted, token_s))


async def alone(rig: Rig, planner: Planner, mixes: list[Mix]) -> tuple[Planner, dict[Mix, Seen]]:
    """Measures single calls; returns the planner with what they say, and their times."""
    for url in rig.servers:  # step times are learned from merged steps
        for mix in mixes:
            await asyncio.gather(*(rig.client.ask(url, mix._replace(output=32)) for _ in range(3)))
    planner = await crowded(rig, planner)
    single: dict[Mix, Seen] = {}
    moves: list[tuple[int, float]] = []
    waits: dict[bool, list[float]] = {False: [], True: []}
    rests: list[float] = []
    for mix in mixes:
        seen = [await rig.ask("merged")(mix) for _ in range(_ALONE)]
        single[mix] = median_seen(seen)
        for _ in range(_ALONE):
            for at_once, of_them in waits.items():
                short = mix._replace(output=2)
                _, moved_s = await rig.client.ask_apart(*rig.servers, short, at_once=at_once)
                of_them.append(moved_s)
            moves.append((mix.prompt, waits[rig.at_once][-1]))
        expected = planner.seen([FleetCall(0.0, *mix)], "merged")[0]
        rests.append(single[mix].ttft_s - expected.ttft_s)
    after, meanwhile = (1e3 * float(np.median(of_them)) for of_them in waits.values())
    print(
        f"a call alone goes on {after:.0f} ms after its prompt, {meanwhile:.0f} ms if sent at once"
    )
    lengths, seconds = np.array(moves).T
    if len(set(lengths)) > 1:
        token_s, fixed_s = np.polyfit(lengths, seconds, 1)
    else:
        token_s, fixed_s = 0.0, np.median(seconds)
    # the first step at the new server is simulated
    step_s = planner.seen([FleetCall(0.0, 1, 1)], "merged")[0].ttft_s
    hand_over = HandOver(max(0.0, float(fixed_s) - step_s), max(0.0, float(token_s)))
    delays = PoolDelays(tokenize_s=max(0.0, float(np.median(rests))))
    return replace(planner, hand_over=hand_over, delays=delays), single


async def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    mixes = [Mix(*map(int, text.split("/"))) for text in given.mixes.split(",")]
    config: dict[str, Any] = {
        "model": str(model_directory(given.model)),
        "dtype": "int8",
        "compute_threads": 1,
        "max_model_len": max(mix.prompt + mix.output for mix in mixes) + 64,
        "max_num_seqs": 32,
        "speculation": "off",
    }
    cost, engine = await asyncio.to_thread(traced, config, tuple({mix.prompt for mix in mixes}))
    print(f"steps: {cost.num_steps}, median error of the fit {100 * cost.median_error:.1f} %")
    found = []
    async with AsyncExitStack() as stack:
        rig = await started(stack, "m", config, at_once=given.at_once)
        async with AsyncExitStack() as hops:
            await rig.start_hops(hops)
            planner, single = await alone(rig, Planner(ServedCost(cost), engine, config), mixes)
        move = planner.hand_over
        print(
            f"a hand-over takes {1e3 * move.fixed_s:.0f} ms and {1e6 * move.token_s:.1f} us a"
            f" token; beside its steps a call takes {1e3 * planner.delays.tokenize_s:.0f} ms and a"
            f" token of many streams {1e3 * planner.cost.token_s:.2f} ms"
        )
        for mix in mixes:
            slo = Slo(TTFT_TIMES * single[mix].ttft_s, TPOT_TIMES * single[mix].tpot_s)
            capacity = planner.capacity(mix)
            print(
                f"\n{mix}: alone {1e3 * single[mix].ttft_s:.0f} ms to the first token,"
                f" {1e3 * single[mix].tpot_s:.1f} ms a token; SLO {1e3 * slo.ttft_s:.0f} ms,"
                f" {1e3 * slo.tpot_s:.1f} ms; merged servers can do {capacity:.2f}/s"
            )
            print(_HEAD, flush=True)
            async with AsyncExitStack() as hops:
                await rig.start_hops(hops)
                for share in map(float, given.loads.split(",")):
                    found += await _rate(rig, planner, mix, slo, share * capacity, given)
    return found


_HEAD = (
    f"{'':8}{'/s':>6}{'TTFT p50':>10}{'p99':>7}{'TPOT p50':>10}{'p99':>7}{'gap p99':>9}"
    f"{'in SLO':>8}   predicted: TTFT p99, TPOT p99, in SLO; predicted/measured"
)


async def _rate(
    rig: Rig, planner: Planner, mix: Mix, slo: Slo, qps: float, given: argparse.Namespace
) -> list[dict[str, Any]]:
    found = []
    runs: dict[Way, list[Seen]] = {way: [] for way in WAYS}
    guesses: dict[Way, list[Seen]] = {way: [] for way in WAYS}
    before = await rig.health()
    for number in range(given.rounds):
        calls = poisson(mix, qps, given.seconds, given.seed + number)
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            runs[way] += await rig.client.load(calls, rig.ask(way))
            guesses[way] += planner.seen(calls, way)
    after = await rig.health()
    for way in WAYS:
        seconds = given.seconds * given.rounds
        real, predicted = figures(runs[way], slo, seconds), figures(guesses[way], slo, seconds)
        print(_line(way, qps, real, predicted), flush=True)
        found.append(
            {"mix": str(mix), "way": way, "qps": qps, "calls": len(runs[way])}
            | {"measured": real._asdict(), "predicted": predicted._asdict()}
        )
    parted = after["apart"] - before["apart"]
    print(f"        auto parted {parted} of {len(runs['auto'])}; {after['last']}", flush=True)
    return found


def _line(way: Way, qps: float, real: Figures, predicted: Figures) -> str:
    ratios = [
        getattr(predicted, name) / getattr(real, name) if getattr(real, name) else float("nan")
        for name in _COMPARED
    ]
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return (
        f"{way:8}{qps:6.2f}{real.ttft_p50:10.0f}{real.ttft_p99:7.0f}{real.tpot_p50:10.1f}"
        f"{real.tpot_p99:7.1f}{real.gap_p99:9.0f}{real.qps:8.2f}   {predicted.ttft_p99:6.0f}"
        f" {predicted.tpot_p99:6.1f} {predicted.qps:5.2f}; {shown}"
    )


def report(found: list[dict[str, Any]]) -> None:
    """Prints the best rate within the SLO of each way, and how near the predictions are."""
    print("\ncalls a second within the SLO, the best of the rates (predicted):")
    for mix in dict.fromkeys(row["mix"] for row in found):
        best = {
            way: [
                max(r[kind]["qps"] for r in found if r["mix"] == mix and r["way"] == way)
                for kind in ("measured", "predicted")
            ]
            for way in WAYS
        }
        print(f"{mix:10}" + "   ".join(f"{w} {b[0]:.2f} ({b[1]:.2f})" for w, b in best.items()))
    for name in _COMPARED:
        pairs = [(row["predicted"][name], row["measured"][name]) for row in found]
        errors = sorted(abs(p / m - 1.0) for p, m in pairs if m)
        near = sum(error <= WITHIN for error in errors)
        print(
            f"{name}: {near} of {len(errors)} predictions within {100 * WITHIN:.0f} %,"
            f" median error {100 * errors[len(errors) // 2]:.0f} %"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="random:llama-300m")
    parser.add_argument("--mixes", default="1024/32,512/256,128/256", help="PROMPT/ANSWER tokens")
    parser.add_argument("--loads", default="0.5,0.8", help="shares of what merged servers can do")
    parser.add_argument("--at-once", action="store_true", help="apart: without waiting for prompts")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="short, as a test of the command")
    given = parser.parse_args()
    if given.smoke:
        given.model, given.mixes, given.loads = "random:tiny", "256/8", "0.2"
        given.seconds = 2.0
    found = asyncio.run(measure(given))
    report(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
