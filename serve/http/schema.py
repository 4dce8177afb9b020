"""Request bodies of the OpenAI API, parsed to SamplingParams and prompts, or refused.

Ranges live in SamplingParams; here are the JSON types, the names, and what the API has that
we do not. null means absent. Knows no engine and no HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve.errors import RequestError
from serve.http.errors import quoted
from serve.http.fields import Fields
from serve.http.messages import parse_messages
from serve.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, Prompt, SamplingParams

COMPLETION_MAX_TOKENS = 16
MAX_PROMPTS = 1024
MAX_SEQUENCES = 1024
MAX_COMPLETION_LOGPROBS = 5
MAX_TOP_LOGPROBS = MAX_LOGPROBS
MAX_TOKEN_ID = 1 << 31
MAX_METADATA = 16

_INTEGERS = ("n", "min_tokens", "top_k", "seed", "priority")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_BOOLEANS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
_SAMPLING = {*_INTEGERS, *_NUMBERS, *_BOOLEANS, "stop", "stop_token_ids", "logit_bias"}
_COMMON = {"model", "stream", "stream_options", "max_tokens", "logprobs", "cache_salt"}
# Who or what asks, the most telling first: answers' lengths are predicted per client.
_CLIENT = ("prompt_cache_key", "safety_identifier", "user")
# Accepted because clients send them and ignoring them harms nobody.
_IGNORED = {*_CLIENT, "metadata", "store", "service_tier", "prompt_cache_retention"}
COMPLETION_FIELDS = frozenset(_COMMON | _SAMPLING | _IGNORED | {"prompt"})
CHAT_FIELDS = frozenset(
    _COMMON | _SAMPLING | _IGNORED | {"messages", "max_completion_tokens", "top_logprobs"}
)
_TOKEN_KEY = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A checked body of POST /v1/completions."""

    model: str
    prompts: list[Prompt]
    params: SamplingParams
    stream: bool
    include_usage: bool
    client: str | None = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A checked body of POST /v1/chat/completions."""

    model: str
    messages: list[dict[str, Any]]
    params: SamplingParams
    stream: bool
    include_usage: bool
    client: str | None = None


def parse_completion(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> CompletionCall:
    """defaults: sampling settings of the server for what the request leaves out."""
    fields = Fields(body, COMPLETION_FIELDS)
    prompts = _prompts(fields.required("prompt"))
    logprobs = fields.integer("logprobs")
    if logprobs is not None and not 0 <= logprobs <= MAX_COMPLETION_LOGPROBS:
        raise RequestError(
            f"logprobs must be between 0 and {MAX_COMPLETION_LOGPROBS}", param="logprobs"
        )
    max_tokens = fields.integer("max_tokens")
    params = _sampling_params(
        fields,
        defaults,
        max_tokens=COMPLETION_MAX_TOKENS if max_tokens is None else max_tokens,
        logprobs=logprobs,
    )
    if len(prompts) * params.n > MAX_SEQUENCES:
        raise RequestError(
            f"prompts times n is more than {MAX_SEQUENCES}",
            param="n",
            code="array_above_max_length",
        )
    stream, include_usage = _streaming(fields)
    return CompletionCall(_model(fields), prompts, params, stream, include_usage, _client(fields))


def parse_chat(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> ChatCall:
    """defaults: sampling settings of the server for what the request leaves out."""
    fields = Fields(body, CHAT_FIELDS)
    messages = parse_messages(fields.required("messages"))
    params = _sampling_params(
        fields, defaults, max_tokens=_chat_max_tokens(fields), logprobs=_chat_logprobs(fields)
    )
    stream, include_usage = _streaming(fields)
    return ChatCall(_model(fields), messages, params, stream, include_usage, _client(fields))


def _client(fields: Fields) -> str | None:
    names = [fields.string(name) for name in _CLIENT]  # each is checked
    return next((name for name in names if name), None)


def _model(fields: Fields) -> str:
    fields.required("model")
    model = fields.string("model") or ""
    if not model:
        raise RequestError("model is empty", param="model", code="missing_required_parameter")
    _check_ignored(fields)
    return model


def _check_ignored(fields: Fields) -> None:
    """Nothing is done with them, but their shape is promised by the API."""
    fields.string("service_tier")
    fields.boolean("store")
    metadata = fields.mapping("metadata") or {}
    if len(metadata) > MAX_METADATA:
        raise RequestError(
            f"metadata has more than {MAX_METADATA} entries",
            param="metadata",
            code="array_above_max_length",
        )
    for key, value in metadata.items():
        if len(key) > 64 or not isinstance(value, str) or len(value) > 512:
            raise RequestError(
                "metadata must map keys of at most 64 characters to strings of at most 512",
                param="metadata",
            )


def _streaming(fields: Fields) -> tuple[bool, bool]:
    stream = fields.boolean("stream") or False
    options = fields.mapping("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    inner = Fields(options, frozenset({"include_usage", "include_obfuscation"}), "stream_options.")
    inner.boolean("include_obfuscation")
    return stream, inner.boolean("include_usage") or False


def _sampling_params(
    fields: Fields, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    values: dict[str, Any] = {
        name: defaults[name]
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if defaults.get(name) is not None
    }
    for names, read in (
        (_INTEGERS, fields.integer),
        (_NUMBERS, fields.number),
        (_BOOLEANS, fields.boolean),
    ):
        for name in names:
            value = read(name)
            if value is not None:
                values[name] = value
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=_stop(fields.get("stop")),
        stop_token_ids=_stop_token_ids(fields.get("stop_token_ids")),
        logit_bias=_logit_bias(fields.mapping("logit_bias")),
        cache_salt=fields.string("cache_salt"),
    )


def _chat_max_tokens(fields: Fields) -> int | None:
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise RequestError(
            "max_tokens and max_completion_tokens are both set and differ",
            param="max_completion_tokens",
        )
    name, value = ("max_tokens", old) if new is None else ("max_completion_tokens", new)
    if value is not None and value < 1:
        raise RequestError(f"{name} must be at least 1", param=name)
    return value


def _chat_logprobs(fields: Fields) -> int | None:
    wanted, top = fields.boolean("logprobs"), fields.integer("top_logprobs")
    if top is None:
        return 0 if wanted else None
    if not wanted:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise RequestError(
            f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}", param="top_logprobs"
        )
    return top


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise RequestError(
            "stop must be a string or a list of strings", param="stop", code="invalid_type"
        )
    if any("\0" in item for item in stops):
        raise RequestError("stop holds a NUL character", param="stop")
    return tuple(stops)


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RequestError(
            "stop_token_ids must be a list of integers", param="stop_token_ids", code="invalid_type"
        )
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids has more than {MAX_STOP_TOKEN_IDS} entries",
            param="stop_token_ids",
            code="array_above_max_length",
        )
    return tuple(value)


def _logit_bias(value: dict[str, Any] | None) -> dict[int, float] | None:
    if not value:
        return None
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has more than {MAX_LOGIT_BIAS} entries",
            param="logit_bias",
            code="array_above_max_length",
        )
    for key in value:
        if not _TOKEN_KEY.fullmatch(key):
            raise RequestError(
                f"logit_bias has the key {quoted(key)}, which is not a token id",
                param="logit_bias",
            )
    bias = {int(key): item for key, item in value.items()}
    if len(bias) != len(value):
        raise RequestError("logit_bias names a token twice", param="logit_bias")
    return bias


def _prompts(value: Any) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError(
            "prompt must be a string, a list of strings, token ids or lists of token ids",
            param="prompt",
            code="invalid_type",
        )
    if not value:
        raise RequestError("prompt is an empty list", param="prompt", code="invalid_prompt")
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return [_token_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise RequestError(
            f"prompt has more than {MAX_PROMPTS} entries",
            param="prompt",
            code="array_above_max_length",
        )
    if all(isinstance(item, str) for item in value):
        return list(value)
    if all(isinstance(item, list) for item in value):
        return [_token_ids(item) for item in value]
    raise RequestError(
        "prompt must hold only strings, only token ids or only lists of token ids",
        param="prompt",
        code="invalid_type",
    )


def _token_ids(value: list[Any]) -> Prompt:
    if not value:
        raise RequestError("prompt holds no tokens", param="prompt", code="invalid_prompt")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(
                "prompt token ids must be integers", param="prompt", code="invalid_type"
            )
        if not 0 <= token < MAX_TOKEN_ID:
            raise RequestError("a prompt token id is out of range", param="prompt")
    return {"prompt_token_ids": value}
