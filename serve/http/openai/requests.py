"""Parses request bodies of OpenAI's API to prompts and SamplingParams.

The tables have the types and ranges of fields; the functions check what depends on several fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve.chat.request import ChatRequest
from serve.errors import RequestError
from serve.http.calls.conversation import CONVERSATION_FIELDS, conversation
from serve.http.calls.messages import MAX_TEXT_CHARS
from serve.http.calls.sampling_fields import (
    COMMON_FIELDS,
    MAX_TOKENS,
    client_name,
    sampling_params,
    stream_options,
)
from serve.http.calls.structured_fields import structured_name
from serve.http.edge import limits
from serve.http.openai.kv_transfer import TRANSFER, KVTransfer, with_transfer
from serve.http.openai.prompts import MAX_PROMPTS, prompts_field, with_options
from serve.http.schema.fields import (
    Boolean,
    Either,
    Integer,
    List,
    OneOfNames,
    Record,
    String,
    Unknown,
    Unsupported,
)
from serve.request import Prompt
from serve.sampling_params import MAX_LOGPROBS, SamplingParams

COMPLETION_MAX_TOKENS = 16
MAX_SEQUENCES = 1024
MAX_BEST_OF = 20
MAX_COMPLETION_LOGPROBS = 5
MAX_TOP_LOGPROBS = MAX_LOGPROBS
MAX_PREDICTION_PARTS = 1024
_TEXT = String(MAX_TEXT_CHARS, is_text=True)
_TEXT_PART = Record({"type": OneOfNames(("text",)), "text": _TEXT}, required=("type", "text"))

COMPLETION = Record(
    {
        **COMMON_FIELDS,
        "prompt": prompts_field(MAX_PROMPTS),
        "kv_transfer_params": TRANSFER,
        "max_tokens": Integer(0, MAX_TOKENS),
        "logprobs": Integer(0, MAX_COMPLETION_LOGPROBS),
        "best_of": Integer(1, MAX_BEST_OF),
        "echo": Boolean(),
        "suffix": Unsupported(("",)),
        "add_special_tokens": Boolean(),
        "truncate_prompt_tokens": Integer(1, MAX_TOKENS),
        "truncation_side": OneOfNames(("left", "right")),
        "prompt_embeds": Unsupported(),
        "tools": Unsupported(([],)),
        "tool_choice": Unsupported(("none", "auto")),
        "parallel_tool_calls": Boolean(),
        "functions": Unsupported(([],)),
        "function_call": Unsupported(("none", "auto")),
        "reasoning_effort": Unsupported(),
        "verbosity": Unsupported(),
        "chat_template_kwargs": Unsupported(({},)),
    },
    required=("model", "prompt"),
)
PREDICTION = Record(
    {
        "type": OneOfNames(("content",)),
        "content": Either(
            {str: _TEXT, list: List(_TEXT_PART, MAX_PREDICTION_PARTS)},
            "a string or a list of text parts",
        ),
    },
    required=("type", "content"),
)
CHAT = Record(
    {
        **COMMON_FIELDS,
        **CONVERSATION_FIELDS,
        "prediction": PREDICTION,
        "kv_transfer_params": TRANSFER,
        "max_tokens": Integer(1, MAX_TOKENS),
        "max_completion_tokens": Integer(1, MAX_TOKENS),
        "logprobs": Boolean(),
        "top_logprobs": Integer(0, MAX_TOP_LOGPROBS),
        "best_of": Unsupported((1,)),
        "echo": Unsupported((False,)),
        "suffix": Unsupported(("",)),
        "truncate_prompt_tokens": Unsupported(),
    },
    required=("model", "messages"),
)


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A checked body of POST /v1/completions.

    num_choices: choices per prompt; params.n may be larger, and the best are chosen. logprobs,
    prompt_logprobs: as requested; those of params may be larger.
    """

    model: str
    prompts: list[Prompt]
    params: SamplingParams
    stream: bool
    include_usage: bool
    client: str | None = None
    continuous_usage: bool = False
    num_choices: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    return_token_ids: bool = False
    structured_name: str = "structured"
    kv_transfer: KVTransfer | None = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A checked body of POST /v1/chat/completions. structured_name: the field that
    params.structured comes from."""

    model: str
    chat: ChatRequest
    stream: bool
    include_usage: bool
    continuous_usage: bool = False
    return_token_ids: bool = False
    structured_name: str = "structured"
    kv_transfer: KVTransfer | None = None

    @property
    def params(self) -> SamplingParams:
        return self.chat.params


def parse_completion(
    body: Mapping[str, Any], defaults: Mapping[str, Any], unknown: Unknown | None = None
) -> CompletionCall:
    """Raises RequestError. defaults: the server's sampling settings for omitted fields."""
    values = COMPLETION.check(body, "", unknown or Unknown())
    stream, include_usage, continuous_usage = stream_options(values)
    num_choices = values.get("n", 1)
    logprobs: int | None = values.get("logprobs")
    best_of = _best_of(values, num_choices, stream=stream)
    echo = values.get("echo", False)
    params = sampling_params(
        values,
        defaults,
        n=best_of,
        max_tokens=values.get("max_tokens", COMPLETION_MAX_TOKENS),
        # best_of compares candidates by the log-probabilities of their tokens
        logprobs=0 if logprobs is None and best_of > num_choices else logprobs,
        prompt_logprobs=_prompt_logprobs(values, logprobs if echo else None),
    )
    prompts = [with_options(prompt, values) for prompt in values["prompt"]]
    if len(prompts) * best_of > MAX_SEQUENCES:
        raise RequestError(
            f"the number of prompts times n is more than {MAX_SEQUENCES}",
            param="n" if best_of == num_choices else "best_of",
            code="array_above_max_length",
        )
    _check_allowed_ids(len(prompts), params)
    transfer = values.get("kv_transfer_params")
    return CompletionCall(
        values["model"],
        prompts,
        with_transfer(params, transfer),
        stream,
        include_usage,
        client_name(values),
        continuous_usage,
        num_choices,
        logprobs=logprobs,
        prompt_logprobs=values.get("prompt_logprobs"),
        echo=echo,
        return_token_ids=values.get("return_token_ids", False),
        structured_name=structured_name(values),
        kv_transfer=transfer,
    )


