"""Parses bodies of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve.chat.reasoning import BUDGET, EFFORTS
from serve.chat.request import ChatRequest
from serve.chat.tools import MAX_DESCRIPTION_CHARS, MAX_SCHEMA_BYTES, MAX_TOOLS
from serve.errors import RequestError
from serve.http.calls.reasoning_fields import BUDGET_FIELD, reasoning_options
from serve.http.calls.sampling_fields import (
    CLIENT_FIELDS,
    IGNORED_FIELDS,
    MAX_TOKENS,
    MODEL,
    SAMPLING_FIELDS,
    client_name,
    sampling_params,
)
from serve.http.calls.structured_fields import BOUNDED, JSON_OBJECT, bounded, json_schema
from serve.http.calls.tools import PARAMETERS
from serve.http.edge.errors import quoted
from serve.http.responses.items import INPUT, NAME, chat_messages, input_items
from serve.http.schema.fields import (
    Boolean,
    Either,
    FieldType,
    Integer,
    JsonObject,
    List,
    OneOfNames,
    Parsed,
    Record,
    Schema,
    String,
    Unknown,
    Unsupported,
    check_length,
    wrong_type,
)
from serve.http.schema.tagged import Tagged
from serve.sampling_params import MAX_LOGPROBS, SamplingParams
from serve.structured_output import StructuredOutput

MAX_INSTRUCTIONS_CHARS = 8 << 20
MAX_METADATA_BYTES = 64 << 10
LOGPROBS = "message.output_text.logprobs"
# All are accepted; only the log-probabilities exist here.
_INCLUDES = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_OTHER_TOOLS = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "custom",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "namespace",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_preview",
)
_FUNCTION = Record(
    {
        "name": NAME,
        "description": String(MAX_DESCRIPTION_CHARS, is_text=True),
        "parameters": PARAMETERS,
        "strict": Boolean(),
        "output_schema": JsonObject(MAX_SCHEMA_BYTES),
        "defer_loading": Unsupported((False,)),
        "allowed_callers": Unsupported((["direct"],)),
        "async": Unsupported((False,)),
    },
    required=("name",),
)
_TOOL = Tagged({"function": _FUNCTION}, _OTHER_TOOLS)


@dataclass(frozen=True, slots=True)
class _Tools:
    """A list of functions. A tool that OpenAI's servers run is refused, but beside functions it is
    left out with a warning: agents send such tools with every request and can do without them."""

    def check(self, value: Any, where: str, unknown: Unknown) -> list[dict[str, Any]]:
        if not isinstance(value, list):
            raise wrong_type(where, "a list")
        check_length(value, where, MAX_TOOLS)
        kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in value]
        tools = []
        for position, (kind, tool) in enumerate(zip(kinds, value, strict=True)):
            if "function" in kinds and kind in _OTHER_TOOLS:
                unknown.left_out.append(f"{where}[{position}] of the type {kind}")
            else:
                tools.append(_TOOL.check(tool, f"{where}[{position}]", unknown))
        return tools

    def schema(self) -> Schema:
        left_out = {
            "type": "object",
            "properties": {"type": {"enum": list(_OTHER_TOOLS)}},
            "required": ["type"],
        }
        item = {"anyOf": [*_TOOL.schema()["anyOf"], left_out]}
        return {"type": "array", "items": item, "maxItems": MAX_TOOLS}


_NAMED = Record({"name": NAME}, required=("name",))
_TOOL_CHOICE = Either(
    {
        str: OneOfNames(("none", "auto", "required")),
        dict: Tagged(
            {
                "function": _NAMED,
                "allowed_tools": Record(
                    {
                        "mode": OneOfNames(("auto", "required")),
                        "tools": List(
                            Tagged({"function": _NAMED}, _OTHER_TOOLS), MAX_TOOLS, min_items=1
                        ),
                    },
                    required=("mode", "tools"),
                ),
            },
            _OTHER_TOOLS,
        ),
    },
    "a string or an object",
)
_SCHEMA = Parsed(lambda value, where, unknown: json_schema(value, where), {"type": "object"})
_FORMAT = Tagged(
    {
        "text": Record({}),
        "json_object": Record({}),
        "json_schema": Record(
            {
                "name": String(64, min_chars=1, pattern="[A-Za-z0-9_-]+"),
                "schema": _SCHEMA,
                "description": String(4096, is_text=True),
                "strict": Boolean(),
            },
            required=("name", "schema"),
        ),
    },
    ("grammar", "python"),
)
_SUMMARY = OneOfNames(("auto", "concise", "detailed"))
_REASONING = Record(
    {
        "effort": OneOfNames(EFFORTS),
        "summary": _SUMMARY,
        "generate_summary": _SUMMARY,
        "context": OneOfNames(("auto", "current_turn", "all_turns")),
        "mode": Unsupported(("standard",)),
    }
)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
_MORE_SAMPLING = (
    *("frequency_penalty", "seed", "stop", "logit_bias", "cache_salt", "kv_policy", "priority"),
)
# The fields that form the prompt, whose tokens input_tokens counts.
_PROMPT_FIELDS: dict[str, FieldType] = {
    "model": MODEL,
    "input": INPUT,
    "instructions": String(MAX_INSTRUCTIONS_CHARS, is_text=True),
    "previous_response_id": String(128, min_chars=1),
    "tools": _Tools(),
    "tool_choice": _TOOL_CHOICE,
    "parallel_tool_calls": Boolean(),
    "text": Record({"format": _FORMAT, "verbosity": OneOfNames(("low", "medium", "high"))}),
    "reasoning": _REASONING,
    BUDGET: BUDGET_FIELD,
    "truncation": Unsupported(("disabled",)),
    "conversation": Unsupported(),
}
CREATE = Record(
    {
        **_PROMPT_FIELDS,
        **{name: SAMPLING_FIELDS[name] for name in (*_SAMPLING, *_MORE_SAMPLING)},
        **CLIENT_FIELDS,
        **IGNORED_FIELDS,
        **BOUNDED,
        "max_output_tokens": Integer(1, MAX_TOKENS),
        "max_tool_calls": Integer(1, MAX_TOKENS),
        "top_logprobs": Integer(0, MAX_LOGPROBS),
        "include": List(OneOfNames(_INCLUDES), len(_INCLUDES)),
        "stream": Boolean(),
        "stream_options": Record({"include_obfuscation": Boolean()}),
        "background": Unsupported((False,)),
        "background_options": Unsupported(),
        "prompt": Unsupported(),
        "prompt_cache_options": Unsupported(),
        "moderation": Unsupported(),
        "context_management": Unsupported(([],)),
        "access_programs": Unsupported(),
        "client_metadata": JsonObject(MAX_METADATA_BYTES),  # Codex sends it; nothing depends on it
        "image": Unsupported(),
    },
    required=("model", "input"),
)
COUNT = Record({**_PROMPT_FIELDS, "personality": Unsupported()}, required=("model", "input"))


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """A checked body. values: its checked fields. items: its input items, perhaps with references.
    functions, tool_choice: see ChatRequest. `chat` makes the messages once the conversation that
    it continues is known."""

    values: dict[str, Any]
    items: list[dict[str, Any]]
    params: SamplingParams
    functions: list[dict[str, Any]]
    tool_choice: str | tuple[str, str]

    @property
    def model(self) -> str:
        return str(self.values["model"])

    @property
    def stream(self) -> bool:
        return bool(self.values.get("stream", False))

    @property
    def previous_id(self) -> str | None:
        return self.values.get("previous_response_id")

    def chat(self, before: list[dict[str, Any]], items: list[dict[str, Any]]) -> ChatRequest:
        """Returns the ChatRequest. before: the items of the conversation that this one continues.
        items: its own, without references."""
        values = self.values
        instructions = values.get("instructions")
        effort = values.get("reasoning", {}).get("effort")
        said = {"reasoning_effort": effort, BUDGET: values.get(BUDGET)}
        return ChatRequest(
            chat_messages(instructions, [*before, *items], first=len(before)),
            self.params,
            tools=self.functions,
            tool_choice=self.tool_choice,
            parallel_tool_calls=values.get("parallel_tool_calls", True),
            reasoning=reasoning_options(said),
            client=client_name(values),
            bounded_json=values.get("bounded_json"),
        )


def parse_response_call(
    body: Mapping[str, Any], defaults: Mapping[str, Any], unknown: Unknown | None = None
) -> ResponseCall:
    """Raises RequestError. defaults: the server's sampling settings for omitted fields."""
    values = CREATE.check(body, "", unknown or Unknown())
    if "stream_options" in values and not values.get("stream"):
        raise RequestError("stream_options needs stream: true", param="stream_options")
    top: int = values.get("top_logprobs", 0)
    wants_logprobs = top > 0 or LOGPROBS in values.get("include", ())
    params = sampling_params(
        values,
        defaults,
        max_tokens=values.get("max_output_tokens"),
        logprobs=top if wants_logprobs else None,
        structured=_structured(values),
    )
    return _call(values, params)


