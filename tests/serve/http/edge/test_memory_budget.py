"""The budget of memory: charges, their end on every way out of a call, and trimming after it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable

import pytest

from serve.http.calls.generation import CHARGED_AT_ONCE, EXPECTED_TOKENS
from serve.http.edge import limits
from serve.http.edge.errors import ApiError
from serve.http.edge.json_body import count_marks
from serve.http.edge.memory_budget import (
    BODY_BYTES,
    BODY_SHARE,
    ENCODE_BYTES,
    LOGPROB_BYTES,
    TRIM_BYTES,
    MemoryBudget,
    encode_bytes,
    parsed_bytes,
)
from serve.machine import trim_heap
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import BODY, CHAT
from tests.support.http.running_server import Served, run_with_server

TEXT = "0123456789" * 10_000
MANY = {"max_work_bytes": ENCODE_BYTES * len(TEXT) * 3 // 2}  # room for one call, not for two


def budget_of(served: Served) -> MemoryBudget:
    return served.server.app.context.budget


def test_a_charge_is_added_refused_and_released() -> None:
    async def main() -> None:
        budget = MemoryBudget(100)
        one, two = budget.charge(), budget.charge()
        one.add(60)
        with pytest.raises(ApiError) as refused:
            two.add(50)
        assert (refused.value.status, refused.value.code) == (429, "memory_budget")
        assert int(refused.value.headers["Retry-After"]) >= 1
        assert (budget.num_bytes, two.num_bytes) == (60, 0)
        one.reduce(40)
        two.add(50)
        with pytest.raises(ApiError) as never:
            two.add(51, "prompt")
        assert (never.value.status, never.value.code) == (400, "request_too_large")
        assert never.value.param == "prompt"
        three = budget.charge()
        with pytest.raises(ApiError, match="no memory left"):
            three.add(20)
        three.add(30, is_body=True)  # a part is for bodies alone
        with pytest.raises(ApiError, match="no memory left"):
            three.add(1, is_body=True)
        for charge in (one, two, three, one):
            charge.release()
        assert budget.num_bytes == 0

    asyncio.run(main())


def test_work_that_has_begun_may_take_twice_the_limit() -> None:
    budget = MemoryBudget(100)
    charge, other = budget.charge(), budget.charge()
    charge.add(80)
    charge.grow(120)
    with pytest.raises(ApiError, match="no memory left"):
        charge.grow(1)
    with pytest.raises(ApiError, match="no memory left"):
        other.add(1)
    assert (charge.num_bytes, budget.num_bytes) == (200, 200)
    budget.close()


@pytest.mark.parametrize("name", ["run", "finish"])
def test_a_cancelled_call_is_charged_until_its_thread_is_done(name: str) -> None:
    async def main() -> None:
        budget = MemoryBudget(100)
        may_end, begun = threading.Event(), threading.Event()

        def job() -> None:
            begun.set()
            may_end.wait(5)

        async def call(job: Callable[[], object]) -> None:
            charge = budget.charge()
            try:
                charge.add(20)
                await getattr(charge, name)(job)
            finally:
                charge.release()

        running = [asyncio.create_task(call(job)) for _ in range(2)]  # all threads there are
        await asyncio.to_thread(begun.wait, 5)
        waiting = asyncio.create_task(call(lambda: None))
        await asyncio.sleep(0.01)
        assert budget.num_bytes == 60
        waiting.cancel()
        for task in running:
            task.cancel()
        await asyncio.wait([waiting, *running])
        assert budget.num_bytes == 40, "a job that has not begun takes nothing"
        may_end.set()
        async with asyncio.timeout(5):
            while budget.num_bytes:
                await asyncio.sleep(0.002)

        def fails() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await call(fails)
        assert budget.num_bytes == 0
        budget.close()

    asyncio.run(main())


def test_answers_do_not_wait_for_long_work() -> None:
    async def main() -> None:
        budget, may_end = MemoryBudget(100), threading.Event()
        charge = budget.charge()
        working = [asyncio.create_task(charge.run(may_end.wait)) for _ in range(3)]
        assert await asyncio.wait_for(charge.finish(lambda: "done"), 5) == "done"
        may_end.set()
        await asyncio.gather(*working)
        budget.close()

    asyncio.run(main())


def test_memory_is_trimmed_after_large_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.http.edge.memory_budget._TRIM_WAIT_S", 0.02)
    threads: list[int] = []

    async def main() -> None:
        budget = MemoryBudget(4 * TRIM_BYTES, lambda: threads.append(threading.get_ident()))
        for size in (TRIM_BYTES // 2, TRIM_BYTES // 4):
            charge = budget.charge()
            charge.add(size)
            charge.release()
        await asyncio.sleep(0.06)
        assert not threads
        for _ in range(3):  # a burst is trimmed once
            charge = budget.charge()
            charge.add(TRIM_BYTES)
            charge.release()
        async with asyncio.timeout(5):
            while not threads:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.06)
        assert len(threads) == 1 and threads[0] != threading.get_ident()

    asyncio.run(main())
    trim_heap()


def test_estimates() -> None:
    assert encode_bytes("a" * 100) == 100 * ENCODE_BYTES
    assert encode_bytes("👍" * 100) == 200 * ENCODE_BYTES
    nothing = _parsed_bytes(b'{"a": "b"}')
    assert _parsed_bytes(b'{"a": [1, 2, 3]}') > nothing
    most = limits.JSON_CONTAINERS
    grown = _parsed_bytes(b"{" * (most + 1000)) - _parsed_bytes(b"{" * most)
    assert grown == 1000 * BODY_BYTES, "there are never more objects than the parser allows"


def test_the_largest_text_fits_the_default_budget() -> None:
    from serve.http.openai.tokenize_endpoint import MAX_TEXT_CHARS

    text = "👍" * MAX_TEXT_CHARS
    body = json.dumps({"prompt": text}, ensure_ascii=False).encode()
    allowed = (1 - BODY_SHARE) * limits.WORK_BYTES
    assert encode_bytes(text) + _parsed_bytes(body) <= allowed


def _parsed_bytes(body: bytes) -> int:
    return parsed_bytes(len(body), count_marks(body))


def test_texts_beyond_the_budget_are_refused_and_the_rest_is_answered() -> None:
    async def check(served: Served) -> None:
        body = {"prompt": TEXT, "return_token_strs": True}
        answers = await asyncio.gather(*(served.post("/tokenize", body) for _ in range(6)))
        statuses = [status for status, _ in answers]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 1
        for status, answer in answers:
            if status == 200:
                assert answer["count"] == len(TEXT)
                assert answer["tokens"] == [ord(char) for char in TEXT]
                assert "".join(answer["token_strs"]) == TEXT
            else:
                assert answer["error"]["code"] == "memory_budget"
        assert budget_of(served).num_bytes == 0
        status, answer = await served.post("/tokenize", {"prompt": TEXT * 2})
        assert (status, answer["error"]["code"]) == (400, "request_too_large")
        assert answer["error"]["param"] == "prompt"
        assert budget_of(served).num_bytes == 0

    run_with_server(FakeEngine(), check, **MANY)


def test_texts_are_charged_as_they_are_after_normalizing() -> None:
    class Growing(type(FakeEngine().tokenizer)):  # type: ignore[misc]
        max_growth = 18.0

        def growth(self, text: str) -> float:
            return 12.0 if "\ufdfa" in text else 1.0

    async def check(served: Served) -> None:
        for char, status in (("a", 200), ("\ufdfa", 400)):
            got, answer = await served.post("/tokenize", {"prompt": char * 5000})
            assert got == status
        assert (answer["error"]["code"], answer["error"]["param"]) == (
            "request_too_large",
            "prompt",
        )
        assert budget_of(served).num_bytes == 0

    run_with_server(FakeEngine(tokenizer=Growing()), check, max_work_bytes=ENCODE_BYTES * 12 * 7000)


def test_texts_that_are_cut_are_charged() -> None:
    """They may be far longer than the context."""
    engine = FakeEngine()
    engine.spec.hidden_size = 64
    cut = {"model": "fake", "truncate_prompt_tokens": 3}

    async def check(served: Served) -> None:
        for path, name in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
            status, answer = await served.post(path, {**cut, name: ["a", TEXT * 2]})
            assert (status, answer["error"]["code"]) == (400, "request_too_large")
            assert answer["error"]["param"] == name
            assert budget_of(served).num_bytes == 0
        for side, kept in (("left", "789"), ("right", "012")):
            body = {**cut, "prompt": TEXT, "truncation_side": side, "return_token_ids": True}
            status, answer = await served.post("/v1/completions", body)
            assert (status, answer["choices"][0]["prompt_token_ids"]) == (200, [*map(ord, kept)])
            assert budget_of(served).num_bytes == 0
        _, answer = await served.post("/v1/completions", {"model": "fake", "prompt": TEXT * 2})
        assert answer["error"]["code"] == "context_length_exceeded", "it is not cut"

    run_with_server(engine, check, **MANY)


def test_a_large_text_comes_back_whole() -> None:
    async def check(served: Served) -> None:
        text = 'naïve "日本" \\ \n' * 3000
        tokens = [ord(char) for char in text]
        status, answer = await served.post("/detokenize", {"tokens": tokens})
        assert (status, answer) == (200, {"prompt": text})
        assert budget_of(served).num_bytes == 0

    engine = FakeEngine()
    engine.spec.vocab_size = 1 << 20
    run_with_server(engine, check)


def test_failures_and_clients_that_leave_end_their_charges() -> None:
    may_end = threading.Event()
    begun = threading.Event()

    class SlowTokenizer(type(FakeEngine().tokenizer)):  # type: ignore[misc]
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            begun.set()
            may_end.wait(5)
            raise RuntimeError("a bug")

    async def check(served: Served) -> None:
        budget = budget_of(served)
        posting = asyncio.create_task(served.post("/tokenize", {"prompt": TEXT}))
        await asyncio.to_thread(begun.wait, 5)
        posting.cancel()
        await served.until(lambda: not served.server.app.context.calls)
        assert budget.num_bytes > 0, "the thread still works on it"
        may_end.set()
        await served.until(lambda: budget.num_bytes == 0)
        status, _ = await served.post("/tokenize", {"prompt": TEXT})
        assert status == 500
        assert budget.num_bytes == 0

    run_with_server(FakeEngine(tokenizer=SlowTokenizer()), check)


def test_a_reader_that_leaves_in_the_middle_of_an_answer() -> None:
    async def check(served: Served) -> None:
        body = {"prompt": TEXT * 5, "return_token_strs": True}
        async with served.session.post("/tokenize", json=body) as response:
            assert response.status == 200
            await response.content.readexactly(1000)
            assert budget_of(served).num_bytes > 0
            response.close()
        await served.until(lambda: budget_of(served).num_bytes == 0)

    run_with_server(FakeEngine(), check, send_buffer_bytes=4096)


def test_log_probabilities_are_charged_before_and_as_they_come() -> None:
    """An answer of unknown length is charged for 1,024 tokens, and for more as they come. It is
    never ended for that; new calls are refused meanwhile."""
    body = {**BODY, "logprobs": True, "top_logprobs": 1}
    charged: list[int] = []

    async def check(served: Served) -> None:
        budget = budget_of(served)
        other = budget.charge()
        other.add(others)
        posting = asyncio.create_task(served.post(CHAT, {**body, "max_tokens": 10_000}))
        await served.until(lambda: len(served.engine.running) == 1)
        while not posting.done():
            if budget.num_bytes not in charged[-1:]:
                charged.append(budget.num_bytes)
            if budget.num_bytes > limit:
                with pytest.raises(ApiError, match="no memory left"):
                    budget.charge().add(1)
            await asyncio.sleep(0.001)
        status, answer = await posting
        assert status == 200 and len(answer["choices"][0]["logprobs"]["content"]) == 10_000
        assert budget.num_bytes == others and not served.engine.running
        other.release()
        status, answer = await served.post(CHAT, {**body, "max_tokens": 1000})
        assert status == 200 and len(answer["choices"][0]["logprobs"]["content"]) == 1000
        assert budget.num_bytes == 0
        status, answer = await served.post(CHAT, {**body, "n": 99, "max_tokens": 1000})
        assert (status, answer["error"]["code"]) == (400, "request_too_large")
        assert answer["error"]["param"] == "top_logprobs"
        await served.until(lambda: not served.engine.running)
        assert budget.num_bytes == 0

    expected = LOGPROB_BYTES * 2 * EXPECTED_TOKENS
    limit = LOGPROB_BYTES * CHARGED_AT_ONCE + expected
    others = limit // 2
    engine = FakeEngine(repeat=1000, max_model_len=20_000)
    run_with_server(engine, check, max_work_bytes=limit)
    assert max(charged) == others + limit and others + expected in charged
