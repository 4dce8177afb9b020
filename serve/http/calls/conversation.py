"""The fields of a chat request that form its prompt or say how its answer is parsed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from serve.errors import RequestError
from serve.http.calls.chat_run import ChatRequest
from serve.http.calls.messages import MESSAGES
from serve.http.calls.tools import TOOL_FIELDS, tool_options
from serve.http.edge.errors import quoted
from serve.http.schema.fields import (
    Boolean,
    FieldType,
    OneOfNames,
    Parsed,
    Unknown,
    Unsupported,
    check_length,
    wrong_type,
)
from serve.sampling_params import SamplingParams

MAX_TEMPLATE_KWARGS = 16
MAX_KWARG_CHARS = 1024
MAX_KWARG_INTEGER = 1 << 53
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_KWARG_NAME = "(?:[a-z_]{1,64})"
# Names that the server passes to templates, and Jinja's own: clients cannot override them.
_RESERVED = frozenset(
    (
        *("messages", "tools", "documents", "tool_choice", "add_generation_prompt"),
        *("continue_final_message", "chat_template", "tokenize", "tokenizer", "return_dict"),
        *("return_tensors", "padding", "truncation", "max_length", "raise_exception"),
        *("strftime_now", "namespace", "range", "dict", "lipsum", "cycler", "joiner", "loop"),
        *("self", "caller", "true", "false", "none"),
    )
)


def _template_kwargs(value: Any, where: str, unknown: Unknown) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(where, "an object")
    check_length(value, where, MAX_TEMPLATE_KWARGS)
    for name, item in value.items():
        if not re.fullmatch(_KWARG_NAME, name) or _is_reserved(name):
            raise RequestError(
                f"{where} cannot set {quoted(name)}",
                param=where,
                code="unsupported_parameter",
            )
        _check_scalar(item, f"{where}.{name}")
    return value


def _is_reserved(name: str) -> bool:
    return name in _RESERVED or name.startswith("_") or name.endswith(("_token", "_tokens"))


def _check_scalar(value: Any, where: str) -> None:
    if isinstance(value, str):
        if len(value) > MAX_KWARG_CHARS:
            raise RequestError(
                f"{where} is longer than {MAX_KWARG_CHARS} characters",
                param=where,
                code="string_above_max_length",
            )
    elif isinstance(value, dict | list):
        raise wrong_type(where, "a string, a number, true, false or null")
    elif isinstance(value, int) and abs(value) > MAX_KWARG_INTEGER:
        raise RequestError(f"{where} is out of range", param=where)


_KWARGS_SCHEMA = {
    "type": "object",
    "properties": {"enable_thinking": {"type": "boolean"}},
    "additionalProperties": False,
}
CONVERSATION_FIELDS: dict[str, FieldType] = {
    "messages": MESSAGES,
    **TOOL_FIELDS,
    "reasoning_effort": OneOfNames(EFFORTS),
    "include_reasoning": Boolean(),
    "verbosity": Unsupported(),
    "chat_template_kwargs": Parsed(_template_kwargs, _KWARGS_SCHEMA),
    "add_generation_prompt": Boolean(),
    "continue_final_message": Boolean(),
}


def conversation(
    values: Mapping[str, Any], params: SamplingParams, client: str | None
) -> ChatRequest:
    """Makes the ChatRequest. values: checked fields."""
    messages: list[dict[str, Any]] = values["messages"]
    options = tool_options(values)
    continues = values.get("continue_final_message", False)
    adds_prompt = values.get("add_generation_prompt", not continues)
    if continues:
        _check_continued(messages[-1], adds_prompt=adds_prompt)
    kwargs: dict[str, Any] = dict(values.get("chat_template_kwargs", {}))
    kwargs = {**effort_kwargs(values.get("reasoning_effort")), **kwargs}
    return ChatRequest(
        messages,
        params,
        tools=options.tools,
        tool_choice=options.choice,
        parallel_tool_calls=options.parallel,
        template_kwargs=kwargs,
        add_generation_prompt=adds_prompt,
        continue_final_message=continues,
        include_reasoning=values.get("include_reasoning", True),
        client=client,
        bounded_json=values.get("bounded_json"),
    )


def effort_kwargs(effort: str | None) -> dict[str, Any]:
    """Returns the chat template variables for a reasoning effort."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


def _check_continued(last: Mapping[str, Any], *, adds_prompt: bool) -> None:
    if adds_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt cannot both be true",
            param="add_generation_prompt",
        )
    if last["role"] != "assistant" or "tool_calls" in last or not last["content"]:
        raise RequestError(
            "continue_final_message needs a last message of the assistant with text and no calls",
            param="continue_final_message",
        )
