"""Completions with echo, best_of, log-probabilities, token ids and continuous usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from serve import Engine
from tests.support.engine.checkpoints import checkpoint
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.official_clients import openai_client
from tests.support.http.running_server import Served, ServerThread, run_with_server

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "fake", "prompt": "abc", "max_tokens": 3}


def _joined(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Returns the choices of a stream, with the chunks of each joined."""
    assert events.pop() == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            empty = {"text": "", "tokens": [], "text_offset": [], "token_logprobs": [], "ids": []}
            choice = choices.setdefault(part["index"], empty)
            choice["text"] += part["text"]
            choice["ids"] += part.get("token_ids", [])
            choice["finish_reason"] = part["finish_reason"]
            for name in ("tokens", "text_offset", "token_logprobs"):
                choice[name] += (part["logprobs"] or {name: []})[name]
            if "prompt_token_ids" in part:
                assert "prompt_ids" not in choice
                choice["prompt_ids"] = part["prompt_token_ids"]
    return choices


@pytest.mark.covering(1)
@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], ["abc", "d"], [[97, 98, 99], [100]]])
@pytest.mark.parametrize("n", [1, 2])
def test_echo(prompt: Any, n: int) -> None:
    async def check(served: Served) -> None:
        body = {**BODY, "prompt": prompt, "echo": True, "n": n}
        _, answer = await served.post(COMPLETIONS, body)
        texts = [choice["text"] for choice in answer["choices"]]
        expected = ["abcHel"] * n + (["dHel"] * n if len(prompt) == 2 else [])
        assert texts == expected
        assert all(choice["logprobs"] is None for choice in answer["choices"])
        streamed = _joined(await served.events(COMPLETIONS, body))
        assert [streamed[i]["text"] for i in range(len(expected))] == expected

    run_with_server(FakeEngine(), check)


def test_echo_with_logprobs_begins_with_the_prompts() -> None:
    async def check(served: Served) -> None:
        body = {**BODY, "max_tokens": 2, "echo": True, "logprobs": 1}
        _, answer = await served.post(COMPLETIONS, body)
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs == {
            "tokens": ["a", "b", "c", "H", "e"],
            "token_logprobs": [None, -0.25, -0.5, -0.5, -0.5],
            "top_logprobs": [None, {"b": -0.25}, {"c": -0.5}, {"H": -0.5}, {"e": -0.5}],
            "text_offset": [0, 1, 2, 3, 4],
        }
        assert served.engine.submitted[0][1].prompt_logprobs == 1
        streamed = _joined(await served.events(COMPLETIONS, body))[0]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert streamed[name] == logprobs[name]

    run_with_server(FakeEngine(), check)


def test_echo_of_zero_tokens_is_the_prompt() -> None:
    async def check(served: Served) -> None:
        body = {**BODY, "max_tokens": 0, "echo": True, "logprobs": 0}
        _, answer = await served.post(COMPLETIONS, body)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.5]
        assert _joined(await served.events(COMPLETIONS, body))[0]["text"] == "abc"

    run_with_server(FakeEngine(), check)


def test_skipped_special_tokens_have_no_width() -> None:
    engine = FakeEngine()
    engine.tokenizer.special_ids = frozenset({ord("b")})

    async def check(served: Served) -> None:
        body = {**BODY, "echo": True, "logprobs": 0}
        _, answer = await served.post(COMPLETIONS, body)
        assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 4]
        _, answer = await served.post(COMPLETIONS, {**body, "skip_special_tokens": False})
        assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5]

    run_with_server(engine, check)


def test_prompt_logprobs_in_vllms_shape() -> None:
    async def check(served: Served) -> None:
        _, answer = await served.post(COMPLETIONS, {**BODY, "prompt_logprobs": 2})
        first, second, _ = answer["choices"][0]["prompt_logprobs"]
        assert first is None
        assert second == {
            "98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -1.25, "rank": 2, "decoded_token": "c"},
        }
        assert answer["choices"][0]["logprobs"] is None

    run_with_server(FakeEngine(), check)


