"""/v1/embeddings through the official client, on a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from serve import Engine
from tests.support.engine.checkpoints import checkpoint
from tests.support.http.official_clients import openai_client
from tests.support.http.running_server import ServerThread

TEXTS = ["the quick brown fox", "a page is mapped", "naïve 👍🏽"]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    engine = Engine(str(checkpoint("llama")), served_model_name="m", max_num_seqs=8)
    with ServerThread(engine) as server, openai_client(server) as client:
        yield client


def _vectors(client: openai.OpenAI, texts: Any = TEXTS, **options: Any) -> Any:
    extra = {name: options.pop(name) for name in ("pooling", "normalize") if name in options}
    answer = client.embeddings.create(model="m", input=texts, extra_body=extra, **options)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return np.array([item.embedding for item in answer.data])


def test_both_encodings_are_equal(client: openai.OpenAI) -> None:
    """The client requests base64 by default and decodes it."""
    vectors = _vectors(client)
    assert vectors.shape[0] == 3
    floats = _vectors(client, encoding_format="float")
    np.testing.assert_array_equal(vectors.astype(np.float32), floats.astype(np.float32))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    raw = client.embeddings.create(model="m", input="a", encoding_format="base64").data[0]
    assert isinstance(raw.embedding, str)


def test_all_forms_of_input(client: openai.OpenAI) -> None:
    single = _vectors(client, TEXTS[0])
    np.testing.assert_allclose(single[0], _vectors(client)[0], atol=1e-5)
    answer = client.completions.create(
        model="m", prompt=TEXTS[0], max_tokens=1, extra_body={"return_token_ids": True}
    )
    ids: Any = answer.choices[0].model_extra["prompt_token_ids"]  # type: ignore[index]
    np.testing.assert_allclose(_vectors(client, ids), single, atol=1e-5)
    np.testing.assert_allclose(_vectors(client, [ids, [5, 6]])[:1], single, atol=1e-5)
    response = client.embeddings.create(
        model="m", input=TEXTS[0], extra_body={"truncate_prompt_tokens": 3}
    )
    last_three = _vectors(client, ids[-3:])[0]
    np.testing.assert_allclose(response.data[0].embedding, last_three, atol=1e-5)
    assert response.usage.prompt_tokens == response.usage.total_tokens == 3


def test_options(client: openai.OpenAI) -> None:
    whole = _vectors(client, normalize=False)
    size = whole.shape[1]
    short = _vectors(client, dimensions=size // 2, normalize=False)
    np.testing.assert_allclose(short, whole[:, : size // 2], atol=1e-5)
    unit = _vectors(client, dimensions=size // 2)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-5)
    assert not np.allclose(_vectors(client, pooling="last"), _vectors(client, pooling="mean"))


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "invalid_prompt"),
        ({"input": [[]]}, "input", "invalid_prompt"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": ["a", [1]]}, "input", "invalid_type"),
        ({"input": ["a"] * 2049}, "input", "array_above_max_length"),
        ({"input": [10**6]}, "input", "invalid_value"),
        ({"input": [[5], [-1]]}, "input", "invalid_value"),
        ({"input": ["a", "word " * 50_000]}, "input", "context_length_exceeded"),
        ({"dimensions": 0}, "dimensions", "invalid_value"),
        ({"dimensions": 100_000}, "dimensions", "invalid_value"),
        ({"encoding_format": "binary"}, "encoding_format", "invalid_value"),
        ({"pooling": "max"}, "pooling", "invalid_value"),
        ({"normalize": 1}, "normalize", "invalid_type"),
        ({"user": "u" * 513}, "user", "string_above_max_length"),
        ({"zap": 1}, "zap", "unknown_parameter"),
    ],
)
def test_refused(client: openai.OpenAI, change: dict[str, Any], param: str, code: str) -> None:
    body = {"model": "m", "input": "a", **change}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/embeddings", cast_to=object, body=body)
    assert (caught.value.param, caught.value.code) == (param, code)
    _vectors(client, "still serving")


def test_another_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="x", input="a")
