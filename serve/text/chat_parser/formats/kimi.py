"""Kimi K2: ids with the name of the function and the number of the call.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}
    <|tool_call_end|><|tool_calls_section_end|>

It is that of Kimi K2's chat template (K2 Thinking's is in ggml-org/llama.cpp, models/templates) and
of vLLM's kimi_k2_tool_parser.py. A template writes a call by its id alone, which has to have this
form; the number counts the calls of the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from serve.text.chat_parser.syntax.format_types import ToolFormat
from serve.text.chat_parser.syntax.named_calls import NamedCalls
from serve.text.chat_parser.syntax.stored_calls import with_ids

_ID = re.compile(r"functions\.[A-Za-z0-9_.-]{1,64}:[0-9]{1,6}")


def _make_id(name: str, number: int) -> str:
    return f"functions.{name}:{number}"


def _fit_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return with_ids(
        messages,
        lambda call_id, name, number: call_id if _ID.fullmatch(call_id) else _make_id(name, number),
    )


KIMI_K2 = ToolFormat(
    name="kimi_k2",
    families="Kimi K2",
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    also_begin=("<|tool_call_section_begin|>",),
    syntax=NamedCalls(
        head=r"(?:functions\.)?([A-Za-z0-9_.-]{1,64})(?::[0-9]{1,6})?",
        written_head="functions.{name}:{number}",
        before="<|tool_call_argument_begin|>",
        call_begin="<|tool_call_begin|>",
        call_end=("<|tool_call_end|>",),
        end="<|tool_calls_section_end|>",
    ),
    is_list=True,
    others=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    make_id=_make_id,
    fit_ids=_fit_ids,
    marks=("<|tool_calls_section_begin|>",),
    example="<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    '<|tool_call_argument_begin|>{"x": 1}'
    "<|tool_call_end|><|tool_calls_section_end|>",
)
