"""Llama: JSON objects as the whole answer, or calls of Python in brackets.

    {"name": "f", "parameters": {"x": 1}}                                              Llama 3
    <|python_start|>text<|python_end|>{"name": "f", "parameters": {"x": 1}}{...}       Llama 4
    [f(x=1), g()]

The first one is that of the chat templates of Llama 3.1 and 3.3. The second one is that of Llama
4's (Transformers has it in models/llama4/processing_llama4.py), where calls follow each other
without a separator; a model may leave the markers out or put a call between them. The third one is
that of Meta's prompts for Llama 3.2 and 4, of ToolACE and of Gemma 3 (vLLM's llama_tool_parser.py,
llama4_pythonic_tool_parser.py, pythonic_tool_parser.py and their chat templates). All may follow a
marker, and a bare one counts only if it names a tool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve.text.chat_parser.syntax.format_types import ToolFormat
from serve.text.chat_parser.syntax.json_calls import JsonCalls
from serve.text.chat_parser.syntax.python_calls import PythonCalls
from serve.text.chat_parser.syntax.reader import Reader, Wait
from serve.text.chat_parser.syntax.rules import Rules

_OBJECT = JsonCalls(key="parameters")
_PYTHON_END = "<|python_end|>"


@dataclass(frozen=True, slots=True)
class _Llama4Calls:
    """Reads objects one after another. Both markers begin a block; where no object follows, they
    were around a text and are dropped."""

    def block(self, reader: Reader) -> Wait[bool]:
        if not (yield from reader.sees("{")):
            reader.drop()
            reader.hold()
            yield from reader.skip_space()
            if not (yield from reader.sees("{")):
                return reader.fail()
        while True:
            num_calls = reader.num_calls
            is_read = yield from _OBJECT.block(reader)
            if not is_read or reader.num_calls == num_calls:
                return is_read
            reader.hold()
            yield from reader.skip_space()
            yield from reader.take(";")
            yield from reader.skip_space()
            if not (yield from reader.sees("{")):
                reader.back()
                return True

    def rule(
        self,
        rules: Rules,
        tools: Sequence[Mapping[str, Any]],
        *,
        max_calls: int,
        all_strict: bool,
    ) -> str:
        one = _OBJECT.rule(rules, tools, max_calls=1, all_strict=all_strict)
        return rules.add(f"{one} {one}{{0,{max_calls - 1}}}") if max_calls > 1 else one


LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    families="Llama 3.1 and 3.3",
    begin="<|python_tag|>",
    syntax=JsonCalls(key="parameters", separator=";"),
    bare="{",
    is_list=True,
    is_single=True,  # the chat templates refuse a later message with two calls
    marks=("<|python_tag|>", '"parameters": dictionary'),
    example='{"name": "f", "parameters": {"x": 1}}',
)
LLAMA4_JSON = ToolFormat(
    name="llama4_json",
    families="Llama 4",
    begin="<|python_start|>",
    syntax=_Llama4Calls(),
    bare="{",
    is_list=True,
    also_begin=(_PYTHON_END,),
    marks=("<|python_start|>", '"parameters": dictionary'),
    needs=("<|header_start|>",),
    example='{"name": "f", "parameters": {"x": 1}}{"name": "g", "parameters": {}}',
)
LLAMA4_PYTHONIC = ToolFormat(
    name="llama4_pythonic",
    families="Llama 4 with Meta's prompt",
    begin="<|python_start|>",
    end=_PYTHON_END,
    syntax=PythonCalls(end=_PYTHON_END),
    bare="[",
    is_list=True,
    marks=("[func_name1(",),
    needs=("<|header_start|>",),
    example="[f(x=1), g()]",
)
PYTHONIC = ToolFormat(
    name="pythonic",
    families="Llama 3.2 with Meta's prompt, ToolACE, Gemma 3 with vLLM's template",
    begin="<|python_tag|>",
    syntax=PythonCalls(),
    bare="[",
    is_list=True,
    marks=("[func_name1(", "[func1(", "pythonic"),
    example="[f(x=1), g()]",
)
