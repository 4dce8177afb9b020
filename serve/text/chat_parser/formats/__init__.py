"""The tables of the formats of tool calls and reasoning, and the choice of one by the template.

A format is a row in one of the files of this folder, which names where it is described. The order
of a table is that of the choice: the first one whose marks a template has.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from serve.text.chat_parser.formats import (
    deepseek,
    gemma,
    glm,
    harmony,
    hermes,
    json_lists,
    kimi,
    llama,
    minimax,
    mistral,
    pythonic,
    qwen_coder,
    thinking,
)
from serve.text.chat_parser.syntax.format_types import ReasoningFormat, ToolFormat

logger = logging.getLogger(__name__)

# A statement or an expression of Jinja, and the strings in it.
_CODE = re.compile(
    r"""\{[{%](?:'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+"|(?![%}]\})[^'"])*+[%}]\}""", re.DOTALL
)
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+["]""", re.DOTALL)
_TOOLS_VARIABLE = re.compile(r"(?<![.\w])tools\b(?!\s*=[^=])")
_ROWS = (
    *(harmony.TOOLS, gemma.GEMMA4, gemma.FUNCTIONGEMMA),
    *(deepseek.DEEPSEEK_V32, deepseek.DEEPSEEK_V31, deepseek.DEEPSEEK_V3, kimi.KIMI_K2),
    *(minimax.MINIMAX_M2, qwen_coder.SEED_OSS, glm.GLM, qwen_coder.QWEN3_CODER),
    *(pythonic.LFM2, pythonic.OLMO3, json_lists.PHI4_MINI_JSON, json_lists.PHI4_MINI),
    *(json_lists.GRANITE, json_lists.HUNYUAN_A13B, json_lists.COHERE, json_lists.APERTUS),
    *(json_lists.INTERNLM, mistral.MISTRAL_ARGS, mistral.MISTRAL, hermes.HERMES),
    *(llama.LLAMA4_PYTHONIC, llama.LLAMA4_JSON, llama.PYTHONIC, llama.LLAMA3_JSON),
)
_REASONING_ROWS = (
    *(harmony.REASONING, gemma.GEMMA_REASONING, qwen_coder.SEED_REASONING, mistral.REASONING),
    *(thinking.COHERE, thinking.APERTUS, thinking.GRANITE, thinking.RESPONSE, thinking.HUNYUAN),
    thinking.THINK,
)
TOOL_FORMATS: dict[str, ToolFormat] = {row.name: row for row in _ROWS}
REASONING_FORMATS: dict[str, ReasoningFormat] = {row.name: row for row in _REASONING_ROWS}
_BY_NAME = TOOL_FORMATS | {alias: row for row in _ROWS for alias in row.aliases}
_REASONING_BY_NAME = REASONING_FORMATS | {
    alias: row for row in _REASONING_ROWS for alias in row.aliases
}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats of one model's answers.

    tools: the format of calls; None if they are not parsed. has_native_tools: whether the chat
    template renders tools; else the conversation describes them. has_native_calls: whether it
    renders stored calls and their results; else they are text. has_tools_key: whether it renders
    the text `tools` of the system message. special_ids: the ids of markers that are special tokens.
    reasoning_end_id: the id of the end marker if it is one token. call_begins: the markers before
    calls that are one token; a call after one of them ends the reasoning.
    """

    tools: ToolFormat | None = hermes.HERMES
    reasoning: ReasoningFormat | None = None
    has_native_tools: bool = False
    has_native_calls: bool = False
    has_tools_key: bool = False
    special_ids: Mapping[str, int] = field(default_factory=dict)
    reasoning_end_id: int | None = None
    call_begins: tuple[str, ...] = ()

    @property
    def has_channels(self) -> bool:
        """Whether reasoning, calls and texts are messages on channels, as in Harmony."""
        return self.tools is harmony.TOOLS or self.reasoning is harmony.REASONING


@lru_cache(maxsize=4)
def choose_format(template: str, tool_parser: str, reasoning_parser: str) -> ChatFormat:
    """Returns the formats for the text of a chat template and the two settings.

    "auto" takes the format of the template. Tools that a template does not render are described in
    the conversation: in the format in which it writes calls, or else in Hermes.
    """
    style = None
    if tool_parser == "auto":
        style = next((row for row in _ROWS if row.is_of(template)), None)
    elif tool_parser != "none":
        style = _named(tool_parser, template)
    has_tools = style is not None and _has_tools(template)
    has_key = style is json_lists.PHI4_MINI and not has_tools and "['tools']" in template
    has_calls = has_tools or (style is not None and _writes(template, style))
    if tool_parser != "none" and not (has_calls or has_key):
        if tool_parser != "auto" and style is not hermes.HERMES:
            logger.warning(
                "tool_parser %s is not used: the chat template shows neither tools nor calls of "
                "this format, so the conversation describes the tools in the format hermes",
                tool_parser,
            )
        style = hermes.HERMES
    if reasoning_parser == "auto":
        reasoning = next((row for row in _REASONING_ROWS if row.is_of(template)), None)
    else:
        reasoning = _REASONING_BY_NAME.get(reasoning_parser)
    return ChatFormat(
        tools=style,
        reasoning=reasoning,
        has_native_tools=has_tools,
        has_native_calls=has_calls,
        has_tools_key=has_key,
    )


def setting_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the formats' names and aliases, which are values of the two settings."""
    return tuple(sorted(_BY_NAME)), tuple(sorted(_REASONING_BY_NAME))


def _has_tools(template: str) -> bool:
    """Returns whether the template reads the variable `tools`."""
    return any(_TOOLS_VARIABLE.search(_STRING.sub("''", code)) for code in _CODE.findall(template))


def _writes(template: str, style: ToolFormat) -> bool:
    """Returns whether the template writes stored calls in this format."""
    return "tool_calls" in template and style.begin in template


def _named(name: str, template: str) -> ToolFormat | None:
    """Returns the format of a setting. Mistral's old and new one have one name in vLLM."""
    if name == mistral.MISTRAL.name and mistral.MISTRAL_ARGS.is_of(template):
        return mistral.MISTRAL_ARGS
    return _BY_NAME.get(name)
