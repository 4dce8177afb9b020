"""The parts of an answer: text, reasoning and tool calls.

Each chat API (chat completions, responses, messages) builds its answers from them.
"""

from __future__ import annotations

from typing import NamedTuple


class Text(NamedTuple):
    """Another piece of the visible answer."""

    text: str


class Reasoning(NamedTuple):
    """Another piece of the reasoning."""

    text: str


class ToolCallStart(NamedTuple):
    """The start of a call. number: its index in this choice. call_id: made by the server."""

    number: int
    call_id: str
    name: str


class ToolCallArguments(NamedTuple):
    """Another piece of the JSON text of a call's arguments."""

    number: int
    text: str


Part = Text | Reasoning | ToolCallStart | ToolCallArguments
