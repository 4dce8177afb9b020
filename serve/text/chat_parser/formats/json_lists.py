"""Lists of JSON objects after a marker, each family with markers of its own.

    <|tool_call|>[{"name": "f", "arguments": {"x": 1}}]               Granite 3
    <|tool_call|>[...]<|/tool_call|>                                  Phi-4-mini
    functools[...]                                                    Phi-4-mini, as vLLM's template
    <tool_calls>[...]</tool_calls>                                    Hunyuan, Jamba
    <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}]<|END_ACTION|>
                                                                      Command R7B, Command A
    <|tools_prefix|>[{"f": {"x": 1}}]<|tools_suffix|>                 Apertus
    <|action_start|><|plugin|>{"name": "f", "parameters": {"x": 1}}<|action_end|>   InternLM 2 and 3

They are those of vLLM's granite_, phi4mini_, hunyuan_a13b_, jamba_, cohere_command_, apertus_ and
internlm2_tool_parser.py and the chat templates beside them. That of Phi-4-mini with markers is
Microsoft's: its template has only a text `tools` of the system message, between <|tool|> and
<|/tool|>; one that writes calls, too, is in ggml-org/llama.cpp, models/templates.
"""

from __future__ import annotations

from serve.text.chat_parser.syntax.format_types import ToolFormat
from serve.text.chat_parser.syntax.json_calls import JsonCalls
from serve.text.chat_parser.syntax.named_calls import NamedCalls

TOOLS_KEY = "tools"  # of the system message, in Phi-4-mini's template
_CALL = '{"name": "f", "arguments": {"x": 1}}'

GRANITE = ToolFormat(
    name="granite",
    families="Granite 3",
    begin="<|tool_call|>",
    also_begin=("<tool_call>",),
    syntax=JsonCalls(list="optional"),
    is_list=True,
    marks=("<|tool_call|>",),
    lacks=("<|/tool_call|>", "<|/tool|>"),
    example=f"<|tool_call|>[{_CALL}]",
)
PHI4_MINI = ToolFormat(
    name="phi4_mini",
    families="Phi-4-mini",
    begin="<|tool_call|>",
    end="<|/tool_call|>",
    syntax=JsonCalls(list="optional", end="<|/tool_call|>"),
    is_list=True,
    marks=("<|/tool_call|>", "<|/tool|>"),
    example=f"<|tool_call|>[{_CALL}]<|/tool_call|>",
)
PHI4_MINI_JSON = ToolFormat(
    name="phi4_mini_json",
    families="Phi-4-mini with vLLM's template",
    begin="functools",
    syntax=JsonCalls(list="always"),
    is_list=True,
    marks=("functools[",),
    example=f"functools[{_CALL}]",
)
HUNYUAN_A13B = ToolFormat(
    name="hunyuan_a13b",
    families="Hunyuan, Jamba",
    begin="<tool_calls>",
    end="</tool_calls>",
    syntax=JsonCalls(list="always", end="</tool_calls>"),
    aliases=("jamba",),
    is_list=True,
    marks=("<tool_calls>",),
    lacks=("<tool_sep>", "<arg_key>"),
    example=f"<tool_calls>[{_CALL}]</tool_calls>",
)
COHERE = ToolFormat(
    name="cohere_command3",
    families="Command R7B, Command A",
    begin="<|START_ACTION|>",
    end="<|END_ACTION|>",
    syntax=JsonCalls(
        key="parameters",
        name_key="tool_name",
        id_key="tool_call_id",
        list="always",
        end="<|END_ACTION|>",
    ),
    is_list=True,
    marks=("<|START_ACTION|>",),
    example='<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}]'
    "<|END_ACTION|>",
)
APERTUS = ToolFormat(
    name="apertus",
    families="Apertus",
    begin="<|tools_prefix|>",
    end="<|tools_suffix|>",
    syntax=NamedCalls(
        head=r"([A-Za-z0-9_.-]{1,64})\"\s{0,4}",
        written_head='{name}"',
        before=": ",
        call_begin='{"',
        call_end=("}",),
        between=", ",
        list=True,
        end="<|tools_suffix|>",
    ),
    is_list=True,
    marks=("<|tools_prefix|>",),
    example='<|tools_prefix|>[{"f": {"x": 1}}]<|tools_suffix|>',
)
INTERNLM = ToolFormat(
    name="internlm",
    families="InternLM 2 and 3",
    begin="<|action_start|><|plugin|>",
    end="<|action_end|>",
    syntax=JsonCalls(key="parameters", end="<|action_end|>", space="\n"),
    others=("<|action_start|>", "<|plugin|>"),
    marks=("<|action_start|>",),
    example='<|action_start|><|plugin|>{"name": "f", "parameters": {"x": 1}}<|action_end|>',
)
