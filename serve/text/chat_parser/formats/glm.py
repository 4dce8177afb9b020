"""GLM-4.5 and later: a name, then pairs of tags for each parameter.

    <tool_call>f
    <arg_key>x</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

It is that of the chat templates of GLM-4.5 to 4.7 (GLM-4.6's is in ggml-org/llama.cpp,
models/templates); vLLM's glm4_moe_tool_parser.py and glm47_moe_tool_parser.py, whose models write
no newlines, so that the grammar lets them be missing. A text is a string if the schema says so, and
else JSON.
"""

from __future__ import annotations

from serve.text.chat_parser.syntax.format_types import ToolFormat
from serve.text.chat_parser.syntax.tagged_calls import TaggedCalls

GLM = ToolFormat(
    name="glm45",
    families="GLM-4.5 to 4.7",
    begin="<tool_call>",
    end="</tool_call>",
    syntax=TaggedCalls(
        call_open="",
        name_end="",
        call_close="",
        key_open="<arg_key>",
        key_end="</arg_key>",
        value_open="<arg_value>",
        value_gap="\n",
        value_close="</arg_value>",
        end="</tool_call>",
        lead="",
        has_gaps=False,
    ),
    others=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    aliases=("glm47",),
    marks=("<arg_key>",),
    lacks=("<tool_sep>",),
    example="<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
)
