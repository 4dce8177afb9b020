"""MiniMax M2: several calls in one block of tags.

    <minimax:tool_call>
    <invoke name="f">
    <parameter name="x">1</parameter>
    </invoke>
    </minimax:tool_call>

It is that of its chat template (ggml-org/llama.cpp, models/templates/unsloth-MiniMax-M2.jinja) and
of vLLM's minimax_m2_tool_parser.py.
"""

from __future__ import annotations

from serve.text.chat_parser.syntax.format_types import ToolFormat
from serve.text.chat_parser.syntax.tagged_calls import TaggedCalls

MINIMAX_M2 = ToolFormat(
    name="minimax_m2",
    families="MiniMax M2",
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    syntax=TaggedCalls(
        call_open='<invoke name="',
        name_end='">',
        call_close="</invoke>",
        key_open='<parameter name="',
        key_end='">',
        value_close="</parameter>",
        end="</minimax:tool_call>",
        is_list=True,
    ),
    is_list=True,
    marks=("<minimax:tool_call>",),
    example='<minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke>'
    "</minimax:tool_call>",
)
