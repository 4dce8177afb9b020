"""Gemma 4 and FunctionGemma: a notation of their own.

    <|tool_call>call:f{x:1,y:<|"|>text<|"|>}<tool_call|>                         Gemma 4
    <start_function_call>call:f{y:<escape>text<escape>}<end_function_call>       FunctionGemma
    <|channel>thought
    thoughts<channel|>                                                           Gemma 4's reasoning

They are those of Gemma 4's chat template (ggml-org/llama.cpp, models/templates/gemma4.jinja) and of
vLLM's gemma4_tool_parser.py, functiongemma_tool_parser.py and gemma4_reasoning_parser.py. Gemma 3
was trained on no format; vLLM's template for it has that of `pythonic`.
"""

from __future__ import annotations

from serve.text.chat_parser.syntax.format_types import ReasoningFormat, ToolFormat
from serve.text.chat_parser.syntax.gemma_calls import GemmaCalls

GEMMA4 = ToolFormat(
    name="gemma4",
    families="Gemma 4",
    begin="<|tool_call>",
    end="<tool_call|>",
    syntax=GemmaCalls(quote='<|"|>', end="<tool_call|>"),
    others=('<|"|>',),
    between="",
    marks=("<|tool_call>",),
    example='<|tool_call>call:f{x:1,y:<|"|>text<|"|>}<tool_call|>',
)
FUNCTIONGEMMA = ToolFormat(
    name="functiongemma",
    families="FunctionGemma",
    begin="<start_function_call>",
    end="<end_function_call>",
    syntax=GemmaCalls(quote="<escape>", end="<end_function_call>"),
    others=("<escape>",),
    between="",
    marks=("<start_function_call>",),
    example="<start_function_call>call:f{x:1,y:<escape>text<escape>}<end_function_call>",
)
GEMMA_REASONING = ReasoningFormat(
    name="gemma4",
    families="Gemma 4",
    begin="<|channel>thought",
    end="<channel|>",
    others=("<|channel>",),
    marks=("<|channel>",),
)
