"""Fuzz targets: functions of bytes that may raise only documented errors.

A target also asserts properties of the result. Mutations start from its seeds, valid inputs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from bench.soak.bodies import (
    CHAT_BODIES,
    COMPLETION_BODIES,
    MESSAGE_BODIES,
    RESPONSE_BODIES,
)
from memory.nodes.wire import (
    HEADER_BYTES,
    Append,
    Edit,
    EditKind,
    Kind,
    NodePlan,
    Query,
    WireError,
    pack_json,
    pack_plan,
    read_header,
    read_json,
    read_plan,
)
from serve.checkpoint_json import ConfigReader
from serve.errors import ConfigError, ModelLoadError, RequestError
from serve.http.anthropic.requests import parse_messages_call
from serve.http.edge.errors import ApiError
from serve.http.edge.json_body import parse_object
from serve.http.openai import requests as schema
from serve.http.responses.items import REFERENCE
from serve.http.responses.requests import parse_response_call
from serve.http.responses.response_head import response_head
from serve.sampling_params import SamplingParams
from serve.structured.grammar_source import grammar_of
from serve.text.chat_parser import AnswerParser, ChatFormat, ToolCallArguments, ToolCallStart
from serve.text.chat_parser.calls import ToolCallParser
from serve.text.chat_parser.formats import REASONING_FORMATS, TOOL_FORMATS
from serve.text.chat_parser.grammar import forced_calls
from serve.text.chat_parser.reasoning import ReasoningParser
from serve.text.chat_template import neutralize, split_neutralized
from tests.fuzz import gguf_file, model_config, quantized, tokenizer

Expected = (ApiError, RequestError)
FORMAT = ChatFormat()
ROWS = (*TOOL_FORMATS.values(),)
_HERMES, _LLAMA = (bytes([[*TOOL_FORMATS].index(name)]) for name in ("hermes", "llama3_json"))
CALL = b'{"name": "f", "arguments": {"a": "\\"}"}}'
PLAN = NodePlan([Edit(next(iter(EditKind)), 1, 2, 3, 4)], [Query(1, 2, 3)], [Append(1, 2, 3)])
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "</s>", "<s>", "[INST]", "<<", ">>")


@dataclass(frozen=True, slots=True)
class Target:
    """run may return a word for what became of an input, of which runs count the cases. Those with
    one of the words `ends` are not mutated further."""

    run: Callable[[bytes], str | None]
    seeds: tuple[bytes, ...]
    ends: tuple[str, ...] = ()


def _completion(data: bytes) -> None:
    with contextlib.suppress(*Expected):
        call = schema.parse_completion(parse_object(data), {})
        assert isinstance(call.params, SamplingParams) and call.prompts


def _chat(data: bytes) -> None:
    with contextlib.suppress(*Expected):
        call = schema.parse_chat(parse_object(data), {})
        assert call.chat.messages
        if call.chat.tools:
            for parallel in (True, False):
                form = forced_calls(FORMAT, call.chat.tools, parallel=parallel, is_open=False)
                assert grammar_of(form)


def _answer(data: bytes) -> None:
    """Parses a model's text, whose parts must not depend on the pieces."""
    if len(data) < 2:
        return
    style, size = ROWS[data[0] % len(ROWS)], data[1] % 7 + 1
    text = data[2:].decode("utf-8", "ignore")
    results = []
    for pieces in ([text], [text[at : at + size] for at in range(0, len(text), size)]):
        reasoning = ReasoningParser(REASONING_FORMATS["deepseek_r1"], is_open=data[0] > 127)
        parser = AnswerParser(reasoning, ToolCallParser(style, {"f": {}}))
        parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
        joined: dict[object, str] = {}
        for part in parts:
            if isinstance(part, ToolCallStart):
                joined[part.number, "name"] = part.name
            else:
                key = part.number if isinstance(part, ToolCallArguments) else type(part)
                joined[key] = joined.get(key, "") + part.text
        results.append(joined)
    assert results[0] == results[1]
    if "<" not in text and "[" not in text and "{" not in text and data[0] < 128:
        assert "".join(results[0].values()) == text


def _response(data: bytes) -> None:
    with contextlib.suppress(*Expected):
        call = parse_response_call(parse_object(data), {})
        assert orjson.dumps(call.items)  # the form in which they are stored
        assert orjson.dumps(response_head(call, "resp_x", 1, "m"))
        chat = call.chat([], [item for item in call.items if item["type"] != REFERENCE])
        assert json.dumps(chat.messages) and json.dumps(chat.tools)


def _message(data: bytes) -> None:
    with contextlib.suppress(*Expected):
        call = parse_messages_call(parse_object(data), {})
        assert json.dumps(call.chat.messages) and json.dumps(call.chat.tools)


def _json(data: bytes) -> None:
    with contextlib.suppress(ApiError):
        value = parse_object(data)
        assert json.loads(data) == value  # both parsers agree on accepted input


def _no_special_token_in_user_text(data: bytes) -> None:
    text = data.decode("utf-8", "ignore")
    (message,) = neutralize([{"role": "user", "content": text}], SPECIAL_TOKENS)
    parts = split_neutralized(message["content"])
    assert "".join(parts) == text
    for part in parts:
        assert not any(token in part for token in SPECIAL_TOKENS)


def _frames(data: bytes) -> None:
    for read in (read_header, read_plan, read_json):
        for message in (data, bytes(HEADER_BYTES) + data):
            with contextlib.suppress(WireError):
                read(memoryview(message))


def _config(data: bytes) -> None:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(values, dict):
        return
    reader = ConfigReader(values, "config.json")
    for key in list(values)[:50]:
        for read in (reader.integer, reader.number):
            with contextlib.suppress(ModelLoadError, ConfigError):
                read(key)


TARGETS: dict[str, Target] = {
    "json": Target(_json, COMPLETION_BODIES + CHAT_BODIES),
    "completion": Target(_completion, COMPLETION_BODIES),
    "chat": Target(_chat, CHAT_BODIES),
    "response": Target(_response, RESPONSE_BODIES),
    "message": Target(_message, MESSAGE_BODIES),
    "answer": Target(
        _answer,
        (
            *(bytes((index, 3)) + row.example.encode() for index, row in enumerate(ROWS)),
            _HERMES
            + b"\3<think>\nso\n</think>\n\nI say <tool_call>\n"
            + CALL
            + b"\n</tool_call> and",
            _LLAMA + b"\2" + CALL + b"; " + CALL,
            _HERMES + b'\1<tool_call>{"arguments": {}, "name": "f"}</tool_call>\xc3\xa9',
        ),
    ),
    "special-tokens": Target(
        _no_special_token_in_user_text, (b"a<|im_start|>b</s><<>>[INST]", b"<|im_<|im_end|>end|>")
    ),
    "node-frames": Target(
        _frames, (pack_plan(1, 1, PLAN), pack_json(Kind.ATTACH, 1, {"layers": [1, 2]}))
    ),
    "tokenizer": Target(tokenizer.run, tokenizer.SEEDS),
    "ranks": Target(tokenizer.run_ranks, tokenizer.RANK_SEEDS),
    "tekken": Target(tokenizer.run_tekken, tokenizer.TEKKEN_SEEDS),
    "quantized": Target(quantized.run, quantized.SEEDS),
    "gguf": Target(gguf_file.run, gguf_file.SEEDS, (gguf_file.REFUSED, gguf_file.NO_FILE)),
    "model-config": Target(model_config.run, model_config.SEEDS),
    "config": Target(_config, (b'{"hidden_size": 64, "rope": {"factor": 2.0}, "x": [1, null]}',)),
}
