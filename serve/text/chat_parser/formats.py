"""The formats of tool calls and reasoning, and the choice of one by the chat template."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_ALPHANUMERIC = string.ascii_letters + string.digits
_TOOLS_VARIABLE = re.compile(r"\btools\b")


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_call_id() -> str:
    """Returns nine letters and digits, as the chat templates of Mistral require."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of calls, each of which is a JSON object with a name and arguments or parameters.

    begin: the marker before a call or a list of calls. end: the marker after each call, if any.
    separator: the text between the calls of a list, if any. is_list: the calls are in brackets.
    is_bare: an answer that begins with { is a call too. key: the arguments' key in the model's
    training.
    """

    name: str
    begin: str
    end: str = ""
    separator: str = ""
    is_list: bool = False
    is_bare: bool = False
    key: str = "arguments"
    make_id: Callable[[], str] = _call_id

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(marker for marker in (self.begin, self.end) if marker)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a model's reasoning."""

    name: str
    begin: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        return self.begin, self.end


TOOL_FORMATS = {
    item.name: item
    for item in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>"),
        ToolFormat("llama3_json", "<|python_tag|>", separator=";", is_bare=True, key="parameters"),
        ToolFormat("mistral", "[TOOL_CALLS]", separator=",", is_list=True, make_id=_short_call_id),
    )
}
REASONING_FORMATS = {"deepseek_r1": ReasoningFormat("deepseek_r1", "<think>", "</think>")}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats of one model's answers.

    tools: the format of calls; None if they are not parsed. has_native_tools: whether the chat
    template renders tools; else the conversation describes them. special_ids: the ids of markers
    that are special tokens. reasoning_end_id: the id of the end marker if it is one token.
    opens_reasoning: whether prompts end inside the reasoning, unless enable_thinking is false.
    """

    tools: ToolFormat | None = TOOL_FORMATS["hermes"]
    reasoning: ReasoningFormat | None = None
    has_native_tools: bool = False
    special_ids: Mapping[str, int] = field(default_factory=dict)
    reasoning_end_id: int | None = None
    opens_reasoning: bool = False


def choose_format(template: str, tool_parser: str, reasoning_parser: str) -> ChatFormat:
    """Returns the formats for the text of a chat template and the two settings.

    "auto" takes the format of the template; tools in an unknown format are described in the
    conversation instead.
    """
    has_tools = _TOOLS_VARIABLE.search(template) is not None
    name = tool_parser
    if tool_parser == "auto":
        name = _call_format(template)
        has_tools = has_tools and bool(name)
    if not has_tools and tool_parser != "none":
        name = "hermes"  # the format of the description
    if reasoning_parser == "auto":
        reasoning_parser = "deepseek_r1" if "</think>" in template else "none"
    reasoning = REASONING_FORMATS.get(reasoning_parser)
    return ChatFormat(
        tools=TOOL_FORMATS.get(name),
        reasoning=reasoning,
        has_native_tools=has_tools,
        opens_reasoning=reasoning is not None and _opens(template, reasoning),
    )


def _opens(template: str, reasoning: ReasoningFormat) -> bool:
    """Returns whether the end of a prompt begins the reasoning without always ending it."""
    last = template.rpartition("add_generation_prompt")[2]
    return last.count(reasoning.begin) > last.count(reasoning.end)


def _call_format(template: str) -> str:
    """Returns the format of the calls in a template, or ""."""
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return "llama3_json"
    return ""
