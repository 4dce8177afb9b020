"""Required calls in formats whose values are plain text are completed before the tokens run out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from serve import LLM, SamplingParams
from serve.config import default_model_path
from serve.text.chat_parser import ChatFormat, Text, ToolCallArguments, make_parser
from serve.text.chat_parser.formats import TOOL_FORMATS
from serve.text.chat_parser.grammar import forced_calls
from serve.text.tokenizer import Tokenizer

STYLES = ("qwen3_coder", "glm45", "minimax_m2", "deepseek_v32", "gemma4", "pythonic", "hermes")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "code": {"type": "string", "pattern": "^[a-z]{2}[0-9]$"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["text", "code", "tags"],
    "additionalProperties": False,
}
PLAIN: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=8, max_model_len=1024) as made:
        yield made


def check(chat: ChatFormat, schema: dict[str, Any], text: str) -> None:
    parser = make_parser(chat, {"f": schema}, reasons=False)
    parts = parser.push(text) + parser.finish()
    assert not any(isinstance(part, Text) for part in parts), text
    made = "".join(part.text for part in parts if isinstance(part, ToolCallArguments))
    jsonschema.validate(json.loads(made), schema)


@pytest.mark.covering(1)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("schema", [SCHEMA, PLAIN], ids=["values", "text"])
def test_required_calls_end(llm: LLM, style: str, schema: dict[str, Any]) -> None:
    chat = ChatFormat(tools=TOOL_FORMATS[style])
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = forced_calls(chat, [tool], parallel=False, is_open=False)
    params = [
        SamplingParams(max_tokens=size, temperature=1.0, seed=size, structured=form)
        for size in (240, 300)
    ]
    for answer in llm.generate(["Once upon a time"] * len(params), params):
        check(chat, schema, answer.outputs[0].text)


@pytest.mark.parametrize(
    ("style", "markers"),
    [
        ("gemma4", ("<|tool_call>", '<|"|>', "<tool_call|>")),
        ("glm45", ("<tool_call>", "</arg_value>", "<arg_key>")),
        ("minimax_m2", ("<minimax:tool_call>", "</minimax:tool_call>")),
        ("hermes", ("<tool_call>", "</tool_call>")),
    ],
)
def test_markers_that_are_special_tokens(llm: LLM, style: str, markers: tuple[str, ...]) -> None:
    """The embedded model's special tokens stand for the markers."""
    tokenizer = Tokenizer.load(default_model_path())
    names = [name for name, i in tokenizer.special_token_ids.items() if i != tokenizer.eos_token_id]
    places = dict(zip(markers, names, strict=False))
    ids = {marker: tokenizer.special_token_ids[name] for marker, name in places.items()}
    chat = ChatFormat(tools=TOOL_FORMATS[style], special_ids=ids)
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    form = forced_calls(chat, [tool], parallel=False, is_open=False)
    params = [
        SamplingParams(
            max_tokens=size,
            temperature=1.0,
            seed=size,
            structured=form,
            skip_special_tokens=False,
        )
        for size in (150, 250)
    ]
    for answer in llm.generate(["Once upon a time"] * len(params), params):
        text = answer.outputs[0].text
        for marker, name in places.items():
            assert marker not in text
            text = text.replace(name, marker)
        check(chat, SCHEMA, text)
