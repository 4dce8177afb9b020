"""A history may have whatever this server has sent, wherever max_tokens has cut it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest

from serve import Engine
from tests.serve.http.calls.test_tools_client import MARKERS, marked_model
from tests.support.http.running_server import ServerThread
from tests.support.profile import every_day

ALL, FEW = range(1, 41), range(1, 41, 5)
LENGTHS = pytest.mark.parametrize("lengths", every_day((0,), [FEW, ALL]), ids=["few", "all"])
TEXT = "What is the weather in Rome?"
ASKED = {"role": "user", "content": TEXT}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city", "days"],
}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
# Without bounds the answers are cut; with them they are completed before max_tokens.
UNBOUNDED, BOUNDED = (
    {"bounded_json": is_bounded, "temperature": 1.0} for is_bounded in (False, True)
)
# Biases by which the model with markers thinks for a while, or calls by its own choice.
THINKS, CALLS = (
    {str(4096 - len(MARKERS) + number): bias for number, bias in biases.items()}
    for biases in ({2: 100, 3: 5}, {0: 100, 2: -100})
)


@pytest.fixture(scope="module", params=["plain", "marked"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The embedded model, also with special tokens for calls and for reasoning."""
    options: dict[str, Any] = {}
    if request.param == "marked":
        path = marked_model(tmp_path_factory.mktemp("marked") / "model")
        options = {"model": str(path), "reasoning_parser": "deepseek_r1"}
    engine = Engine(served_model_name="m", max_num_seqs=8, **options)
    with ServerThread(engine) as served:
        yield served.url


def of_every_length(
    lengths: range, once: Callable[[int, bool, dict[str, Any]], set[str]]
) -> set[str]:
    """Calls once(size, is_required, other fields) for every length. Returns what the answers had,
    which tells that the test has seen them all. A few lengths need not have every kind."""
    had: set[str] = set()
    for size in lengths:
        had |= once(size, True, {**(BOUNDED if size % 4 == 0 else UNBOUNDED), "seed": size})
        if size % 4 < 2:
            bias = CALLS if size % 4 else THINKS
            had |= once(size, False, {**UNBOUNDED, "seed": size, "logit_bias": bias})
    return had


@LENGTHS
def test_chat_completions(server: str, lengths: range) -> None:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:

        def ask(history: list[Any], size: int, **options: Any) -> Any:
            body = {"tools": [CHAT_TOOL], "logprobs": True, "top_logprobs": 1, **options}
            answer = client.chat.completions.create(
                model="m", messages=history, max_tokens=size, **body
            )
            return answer.choices[0]

        def once(size: int, is_required: bool, given: dict[str, Any]) -> set[str]:
            choice = "required" if is_required else "auto"
            answer = ask([ASKED], size, tool_choice=choice, extra_body=given)
            message = answer.message.model_dump()
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
                for call in message["tool_calls"] or ()
            ]
            filled = {name: value for name, value in message.items() if value}
            ask([ASKED, message, *results, ASKED], 1)
            ask([ASKED, {"content": "", **filled}, ASKED], 1)
            return {answer.finish_reason, *filled}

        had = of_every_length(lengths, once)
    assert had >= {"length", "tool_calls"} | ({"content"} if lengths == ALL else set())


@LENGTHS
def test_responses(server: str, lengths: range) -> None:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        tool: Any = {"type": "function", "name": "weather", "parameters": WEATHER}

        def ask(items: list[Any], size: int, **options: Any) -> Any:
            included = ["message.output_text.logprobs", "reasoning.encrypted_content"]
            body: Any = {"tools": [tool], "include": included, "max_output_tokens": size, **options}
            return client.responses.create(model="m", input=items, **body)

        def once(size: int, is_required: bool, given: dict[str, Any]) -> set[str]:
            choice = "required" if is_required else "auto"
            answer = ask([ASKED], size, tool_choice=choice, extra_body=given)
            output = [item.model_dump() for item in answer.output]
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
                for item in output
                if item["type"] == "function_call"
            ]
            ask([ASKED, *output, *results, ASKED], 1)
            ask([*results, ASKED], 1, previous_response_id=answer.id)
            return {answer.status, *(item["type"] for item in output)}

        had = of_every_length(lengths, once)
    assert had >= {"incomplete", "function_call"} | ({"message"} if lengths == ALL else set())


@pytest.mark.covering(1)
@LENGTHS
@pytest.mark.parametrize("is_streamed", [False, True])
def test_messages(server: str, is_streamed: bool, lengths: range) -> None:
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        tool = {"name": "weather", "input_schema": WEATHER}

        def ask(history: list[Any], size: int, **options: Any) -> Any:
            body: Any = {"model": "m", "messages": history, "max_tokens": size, "tools": [tool]}
            if not is_streamed:
                return client.messages.create(**body, **options)
            with client.messages.stream(**body, **options) as stream:
                return stream.get_final_message()

        def once(size: int, is_required: bool, given: dict[str, Any]) -> set[str]:
            choice = {"type": "any" if is_required else "auto"}
            known = {"bounded_json": given["bounded_json"]}  # this API has no biases
            answer = ask([ASKED], size, tool_choice=choice, extra_body=known)
            content = [block.model_dump() for block in answer.content]
            results: list[Any] = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"}
                for block in content
                if block["type"] == "tool_use"
            ]
            said = {"role": "assistant", "content": content}
            results.append({"type": "text", "text": TEXT})
            ask([ASKED, said, {"role": "user", "content": results}], 1)
            ask([ASKED, said, ASKED], 1)
            return {answer.stop_reason, *(block["type"] for block in content)}

        had = of_every_length(lengths, once)
    assert had >= {"max_tokens"} | ({"tool_use", "text"} if lengths == ALL else set())
