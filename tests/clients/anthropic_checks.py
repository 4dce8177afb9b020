"""Anthropic's own client: messages, streams, tools, its loop over tools, structured output."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
from checks import DICTATED_ROOT, KEY, MODEL, ROOT, TWO_SUMS, main
from pydantic import BaseModel

CLIENT = anthropic.Anthropic(base_url=ROOT, api_key=KEY)
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "What is 2 plus 3?"}]}
ADD: Any = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


class City(BaseModel):
    name: str  # without a bound, which this library would not pass on
    country: Literal["France", "Italy"]
    inhabitants: int


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def check_messages() -> None:
    options: Any = {"max_tokens": 64, "extra_body": {"temperature": 0}, **ASK}
    whole = CLIENT.messages.create(**options)
    assert "5" in text_of(whole) and whole.stop_reason == "end_turn"
    with CLIENT.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
    count = CLIENT.messages.count_tokens(**ASK)
    assert count.input_tokens > 0


def check_required_tool() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        options: Any = {"max_tokens": 400, "tools": [ADD], "tool_choice": choice, **ASK}
        with CLIENT.messages.stream(**options) as stream:
            streamed = stream.get_final_message()
        for message in (CLIENT.messages.create(**options), streamed):
            assert message.stop_reason == "tool_use", message
            for block in message.content:
                assert block.type == "tool_use" and set(block.input) == {"a", "b"}


def check_the_loop_over_tools() -> None:
    client = anthropic.Anthropic(base_url=DICTATED_ROOT, api_key=KEY)
    sums: list[int] = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: The first one.
            b: The second one.
        """
        sums.append(a + b)
        return str(a + b)

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=400,
        tools=[add],
        messages=[{"role": "user", "content": TWO_SUMS}],
    )
    assert text_of(runner.until_done()) == "5 and 2." and sorted(sums) == [2, 5]


def check_structured_output() -> None:
    message = CLIENT.messages.parse(max_tokens=400, output_format=City, **ASK)
    assert isinstance(message.parsed_output, City)


async def check_async() -> None:
    async with anthropic.AsyncAnthropic(base_url=ROOT, api_key=KEY) as client:
        assert text_of(await client.messages.create(max_tokens=64, **ASK))


if __name__ == "__main__":
    main()
