"""What an answer says of tokens from before a break: log-probabilities, and those of reasoning."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from serve.cluster.front import answer_log
from serve.cluster.front.answer_log import AnswerLog, JournalError, scores_room
from serve.engine.engine import Engine
from serve.engine.request_stream import RequestStream
from serve.http import HttpServer, HttpSettings
from serve.http.calls.continuation import Journal
from serve.http.edge.limits import BODY_BYTES, JSON_CONTAINERS
from serve.request import FinishReason, TokenDelta, TokenLogprobs
from serve.sampling_params import SamplingParams
from tests.serve.http.calls.test_continuation import ASK, CHAT, MODEL, Pair, blocks_of, run
from tests.support.http.dictated_engine import load_dictated

SAYS = "SAY<<<think>Two and three, which is five. Or is it?</think>It is five.>>"
RESPONSES = "/v1/responses"


def run_dictated(check: Any) -> None:
    """Runs a check with two servers of a model that reasons."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            servers = []
            for _ in range(2):
                engine = Engine(
                    load=load_dictated,
                    served_model_name=MODEL,
                    max_model_len=4096,
                    max_num_seqs=4,
                    reasoning_parser="deepseek_r1",
                )
                server = HttpServer(engine, HttpSettings(port=0))
                servers.append(await stack.enter_async_context(server))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            await check(Pair(session, servers))

    asyncio.run(main())


def usage_of(stream: bytes) -> dict[str, Any]:
    """Returns the last usage of a stream."""
    events = [json.loads(b[6:]) for b in stream.split(b"\n\n") if b.startswith(b"data: {")]
    return [event["usage"] for event in events if event.get("usage")][-1]  # type: ignore[no-any-return]


def test_tokens_of_reasoning_are_those_of_a_stream_that_did_not_break(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take = lambda stream: stream.sink.pending.popleft()  # noqa: E731
    monkeypatch.setattr(RequestStream, "_take", take)  # deltas are not joined
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": SAYS}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    async def check(pair: Pair) -> None:
        status, whole = await pair.post(0, CHAT, body)
        assert status == 200, whole
        expected = usage_of(whole)
        thought = expected["completion_tokens_details"]["reasoning_tokens"]
        assert 5 < thought < expected["completion_tokens"] - 3
        blocks = blocks_of(whole)
        cuts = [i + 1 for i, block in enumerate(blocks) if block.startswith(b": tokens")]
        estimates = set()
        for cut in cuts:
            log = AnswerLog()
            sent = log.feed(b"".join(blocks[:cut]))
            continuation = log.continuation
            assert continuation is not None
            _, rest = await pair.post(1, CHAT, body | {"continuation": continuation})
            log.begin_stream()
            found = usage_of(sent + log.feed(rest) + log.end())
            assert found["completion_tokens"] == expected["completion_tokens"]
            assert found == expected, cut
            continuation["answers"][0].pop("reasoning_tokens", None)
            _, rest = await pair.post(1, CHAT, body | {"continuation": continuation})
            estimates.add(usage_of(rest)["completion_tokens_details"]["reasoning_tokens"])
        assert estimates and estimates != {thought}, "else nothing is tested here"

    run_dictated(check)


def test_a_whole_answer_with_log_probabilities_is_handed_over() -> None:
    body = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 400}
    body |= {"ignore_eos": True, "logprobs": True, "top_logprobs": 3, "n": 2}

    async def check(pair: Pair) -> None:
        expected = json.loads((await pair.post(1, CHAT, body))[1])
        asking = asyncio.create_task(pair.post(0, CHAT, body))
        while not pair.servers[0].app.is_computing:
            await asyncio.sleep(0.005)
        (policy,) = pair.servers[0].app.context.calls
        while sum(metrics.num_output_tokens for metrics in policy.usage()) < 20:
            await asyncio.sleep(0.001)
        await pair.servers[0].drain()
        status, answer = await asking
        assert status == 503
        continuation = json.loads(answer)["continuation"]
        answers = continuation["answers"]
        assert any(one["token_ids"] for one in answers)
        for one in answers:
            assert len(one.get("scores", ())) == len(one["token_ids"]) < 400
        status, answer = await pair.post(1, CHAT, body | {"continuation": continuation})
        assert status == 200 and json.loads(answer)["choices"] == expected["choices"]

    run(check)


