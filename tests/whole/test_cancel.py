"""A client that leaves gives its memory back: a thousand times in a row, over real sockets.

Each time one client leaves while its request is queued, in its prompt, or getting tokens, with a
stream or without, by closing or by a reset. From then on nothing of it may be left after 100 ms,
and after it is known at most one step may still have its rows.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import uvloop

from serve import Engine, SamplingParams
from serve.config import DEFAULT_MODEL
from serve.http import HttpServer, HttpSettings
from serve.scheduler.sequence import Sequence, SequenceStatus

pytestmark = pytest.mark.process

NUM_LEAVES = 1000
LIMIT_S = 0.1
STAGES = ("queued", "prompt", "decode")
RESET = struct.pack("ii", 1, 0)


class Took(NamedTuple):
    """seconds: from the client's end to the release of the last page. waited_s: the part of it
    that threads waited for a processor."""

    seconds: float
    waited_s: float


class Watched:
    """The engine's own view of the one request under test."""

    def __init__(self, engine: Engine) -> None:
        core = engine.loaded.core
        self.core, self.scheduler = core, core._scheduler
        self.holders: set[str] = set()
        self.steps_after: list[int] = []
        self._aborted: dict[str, int] = {}
        loop, compute = threading.get_native_id(), core._compute._thread.native_id
        self._threads = [f"/proc/self/task/{number}/schedstat" for number in (loop, compute)]
        self._abort, self._finish = core.abort, self.scheduler.finish
        core.abort = self.abort  # type: ignore[method-assign]
        self.scheduler.finish = self.finish  # type: ignore[method-assign]

    def abort(self, state) -> None:
        self._aborted.setdefault(state.request_id, self.scheduler.num_steps)
        self._abort(state)

    def finish(self, sequence, reason) -> bool:
        has_ended = self._finish(sequence, reason)
        began = self._aborted.pop(sequence.request.request_id, None)
        if has_ended and began is not None:
            self.steps_after.append(self.scheduler.num_steps - began)
        return has_ended

    def sequence(self) -> Sequence | None:
        """The sequence of the request under test, once it is in the scheduler."""
        states = [s for s in self.core._requests.states() if s.request_id not in self.holders]
        return states[0].sequences[0] if states and states[0].sequences else None

    def is_at(self, stage: str) -> bool:
        sequence = self.sequence()
        if sequence is None:
            return False
        is_running = sequence.status is SequenceStatus.RUNNING
        if stage == "queued":
            return sequence.status is SequenceStatus.WAITING
        if stage == "prompt":
            return is_running and 0 < sequence.num_computed_tokens < sequence.num_prompt_tokens
        return is_running and sequence.num_output_tokens > 1

    def waited_s(self) -> float:
        """For a processor, by the two threads that have work to do here: a machine that is busy
        with something else lets them wait, and that is no time of ours."""
        files = [Path(file) for file in self._threads]  # not every kernel counts
        return sum(int(file.read_text().split()[1]) for file in files if file.exists()) * 1e-9

    @property
    def is_free(self) -> bool:
        """Nothing is left but the holders' requests."""
        scheduler, num_held = self.scheduler, len(self.holders)
        return (
            len(self.core._requests) == num_held
            and len(scheduler.running) + len(scheduler.waiting) == num_held
            and (num_held > 0 or scheduler.kv.num_in_use == 0)
        )


class Client:
    """One request on a connection of its own."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def ask(self, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
        )
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(head + data)

    def leave(self, *, resets: bool) -> None:
        if resets:
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.writer.transport.abort() if resets else self.writer.close()


async def until(condition, limit_s: float = 5.0) -> float:
    """Returns the seconds that it took."""
    began = time.perf_counter()
    while not condition():
        assert time.perf_counter() < began + limit_s, "never"
        await asyncio.sleep(0.0005)
    return time.perf_counter() - began


async def leave_once(watched: Watched, port: int, stage: str, rng: random.Random) -> Took:
    prompt = [rng.randrange(5, 4000) for _ in range(240 if stage == "prompt" else 20)]
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": rng.random() < 0.5,
        "n": 1 if stage == "prompt" else rng.choice([1, 1, 2]),
    }
    client = Client(port)
    await client.ask(body)
    await until(lambda: watched.is_at(stage))
    waited_s = watched.waited_s()
    client.leave(resets=rng.random() < 0.5)
    seconds = await until(lambda: watched.is_free)
    return Took(seconds, watched.waited_s() - waited_s)


def test_a_thousand_clients_that_leave_hold_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(5)
    took: list[Took] = []

    async def main() -> tuple[Watched, int]:
        engine = Engine(
            DEFAULT_MODEL,
            served_model_name="m",
            dtype="float32",
            max_num_seqs=2,
            max_model_len=1024,
            max_chunk_tokens=16,
        )
        async with HttpServer(engine, HttpSettings(port=0)) as server:
            port = int(server.url.rpartition(":")[2])
            watched = Watched(engine)
            for stage in STAGES:
                holders = []
                while len(took) < NUM_LEAVES * (1 + STAGES.index(stage)) // len(STAGES):
                    if stage == "queued":
                        holders = await hold(engine, watched, holders)
                    took.append(await leave_once(watched, port, stage, rng))
                for holder in holders:
                    holder.abort()
                watched.holders.clear()
                await until(lambda: watched.is_free)
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.pages_in_use) == (0, 0, 0)
            return watched, server.app.num_calls

    watched, num_running = uvloop.run(main())
    assert num_running == 0
    assert len(took) == NUM_LEAVES
    seconds = sorted(each.seconds for each in took)
    own = max(each.seconds - each.waited_s for each in took)
    with capsys.disabled():
        print(
            f" median {seconds[NUM_LEAVES // 2] * 1e3:.1f} ms, worst {seconds[-1] * 1e3:.1f} ms,"
            f" {own * 1e3:.1f} ms without waiting for a processor ",
            end="",
        )
    assert len(watched.steps_after) >= NUM_LEAVES
    assert max(watched.steps_after) <= 1
    assert own < LIMIT_S
    assert seconds[NUM_LEAVES // 2] < LIMIT_S / 2


async def hold(engine: Engine, watched: Watched, holders: list) -> list:
    """Both slots are taken by requests that keep running."""
    scheduler = watched.scheduler
    if len(scheduler.running) == 2 and all(s.num_tokens < 900 for s in scheduler.running):
        return holders
    for holder in holders:
        holder.abort()
    watched.holders.clear()
    await until(lambda: watched.is_free)
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    holders = [engine.submit([5, 6, 7], params) for _ in range(2)]
    watched.holders |= {holder.request_id for holder in holders}
    await until(lambda: len(scheduler.running) == 2)
    return holders
