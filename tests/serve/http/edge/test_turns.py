"""Large bodies and very long conversations take turns, so that the event loop goes on."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from serve.http.edge.body import PACED_BYTES, READS_PER_PASS, Bodies
from serve.http.responses import endpoint as responses
from serve.request import Request
from tests.support.http.fake_engine import FakeEngine, FakeStream
from tests.support.http.running_server import Served, run_with_server


@pytest.mark.parametrize("is_chunked", [False, True])
def test_very_long_conversations_take_turns(
    is_chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is accepted before the next one is put together; short ones and those with a grammar
    of their own do not wait."""
    monkeypatch.setattr(responses, "TURN_BYTES", 20_000)
    at_work, most, may_end = [0], [0], asyncio.Event()

    async def accepted(self: FakeStream) -> Request:
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        await may_end.wait()
        at_work[0] -= 1
        return await accept(self)

    accept = FakeStream.accepted
    monkeypatch.setattr(FakeStream, "accepted", accepted)

    async def check(served: Served) -> None:
        async def post(size: int, **more: Any) -> int:
            body = orjson.dumps({"model": "fake", "input": "a" * size, **more})
            data = pieces_of(body) if is_chunked else body
            headers = {"Content-Type": "application/json"}
            async with served.session.post("/v1/responses", data=data, headers=headers) as answer:
                return answer.status

        grammar = {"text": {"format": {"type": "json_object"}}}
        for size, more, expected in ((30_000, {}, 1), (10, {}, 3), (30_000, grammar, 3)):
            may_end.clear()
            most[0] = 0
            posts = [asyncio.create_task(post(size, **more)) for _ in range(3)]
            await served.until(lambda expected=expected: at_work[0] == expected)
            await asyncio.sleep(0.05)
            may_end.set()
            assert list(await asyncio.gather(*posts)) == [200] * 3
            assert most[0] == expected

    run_with_server(FakeEngine(max_model_len=100_000), check)


async def pieces_of(body: bytes) -> AsyncIterator[bytes]:
    yield body[:100]
    yield body[100:]


def test_large_bodies_are_read_in_turns() -> None:
    """A pass of the event loop reads some of them; one that has left delays no other."""

    async def main() -> None:
        bodies, read, passes = Bodies(), [], 0

        async def body(number: int) -> None:
            await bodies.turn()
            read.append((number, passes))

        tasks = [asyncio.create_task(body(number)) for number in range(2 * READS_PER_PASS + 2)]
        await asyncio.sleep(0)
        assert len(read) == READS_PER_PASS
        tasks[READS_PER_PASS].cancel()
        while len(read) < len(tasks) - 1:
            passes += 1
            await asyncio.sleep(0)
            assert passes < 10
        numbers = [number for number, _ in read]
        assert numbers == [n for n in range(len(tasks)) if n != READS_PER_PASS]
        later = [at for _, at in read[READS_PER_PASS:]]
        assert max(later.count(at) for at in later) <= READS_PER_PASS and len(set(later)) == 2
        bodies.close()

    asyncio.run(main())


def test_a_large_body_waits_for_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    turn = Bodies.turn

    async def counted(self: Bodies) -> None:
        turns.append(self.num_bytes)
        await turn(self)

    monkeypatch.setattr(Bodies, "turn", counted)

    async def check(served: Served) -> None:
        for size, is_paced in ((PACED_BYTES // 2, False), (8 * PACED_BYTES, True)):
            turns.clear()
            body = io.BytesIO(orjson.dumps({"prompt": "a" * size}))
            headers = {"Content-Type": "application/json"}
            async with served.session.post("/tokenize", data=body, headers=headers) as answer:
                assert answer.status == 200
            assert bool(turns) == is_paced

    run_with_server(FakeEngine(), check)
