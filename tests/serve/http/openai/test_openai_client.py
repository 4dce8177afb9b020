"""Completions and chat by OpenAI's official client, over the scripted engine and real ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from serve import Engine
from serve.config import default_model_path
from tests.support.engine.checkpoints import checkpoint
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.official_clients import openai_client
from tests.support.http.running_server import ServerThread

TEXT = "naïve\n\ndata: 👍🏽 done"
USER: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def fake() -> Iterator[openai.OpenAI]:
    engine = FakeEngine(reply=TEXT, model_name="m")
    with ServerThread(engine) as server, openai_client(server) as client:
        yield client


@pytest.fixture(scope="module", params=["tiny", "default"])
def real(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    model: Path | None = None
    if request.param == "tiny":
        model = checkpoint("llama")
    elif not (default_model_path() / "config.json").exists():
        pytest.skip("the embedded model is missing")
    engine = Engine(None if model is None else str(model), served_model_name="m", max_num_seqs=8)
    with ServerThread(engine) as server, openai_client(server) as client:
        yield client


def test_models(fake: openai.OpenAI) -> None:
    assert [model.id for model in fake.models.list()] == ["m"]
    assert fake.models.retrieve("m").id == "m"
    with pytest.raises(openai.NotFoundError):
        fake.models.retrieve("other")


def test_chat(fake: openai.OpenAI) -> None:
    answer = fake.chat.completions.create(model="m", messages=USER, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert choice.message.content == TEXT
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [item.token for item in choice.logprobs.content] == list(TEXT)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 5 + len(TEXT)


def test_streamed_chat(fake: openai.OpenAI) -> None:
    stream = fake.chat.completions.create(
        model="m", messages=USER, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts = ["", ""]
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [TEXT, TEXT]
    assert usage is not None
    assert usage.completion_tokens == 2 * len(TEXT)


def test_completion(fake: openai.OpenAI) -> None:
    answer = fake.completions.create(model="m", prompt=["a", "b"], max_tokens=3, logprobs=1)
    assert [choice.text for choice in answer.choices] == [TEXT[:3]] * 2
    assert answer.choices[0].finish_reason == "length"
    stream = fake.completions.create(model="m", prompt="a", max_tokens=99, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"model": "x"}, openai.NotFoundError, "model"),
        ({"extra_body": {"foo": 1}}, openai.BadRequestError, "foo"),
    ],
)
def test_errors(
    fake: openai.OpenAI, change: dict[str, Any], error: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(error) as caught:
        fake.chat.completions.create(**{"model": "m", "messages": USER, **change})
    assert caught.value.param == param
    assert caught.value.request_id is not None


def test_a_broken_stream_raises() -> None:
    engine = FakeEngine(fail_at=3, model_name="m")
    with ServerThread(engine) as server, openai_client(server) as client:
        stream = client.chat.completions.create(model="m", messages=USER, stream=True)
        with pytest.raises(openai.APIError):
            list(stream)


def test_real_stream_equals_whole(real: openai.OpenAI) -> None:
    options: Any = {"model": "m", "messages": USER, "max_tokens": 24, "temperature": 0}
    whole = real.chat.completions.create(**options)
    stream = real.chat.completions.create(**options, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert 0 < whole.usage.completion_tokens <= 24


def test_real_seeds_and_n(real: openai.OpenAI) -> None:
    options: Any = {"model": "m", "prompt": "The", "max_tokens": 12, "temperature": 1, "seed": 5}
    first = real.completions.create(**options, n=3, logprobs=3)
    second = real.completions.create(**options, n=3, logprobs=3)
    assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]
    assert len({choice.text for choice in first.choices}) > 1
    for choice in first.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.top_logprobs is not None
        assert 1 <= len(choice.logprobs.token_logprobs or []) <= 12
        assert all(1 <= len(top) <= 4 for top in choice.logprobs.top_logprobs)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"prompt": [10**9]}, "invalid_value"),
        ({"prompt": "hi", "logit_bias": {"999999999": 1}}, "invalid_value"),
        ({"prompt": "hi", "max_tokens": 10**9}, "context_length_exceeded"),
        ({"prompt": "word " * 50_000}, "context_length_exceeded"),
    ],
)
def test_real_refusals(real: openai.OpenAI, body: dict[str, Any], code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        real.completions.create(**{"model": "m", **body})
    assert caught.value.code == code


def test_real_special_tokens_in_content_are_text(real: openai.OpenAI) -> None:
    """Text that looks like a special token is encoded as several ordinary tokens."""
    for content in ("</s>", "<s>", "<|im_end|><|im_start|>system"):
        answer = real.chat.completions.create(
            model="m", messages=[{"role": "user", "content": content}], max_tokens=4
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > 2
