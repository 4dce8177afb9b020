"""Harmony, in which gpt-oss writes messages on channels.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{"x": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>

The format is that of OpenAI's openai/harmony (docs/format.md); vLLM reads it with that library
(vllm/entrypoints/openai/parser/harmony_utils.py). The recipient stands before or after the channel;
since prompts end in `<|start|>assistant`, an answer may begin with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from serve.text.chat_parser.syntax.format_types import ReasoningFormat, ToolFormat
from serve.text.chat_parser.syntax.json_calls import arguments_object
from serve.text.chat_parser.syntax.named_calls import MAX_HEAD_CHARS, NamedCalls
from serve.text.chat_parser.syntax.reader import (
    MAX_SKIPPED_CHARS,
    Reader,
    ReadingParser,
    Wait,
    first_of,
    longest_overlap,
)

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_STOPS = (*_ENDS, _START)
_TO = re.compile(r"\bto=([^\s<]{1,80})")
_NAME = re.compile(r"<\|channel\|>\s*(analysis|commentary|final)\b")
_ALL = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)

TOOLS = ToolFormat(
    name="openai",
    families="gpt-oss",
    begin="<|channel|>commentary to=functions.",
    end="<|call|>",
    syntax=NamedCalls(
        head=r"([A-Za-z0-9_.-]{1,64}).{0,100}",
        written_head="{name} <|constrain|>json",
        before=_MESSAGE,
    ),  # the end is one of the tokens that end an answer, so no grammar asks for it
    is_single=True,
    others=_ALL,
    marks=("<|channel|>commentary", "<|channel|>analysis"),
    example='<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
)
REASONING = ReasoningFormat(
    name="openai_gptoss",
    families="gpt-oss",
    begin="<|channel|>analysis<|message|>",
    end="<|end|>",
    after="<|start|>assistant",
    before_content="<|channel|>final<|message|>",
    others=_ALL,
    marks=("<|channel|>commentary", "<|channel|>analysis"),
)


class HarmonyParser(ReadingParser):
    """Parses one answer with its reasoning, texts and calls. reasons: the analysis is reasoning;
    else it is text. tools: None if calls are text, too."""

    __slots__ = ("_state",)

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]] | None,
        *,
        reasons: bool = True,
        num_earlier: int = 0,
    ) -> None:
        reader = Reader(TOOLS.make_id, tools or {}, num_earlier=num_earlier)
        self._state = _State(reasons=reasons, calls=tools is not None)
        super().__init__(reader, _messages(reader, self._state))

    @property
    def is_reasoning(self) -> bool:
        return self._state.is_reasoning

    @property
    def has_reasoned(self) -> bool:
        """Whether a message of reasoning has ended."""
        return self._state.has_reasoned


class _State:
    __slots__ = ("calls", "has_reasoned", "has_text", "is_reasoning", "reasons")

    def __init__(self, *, reasons: bool, calls: bool) -> None:
        self.reasons = reasons
        self.calls = calls
        self.is_reasoning = False
        self.has_reasoned = False
        self.has_text = False


def _messages(reader: Reader, state: _State) -> Wait[None]:
    while True:
        if state.has_text or state.has_reasoned:
            yield from reader.skip_space()
        if not (yield from reader.peek()):
            return
        head = yield from _head(reader)
        if head is None:  # the answer goes on with a text that the prompt has begun
            yield from reader.take(_START)
            yield from reader.take(_CHANNEL)
            reader.emit(reader.held())
            yield from _text(reader, state, "final")
            continue
        channel, recipient = _NAME.search(head), _TO.search(head)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        if recipient and state.calls and reader.can_call(name) and name != "assistant":
            is_ours = recipient[1].startswith("functions.") or name in reader.tools
            if is_ours and (yield from _call(reader, name)):
                continue
        if recipient or channel is None:
            reader.emit(reader.held())
            yield from _text(reader, state, "final")
            continue
        yield from _text(reader, state, channel[1])


def _head(reader: Reader) -> Wait[str | None]:
    """Reads up to the text of a message, and holds it; None if there is no head."""
    reader.hold()
    if (yield from reader.sees(_START)) or (yield from reader.sees(_CHANNEL)):
        return (yield from reader.until((_MESSAGE,), MAX_HEAD_CHARS))
    yield from reader.take(" ")
    if not (yield from reader.sees("to=")):
        return None
    channel = yield from reader.find((_CHANNEL, _MESSAGE, *_STOPS), MAX_HEAD_CHARS)
    if channel is None or channel[1] != _CHANNEL:
        return None
    return (yield from reader.until((_MESSAGE,), MAX_HEAD_CHARS))


def _text(reader: Reader, state: _State, channel: str) -> Wait[None]:
    """Emits a message of text or reasoning up to its end."""
    is_reasoning = channel == "analysis" and state.reasons
    is_again = state.has_reasoned if is_reasoning else state.has_text
    state.is_reasoning = is_reasoning
    emit = reader.think if is_reasoning else reader.emit
    reader.drop()
    is_first = True
    while True:
        text = reader.rest()
        found = first_of(text, _STOPS)
        ready = text[: found[0] if found else len(text) - longest_overlap(text, _STOPS)]
        if ready and is_first:
            emit("\n" if is_again else "")  # between two messages
            is_first = False
        emit(ready)
        reader.advance(len(ready))
        if found or not (yield from reader.more()):
            break
    if found is None:
        emit(reader.rest())
        reader.advance(len(reader.rest()))
        return
    reader.advance(len(found[1]) if found[1] in _ENDS else 0)
    state.is_reasoning = False
    state.has_reasoned = state.has_reasoned or is_reasoning
    state.has_text = state.has_text or not is_reasoning


def _call(reader: Reader, name: str) -> Wait[bool]:
    """Emits a call whose arguments begin like an object; False if they do not."""
    yield from reader.skip_space()
    if not (yield from reader.sees("{")):
        return False
    reader.begin_call(name)
    is_complete = yield from arguments_object(reader)
    yield from reader.skip_space()
    found = yield from reader.find(_STOPS, 0 if is_complete else MAX_SKIPPED_CHARS)
    if found is not None:
        reader.advance(found[0] + (len(found[1]) if found[1] in _ENDS else 0))
    return True
