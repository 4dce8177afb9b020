"""Hermes: a JSON object in tags, one pair of tags for each call.

    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

So write Hermes 2 Pro, Qwen 2.5 and 3, SmolLM3, EXAONE 4, Granite 4, ERNIE 4.5 and many others; read
by vLLM's hermes_tool_parser.py, granite4_tool_parser.py and ernie45_tool_parser.py. It is also the
format in which the conversation describes tools where a template has none.
"""

from __future__ import annotations

from serve.text.chat_parser.syntax.format_types import ToolFormat
from serve.text.chat_parser.syntax.json_calls import JsonCalls

HERMES = ToolFormat(
    name="hermes",
    families="Hermes, Qwen 2.5 and 3, SmolLM3, EXAONE 4, Granite 4, ERNIE 4.5",
    begin="<tool_call>",
    end="</tool_call>",
    syntax=JsonCalls(end="</tool_call>", space="\n"),
    aliases=("granite4", "ernie45"),
    marks=("<tool_call>",),
    lacks=("<function=", "<arg_key>"),
    example='<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
)
