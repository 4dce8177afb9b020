"""Qwen3-Coder's tags, and Seed-OSS's.

    <tool_call>
    <function=f>
    <parameter=x>
    1
    </parameter>
    </function>
    </tool_call>

The first one is that of Qwen3-Coder's chat template (vLLM's tool_chat_template_qwen3coder.jinja and
qwen3coder_tool_parser.py), of Qwen3.5 and later; the models sometimes leave the outer tag away.
Seed-OSS has <seed:tool_call>, and no newlines around a value (its template is in
ggml-org/llama.cpp, models/templates/ByteDance-Seed-OSS.jinja; vLLM's seed_oss_tool_parser.py).
"""

from __future__ import annotations

from serve.text.chat_parser.syntax.format_types import ReasoningFormat, ToolFormat
from serve.text.chat_parser.syntax.tagged_calls import TaggedCalls

QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    families="Qwen3-Coder, Qwen3.5 and later",
    begin="<tool_call>",
    end="</tool_call>",
    inner_begin=("<function=",),
    syntax=TaggedCalls(
        call_open="<function=",
        name_end=">",
        call_close="</function>",
        key_open="<parameter=",
        key_end=">",
        value_close="</parameter>",
        end="</tool_call>",
        wraps=True,
    ),
    aliases=("qwen3_xml", "mimo"),
    marks=("<function=",),
    needs=("<parameter=", "<tool_call>"),
    example="<tool_call><function=f><parameter=x>1</parameter></function></tool_call>",
)
SEED_OSS = ToolFormat(
    name="seed_oss",
    families="Seed-OSS",
    begin="<seed:tool_call>",
    end="</seed:tool_call>",
    syntax=TaggedCalls(
        call_open="<function=",
        name_end=">",
        call_close="</function>",
        key_open="<parameter=",
        key_end=">",
        value_close="</parameter>",
        end="</seed:tool_call>",
    ),
    marks=("<seed:tool_call>",),
    example="<seed:tool_call><function=f><parameter=x>1</parameter></function></seed:tool_call>",
)
SEED_REASONING = ReasoningFormat(
    name="seed_oss",
    families="Seed-OSS",
    begin="<seed:think>",
    end="</seed:think>",
    marks=("<seed:think>",),
)
