"""Llama: a JSON object as the whole answer, or calls of Python in brackets.

    {"name": "f", "parameters": {"x": 1}}
    [f(x=1), g()]

The first one is that of the chat templates of Llama 3.1, 3.3 and 4; the second one is that of
Meta's prompts for Llama 3.2 and 4, of ToolACE and of Gemma 3 (vLLM's llama_tool_parser.py,
llama4_pythonic_tool_parser.py, pythonic_tool_parser.py and their chat templates). Both may follow a
marker, and a bare one counts only if it names a tool.
"""

from __future__ import annotations

from serve.text.chat_parser.syntax.format_types import ToolFormat
from serve.text.chat_parser.syntax.json_calls import JsonCalls
from serve.text.chat_parser.syntax.python_calls import PythonCalls

LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    families="Llama 3.1, 3.3 and 4",
    begin="<|python_tag|>",
    syntax=JsonCalls(key="parameters", separator=";"),
    aliases=("llama4_json",),
    bare="{",
    is_list=True,
    is_single=True,  # the chat templates refuse a later message with two calls
    also_begin=("<|python_start|>",),
    others=("<|python_end|>",),
    marks=("<|python_tag|>", '"parameters": dictionary'),
    example='{"name": "f", "parameters": {"x": 1}}',
)
LLAMA4_PYTHONIC = ToolFormat(
    name="llama4_pythonic",
    families="Llama 4 with Meta's prompt",
    begin="<|python_start|>",
    end="<|python_end|>",
    syntax=PythonCalls(end="<|python_end|>"),
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
