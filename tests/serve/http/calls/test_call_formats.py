"""An agent's two rounds of calls and its answer, by the official client, in each format: the chat
template alone chooses it, and calls that are sent back are rendered again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from serve.text.chat_parser.formats import TOOL_FORMATS
from tests.support.http.dictated_engine import dictated_engine
from tests.support.http.official_clients import openai_client
from tests.support.http.running_server import ServerThread
from tests.support.text.spoken_formats import make_model, said, spoken

pytestmark = pytest.mark.process

NOTE = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "is_new": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["text"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "note", "parameters": NOTE}},
    {"type": "function", "function": {"name": "now"}},
]
FIRST = {"text": "It's 5 o'clock, <b>ü</b>\n  {x}", "count": 3, "is_new": True, "tags": ["a", "b"]}
ROUNDS: list[list[tuple[str, dict[str, Any]]]] = [
    [("note", FIRST), ("now", {})],
    [("note", {"text": "7"})],
]
ANSWER = "Both are done."


def rounds_of(style: str) -> list[list[tuple[str, dict[str, Any]]]]:
    one = TOOL_FORMATS[style].is_single
    return [calls[:1] if one else calls for calls in ROUNDS]


def answer(client: openai.OpenAI, messages: list[Any], *, is_streamed: bool) -> Any:
    options: Any = {"model": "m", "messages": messages, "tools": TOOLS}
    if not is_streamed:
        return client.chat.completions.create(**options).choices[0].message
    with client.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message


@pytest.mark.parametrize("style", TOOL_FORMATS)
def test_two_rounds_of_calls(style: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", style)
    rounds = rounds_of(style)
    texts = [*(spoken(style, calls) for calls in rounds), said(style, ANSWER)]
    question = "Do it. " + " ".join(f"SAY<<{text}>>" for text in texts)
    with ServerThread(dictated_engine("m", model)) as server, openai_client(server) as client:
        for is_streamed in (False, True):
            messages: list[Any] = [{"role": "user", "content": question}]
            for calls in rounds:
                message = answer(client, messages, is_streamed=is_streamed)
                made = [
                    (call.function.name, json.loads(call.function.arguments))
                    for call in message.tool_calls
                ]
                assert made == calls
                assert not message.content
                messages.append(message)
                for call in message.tool_calls:
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
            assert answer(client, messages, is_streamed=is_streamed).content == ANSWER
            ids = [item["tool_call_id"] for item in messages if isinstance(item, dict) and
                   "tool_call_id" in item]  # fmt: skip
            assert len(set(ids)) == len(ids) == sum(map(len, rounds))
