"""The bodies of answers: plain dicts in OpenAI's shapes, from engine outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from serve.request import TokenDelta, TokenLogprobs

MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI uses this value too


class TokenTexts(Protocol):
    """The part of a tokenizer that log-probabilities need."""

    @property
    def pieces(self) -> list[bytes] | None: ...

    def token_text(self, token_id: int) -> str: ...


@dataclass(slots=True)
class Choice:
    """One finished sequence, gathered from its deltas."""

    texts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def extend(self, delta: TokenDelta) -> None:
        self.texts.append(delta.text)
        self.num_tokens += len(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def completion_choice(index: int, output: Choice, tokenizer: TokenTexts) -> dict[str, Any]:
    return {
        "index": index,
        "text": output.text,
        "logprobs": completion_logprobs(output.logprobs, tokenizer, 0),
        "finish_reason": output.finish_reason,
    }


def chat_choice(index: int, output: Choice, tokenizer: TokenTexts) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": chat_logprobs(output.logprobs, tokenizer),
        "finish_reason": output.finish_reason,
    }


def completion_logprobs(
    items: Sequence[TokenLogprobs] | None, tokenizer: TokenTexts, text_offset: int
) -> dict[str, Any] | None:
    """text_offset: characters of output before the first of these tokens."""
    if items is None:
        return None
    tokens = [tokenizer.token_text(item.token_id) for item in items]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(item.logprob) for item in items],
        "top_logprobs": [
            {tokenizer.token_text(token): _finite(value) for token, value in item.top}
            for item in items
        ],
        "text_offset": offsets,
    }


def chat_logprobs(
    items: Sequence[TokenLogprobs] | None, tokenizer: TokenTexts
) -> dict[str, Any] | None:
    if items is None:
        return None
    content = [
        {
            **_chat_token(item.token_id, item.logprob, tokenizer),
            "top_logprobs": [_chat_token(token, value, tokenizer) for token, value in item.top],
        }
        for item in items
    ]
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, tokenizer: TokenTexts) -> dict[str, Any]:
    text = tokenizer.token_text(token_id)
    pieces = tokenizer.pieces
    raw = pieces[token_id] if pieces is not None and token_id < len(pieces) else text.encode()
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(value: float) -> float:
    return value if value > MIN_LOGPROB else MIN_LOGPROB


def model_object(name: str, created: int, max_model_len: int, vocab_size: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "mergestep",
        "max_model_len": max_model_len,
        "vocab_size": vocab_size,
    }
