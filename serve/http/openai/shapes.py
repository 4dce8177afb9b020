"""Parts of answers in OpenAI's shapes, made from engine outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import orjson

from serve.http.edge.large_json import json_list
from serve.request import Prediction, TokenLogprobs

MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI uses this value too


class TokenTexts(Protocol):
    """The part of a tokenizer that formats log-probabilities."""

    @property
    def pieces(self) -> list[bytes] | None: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def strips_leading_space(self) -> bool: ...

    def token_text(self, token_id: int) -> str: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    reasoning_tokens: int = 0,
    prediction: Prediction | None = None,
) -> dict[str, Any]:
    details = {"reasoning_tokens": reasoning_tokens}
    if prediction is not None:
        details["accepted_prediction_tokens"] = prediction.num_accepted
        details["rejected_prediction_tokens"] = prediction.num_rejected
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": details,
    }


def completion_logprobs(
    items: Sequence[TokenLogprobs | None],
    tokenizer: TokenTexts,
    text_offset: int,
    *,
    num_top: int,
    first_token: int,
    hides_special: bool,
) -> tuple[dict[str, Any], int]:
    """Returns the log-probabilities and the text offset after the last token.

    text_offset: characters of text before the first token. An item that is None stands for
    first_token, the first of a prompt. hides_special: the text has no special tokens.
    """
    hidden = tokenizer.special_ids if hides_special else frozenset()
    tokens: list[str] = []
    offsets: list[int] = []
    for item in items:
        token_id = first_token if item is None else item.token_id
        text = tokenizer.token_text(token_id)
        tokens.append(text)
        offsets.append(text_offset)
        if token_id not in hidden:
            if text_offset == 0 and item is None and tokenizer.strips_leading_space:
                text = text.removeprefix(" ")
            text_offset += len(text)
    answer = {
        "tokens": tokens,
        "token_logprobs": [None if item is None else _finite(item.logprob) for item in items],
        "top_logprobs": json_list(
            None
            if item is None
            else {tokenizer.token_text(token): _finite(p) for token, p in item.top[:num_top]}
            for item in items
        ),
        "text_offset": offsets,
    }
    return answer, text_offset


def prompt_logprobs(
    items: Iterable[TokenLogprobs | None], tokenizer: TokenTexts, num_top: int
) -> orjson.Fragment:
    """Returns the candidates of each token by id, in vLLM's shape."""
    return json_list(
        None if item is None else _candidates(item, tokenizer, num_top) for item in items
    )


def _candidates(item: TokenLogprobs, tokenizer: TokenTexts, num_top: int) -> dict[str, Any]:
    ranked = [(token, value, rank) for rank, (token, value) in enumerate(item.top[:num_top], 1)]
    return {
        str(token): {
            "logprob": _finite(value),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token),
        }
        for token, value, rank in ((item.token_id, item.logprob, item.rank), *ranked)
    }


def chat_logprobs(
    items: Iterable[TokenLogprobs] | None, tokenizer: TokenTexts
) -> dict[str, Any] | None:
    if items is None:
        return None
    return {"content": json_list(chat_tokens(items, tokenizer)), "refusal": None}


def chat_tokens(items: Iterable[TokenLogprobs], tokenizer: TokenTexts) -> Iterator[dict[str, Any]]:
    for item in items:
        yield {
            **_chat_token(item.token_id, item.logprob, tokenizer),
            "top_logprobs": [_chat_token(token, value, tokenizer) for token, value in item.top],
        }


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
