"""Messages of content blocks, to messages as chat templates take them.

Consecutive messages of one role become one, as Anthropic's API does it: many templates take
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from serve.errors import RequestError
from serve.http.errors import quoted
from serve.http.fields import (
    Boolean,
    Either,
    FieldType,
    JsonObject,
    List,
    OneOfNames,
    Record,
    String,
)
from serve.http.messages import MAX_MESSAGES
from serve.http.tagged import Places, Tagged

MAX_TEXT_CHARS = 8 << 20
MAX_BLOCKS = 8192
MAX_ARGUMENT_BYTES = 1 << 20
MAX_ID_CHARS = 128
IS_ERROR = "Error: "  # templates know no other way to say that a tool failed

CACHE_CONTROL = Record({"type": OneOfNames(("ephemeral",)), "ttl": OneOfNames(("5m", "1h"))})
_TEXT = String(MAX_TEXT_CHARS, is_text=True)
_ID = String(MAX_ID_CHARS, min_chars=1)
NAME = String(128, min_chars=1, pattern="[A-Za-z0-9_-]+")
TEXT_BLOCK = Record(
    {
        "text": _TEXT,
        "cache_control": CACHE_CONTROL,
        "citations": List(JsonObject(64 << 10), 1024),  # echoed by clients, and not looked at
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


TEXTS = _text_or_blocks(Places(Tagged({"text": TEXT_BLOCK}, _NOT_TEXT), MAX_BLOCKS))
_TOOL_USE = Record(
    {
        "id": _ID,
        "name": NAME,
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
_BLOCKS: dict[str, Record] = {
    "text": TEXT_BLOCK,
    "tool_use": _TOOL_USE,
    "tool_result": _TOOL_RESULT,
    "thinking": Record({"thinking": _TEXT, "signature": _TEXT}, required=("thinking",)),
    "redacted_thinking": Record({"data": _TEXT}, required=("data",)),
}
_OF_USERS = ("text", "tool_result")
_OF_ASSISTANTS = ("text", "tool_use", "thinking", "redacted_thinking")
_MESSAGE = Record(
    {
        "role": OneOfNames(("user", "assistant", "system")),
        "content": _text_or_blocks(Places(Tagged(_BLOCKS, _NOT_TEXT + _SERVER_TOOLS), MAX_BLOCKS)),
    },
    required=("role", "content"),
)
MESSAGES = List(_MESSAGE, MAX_MESSAGES, min_items=1)


def text_of(content: str | Sequence[dict[str, Any]]) -> str:
    """content: checked text, or checked text blocks."""
    if isinstance(content, str):
        return content
    return "\n".join(block["text"] for block in content)


def chat_messages(
    system: str | list[dict[str, Any]] | None, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """All of them checked by their tables. RequestError for blocks that the role does not have,
    and for results of tools that were not called."""
    found = _Conversation()
    if system is not None and (text := text_of(system)):
        found.say("system", text)
    for position, message in enumerate(messages):
        where = f"messages[{position}].content"
        if message["role"] == "assistant":
            found.assistant(message["content"], where)
        else:
            found.other(message["role"], message["content"], where)
    return found.messages


class _Conversation:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._called: dict[str, str] = {}  # names of tools by the ids of their calls

    def say(self, role: str, text: str) -> dict[str, Any]:
        """The message that says it: the last one, if that has the role."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != role:
            last = {"role": role, "content": text}
            self.messages.append(last)
        elif text:
            last["content"] += f"\n{text}" if last["content"] else text
        return last

    def other(self, role: str, content: str | list[dict[str, Any]], where: str) -> None:
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for position, block in enumerate(blocks):
            place = f"{where}[{position}]"
            if block["type"] == "tool_result" and role == "user":
                self._result(block, place)
            elif block["type"] == "text":
                self.say(role, block["text"])
            else:
                raise _misplaced(block["type"], role, place)

    def _result(self, block: dict[str, Any], where: str) -> None:
        call_id = block["tool_use_id"]
        name = self._called.get(call_id)
        if name is None:
            raise RequestError(
                f"{where}.tool_use_id {quoted(call_id)} is no tool_use of an earlier message",
                param=f"{where}.tool_use_id",
            )
        text = text_of(block.get("content", ""))
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": call_id,
                "name": name,
                "content": IS_ERROR + text if block.get("is_error") else text,
            }
        )

    def assistant(self, content: str | list[dict[str, Any]], where: str) -> None:
        if isinstance(content, str):
            self.say("assistant", content)
            return
        message = self.say("assistant", "")
        for position, block in enumerate(content):
            kind = block["type"]
            if kind == "text":
                self.say("assistant", block["text"])
            elif kind == "thinking":
                before = message.get("reasoning_content")
                message["reasoning_content"] = _joined((before, block["thinking"]))
            elif kind == "tool_use":
                self._called[block["id"]] = block["name"]
                message.setdefault("tool_calls", []).append(_call(block))
            elif kind != "redacted_thinking":  # which nobody here can read
                raise _misplaced(kind, "assistant", f"{where}[{position}]")


def _call(block: dict[str, Any]) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": block["id"], "type": "function", "function": function}


def _joined(texts: Iterable[str | None]) -> str:
    return "\n".join(text for text in texts if text)


def _misplaced(kind: str, role: str, where: str) -> RequestError:
    wanted = ", ".join(_OF_ASSISTANTS if role == "assistant" else _OF_USERS)
    return RequestError(
        f"{where} is a {kind} block, and messages of the role {role} have only {wanted}"
        if role != "system"
        else f"{where} is a {kind} block, and messages of the role system have only text",
        param=f"{where}.type",
    )
