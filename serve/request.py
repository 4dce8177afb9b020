"""What a client asks and what it gets back.

These types cross thread and pool borders, so they are frozen. Validation happens here,
once, at the edge: everything behind it may trust the values. Nothing here knows HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypedDict

from serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from serve.scheduler.prompt_outputs import PoolingParams, Vector


class TokensPrompt(TypedDict):
    """A prompt that is already token ids. truncate_prompt_tokens: how many of them are taken at
    most, off whose "left" (if nothing is said) or "right" end goes what is too much."""

    prompt_token_ids: list[int]
    truncate_prompt_tokens: NotRequired[int]
    truncation_side: NotRequired[str]


class TextPrompt(TypedDict):
    """A text prompt in the form that vLLM's users know. add_special_tokens: whether it gets those
    that the checkpoint puts around a text (BOS)."""

    prompt: str
    add_special_tokens: NotRequired[bool]
    truncate_prompt_tokens: NotRequired[int]
    truncation_side: NotRequired[str]


Prompt = str | TextPrompt | TokensPrompt | list[int]


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt on its way through the engine, tokenized and checked.

    params.max_tokens is resolved (never None) and params.seed is set. arrival_s is the
    engine's monotonic clock when the request was submitted. client: who or which application
    asks, if it is known; the lengths of answers are predicted per client. pooling: it asks for
    an embedding and gets no token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    client: str | None = None
    pooling: PoolingParams | None = None

    @property
    def reads_prompt(self) -> bool:
        """All rows of its prompt are looked at: none comes from the prefix cache."""
        pooling = self.pooling
        if pooling is not None:
            return pooling.kind == "mean"
        return self.params.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position, from the raw logits.

    top: (token id, logprob) of the most likely tokens, best first. rank: of the chosen token,
    1 is the most likely.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1


class TokenDelta(NamedTuple):
    """What one sequence gained since the last delta delivered to its consumer.

    index: which of the request's n sequences. text never ends inside a character, and never
    holds the beginning of a possible stop string. The last delta of a sequence carries
    finish_reason; stop_reason is the stop string or id of stop_token_ids that ended it, if any;
    error describes finish_reason "error". prompt_logprobs (None for the prompt's first token) and
    embedding: in the first delta of a sequence, where they were asked for.
    """

    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody wants here
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    embedding: Vector | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times on the engine's monotonic clock, in seconds. num_cached_tokens: of the prompt, taken
    from the prefix cache by the sequence that answered first. num_prompt_tokens: 0 until it is
    tokenized. num_output_tokens: of all its sequences. finish_reasons: of those that have ended."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
