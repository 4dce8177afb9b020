"""OpenAI's official client against /v1/responses of the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from serve import Engine
from tests.support.http.official_clients import openai_client
from tests.support.http.running_server import ServerThread


@pytest.fixture(scope="module")
def real() -> Iterator[openai.OpenAI]:
    engine = Engine(None, served_model_name="m", max_num_seqs=8)
    with ServerThread(engine) as server, openai_client(server) as client:
        yield client


def test_real_answers(real: openai.OpenAI) -> None:
    options: Any = {"model": "m", "input": "hello", "max_output_tokens": 24, "temperature": 0}
    whole = real.responses.create(**options)
    stream = real.responses.create(**options, stream=True)
    deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text != ""
    assert whole.usage is not None
    count = real.responses.input_tokens.count(model="m", input="hello")
    assert count.input_tokens == whole.usage.input_tokens
    chat = real.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hello"}], max_tokens=24, temperature=0
    )
    assert chat.choices[0].message.content == whole.output_text


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    is_large: bool


def test_real_answers_follow_the_requested_schema(real: openai.OpenAI) -> None:
    options: Any = {"model": "m", "input": "hello", "max_output_tokens": 200, "temperature": 0}
    parsed = real.responses.parse(text_format=City, **options)
    assert isinstance(parsed.output_parsed, City)
    with real.responses.stream(text_format=City, **options) as stream:
        assert isinstance(stream.get_final_response().output_parsed, City)
    json_object: Any = {"format": {"type": "json_object"}}
    whole = real.responses.create(text=json_object, **options)
    if whole.status == "completed":
        assert isinstance(json.loads(whole.output_text), dict)
    bad_schema: Any = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    text_format: Any = {"format": {"type": "json_schema", "name": "n", "schema": bad_schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        real.responses.create(text=text_format, **options)
    assert (caught.value.param, caught.value.code) == ("text.format.schema", "invalid_schema")


def test_a_real_forced_call(real: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Ulm", "Rom"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools: Any = [{"type": "function", "name": "weather", "parameters": schema, "strict": True}]
    options: Any = {"model": "m", "input": "hello", "max_output_tokens": 200, "tools": tools}
    options |= {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    whole = real.responses.create(**options)
    with real.responses.stream(**options) as stream:
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        (call,) = (item for item in response.output if item.type == "function_call")
        assert call.name == "weather"
        assert json.loads(call.arguments)["city"] in ("Ulm", "Rom")


def test_real_conversations_are_continued(real: openai.OpenAI) -> None:
    """A previous id gives the model the same prompt as the whole conversation."""
    options: Any = {"model": "m", "max_output_tokens": 16, "temperature": 0}
    first = real.responses.create(input="hello", **options)
    by_id = real.responses.create(input="and you?", previous_response_id=first.id, **options)
    whole: Any = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and you?"},
    ]
    resent = real.responses.create(input=whole, **options)
    assert by_id.output_text == resent.output_text
    assert by_id.usage is not None
    assert resent.usage is not None
    assert by_id.usage.input_tokens == resent.usage.input_tokens


def test_real_refusals_name_the_fields_of_the_api(real: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        real.responses.create(model="m", input="hello", max_output_tokens=10**6)
    assert (caught.value.param, caught.value.code) == (
        "max_output_tokens",
        "context_length_exceeded",
    )
    assert "max_output_tokens is 1000000" in caught.value.message