def test_echoed_prompts_are_bounded() -> None:
    async def check(served: Served) -> None:
        body = {**BODY, "prompt": ["x" * 1900] * 40, "prompt_logprobs": 20}
        status, answer = await served.post(COMPLETIONS, body)
        assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
        body = {**BODY, "prompt": "x" * 1900, "n": 128, "echo": True, "logprobs": 5}
        status, answer = await served.post(COMPLETIONS, body)
        assert (status, answer["error"]["param"]) == (400, "logprobs")
        body = {**BODY, "prompt": ["x" * 1900] * 8, "n": 128}
        for name in ("echo", "return_token_ids"):
            status, answer = await served.post(COMPLETIONS, {**body, name: True})
            assert (status, answer["error"]["param"]) == (400, name)
        assert not served.engine.running

    run_with_server(FakeEngine(), check)


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
def test_token_ids(prompt: Any) -> None:
    async def check(served: Served) -> None:
        body = {**BODY, "prompt": prompt, "return_token_ids": True, "n": 2}
        _, answer = await served.post(COMPLETIONS, body)
        for choice in answer["choices"]:
            assert choice["token_ids"] == [72, 101, 108]
            assert choice["prompt_token_ids"] == [97, 98, 99]
        for choice in _joined(await served.events(COMPLETIONS, body)).values():
            assert (choice["ids"], choice["prompt_ids"]) == ([72, 101, 108], [97, 98, 99])

    run_with_server(FakeEngine(), check)


def test_continuous_usage() -> None:
    async def check(served: Served) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {**BODY, "stream_options": options}
        *chunks, last, done = await served.events(COMPLETIONS, body)
        assert done == "[DONE]"
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 3
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}
        assert (last["choices"], last["usage"]) == ([], chunks[-1]["usage"])

    run_with_server(FakeEngine(), check)


@pytest.fixture(scope="module")
def real() -> Iterator[openai.OpenAI]:
    engine = Engine(str(checkpoint("llama")), served_model_name="m", max_num_seqs=32)
    with ServerThread(engine) as server, openai_client(server) as client:
        yield client


def test_best_of_returns_the_likeliest(real: openai.OpenAI) -> None:
    options: Any = {"model": "m", "prompt": ["The quick", "A page"], "max_tokens": 8, "seed": 3}
    candidates = real.completions.create(**options, n=6, logprobs=0)
    best = real.completions.create(**options, n=2, best_of=6)
    for position in range(2):
        of_one_prompt = candidates.choices[position * 6 : position * 6 + 6]
        ranked = sorted(of_one_prompt, key=lambda choice: -_mean_logprob(choice))
        chosen = best.choices[position * 2 : position * 2 + 2]
        assert [choice.text for choice in chosen] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage is not None and candidates.usage is not None
    assert best.usage.completion_tokens == candidates.usage.completion_tokens


def _mean_logprob(choice: Any) -> float:
    values = choice.logprobs.token_logprobs
    return float(sum(values) / len(values))


def test_truncated_prompts(real: openai.OpenAI) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    options: Any = {"model": "m", "prompt": text, "max_tokens": 6, "temperature": 0}

    def ids(**changes: Any) -> list[int]:
        answer = real.completions.create(
            **options, extra_body={"return_token_ids": True, **changes}
        )
        token_ids: list[int] = answer.choices[0].model_extra["prompt_token_ids"]  # type: ignore[index]
        return token_ids

    whole = ids()
    assert len(whole) > 8
    assert ids(truncate_prompt_tokens=5) == whole[-5:]
    assert ids(truncate_prompt_tokens=5, truncation_side="right") == whole[:5]
    assert ids(truncate_prompt_tokens=10_000) == whole
    assert ids(prompt=whole, truncate_prompt_tokens=5) == whole[-5:]
    no_specials = ids(add_special_tokens=False)
    assert no_specials == whole[len(whole) - len(no_specials) :]
    truncation = {"truncate_prompt_tokens": 3}
    echoed = real.completions.create(**options, echo=True, extra_body=truncation).choices[0].text
    num_kept = next(size for size in range(len(text), 0, -1) if text.endswith(echoed[:size]))
    assert 3 <= num_kept < len(text)


def test_echo_of_tokens_is_their_text(real: openai.OpenAI) -> None:
    text = "a page is mapped when it is needed"
    options: Any = {"model": "m", "max_tokens": 5, "temperature": 0, "echo": True}
    of_text = real.completions.create(prompt=text, **options, extra_body={"return_token_ids": True})
    ids = of_text.choices[0].model_extra["prompt_token_ids"]  # type: ignore[index]
    of_ids = real.completions.create(prompt=ids, **options)
    assert of_ids.choices[0].text == of_text.choices[0].text
    assert of_text.choices[0].text.startswith(text)


