"""Several models on memory for fewer: how long switches take, how long requests wait, what is lost.

`python -m bench.cluster.models --memory-budget 800MiB` makes copies of one model, each with packed
weights of its own, serves all at one address, and measures (1) the time to the first token of a
model that is stopped, asleep or ready, and (2) a load of Poisson arrivals over all models, of which
some are asked for more often than others. All answers are held against those of the same model
alone; the memory of all processes is read while the load runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from bench.common.checkpoints import model_directory
from serve.cli.config_file import parse_size
from serve.cluster.models.memory import family_bytes
from serve.config import EngineConfig
from serve.machine import free_port
from serve.units import format_memory

PROMPTS = (
    "Tell me a joke",
    "What is 7 times 8?",
    "Write a short poem about rain",
    "Tell me a long story about a fox",
)
_POPULARITY = 1.0  # exponent of Zipf's law
_SAMPLE_S = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. ttft_s: from its start; None if it failed. state: of its model at its start."""

    model: str
    prompt: str
    text: str
    state: str
    ttft_s: float | None
    failure: str = ""


@dataclass(slots=True)
class Report:
    """What was measured; times in seconds, memory in bytes."""

    first_token_s: dict[str, list[float]] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    changed: int = 0
    most_bytes: int = 0
    switches: Counter[str] = field(default_factory=Counter)


def copy_model(folder: Path, source: Path, number: int) -> list[str]:
    """Makes copies whose weight files share the disk's blocks; returns their names."""
    names = [f"model-{each}" for each in range(number)]
    for name in names:
        (folder / name).mkdir()
        for file in source.iterdir():
            if file.is_file():
                _link(file, folder / name / file.name)
    return names


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # another file system
        shutil.copy(file, to)