def test_log_probabilities_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the stream goes on, and only its last events lack some."""
    monkeypatch.setattr(answer_log, "MAX_SCORES_BYTES", 2000)
    body = {"model": MODEL, "input": "A dog", "max_output_tokens": 40, "top_logprobs": 4}

    async def check(pair: Pair) -> None:
        _, whole = await pair.post(0, RESPONSES, body | {"stream": True, "temperature": 0})
        log = AnswerLog()
        kept = []
        blocks = blocks_of(whole)
        for number, block in enumerate(blocks):
            log.feed(block)
            if block.startswith(b": tokens"):
                continuation = log.continuation
                assert continuation is not None
                kept.append("scores" in continuation["answers"][0])
                assert number > 0
        assert kept[0] and not kept[-1] and kept == sorted(kept, reverse=True)

    run(check)


def fed(log: AnswerLog, count: int, top: int) -> bytes:
    """Lets a log read so many tokens with `top` more scores each. Returns a body that goes on."""
    log.feed(b': state {"id":"a"}\n\n')
    pairs = [[token, -12.345678901234567] for token in range(100_000, 100_000 + top)]
    record = json.dumps([0, [7], None, {"scores": [[-0.123456789, 1, pairs]]}]).encode()
    log.feed(b"data: 1\n\n: tokens %s\n\n" % record * count)
    assert log.continuation is not None
    return json.dumps({"continuation": log.continuation}).encode()


@pytest.mark.parametrize(("count", "top"), [(7000, 20), (70_000, 0)])
def test_servers_take_all_log_probabilities_that_are_kept(count: int, top: int) -> None:
    log = AnswerLog()
    assert b"scores" in fed(log, 2000, top)
    body = fed(log, count, top)
    assert b"scores" not in body and len(body) < BODY_BYTES
    body = fed(AnswerLog(), answer_log.MAX_SCORES_LISTS // (top + 5), top)
    assert b"scores" in body and len(body) < BODY_BYTES // 2
    assert body.count(b"[") + body.count(b"{") < JSON_CONTAINERS


def test_bodies_leave_room_for_log_probabilities() -> None:
    assert scores_room(0) == answer_log.MAX_SCORES_BYTES
    assert scores_room(BODY_BYTES - 8192) == 4096 and scores_room(BODY_BYTES) == 0
    log = AnswerLog(scores_room(BODY_BYTES - 8192))
    assert b"scores" in fed(log, 3, 20) and b"scores" not in fed(log, 30, 20)


@pytest.mark.parametrize(("count", "is_kept"), [(2000, True), (4000, False)])
def test_a_whole_answer_of_too_many_log_probabilities_begins_anew(
    count: int, is_kept: bool
) -> None:
    journal = Journal("a", 1, "f")
    journal.begin([SimpleNamespace(params=SamplingParams(seed=1), **PROMPT)], 1)  # type: ignore[list-item]
    top = tuple((token, -1.0) for token in range(20))
    scored = [TokenLogprobs(7, -0.5, top, 1)]
    for _ in range(count):
        journal.note(0, TokenDelta(0, "a", [7], scored))
    body = json.loads(journal.hand_over().body())
    assert ("continuation" in body) is is_kept


PROMPT = {"prompt_token_ids": [1, 2], "request_id": "a"}


def test_journals_of_other_streams_have_tokens_only() -> None:
    body = {"model": MODEL, "messages": ASK, "stream": True, "logprobs": True, "max_tokens": 9}

    async def check(pair: Pair) -> None:
        _, whole = await pair.post(0, CHAT, body)
        assert b"scores" not in whole and b"reasoning_tokens" not in whole

    run(check)


@pytest.mark.parametrize("more", [b'{"scores":3}', b"[]", b"3", b'{"scores":[]},1'])
def test_a_malformed_record(more: bytes) -> None:
    with pytest.raises(JournalError):
        AnswerLog().feed(b": tokens [0,[1],null," + more + b"]\n\n")


def test_an_ended_choice_keeps_its_last_score() -> None:
    """The last token of a choice that has ended is replayed on its own."""

    async def check(pair: Pair) -> None:
        status, whole = await pair.post(0, RESPONSES, RESPONSE)
        assert status == 200, whole
        log = AnswerLog()
        *blocks, last = blocks_of(whole)
        assert b"response.incomplete" in last or b"response.completed" in last
        end = next(i for i, block in enumerate(blocks) if b',"length"' in block)
        log.feed(b"".join(blocks[: end + 1]))
        continuation = log.continuation
        assert continuation is not None
        (answer,) = continuation["answers"]
        assert answer["finish_reason"] == FinishReason.LENGTH.value
        assert len(answer["scores"]) == len(answer["token_ids"]) == 16
        _, rest = await pair.post(1, RESPONSES, RESPONSE | {"continuation": continuation})
        assert scores_of(rest) == scores_of(whole) and len(scores_of(rest)) == 16

    run(check)


RESPONSE: dict[str, Any] = {
    "model": MODEL,
    "input": "A dog",
    "max_output_tokens": 16,
    "top_logprobs": 2,
    "temperature": 0,
    "stream": True,
}


def scores_of(stream: bytes) -> list[Any]:
    """Returns the log-probabilities of the response at a stream's end."""
    (last,) = (
        json.loads(block.partition(b"data: ")[2])
        for block in stream.split(b"\n\n")
        if block.startswith((b"event: response.incomplete", b"event: response.completed"))
    )
    return [one for item in last["response"]["output"] for one in item["content"][0]["logprobs"]]