def test_echoed_prompts_have_logprobs(real: openai.OpenAI) -> None:
    """Evaluations score a text by its log-probabilities, without generating."""
    text = "the server merges every step"
    options: Any = {"model": "m", "max_tokens": 0, "echo": True, "logprobs": 2}
    (choice,) = real.completions.create(prompt=text, **options).choices
    assert choice.text == text
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset is not None and logprobs.top_logprobs is not None
    for token, offset in list(zip(logprobs.tokens, logprobs.text_offset, strict=True))[2:]:
        assert text[offset : offset + len(token)] == token
    for token, score, top in list(
        zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    )[1:]:
        assert top is not None and len(top) <= 2 and score <= max(top.values()) + 1e-6, token


def test_echoed_logprobs_equal_those_of_generation(real: openai.OpenAI) -> None:
    options: Any = {"model": "m", "temperature": 0, "logprobs": 3}
    generated = real.completions.create(
        prompt="a page is", max_tokens=6, **options, extra_body={"return_token_ids": True}
    ).choices[0]
    extra: Any = generated.model_extra
    ids = [*extra["prompt_token_ids"], *extra["token_ids"]]
    scored = real.completions.create(prompt=ids, max_tokens=0, echo=True, **options).choices[0]
    assert generated.logprobs is not None and scored.logprobs is not None
    generated_scores, scores = generated.logprobs.token_logprobs, scored.logprobs.token_logprobs
    assert generated_scores and scores
    assert scores[-len(generated_scores) :] == pytest.approx(generated_scores, abs=1e-3)


def test_prompt_logprobs_of_a_real_model(real: openai.OpenAI) -> None:
    answer = real.completions.create(
        model="m", prompt="a page is", max_tokens=1, extra_body={"prompt_logprobs": 3}
    )
    extra: Any = answer.choices[0].model_extra
    first, *rest = extra["prompt_logprobs"]
    assert first is None and len(rest) + 1 == answer.usage.prompt_tokens  # type: ignore[union-attr]
    for candidates in rest:
        assert 3 <= len(candidates) <= 4
        best = min(candidates.values(), key=lambda item: item["rank"])
        assert best["rank"] == 1
        assert all(item["logprob"] <= best["logprob"] for item in candidates.values())


OPENAI_PARAMETERS: dict[str, Any] = {
    "best_of": 2,
    "echo": True,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": -10},
    "logprobs": 2,
    "max_tokens": 6,
    "n": 2,
    "presence_penalty": 0.5,
    "seed": 1,
    "stop": ["zzz", "qqq"],
    "suffix": "",
    "temperature": 0.8,
    "top_p": 0.9,
    "user": "ann",
}
VLLM_PARAMETERS: dict[str, Any] = {
    "top_k": 50,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": True,
    "allowed_token_ids": list(range(4, 300)),
    "bad_words": ["fox"],
    "add_special_tokens": True,
    "truncate_prompt_tokens": 100,
    "cache_salt": "s",
    "priority": 3,
    "return_token_ids": True,
    "use_beam_search": False,
    "guided_decoding_backend": "auto",
}


@pytest.mark.parametrize("prompt", ["the lazy dog", ["a page", "my box"], [5, 6, 7], [[5], [6, 7]]])
def test_every_parameter_at_once(real: openai.OpenAI, prompt: Any) -> None:
    """All parameters of OpenAI and vLLM together give the same answer whole and streamed."""
    options: Any = {"model": "m", "prompt": prompt, **OPENAI_PARAMETERS}
    options["extra_body"] = VLLM_PARAMETERS
    whole = real.completions.create(**options)
    num_prompts = 1 if isinstance(prompt[0], int) or isinstance(prompt, str) else len(prompt)
    assert [choice.index for choice in whole.choices] == list(range(2 * num_prompts))
    texts = dict.fromkeys(range(2 * num_prompts), "")
    usage = None
    stream = real.completions.create(**options, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        usage = chunk.usage or usage
        assert chunk.system_fingerprint == whole.system_fingerprint
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
