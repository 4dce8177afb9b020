"""Calls of Python between markers.

    <|tool_call_start|>[f(x=1), g()]<|tool_call_end|>       LFM2, LFM2.5
    <function_calls>                                        OLMo 3
    f(x=1)
    g()
    </function_calls>

The first one is that of LFM2.5's chat template (it is in ggml-org/llama.cpp, models/templates; LFM2
has `<|tool_list_start|>` instead) and vLLM's lfm2_tool_parser.py; the second one that of vLLM's
tool_chat_template_olmo3.jinja.
"""

from __future__ import annotations

from serve.text.chat_parser.syntax.format_types import ToolFormat
from serve.text.chat_parser.syntax.python_calls import PythonCalls

LFM2 = ToolFormat(
    name="lfm2",
    families="LFM2, LFM2.5",
    begin="<|tool_call_start|>",
    end="<|tool_call_end|>",
    syntax=PythonCalls(end="<|tool_call_end|>"),
    is_list=True,
    marks=("<|tool_call_start|>", "<|tool_list_start|>"),
    example="<|tool_call_start|>[f(x=1), g()]<|tool_call_end|>",
)
OLMO3 = ToolFormat(
    name="olmo3",
    families="OLMo 3",
    begin="<function_calls>",
    end="</function_calls>",
    syntax=PythonCalls(in_brackets=False, end="</function_calls>"),
    is_list=True,
    marks=("<function_calls>",),
    lacks=("<invoke",),
    example="<function_calls>f(x=1)</function_calls>",
)
