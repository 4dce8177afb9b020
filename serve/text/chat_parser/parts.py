"""What an assistant says, in parts: text, reasoning, calls of tools.

Whoever speaks a chat API (chat completions, responses, messages) makes its answers of these.
"""

from __future__ import annotations

from typing import NamedTuple


class Text(NamedTuple):
    """More of the visible answer."""

    text: str


class Reasoning(NamedTuple):
    """More of what the model thinks before it answers."""

    text: str


class ToolCallStart(NamedTuple):
    """number: from 0, of the calls of this choice. call_id: made by the server."""

    number: int
    call_id: str
    name: str


class ToolCallArguments(NamedTuple):
    """More of the JSON text of a call's arguments."""

    number: int
    text: str


Part = Text | Reasoning | ToolCallStart | ToolCallArguments
