"""A large call does not block the event loop: slices and threads do the work."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import orjson
import pytest

from serve.errors import OverloadedError
from serve.http.calls.generation import SUBMITTED_AT_ONCE, submit_each
from serve.http.calls.key_policy import KeyPolicy
from serve.http.calls.messages import MAX_MESSAGES
from serve.http.edge import large_json, limits
from serve.http.edge.keys import ApiKey
from serve.http.edge.large_json import PIECE, drained, json_list, large_response
from serve.http.edge.memory_budget import MemoryBudget
from serve.http.responses import endpoint as responses
from serve.http.responses.listing import kept_items
from serve.sampling_params import SamplingParams
from tests.support.http.fake_engine import FakeEngine, FakeStream, FakeTokenizer
from tests.support.http.running_server import Served, run_with_server

PROMPTS = 200


class SlicedEngine(FakeEngine):
    """Counts submissions. most_at_once: the largest number in one turn of the event loop."""

    at_once = most_at_once = 0

    def _submit(self, *arguments: Any) -> FakeStream:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        asyncio.get_running_loop().call_soon(self._turn)
        return super()._submit(*arguments)

    def _turn(self) -> None:
        self.at_once = 0


class WatchedTokenizer(FakeTokenizer):
    """Records the threads that call token_text."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def token_text(self, token_id: int) -> str:
        self.threads.add(threading.get_ident())
        return super().token_text(token_id)


# ---- submitting


def test_many_prompts_are_submitted_in_slices() -> None:
    engine = SlicedEngine()

    async def check(served: Served) -> None:
        body = {"model": "fake", "prompt": ["a"] * PROMPTS, "max_tokens": 1}
        status, answer = await served.post("/v1/completions", body)
        assert (status, len(answer["choices"])) == (200, PROMPTS)

    run_with_server(engine, check)
    assert len(engine.submitted) == PROMPTS
    assert engine.most_at_once <= SUBMITTED_AT_ONCE


def test_a_call_that_is_cancelled_between_slices_aborts_its_requests() -> None:
    async def main() -> None:
        engine = FakeEngine(slots=0)

        def submit(prompt: Any, name: str) -> Any:
            return engine.submit(prompt, SamplingParams(), request_id=name)

        task = asyncio.create_task(submit_each(["a"] * PROMPTS, "req", submit))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        names = ["req", *(f"req-{number}" for number in range(1, len(engine.aborted)))]
        assert SUBMITTED_AT_ONCE <= len(engine.submitted) < PROMPTS
        assert engine.aborted == names
        assert len(names) == len(engine.submitted)

    asyncio.run(main())


def test_a_refused_prompt_aborts_the_earlier_ones() -> None:
    async def main() -> None:
        engine = FakeEngine(slots=0, max_waiting=SUBMITTED_AT_ONCE + 3)

        def submit(prompt: Any, name: str) -> Any:
            return engine.submit(prompt, SamplingParams(), request_id=name)

        with pytest.raises(OverloadedError):
            await submit_each(["a"] * PROMPTS, "req", submit)
        assert len(engine.aborted) == len(engine.submitted) == SUBMITTED_AT_ONCE + 3

    asyncio.run(main())


def test_the_prompts_of_a_call_are_not_validated_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = []
    monkeypatch.setattr(SamplingParams, "_check_masks", lambda self: checks.append(self))
    params = SamplingParams(allowed_token_ids=(1, 2, 3))
    checks.clear()
    inner = FakeEngine()
    policy = KeyPolicy(ApiKey("alice", b""))

    async def main() -> None:
        for _ in range(PROMPTS):
            inner.submit("a", params, policy=policy)

    asyncio.run(main())
    assert checks == []
    params_ids = {id(params) for _, params in inner.submitted}
    assert len(params_ids) == 1  # all prompts share one copy that has the salt of the key
    assert inner.submitted[0][1].cache_salt is not None


def test_prompts_times_allowed_ids_are_bounded() -> None:
    async def check(served: Served) -> None:
        ids = list(range(limits.ALLOWED_IDS // 1024 + 1))
        body = {"model": "fake", "prompt": ["a"] * 1024, "allowed_token_ids": ids}
        status, answer = await served.post("/v1/completions", body)
        error = answer["error"]
        assert (status, error["param"]) == (400, "allowed_token_ids")
        assert error["code"] == "array_above_max_length"
        assert not served.engine.submitted

    run_with_server(FakeEngine(), check)


# ---- answering


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2},
        ),
        ("/v1/completions", {"prompt": "hi", "logprobs": 2}),
    ],
)
def test_a_thread_converts_many_logprobs(path: str, body: dict[str, Any]) -> None:
    tokenizer = WatchedTokenizer()

    async def check(served: Served) -> None:
        call = {"model": "fake", "n": 8, "max_tokens": 400, **body}
        status, answer = await served.post(path, call)
        assert status == 200
        assert tokenizer.threads
        assert threading.get_ident() not in tokenizer.threads
        scores = [choice["logprobs"] for choice in answer["choices"]]
        assert len(scores) == 8
        for score in scores:
            assert len(score.get("content") or score["tokens"]) == 400
        tokenizer.threads.clear()
        await served.post(path, {**call, "n": 1, "max_tokens": 2})
        # the event loop converts short answers itself
        assert tokenizer.threads == {threading.get_ident()}

    run_with_server(FakeEngine(tokenizer=tokenizer, repeat=40), check)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20},
            "top_logprobs",
        ),
        ("/v1/completions", {"prompt": "hi", "logprobs": 5}, "logprobs"),
        ("/v1/completions", {"prompt": "hi", "best_of": 20}, "best_of"),
    ],
)
def test_too_many_logprobs_are_refused(path: str, body: dict[str, Any], param: str) -> None:
    engine = FakeEngine(max_model_len=1 << 20)

    async def check(served: Served) -> None:
        n = {} if "best_of" in body else {"n": 20}
        call = {"model": "fake", "max_tokens": 200_000, **n, **body}
        status, answer = await served.post(path, call)
        assert (status, answer["error"]["param"]) == (400, param)
        assert len(engine.aborted) == len(engine.submitted) == 1
        if param != "best_of":
            status, _ = await served.post(path, {**call, "n": 1, "max_tokens": 20_000})
            assert status == 200

    run_with_server(engine, check)


