"""Anthropic's official client against /v1/messages of the embedded model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pydantic
import pytest

from serve import Engine
from tests.support.http.official_clients import anthropic_client
from tests.support.http.running_server import ServerThread

USER: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def real() -> Iterator[anthropic.Anthropic]:
    engine = Engine(None, served_model_name="m", max_num_seqs=8)
    with ServerThread(engine) as server, anthropic_client(server) as client:
        yield client


def test_real_answers(real: anthropic.Anthropic) -> None:
    options: Any = {"model": "m", "max_tokens": 24, "messages": USER}
    options["extra_body"] = {"temperature": 0}
    whole = real.messages.create(**options)
    with real.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in whole.content] == [
        {"type": "text", "text": streamed.content[0].to_dict()["text"]}
    ]
    assert 0 < whole.usage.output_tokens <= 24
    count = real.messages.count_tokens(model="m", messages=USER)
    num_input = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert count.input_tokens == num_input > 3


def test_a_real_prefilled_answer_is_continued(real: anthropic.Anthropic) -> None:
    """The model continues its own first words."""
    options: Any = {"model": "m", "max_tokens": 24, "extra_body": {"temperature": 0}}
    text = real.messages.create(messages=USER, **options).content[0].to_dict()["text"]
    beginning = " ".join(str(text).split(" ")[:3])
    prefilled: Any = [*USER, {"role": "assistant", "content": beginning}]
    rest = real.messages.create(messages=prefilled, **options).content[0].to_dict()["text"]
    assert f"{beginning}{rest}" == text
    whole = real.messages.count_tokens(model="m", messages=USER).input_tokens
    assert real.messages.count_tokens(model="m", messages=prefilled).input_tokens > whole


class City(pydantic.BaseModel):
    name: Literal["Ulm", "Rom"]
    is_large: bool


def test_real_answers_follow_the_requested_schema(real: anthropic.Anthropic) -> None:
    options: Any = {"model": "m", "max_tokens": 200, "messages": USER}
    options["extra_body"] = {"temperature": 0}
    parsed = real.messages.parse(output_format=City, **options)
    assert isinstance(parsed.parsed_output, City)
    with real.messages.stream(output_format=City, **options) as stream:
        assert isinstance(stream.get_final_message().parsed_output, City)
    bad_schema: Any = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    output_config: Any = {"format": {"type": "json_schema", "schema": bad_schema}}
    with pytest.raises(anthropic.BadRequestError) as caught:
        real.messages.create(output_config=output_config, **options)
    assert "output_config.format.schema" in str(caught.value.api_message)


def test_a_real_forced_call(real: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Ulm", "Rom"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    options: Any = {"model": "m", "max_tokens": 200, "messages": USER}
    options["extra_body"] = {"temperature": 0}
    options["tools"] = [{"name": "weather", "input_schema": schema}]
    options["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    whole = real.messages.create(**options)
    with real.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        (tool_use,) = (block for block in message.content if block.type == "tool_use")
        assert tool_use.name == "weather"
        assert tool_use.input["city"] in ("Ulm", "Rom")
        assert message.stop_reason == "tool_use"


def test_real_refusals_name_the_fields_of_the_api(real: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "word " * 50_000}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        real.messages.create(model="m", max_tokens=9, messages=messages)
    message = str(caught.value.api_message)
    assert message.startswith("messages: This model's maximum context length is 1024 tokens, ")
    # Claude Code shortens the conversation when it finds these words and numbers.
    assert re.search(r"prompt is too long[^0-9]*\d+\s*tokens?\s*>\s*1024", message)
    with pytest.raises(anthropic.BadRequestError):
        real.messages.count_tokens(model="m", messages=messages)