def parse_count_call(body: Mapping[str, Any], unknown: Unknown | None = None) -> ResponseCall:
    """Parses a body of POST /v1/responses/input_tokens."""
    return _call(COUNT.check(body, "", unknown or Unknown()), SamplingParams())


def _call(values: dict[str, Any], params: SamplingParams) -> ResponseCall:
    functions, choice = _functions(values.get("tools", []), values.get("tool_choice", "auto"))
    return ResponseCall(values, input_items(values["input"]), params, functions, choice)


def _structured(values: Mapping[str, Any]) -> StructuredOutput | None:
    form = values.get("text", {}).get("format", {"type": "text"})
    if form["type"] == "text":
        return None
    return bounded(form["schema"] if form["type"] == "json_schema" else JSON_OBJECT, values)


def _functions(
    tools: list[dict[str, Any]], choice: str | dict[str, Any]
) -> tuple[list[dict[str, Any]], str | tuple[str, str]]:
    """Returns the tools and tool_choice of a ChatRequest."""
    names = [tool["name"] for tool in tools]
    for position, name in enumerate(names):
        if name in names[:position]:
            where = f"tools[{position}].name"
            raise RequestError(f"{where} {quoted(name)} appears twice", param=where)
    if choice not in ("auto", "none") and not tools:
        raise RequestError("tool_choice needs tools", param="tool_choice")
    if isinstance(choice, str):
        return [_function(tool) for tool in tools], choice
    if choice["type"] == "function":
        _check_name(choice["name"], names, "tool_choice.name")
        return [_function(tool) for tool in tools], ("function", choice["name"])
    allowed = [tool["name"] for tool in choice["tools"]]
    for position, name in enumerate(allowed):
        _check_name(name, names, f"tool_choice.tools[{position}].name")
    return [_function(tool) for tool in tools if tool["name"] in allowed], choice["mode"]


def _check_name(name: str, names: list[str], where: str) -> None:
    if name not in names:
        raise RequestError(f"{where} {quoted(name)} is not one of the tools", param=where)


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}
