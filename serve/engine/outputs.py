"""The results of a finished request, in the shapes that vLLM's users know."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serve.engine.node_recovery import generation_error
from serve.errors import EngineStoppedError
from serve.pooling import Vector
from serve.request import FinishReason, Request, RequestMetrics, TokenDelta, TokenLogprobs


class Logprob(NamedTuple):
    """One candidate at one output position. rank: 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One finished sequence of a request. logprobs: per position, token id -> Logprob.

    LLM.chat also sets what it has read in the text. content: the visible answer, None if there are
    only calls or reasoning. reasoning: the model's thoughts. tool_calls: in OpenAI's shape.
    reasoning_tokens: the tokens of the reasoning, markers included. finish_reason is then
    "tool_calls" for an answer that ends with calls.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning_tokens: int = 0

    def message(self) -> dict[str, Any]:
        """Returns the answer of a chat as the message that continues the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def extend(self, delta: TokenDelta, token_text: Callable[[int], str]) -> None:
        """Appends a delta of this sequence; token_text gives the text of a single token."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        for item in delta.logprobs or ():
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + item.logprob
            self.logprobs.append(_decode_logprobs(item, token_text))
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            self.stop_reason = delta.stop_reason
            self.error = delta.error


def decode_prompt_logprobs(
    logprobs: Iterable[TokenLogprobs | None], token_text: Callable[[int], str]
) -> list[dict[int, Logprob] | None]:
    """Returns TokenDelta.prompt_logprobs in the form of CompletionOutput.logprobs."""
    return [None if item is None else _decode_logprobs(item, token_text) for item in logprobs]


def _decode_logprobs(item: TokenLogprobs, token_text: Callable[[int], str]) -> dict[int, Logprob]:
    entry = {item.token_id: Logprob(item.logprob, item.rank, token_text(item.token_id))}
    for rank, (token, logprob) in enumerate(item.top, start=1):
        entry.setdefault(token, Logprob(logprob, rank, token_text(token)))
    return entry


@dataclass(slots=True)
class RequestOutput:
    """A finished request: the prompt and its n completions. prompt_logprobs: per token of the
    prompt, token id -> Logprob; None for the first one. The tokens that were drafted from the
    parameters' prediction are counted: those that agreed, and the others."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(slots=True)
class EmbeddingOutput:
    """A prompt's embedding: [dimensions] fp32."""

    request_id: str
    embedding: Vector
    num_prompt_tokens: int
    metrics: RequestMetrics


def embedding_output(
    request: Request, last: TokenDelta | None, metrics: RequestMetrics
) -> EmbeddingOutput:
    """Returns the embedding in a request's last delta. Raises GenerationError or EngineStoppedError
    if the request ended without one."""
    if last is None or last.finish_reason is FinishReason.ABORT:
        raise EngineStoppedError("the request was aborted")
    if last.error is not None:
        raise generation_error(last.error)
    assert last.embedding is not None, f"{last}"
    count = len(request.prompt_token_ids)
    return EmbeddingOutput(request.request_id, last.embedding, count, metrics)
