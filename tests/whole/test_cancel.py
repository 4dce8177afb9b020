"""A thousand clients disconnect one after the other over real sockets and leave no memory in use.

Each client disconnects while its request is queued, prefilled or decoded, with a stream or without,
by closing or by a reset. All of its resources must be free within 100 ms, and at most one step may
still have its rows after the engine knows.
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

NUM_CLIENTS = 1000
LIMIT_S = 0.1
STAGES = ("queued", "prompt", "decode")
RESET = struct.pack("ii", 1, 0)


class ReleaseTime(NamedTuple):
    """seconds: from the disconnect to the release of the last page. waited_s: the part of it that
    threads waited for a processor."""

    seconds: float
    waited_s: float


class Observer:
    """Observes the request under test in the engine."""

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
        """Returns the seconds that the loop and compute threads have waited for a processor, which
        the test subtracts because the machine may be busy with other work."""
        files = [Path(file) for file in self._threads]  # some kernels do not count
        return sum(int(file.read_text().split()[1]) for file in files if file.exists()) * 1e-9

    @property
    def is_free(self) -> bool:
        """Whether only the holders' requests are left."""
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

    async def send(self, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
        )
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(head + data)

    def disconnect(self, *, resets: bool) -> None:
        if resets:
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.writer.transport.abort() if resets else self.writer.close()


async def until(condition, limit_s: float = 5.0) -> float:
    """Waits for the condition; returns the seconds."""
    began = time.perf_counter()
    while not condition():
        assert time.perf_counter() < began + limit_s, "the condition was not met"
        await asyncio.sleep(0.0005)
    return time.perf_counter() - began


async def disconnect_once(
    observer: Observer, port: int, stage: str, rng: random.Random
) -> ReleaseTime:
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
    await client.send(body)
    await until(lambda: observer.is_at(stage))
    waited_s = observer.waited_s()
    client.disconnect(resets=rng.random() < 0.5)
    seconds = await until(lambda: observer.is_free)
    return ReleaseTime(seconds, observer.waited_s() - waited_s)


def test_a_thousand_disconnected_clients_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(5)
    times: list[ReleaseTime] = []

    async def main() -> tuple[Observer, int]:
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
            observer = Observer(engine)
            for stage in STAGES:
                holders = []
                while len(times) < NUM_CLIENTS * (1 + STAGES.index(stage)) // len(STAGES):
                    if stage == "queued":
                        holders = await hold(engine, observer, holders)
                    times.append(await disconnect_once(observer, port, stage, rng))
                for holder in holders:
                    holder.abort()
                observer.holders.clear()
                await until(lambda: observer.is_free)
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.pages_in_use) == (0, 0, 0)
            return observer, server.app.num_calls

    observer, num_running = uvloop.run(main())
    assert num_running == 0
    assert len(times) == NUM_CLIENTS
    seconds = sorted(each.seconds for each in times)
    own = max(each.seconds - each.waited_s for each in times)
    with capsys.disabled():
        print(
            f" median {seconds[NUM_CLIENTS // 2] * 1e3:.1f} ms, worst {seconds[-1] * 1e3:.1f} ms,"
            f" {own * 1e3:.1f} ms without waiting for a processor ",
            end="",
        )
    assert len(observer.steps_after) >= NUM_CLIENTS
    assert max(observer.steps_after) <= 1
    assert own < LIMIT_S
    assert seconds[NUM_CLIENTS // 2] < LIMIT_S / 2


async def hold(engine: Engine, observer: Observer, holders: list) -> list:
    """Keeps both slots taken by running requests; returns their streams."""
    scheduler = observer.scheduler
    if len(scheduler.running) == 2 and all(s.num_tokens < 900 for s in scheduler.running):
        return holders
    for holder in holders:
        holder.abort()
    observer.holders.clear()
    await until(lambda: observer.is_free)
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    holders = [engine.submit([5, 6, 7], params) for _ in range(2)]
    observer.holders |= {holder.request_id for holder in holders}
    await until(lambda: len(scheduler.running) == 2)
    return holders
