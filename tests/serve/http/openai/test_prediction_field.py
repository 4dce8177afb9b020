"""The field `prediction` of chats, with OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from serve import Engine
from tests.serve.speculation.test_prediction import EDITED, TEXT
from tests.support.engine.checkpoints import checkpoint
from tests.support.http.official_clients import openai_client
from tests.support.http.running_server import ServerThread


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    engine = Engine(str(checkpoint("llama")), served_model_name="m", dtype="int8")
    with ServerThread(engine) as server:
        yield openai_client(server)


def ask(client: openai.OpenAI, prediction: Any, **more: Any) -> Any:
    if prediction is not None:
        more["prediction"] = prediction
    return client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "edit"}],
        temperature=0.0,
        max_tokens=160,
        extra_body={"guided_choice": [EDITED]},
        **more,
    )


PARTS = [{"type": "text", "text": TEXT[:30]}, {"type": "text", "text": TEXT[30:]}]


@pytest.mark.parametrize("content", [TEXT, PARTS], ids=["string", "parts"])
def test_an_edited_answer_is_drafted(client: openai.OpenAI, content: Any) -> None:
    plain = ask(client, None)
    assert plain.choices[0].message.content == EDITED
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens is None
    prediction = {"type": "content", "content": content}
    for _ in range(4):  # the first requests learn what a step takes
        answer = ask(client, prediction)
        assert answer.choices == plain.choices
        details = answer.usage.completion_tokens_details
        if details.accepted_prediction_tokens > 20:
            break
    assert details.accepted_prediction_tokens > 20
    assert details.rejected_prediction_tokens >= 0
    assert answer.usage.completion_tokens == plain.usage.completion_tokens


def test_streams_count_at_the_end(client: openai.OpenAI) -> None:
    prediction = {"type": "content", "content": TEXT}
    options = {"include_usage": True}
    chunks = list(ask(client, prediction, stream=True, stream_options=options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == EDITED
    details = chunks[-1].usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "other", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": 7}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
        ({"type": "content", "content": "the " * 600}, "prediction"),
        ({"type": "content", "content": "the " * 100_000}, "prediction"),
    ],
)
def test_refused(client: openai.OpenAI, prediction: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, prediction)
    assert caught.value.param == param


def test_without_effect(client: openai.OpenAI) -> None:
    """Null, as in any optional field, and an empty text predict nothing."""
    for prediction in ({"type": "content", "content": ""}, {"type": "content", "content": []}):
        answer = ask(client, prediction)
        assert answer.choices[0].message.content == EDITED


def test_not_in_completions(client: openai.OpenAI) -> None:
    prediction = {"type": "content", "content": "a"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="m", prompt="a", extra_body={"prediction": prediction})
    assert caught.value.param == "prediction"
