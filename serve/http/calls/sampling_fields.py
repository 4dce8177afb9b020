"""The fields that completions and chat share: sampling, streaming and the client's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memory.policies.setting import MAX_CHARS, OFF, POLICIES, parse_kv_policy
from serve.errors import RequestError
from serve.http.calls.reasoning_fields import BUDGET_FIELD
from serve.http.calls.structured_fields import STRUCTURED_FIELDS, structured_output
from serve.http.edge.errors import quoted
from serve.http.schema.fields import (
    Boolean,
    Either,
    FieldType,
    Integer,
    List,
    Map,
    Number,
    Parsed,
    Record,
    String,
    TokenIds,
    Unknown,
    Unsupported,
    wrong_type,
)
from serve.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    PRIORITY_LIMIT,
    SEED_LIMIT,
    SamplingParams,
)

MAX_TOKENS = (1 << 31) - 1
MAX_CLIENT_CHARS = 512
MAX_METADATA = 16

MODEL = String(512, min_chars=1, if_empty="missing_required_parameter")
_STOP = String(MAX_STOP_LENGTH, min_chars=1)


def _kv_policy(value: Any, where: str, unknown: Unknown) -> str:
    if not isinstance(value, str):
        raise wrong_type(where, "a string")
    if len(value) > MAX_CHARS:
        raise RequestError(
            f"{where} is longer than {MAX_CHARS} characters",
            param=where,
            code="string_above_max_length",
        )
    try:
        parse_kv_policy(value)
    except ValueError as error:
        raise RequestError(f"{where} {error}", param=where) from None
    return value


# Whether a server can follow it depends on its own kv_policy.
KV_POLICY = Parsed(
    _kv_policy,
    {
        "type": "string",
        "maxLength": MAX_CHARS,
        "pattern": f"^({OFF}|({'|'.join(POLICIES)}):budget="
        "([1-9][0-9]{2,6}|6[4-9]|[7-9][0-9]|[1-9][0-9]{0,6},least=1|"
        "(100|[1-9][0-9]?(\\.[0-9]{1,3})?)%(,least=[1-9][0-9]{0,5})?))$",
    },
)

# The names are those of SamplingParams.
SAMPLING_FIELDS: dict[str, FieldType] = {
    "n": Integer(1, MAX_N),
    "min_tokens": Integer(0, MAX_TOKENS),
    "temperature": Number(0, 2),
    "top_p": Number(0, 1),
    "top_k": Integer(-1, MAX_TOKENS),
    "min_p": Number(0, 1),
    "repetition_penalty": Number(0.01, 100),
    "presence_penalty": Number(-2, 2),
    "frequency_penalty": Number(-2, 2),
    "seed": Integer(-SEED_LIMIT, SEED_LIMIT - 1),
    "stop": Either(
        {str: _STOP, list: List(_STOP, MAX_STOP_STRINGS)}, "a string or a list of strings"
    ),
    "stop_token_ids": TokenIds(MAX_STOP_TOKEN_IDS),
    "include_stop_str_in_output": Boolean(),
    "ignore_eos": Boolean(),
    "skip_special_tokens": Boolean(),
    "logit_bias": Map(Number(-100, 100), MAX_LOGIT_BIAS, key="[0-9]{1,10}", keys="a token id"),
    "cache_salt": String(128, min_chars=1, pattern="[A-Za-z0-9_-]+"),
    "kv_policy": KV_POLICY,
    "priority": Integer(-PRIORITY_LIMIT, PRIORITY_LIMIT - 1),
    "allowed_token_ids": TokenIds(MAX_ALLOWED_TOKEN_IDS, min_items=1),
    "bad_words": List(String(MAX_BAD_WORD_LENGTH, min_chars=1), MAX_BAD_WORDS),
    "prompt_logprobs": Integer(0, MAX_LOGPROBS),
    "thinking_token_budget": BUDGET_FIELD,
}
STREAM_FIELDS: dict[str, FieldType] = {
    "stream": Boolean(),
    "stream_options": Record(
        {
            "include_usage": Boolean(),
            "continuous_usage_stats": Boolean(),
            "include_obfuscation": Boolean(),
        }
    ),
}
# The client's name, the most specific field first: lengths of answers are predicted per client.
CLIENT_FIELDS: dict[str, FieldType] = {
    name: String(MAX_CLIENT_CHARS) for name in ("prompt_cache_key", "safety_identifier", "user")
}
# Fields that clients send and that the server can safely ignore.
IGNORED_FIELDS: dict[str, FieldType] = {
    "metadata": Map(
        String(512, is_text=True),
        MAX_METADATA,
        key=r"[\s\S]{0,64}",
        keys="of at most 64 characters",
    ),
    "store": Boolean(),
    "service_tier": String(64),
    "prompt_cache_retention": String(64),
}
UNSUPPORTED_FIELDS: dict[str, FieldType] = {
    "modalities": Unsupported((["text"],)),
    "audio": Unsupported(),
    "prediction": Unsupported(),
    "web_search_options": Unsupported(),
    "chat_template": Unsupported(),
    "use_beam_search": Unsupported((False,)),
    "length_penalty": Unsupported((1, 1.0)),
    "spaces_between_special_tokens": Unsupported((True,)),
    "return_tokens_as_token_ids": Unsupported((False,)),
    "kv_transfer_params": Unsupported(),
}
COMMON_FIELDS: dict[str, FieldType] = {
    "model": MODEL,
    **SAMPLING_FIELDS,
    **STRUCTURED_FIELDS,
    **STREAM_FIELDS,
    **CLIENT_FIELDS,
    **IGNORED_FIELDS,
    **UNSUPPORTED_FIELDS,
    "return_token_ids": Boolean(),
}


def sampling_params(
    values: Mapping[str, Any], defaults: Mapping[str, Any], **more: Any
) -> SamplingParams:
    """Makes SamplingParams. values: checked fields. defaults: the server's values for fields that
    the request leaves out. more: arguments of SamplingParams that are not plain fields."""
    arguments: dict[str, Any] = {
        name: defaults[name]
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if defaults.get(name) is not None
    }
    arguments |= {name: values[name] for name in SAMPLING_FIELDS if name in values}
    arguments["logit_bias"] = _logit_bias(values.get("logit_bias"))
    arguments["structured"] = structured_output(values)
    return SamplingParams(**(arguments | more))


def client_name(values: Mapping[str, Any]) -> str | None:
    return next((values[name] for name in CLIENT_FIELDS if values.get(name)), None)


def stream_options(values: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Returns whether to stream, to end with the usage, and to send usage with every chunk."""
    stream = values.get("stream", False)
    options = values.get("stream_options")
    if options is not None and not stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    options = options or {}
    continuous = options.get("continuous_usage_stats", False)
    if continuous and not options.get("include_usage"):
        raise RequestError(
            "continuous_usage_stats needs include_usage: true",
            param="stream_options.continuous_usage_stats",
        )
    if stream and values.get("prompt_logprobs") is not None:
        raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    return stream, options.get("include_usage", False), continuous


def _logit_bias(value: Mapping[str, float] | None) -> dict[int, float] | None:
    if not value:
        return None
    bias = {int(key): item for key, item in value.items()}
    if len(bias) != len(value):
        raise RequestError(
            f"logit_bias names a token twice, such as {quoted(min(value, key=int))}",
            param="logit_bias",
        )
    return bias