def test_large_json_is_made_in_a_thread_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    threads: set[int] = set()

    def dumps(value: Any, option: int = 0) -> bytes:
        sizes.append(len(value))
        threads.add(threading.get_ident())
        return orjson.dumps(value, option=option)

    class WatchedJson:
        OPT_SERIALIZE_NUMPY = orjson.OPT_SERIALIZE_NUMPY
        Fragment = orjson.Fragment

    WatchedJson.dumps = staticmethod(dumps)  # type: ignore[attr-defined]
    monkeypatch.setattr(large_json, "orjson", WatchedJson)
    items = [{"number": number} for number in range(1000)]

    async def main() -> bytes:
        body = {"items": items}
        charge = MemoryBudget(1 << 20).charge()
        response = await large_response(
            lambda: {"items": json_list(items)}, 10_000, "req_1", charge
        )
        assert isinstance(response.body, bytes)
        assert orjson.loads(response.body) == body
        return response.body

    asyncio.run(main())
    assert max(sizes) == PIECE
    assert sum(sizes) == len(items) + 1
    assert threading.get_ident() not in threads


def test_a_drained_list_releases_its_items() -> None:
    items = list(range(5))
    remaining = [(item, len(items)) for item in drained(items)]
    assert remaining == [(0, 4), (1, 3), (2, 2), (3, 1), (4, 0)]


@pytest.mark.parametrize("num_items", [0, 1, PIECE, PIECE + 1, 3 * PIECE])
def test_a_list_in_pieces_is_the_list(num_items: int) -> None:
    items = [{"a": number, "b": [None, "é"]} for number in range(num_items)]
    assert orjson.loads(orjson.dumps(json_list(items))) == items


# ---- conversations


def test_kept_items_hold_only_what_becomes_tokens() -> None:
    texts = [{"type": "summary_text", "text": text} for text in ("", "a", "")]
    output = {"type": "output_text", "text": "x", "annotations": [{}], "logprobs": [{"a": 1}]}
    items = [
        {"type": "reasoning", "id": "1", "encrypted_content": "x" * 99, "summary": texts},
        {"type": "reasoning", "id": "2", "content": texts, "summary": texts},
        {"type": "message", "id": "3", "content": [output, {"type": "input_text", "text": ""}]},
    ]
    assert list(kept_items(items)) == [
        {"type": "reasoning", "id": "1", "summary": [texts[1]]},
        {"type": "reasoning", "id": "2", "content": [texts[1]], "summary": []},
        {
            "type": "message",
            "id": "3",
            "content": [
                {"type": "output_text", "text": "x", "annotations": []},
                {"type": "input_text", "text": ""},
            ],
        },
    ]


def test_a_long_conversation_is_continued_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    head = responses.response_head

    def watched(*arguments: Any) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return head(*arguments)

    monkeypatch.setattr(responses, "response_head", watched)

    async def check(served: Served) -> None:
        async def create(**fields: Any) -> dict[str, Any]:
            status, answer = await served.post("/v1/responses", {"model": "fake", **fields})
            assert status == 200, answer
            return answer

        loop_thread = threading.get_ident()
        short = await create(input="hi")
        await create(input="you", previous_response_id=short["id"])
        assert threads == [loop_thread, loop_thread]
        long = await create(input=[{"role": "user", "content": "hello"}] * 200)
        next_response = await create(input="you", previous_response_id=long["id"])
        reference = {"type": "item_reference", "id": next_response["output"][0]["id"]}
        await create(input=[reference])
        assert loop_thread not in threads[2:]
        assert len(threads) == 5

    run_with_server(FakeEngine(max_model_len=1 << 20), check, parse_inline_bytes=4096)


def test_the_items_of_a_conversation_are_bounded() -> None:
    async def check(served: Served) -> None:
        empty = [{"type": "reasoning", "summary": []}] * (MAX_MESSAGES - 1)
        first = {"model": "fake", "input": [*empty, {"role": "user", "content": "a"}]}
        status, answer = await served.post("/v1/responses", first)
        assert status == 200
        second = {"model": "fake", "input": "b", "previous_response_id": answer["id"]}
        status, answer = await served.post("/v1/responses", second)
        error = answer["error"]
        assert (status, error["param"]) == (400, "input")
        assert error["code"] == "array_above_max_length"

    run_with_server(FakeEngine(), check)


def test_a_second_reference_to_an_item_is_refused() -> None:
    async def check(served: Served) -> None:
        _, answer = await served.post("/v1/responses", {"model": "fake", "input": "hi"})
        item = {"type": "item_reference", "id": answer["output"][0]["id"]}
        body: dict[str, Any] = {"model": "fake", "input": [item]}
        assert (await served.post("/v1/responses", body))[0] == 200
        status, answer = await served.post("/v1/responses", {**body, "input": [item, item]})
        assert (status, answer["error"]["param"]) == (400, "input[1].id")

    run_with_server(FakeEngine(), check)
