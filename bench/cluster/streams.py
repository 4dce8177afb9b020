"""Streams of many kinds, and what their answers say however they were cut into events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

CHAT = "/v1/chat/completions"
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}},
    },
    "required": ["name", "tags"],
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}


@dataclass(frozen=True, slots=True)
class StreamCall:
    path: str
    body: dict[str, Any]


def mixed_calls(count: int, model: str, num_tokens: int) -> list[StreamCall]:
    """Returns calls that each have a seed: greedy, sampled, n = 2, with log-probabilities, with a
    schema, of two prompts, in the other APIs' shapes, and one in eight that is not streamed."""
    return [_call(number, model, num_tokens) for number in range(count)]


def _call(number: int, model: str, num_tokens: int) -> StreamCall:
    messages = [{"role": "user", "content": f"Tell a story about {number} boats and a dog."}]
    common = {"model": model, "seed": number, "stream": True}
    chat = {**common, "messages": messages, "max_tokens": num_tokens, "ignore_eos": True}
    usage = {"stream_options": {"include_usage": True}}
    match number % 8:
        case 0:
            return StreamCall(CHAT, chat | {"temperature": 0})
        case 1:
            return StreamCall(CHAT, chat | usage | {"n": 2})
        case 2:
            return StreamCall(CHAT, chat | {"logprobs": True, "top_logprobs": 2})
        case 3:
            return StreamCall(CHAT, chat | {"response_format": _FORMAT})
        case 4:
            prompts = {"prompt": [f"A boat {number}", "A dog"], "stop": ["zz"]}
            return StreamCall("/v1/completions", common | prompts | {"max_tokens": num_tokens})
        case 5:
            body = {"model": model, "messages": messages, "stream": True, "temperature": 0}
            return StreamCall("/v1/messages", body | {"max_tokens": num_tokens})
        case 6:
            body = {"model": model, "input": f"Say {number} words.", "stream": True}
            more = {"temperature": 0, "max_output_tokens": num_tokens}
            return StreamCall("/v1/responses", body | more)
    return StreamCall(CHAT, chat | {"stream": False, "n": 2})


@dataclass(slots=True)
class StreamResult:
    """said: what the answer says; None if it failed, with the error. gap_s: the longest time
    between two parts of it; first_s: until the first."""

    said: Any = None
    error: str = ""
    gap_s: float = 0.0
    first_s: float = 0.0
    num_parts: int = 0


async def ask(session: aiohttp.ClientSession, url: str, call: StreamCall) -> StreamResult:
    loop = asyncio.get_running_loop()
    result = StreamResult()
    pieces = []
    last_s = began_s = loop.time()
    try:
        async with session.post(url + call.path, json=call.body) as response:
            async for piece in response.content.iter_any():
                now_s = loop.time()
                if not pieces:
                    result.first_s = now_s - began_s
                else:
                    result.gap_s = max(result.gap_s, now_s - last_s)
                last_s = now_s
                result.num_parts += 1
                pieces.append(piece)
            text = b"".join(pieces).decode()
            if response.status != 200:
                result.error = f"{response.status} {text[:200]}"
                return result
    except (aiohttp.ClientError, OSError) as error:
        result.error = repr(error)
        return result
    try:
        result.said = said(text, streams=bool(call.body.get("stream")))
    except ValueError as error:
        result.error = str(error)
    return result


def said(text: str, *, streams: bool) -> Any:
    """Returns what an answer says, without ids and without how it was cut into events. Raises
    ValueError for a stream that has an error or does not end."""
    if not streams:
        return json.loads(text)["choices"]
    collected = _Collected()
    for block in text.split("\n\n"):
        if block:
            collected.add(block)
    return collected.result()


class _Collected:
    def __init__(self) -> None:
        self._choices: dict[int, dict[str, Any]] = {}
        self._texts: list[str] = []
        self._usage: int | None = None
        self._numbers: list[int] = []
        self._is_over = False

    def add(self, block: str) -> None:
        data = block.rpartition("data: ")[2]
        if data == "[DONE]":
            self._is_over = True
            return
        if not block.startswith(("data: ", "event: ")):
            raise ValueError(f"no event: {block[:100]}")
        event = json.loads(data)
        if event.get("error"):
            raise ValueError(f"an error: {data[:200]}")
        if "sequence_number" in event:
            self._numbers.append(event["sequence_number"])
        kind = event.get("type", "")
        self._is_over |= kind in ("message_stop", "response.completed", "response.incomplete")
        if kind in ("content_block_delta", "response.output_text.delta"):
            delta = event["delta"]
            self._texts.append(delta if isinstance(delta, str) else delta.get("text", ""))
        for choice in event.get("choices", ()):
            self._add_choice(choice)
        if event.get("usage") and "choices" in event:
            self._usage = event["usage"]["completion_tokens"]

    def _add_choice(self, choice: dict[str, Any]) -> None:
        start: Callable[[], dict[str, Any]] = lambda: {"text": "", "logprobs": [], "end": None}  # noqa: E731
        one = self._choices.setdefault(choice["index"], start())
        one["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        one["logprobs"] += (choice["logprobs"] or {}).get("content", [])
        one["end"] = choice["finish_reason"] or one["end"]

    def result(self) -> Any:
        if not self._is_over:
            raise ValueError("the stream does not end")
        if self._numbers != list(range(len(self._numbers))):
            raise ValueError("events are missing or repeated")
        return {"choices": self._choices, "text": "".join(self._texts), "usage": self._usage}
