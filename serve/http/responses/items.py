"""Items of the Responses API: their fields, and their conversion to messages of chat templates.

The reasoning, text and calls of one assistant turn become one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from serve.http.calls.messages import MAX_MESSAGES, parse_arguments
from serve.http.calls.turns import Turns
from serve.http.schema.fields import (
    Either,
    FieldType,
    JsonObject,
    List,
    OneOfNames,
    Parsed,
    Record,
    String,
    Unknown,
    Unsupported,
)
from serve.http.schema.tagged import Tagged

REFERENCE = "item_reference"
MAX_TEXT_CHARS = 8 << 20
MAX_PARTS = 8192
MAX_ID_CHARS = 128
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}

_TEXT = String(MAX_TEXT_CHARS, is_text=True)
_ID = String(MAX_ID_CHARS, min_chars=1)
_STATUS = OneOfNames(("in_progress", "completed", "incomplete"))
NAME = String(128, min_chars=1, pattern="[A-Za-z0-9_-]+")
# A model may have called a name that no tool can have; clients may send it back.
_CALLED_NAME = String(128, min_chars=1, pattern="[A-Za-z0-9_.-]+")
_ECHOED = List(JsonObject(64 << 10), 1 << 16)  # echoed from answers, and ignored
_BREAKPOINT = Record({"mode": OneOfNames(("explicit",)), "ttl": OneOfNames(("30m", "12h"))})
_INPUT_TEXT = Record({"text": _TEXT, "prompt_cache_breakpoint": _BREAKPOINT}, required=("text",))
_NOT_TEXT = ("input_image", "input_file", "input_audio", "computer_screenshot")
_PARTS: dict[str, Record] = {
    "input_text": _INPUT_TEXT,
    "output_text": Record(
        {"text": _TEXT, "annotations": _ECHOED, "logprobs": _ECHOED}, required=("text",)
    ),
    "refusal": Record({"refusal": _TEXT}, required=("refusal",)),
}


def _argument_text(value: Any, where: str, unknown: Unknown) -> str:
    parse_arguments(value, where, unknown)
    return str(value)


def _text_or_parts(parts: Mapping[str, Record]) -> Either:
    listed = List(Tagged(parts, _NOT_TEXT), MAX_PARTS, min_items=1)
    return Either({str: _TEXT, list: listed}, "a string or a list of parts")


def _texts(kind: str) -> FieldType:
    record = Record({"text": _TEXT}, required=("text",))
    return List(Tagged({kind: record}), MAX_PARTS)


_CALLER = Tagged({"direct": Record({})}, ("program",))
_ITEMS: dict[str, Record] = {
    "message": Record(
        {
            "id": _ID,
            "status": _STATUS,
            "phase": OneOfNames(("commentary", "final_answer")),
            "role": OneOfNames(tuple(ROLES)),
            "content": _text_or_parts(_PARTS),
        },
        required=("role", "content"),
    ),
    "function_call": Record(
        {
            "id": _ID,
            "status": _STATUS,
            "call_id": _ID,
            "name": _CALLED_NAME,
            "arguments": Parsed(_argument_text, _TEXT.schema()),
            "caller": _CALLER,
            "namespace": Unsupported(),
            "async": Unsupported((False,)),
        },
        required=("call_id", "name", "arguments"),
    ),
    "function_call_output": Record(
        {
            "id": _ID,
            "status": _STATUS,
            "call_id": _ID,
            "output": _text_or_parts({"input_text": _INPUT_TEXT}),
            "caller": _CALLER,
            "name": _CALLED_NAME,
            "namespace": Unsupported(),
        },
        required=("call_id", "output"),
    ),
    REFERENCE: Record({"id": _ID}, required=("id",)),
    "reasoning": Record(
        {
            "id": _ID,
            "status": _STATUS,
            "summary": _texts("summary_text"),
            "content": _texts("reasoning_text"),
            "encrypted_content": _TEXT,
        }
    ),
}
_OTHERS = (
    "additional_tools",
    "apply_patch_call",
    "apply_patch_call_output",
    "code_interpreter_call",
    "compaction",
    "compaction_trigger",
    "computer_call",
    "computer_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "file_search_call",
    "image_generation_call",
    "local_shell_call",
    "local_shell_call_output",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "shell_call",
    "shell_call_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
)
_ITEM_LIST = List(Tagged(_ITEMS, _OTHERS, default="message"), MAX_MESSAGES, min_items=1)
INPUT = Either({str: _TEXT, list: _ITEM_LIST}, "a string or a list of items")


def input_items(value: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns complete items of a checked input: omitted fields are filled, except ids. References
    stay."""
    items = (
        [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value
    )
    return [_complete(item) for item in items]


def _complete(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] == "message" and isinstance(item["content"], str):
        is_answer = item["role"] == "assistant"
        part: dict[str, Any] = {"type": "output_text" if is_answer else "input_text"}
        part["text"] = item["content"]
        if is_answer:
            part["annotations"] = []
        item = {**item, "content": [part]}
    return item if item["type"] == REFERENCE else {"status": "completed", **item}


def chat_messages(
    instructions: str | None, items: Iterable[dict[str, Any]], first: int
) -> list[dict[str, Any]]:
    """Returns the messages of complete items. first: the index of the first item of the request's
    own input; errors name items by their index there. Raises RequestError for outputs of unknown
    calls."""
    turns = Turns(join_all=False)
    if instructions:
        turns.say("system", instructions)
    for position, item in enumerate(items):
        _add(turns, item, f"input[{position - first}]")
    return turns.messages()


def _add(turns: Turns, item: Mapping[str, Any], where: str) -> None:
    kind = item["type"]
    if kind == "message":
        turns.say(ROLES[item["role"]], _text(item["content"]))
    elif kind == "function_call":
        turns.call(item["call_id"], item["name"], _arguments(item["arguments"]))
    elif kind == "function_call_output":
        turns.result(item["call_id"], _text(item["output"]), f"{where}.call_id")
    else:
        for part in item.get("content") or item.get("summary") or ():
            turns.think(part["text"])  # encrypted content is ignored


def _arguments(text: str) -> dict[str, Any] | str:
    return parse_arguments(text, "", Unknown())


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal" if part["type"] == "refusal" else "text"] for part in content)
