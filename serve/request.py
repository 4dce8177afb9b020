"""A request and its results, as they pass from thread to thread.

The types are frozen because several threads share them. Nothing here knows HTTP.
"""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypedDict

from serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from serve.pooling import PoolingParams, Vector


class TokensPrompt(TypedDict):
    """A prompt of token ids.

    truncate_prompt_tokens: the most tokens that are used; the rest is cut off at truncation_side,
    "left" (the default) or "right".
    """

    prompt_token_ids: list[int]
    truncate_prompt_tokens: NotRequired[int]
    truncation_side: NotRequired[str]


class TextPrompt(TypedDict):
    """A text prompt in vLLM's form. add_special_tokens: whether BOS and the like are added."""

    prompt: str
    add_special_tokens: NotRequired[bool]
    truncate_prompt_tokens: NotRequired[int]
    truncation_side: NotRequired[str]


Prompt = str | TextPrompt | TokensPrompt | list[int]


class FinishReason(Enum):
    """The reason why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


@dataclass(eq=False, slots=True)
class Prediction:
    """A text that a request's answers are expected to repeat, and how many of the tokens that were
    drafted from it have agreed. The compute thread counts; others read."""

    token_ids: tuple[int, ...]
    num_accepted: int = 0
    num_rejected: int = 0

    def count(self, num_drafted: int, num_accepted: int) -> None:
        self.num_accepted += num_accepted
        self.num_rejected += num_drafted - num_accepted


@dataclass(frozen=True, slots=True)
class Request:
    """A tokenized and checked prompt with its parameters.

    params.max_tokens is resolved (never None) and params.seed is set. arrival_s: the engine's
    monotonic clock at submission. client: the user or application, where known; the lengths of
    answers are predicted per client. pooling: set where the request asks for an embedding, for
    which no token is generated. prediction: that of params, tokenized.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    client: str | None = None
    pooling: PoolingParams | None = None
    prediction: Prediction | None = None

    @property
    def reads_prompt(self) -> bool:
        """Whether all prompt rows must be computed, so that no prefix comes from the cache."""
        pooling = self.pooling
        if pooling is not None:
            return pooling.kind == "mean"
        return self.params.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, computed from the raw logits.

    top: (token id, logprob) of the most likely tokens, best first. rank: the chosen token's rank
    by probability, from 1.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1


class TokenDelta(NamedTuple):
    """The text and tokens that a sequence gained since its last delivered delta.

    index: the sequence's number among the request's n. text never ends inside a character and
    never holds the beginning of a possible stop string. The last delta of a sequence carries
    finish_reason; stop_reason is the stop string or the id of stop_token_ids that ended it, if
    any; error describes finish_reason "error". The first delta of a sequence carries
    prompt_logprobs (None for the prompt's first token) and embedding where they are requested.
    is_replayed: the tokens are those that the sequence had before (SamplingParams.answers_so_far).
    """

    index: int  # type: ignore[assignment]  # shadows tuple.index
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    prompt_logprobs: abc.Sequence[TokenLogprobs | None] | None = None
    embedding: Vector | None = None
    is_replayed: bool = False


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The times and counts of a request; times are seconds on the engine's monotonic clock.

    num_cached_tokens: the prompt tokens that the first sequence to answer took from the prefix
    cache. num_prompt_tokens: 0 until the prompt is tokenized. num_output_tokens: the sum over its
    sequences. finish_reasons: those of the sequences that have ended.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
