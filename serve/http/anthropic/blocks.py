"""Converts messages of content blocks to messages of chat templates.

Consecutive messages of one role become one, as in Anthropic's API; many templates require it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve.http.calls.messages import MAX_MESSAGES
from serve.http.calls.turns import Turns
from serve.http.schema.fields import (
    Boolean,
    Either,
    FieldType,
    JsonObject,
    List,
    OneOfNames,
    Record,
    String,
)
from serve.http.schema.tagged import Tagged

MAX_TEXT_CHARS = 8 << 20
MAX_BLOCKS = 8192
MAX_ARGUMENT_BYTES = 1 << 20
MAX_ID_CHARS = 128
IS_ERROR = "Error: "  # templates have no other way to mark a failed tool call

CACHE_CONTROL = Record({"type": OneOfNames(("ephemeral",)), "ttl": OneOfNames(("5m", "1h"))})
_TEXT = String(MAX_TEXT_CHARS, is_text=True)
_ID = String(MAX_ID_CHARS, min_chars=1)
NAME = String(128, min_chars=1, pattern="[A-Za-z0-9_-]+")
# A model may have called a name that no tool can have; clients may send it back.
_CALLED_NAME = String(128, min_chars=1, pattern="[A-Za-z0-9_.-]+")
TEXT_BLOCK = Record(
    {
        "text": _TEXT,
        "cache_control": CACHE_CONTROL,
        "citations": List(JsonObject(64 << 10), 1024),  # echoed by clients, and ignored
    },
    required=("text",),
)
_NOT_TEXT = ("image", "document", "search_result", "tool_reference", "browser_state")
_SERVER_TOOLS = (
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "container_upload",
    "compaction",
)


def _text_or_blocks(blocks: FieldType) -> Either:
    return Either({str: _TEXT, list: blocks}, "a string or a list of blocks")


TEXTS = _text_or_blocks(List(Tagged({"text": TEXT_BLOCK}, _NOT_TEXT), MAX_BLOCKS))
_TOOL_USE = Record(
    {
        "id": _ID,
        "name": _CALLED_NAME,
        "input": JsonObject(MAX_ARGUMENT_BYTES),
        "cache_control": CACHE_CONTROL,
        "caller": Tagged({"direct": Record({})}, ("code_execution_20250825",)),
    },
    required=("id", "name", "input"),
)
_TOOL_RESULT = Record(
    {
        "tool_use_id": _ID,
        "content": TEXTS,
        "is_error": Boolean(),
        "cache_control": CACHE_CONTROL,
    },
    required=("tool_use_id",),
)
_BLOCKS = {
    "user": {"text": TEXT_BLOCK, "tool_result": _TOOL_RESULT},
    "assistant": {
        "text": TEXT_BLOCK,
        "tool_use": _TOOL_USE,
        "thinking": Record({"thinking": _TEXT, "signature": _TEXT}, required=("thinking",)),
        "redacted_thinking": Record({"data": _TEXT}, required=("data",)),
    },
    "system": {"text": TEXT_BLOCK},
}


def _message(role: str) -> Record:
    blocks = List(Tagged(_BLOCKS[role], _NOT_TEXT + _SERVER_TOOLS), MAX_BLOCKS)
    return Record({"content": _text_or_blocks(blocks)}, required=("content",))


MESSAGES = List(
    Tagged({role: _message(role) for role in _BLOCKS}, by="role"), MAX_MESSAGES, min_items=1
)


def text_of(content: str | Sequence[dict[str, Any]]) -> str:
    """Returns the text of a checked content."""
    if isinstance(content, str):
        return content
    return "\n".join(block["text"] for block in content)


def chat_messages(
    system: str | list[dict[str, Any]] | None, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the template's messages. system, messages: checked fields. Raises RequestError for
    results of calls that no earlier message has."""
    turns = Turns(join_all=True)
    if system is not None and (text := text_of(system)):
        turns.say("system", text)
    for position, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if isinstance(content, str):
            turns.say(role, content)
            continue
        for number, block in enumerate(content):
            _add(turns, role, block, f"messages[{position}].content[{number}]")
    return turns.messages()


def _add(turns: Turns, role: str, block: dict[str, Any], where: str) -> None:
    kind = block["type"]
    if kind == "text":
        turns.say(role, block["text"])
    elif kind == "thinking":
        turns.think(block["thinking"])
    elif kind == "tool_use":
        turns.call(block["id"], block["name"], block["input"])
    elif kind == "tool_result":
        text = text_of(block.get("content", ""))
        if block.get("is_error"):
            text = IS_ERROR + text
        turns.result(block["tool_use_id"], text, f"{where}.tool_use_id")
    # a redacted_thinking block has no text that could be used
