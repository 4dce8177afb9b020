"""Reasoning between two markers at the start of an answer.

    <think> ... </think>                                     DeepSeek R1, Qwen 3, GLM, MiniMax, ...
    <think> ... </think><response> ... </response>           Granite 3.3, ERNIE 4.5
    <think> ... </think><answer> ... </answer>               Hunyuan
    Here is my thought process: ... Here is my response:     Granite 3.2
    <|START_THINKING|> ... <|END_THINKING|>                  Command A Reasoning
    <|inner_prefix|> ... <|inner_suffix|>                    Apertus

They are those of vLLM's reasoning parsers of the same names and of the models' chat templates.
Others stand beside the calls of their families.
"""

from __future__ import annotations

from serve.text.chat_parser.syntax.format_types import ReasoningFormat

THINK = ReasoningFormat(
    name="deepseek_r1",
    families="DeepSeek, Qwen, QwQ, GLM, MiniMax, Kimi, OLMo 3, SmolLM3, EXAONE 4",
    begin="<think>",
    end="</think>",
    aliases=(
        *("deepseek_v3", "glm45", "glm47", "holo2", "kimi_k2", "mimo", "minimax_m2"),
        *("nemotron_v3", "olmo3", "qwen3", "step3", "step3p5"),
    ),
    marks=("</think>",),
)
RESPONSE = ReasoningFormat(
    name="ernie45",
    families="ERNIE 4.5, Granite 3.3",
    begin="<think>",
    end="</think>",
    answer=("<response>", "</response>"),
    marks=("</think>",),
    needs=("<response>", "</response>"),
    lacks=("<minimax:tool_call>",),  # its results of tools have this tag
)
HUNYUAN = ReasoningFormat(
    name="hunyuan_a13b",
    families="Hunyuan",
    begin="<think>",
    end="</think>",
    answer=("<answer>", "</answer>"),
    marks=("<answer>", "<|extra_0|>"),  # the second one ends a turn of Hunyuan
    needs=("</think>",),
)
GRANITE = ReasoningFormat(
    name="granite",
    families="Granite 3.2",
    begin="Here is my thought process:",
    end="Here is my response:",
    other_begins=("Here's my thought process:",),
    other_ends=("Here's my response:",),
    marks=("Here is my thought process:",),
)
COHERE = ReasoningFormat(
    name="cohere_command3",
    families="Command A Reasoning",
    begin="<|START_THINKING|>",
    end="<|END_THINKING|>",
    answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    marks=("<|START_THINKING|>",),
)
APERTUS = ReasoningFormat(
    name="apertus",
    families="Apertus",
    begin="<|inner_prefix|>",
    end="<|inner_suffix|>",
    marks=("<|inner_prefix|>",),
)
