"""The formats of tool calls and reasoning, and which of them a chat template asks for."""

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
    """Nine letters and digits: the templates of Mistral raise for any other id."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Each call is a JSON object with a name and arguments (or parameters).

    begin: before a call, or before a list of them. end: after each call, if not empty.
    separator: between the calls of one list, if not empty. is_list: the calls stand in [].
    is_bare: an answer that begins with { is a call as well. key: of the arguments, as the model
    is used to it.
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
    """What stands around what a model thinks."""

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
    """How one model's answers are read.

    tools: None: calls are not read. has_native_tools: the chat template renders tools; else they
    are described in the conversation. special_ids: the markers that are special tokens.
    reasoning_end_id: the token that ends the reasoning, if it is one. opens_reasoning: prompts end
    inside the reasoning, unless enable_thinking is false.
    """

    tools: ToolFormat | None = TOOL_FORMATS["hermes"]
    reasoning: ReasoningFormat | None = None
    has_native_tools: bool = False
    special_ids: Mapping[str, int] = field(default_factory=dict)
    reasoning_end_id: int | None = None
    opens_reasoning: bool = False


def choose_format(template: str, tool_parser: str, reasoning_parser: str) -> ChatFormat:
    """For a chat template's text and the two settings. "auto": what the template writes; tools
    that it writes in a way that is not known here are described in the conversation instead."""
    has_tools = _TOOLS_VARIABLE.search(template) is not None
    name = tool_parser
    if tool_parser == "auto":
        name = _written(template)
        has_tools = has_tools and bool(name)
    if not has_tools and tool_parser != "none":
        name = "hermes"  # as they are described
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
    """Whether what a template writes last begins the reasoning, and does not always end it."""
    last = template.rpartition("add_generation_prompt")[2]
    return last.count(reasoning.begin) > last.count(reasoning.end)


def _written(template: str) -> str:
    """The format that a template shows its calls in, or ""."""
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return "llama3_json"
    return ""