def parse_chat(
    body: Mapping[str, Any], defaults: Mapping[str, Any], unknown: Unknown | None = None
) -> ChatCall:
    """Raises RequestError. defaults: the server's sampling settings for omitted fields."""
    values = CHAT.check(body, "", unknown or Unknown())
    stream, include_usage, continuous_usage = stream_options(values)
    params = sampling_params(
        values,
        defaults,
        max_tokens=_chat_max_tokens(values),
        logprobs=_chat_logprobs(values),
        prediction=_prediction(values),
    )
    transfer = values.get("kv_transfer_params")
    params = with_transfer(params, transfer)
    return ChatCall(
        values["model"],
        conversation(values, params, client_name(values)),
        stream,
        include_usage,
        continuous_usage,
        values.get("return_token_ids", False),
        structured_name(values),
        transfer,
    )


def _prediction(values: Mapping[str, Any]) -> str | None:
    given = values.get("prediction")
    content = "" if given is None else given["content"]
    text = content if isinstance(content, str) else "".join([part["text"] for part in content])
    return text or None


def _best_of(values: Mapping[str, Any], num_choices: int, *, stream: bool) -> int:
    best_of: int = values.get("best_of", num_choices)
    if best_of < num_choices:
        raise RequestError(f"best_of ({best_of}) is below n ({num_choices})", param="best_of")
    if stream and best_of > num_choices:
        raise RequestError("best_of above n cannot be streamed", param="best_of")
    return best_of


def _check_allowed_ids(num_prompts: int, params: SamplingParams) -> None:
    """Bounds the work of making a mask of the allowed tokens for each prompt."""
    if num_prompts * len(params.allowed_token_ids or ()) > limits.ALLOWED_IDS:
        raise RequestError(
            f"the number of prompts times allowed_token_ids is more than {limits.ALLOWED_IDS}",
            param="allowed_token_ids",
            code="array_above_max_length",
        )


def _prompt_logprobs(values: Mapping[str, Any], for_echo: int | None) -> int | None:
    asked: int | None = values.get("prompt_logprobs")
    if asked is None or for_echo is None:
        return for_echo if asked is None else asked
    return max(asked, for_echo)


def _chat_max_tokens(values: Mapping[str, Any]) -> int | None:
    old, new = values.get("max_tokens"), values.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise RequestError(
            "max_tokens and max_completion_tokens are both set and differ",
            param="max_completion_tokens",
        )
    return old if new is None else new


def _chat_logprobs(values: Mapping[str, Any]) -> int | None:
    top: int | None = values.get("top_logprobs")
    if values.get("logprobs"):
        return top or 0
    if top is not None:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return None