@contextmanager
def served(options: list[str]) -> Iterator[tuple[int, str]]:
    """Runs `serve run`; yields the process and its address."""
    port = free_port()
    command = [sys.executable, "-m", "serve", "run", *options, "--port", str(port), "--quiet"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--no-access-log", "--log-level", "warning"],
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            yield process.pid, f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            if process.wait(60):
                log.seek(0)
                sys.stderr.write(log.read()[-4000:].decode("utf-8", "replace"))


async def until_ready(session: aiohttp.ClientSession) -> None:
    for _ in range(6000):
        try:
            async with session.get("/ready") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientConnectionError:
            pass
        await asyncio.sleep(0.05)
    raise SystemExit("the server does not start")


async def ask(
    session: aiohttp.ClientSession, model: str, prompt: str, tokens: int, state: str = ""
) -> Answer:
    """Streams one greedy answer."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "stream": True}
    body |= {"temperature": 0, "max_tokens": tokens}
    began_s = time.perf_counter()
    first_s: float | None = None
    text = ""
    async with session.post("/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            failure = (await answer.json())["error"]["code"]
            return Answer(model, prompt, "", state, None, failure)
        is_whole = False
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                is_whole = True
                break
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return Answer(model, prompt, text, state, None, chunk["error"]["code"])
            if first_s is None:
                first_s = time.perf_counter() - began_s
            text += chunk["choices"][0]["delta"].get("content") or ""
    return Answer(model, prompt, text, state, first_s, "" if is_whole else "cut off")


async def states(session: aiohttp.ClientSession) -> dict[str, str]:
    async with session.get("/v1/models") as answer:
        return {each["id"]: each.get("state", "") for each in (await answer.json())["data"]}


async def expected_texts(url: str, name: str, tokens: int) -> dict[str, str]:
    """Returns the answers of the model alone."""
    async with aiohttp.ClientSession(url) as session:
        await until_ready(session)
        return {prompt: (await ask(session, name, prompt, tokens)).text for prompt in PROMPTS}


async def measure_switches(
    session: aiohttp.ClientSession, names: list[str], rounds: int, report: Report
) -> None:
    """Measures first tokens of models that are stopped, asleep and ready, in turns."""
    found: dict[str, list[float]] = {"stopped": [], "asleep": [], "ready": []}
    for number in range(rounds * len(names)):
        model = names[number % len(names)]
        for wanted in ("stopped", "ready", "asleep"):
            if wanted == "asleep":
                async with session.post(f"/sleep?model={model}") as answer:
                    await answer.read()
            state = (await states(session))[model]
            answer_of = await ask(session, model, PROMPTS[0], 4)
            if state == wanted and answer_of.ttft_s is not None:
                found[wanted].append(answer_of.ttft_s)
    report.first_token_s = found


async def run_load(
    session: aiohttp.ClientSession, pid: int, names: list[str], given: Any, report: Report
) -> None:
    """Sends Poisson arrivals and waits for all answers."""
    rng = random.Random(given.seed)
    weights = [1 / (rank + 1) ** _POPULARITY for rank in range(len(names))]
    is_over = asyncio.Event()

    async def watch() -> None:
        while not is_over.is_set():
            report.most_bytes = max(report.most_bytes, await asyncio.to_thread(_children, pid))
            await asyncio.sleep(_SAMPLE_S)

    async def one(model: str, prompt: str) -> None:
        state = (await states(session))[model]
        report.answers.append(await ask(session, model, prompt, given.tokens, state))

    watching = asyncio.create_task(watch())
    tasks, began_s, at_s = [], time.perf_counter(), 0.0
    while at_s < given.seconds:
        at_s += rng.expovariate(given.qps)
        await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
        (model,) = rng.choices(names, weights)
        tasks.append(asyncio.create_task(one(model, rng.choice(PROMPTS))))
    await asyncio.gather(*tasks)
    is_over.set()
    await watching
    async with session.get("/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith("mergestep:model_switch_seconds_count"):
                kind = line.partition('switch="')[2].partition('"')[0]
                report.switches[kind] += int(float(line.rpartition(" ")[2]))


def _children(pid: int) -> int:
    """Returns the memory of the models, without the front."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return sum(family_bytes(int(child)) for child in text.split())


def show(report: Report, budget: int) -> None:
    print("time to the first token, by the state of the model when it is asked:")
    for state, seconds in report.first_token_s.items():
        if seconds:
            print(f"  {state:8} {_spread(seconds)}")
    answers = report.answers
    failed = Counter(each.failure for each in answers if each.failure)
    print(f"load: {len(answers)} requests, {sum(failed.values())} failed {dict(failed) or ''}")
    print(f"  changed answers: {report.changed}; switches: {dict(report.switches)}")
    print(f"  most memory: {format_memory(report.most_bytes)} of {format_memory(budget)}")
    for state in sorted({each.state for each in answers}):
        seconds = [e.ttft_s for e in answers if e.state == state and e.ttft_s is not None]
        if seconds:
            print(f"  first token, model {state}: {_spread(seconds)}")


def _spread(seconds: list[float]) -> str:
    p50, p90 = np.percentile(seconds, (50, 90))
    return f"p50 {p50:.3f} s, p90 {p90:.3f} s, most {max(seconds):.3f} s ({len(seconds)})"


def measure(given: argparse.Namespace, folder: Path) -> Report:
    found = model_directory(given.model)
    source = Path(found) if found is not None else EngineConfig().model_path
    names = copy_model(folder, source, given.number)
    kv = ["--kv-cache-bytes", str(given.kv_cache_bytes)]
    with served([str(folder / names[0]), *kv]) as (_, url):
        expected = asyncio.run(expected_texts(url, names[0], given.tokens))
    report = Report()
    more = ["--memory-budget", str(given.memory_budget), "--enable-sleep-mode"]
    with served([str(folder), *kv, *more, "--idle-seconds", str(given.idle_seconds)]) as running:

        async def live() -> None:
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(
                running[1], connector=connector, timeout=timeout
            ) as session:
                await until_ready(session)
                for name in names:  # the first start packs the weights
                    await ask(session, name, PROMPTS[0], 4)
                await measure_switches(session, names, given.rounds, report)
                await run_load(session, running[0], names, given, report)

        asyncio.run(live())
    report.changed = sum(
        each.text != expected[each.prompt] for each in report.answers if not each.failure
    )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a directory or random:SHAPE; default: the embedded one")
    parser.add_argument("--number", type=int, default=5)
    parser.add_argument("--memory-budget", type=parse_size, default=800 << 20)
    parser.add_argument("--kv-cache-bytes", type=parse_size, default=64 << 20)
    parser.add_argument("--idle-seconds", type=float, default=300.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--qps", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the copies are made")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        report = measure(given, Path(folder))
    show(report, given.memory_budget)
    if report.changed or any(each.failure for each in report.answers):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
