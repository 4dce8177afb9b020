"""Pool 1's work: from what a caller submits to a checked request that is ready to be queued.

Several threads run it at once, beside the loop, so tokenizing, checking, hashing pages and
predicting the first token's time take no time between two steps.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from serve.engine.early_rejection import EarlyRejection
from serve.engine.output_processor import OutputState, Sink
from serve.engine.request_limits import RequestLimits, check_request, check_text
from serve.engine.request_table import RequestState
from serve.errors import ContextLengthError, MergestepError, RequestError
from serve.parameter_checks import parameters_named
from serve.pooling import PoolingParams
from serve.request import FinishReason, Prediction, Prompt, Request
from serve.sampling_params import SamplingParams
from serve.scheduler.prefix_lookup import PrefixLookup
from serve.scheduler.sequence import Sequence, SequenceStatus, make_sequences
from serve.structured.masks import MaskMaker
from serve.structured.token_mask import SequenceMask
from serve.text.detokenizer import DetokenizerFactory
from serve.text.large_texts import LARGE_CHARS
from serve.text.tokenizer import Tokenizer

FREED_AT_ONCE = 1 << 14
MAX_TRUNCATED = (1 << 31) - 1

logger = logging.getLogger(__name__)

# Requests without a seed get distinct ones: multiples of 2^64 / golden ratio.
_SEED_STEP = 0x9E3779B97F4A7C15
_SEED_MASK = (1 << 62) - 1

Encode = Callable[[], "list[int]"]
"""A function that makes the prompt's token ids; pool 1 calls it."""


class PreparedRequest(NamedTuple):
    """A tokenized and checked request, and what pool 1 has found out about its prompt.

    page_keys: hashes of the prompt's pages, for the prefix cache. num_rows: prompt tokens that
    the prefix cache does not have. prefill_s: predicted seconds to compute them, as early rejection
    has counted them; None if it has not. masks: one for each sequence, when not every token is
    allowed.
    """

    request: Request
    page_keys: list[bytes]
    num_rows: int
    prefill_s: float | None
    masks: list[SequenceMask] | None = None


class Preprocessor:
    """Tokenizes and checks requests. Any thread may call it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        prefixes: PrefixLookup,
        rejection: EarlyRejection | None,
        eos_token_ids: frozenset[int],
        seed: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._prefixes = prefixes
        self._rejection = rejection
        self.masks = MaskMaker(
            tokenizer,
            limits.vocab_size,
            eos_token_ids,
            bounded_json=limits.bounded_json,
            reasoning=limits.reasoning,
        )
        self._seed = seed
        self._counter = itertools.count()

    def is_large(
        self,
        prompt: Prompt | Encode,
        num_chars: int,
        params: SamplingParams | PoolingParams | None = None,
    ) -> bool:
        """Returns whether a prompt has a large text to encode, which takes a while, or a prediction
        has. num_chars: the size of that of a function."""
        if isinstance(params, SamplingParams) and len(params.prediction or "") > LARGE_CHARS:
            return True
        text: object = prompt
        if isinstance(prompt, dict):
            text = None if "prompt_token_ids" in prompt else prompt.get("prompt")
        return (len(text) if isinstance(text, str) else num_chars) > LARGE_CHARS

    def make_state(
        self,
        prompt: Prompt | Encode,
        params: SamplingParams | PoolingParams,
        sink: Sink,
        now_s: float,
        request_id: str | None = None,
        client: str | None = None,
    ) -> RequestState:
        """Returns the state of a request that is not tokenized yet. The request gets an id and a
        seed if the caller gave none."""
        text = prompt if isinstance(prompt, str) else None
        number = next(self._counter)
        pooling = None
        if isinstance(params, PoolingParams):
            pooling, params = params, params.sampling()
        if params.seed is None:
            params = params.changed(seed=(self._seed + number * _SEED_STEP) & _SEED_MASK)
        name = request_id or f"req-{number}"
        return RequestState(Request(name, text, (), params, now_s, client, pooling), sink)

    def prepare(self, state: RequestState, prompt: Prompt | Encode) -> PreparedRequest:
        """Tokenizes and checks the request; state.request has its token ids afterwards. Raises
        a MergestepError that names the mistake, or OverloadedError when the first token is
        predicted to come too late."""
        try:
            is_limited = state.request.params.max_tokens is not None
            state.request = request = self._tokenized(state, prompt)
            masks = None
            if request.prompt_token_ids:
                masks = self.masks.make(request, is_limited=is_limited)
                _replay_masks(request, masks)
            keys = self._prefixes.page_keys(request)
            num_rows = self._prefixes.num_missing_rows(request, keys)
            prefill_s = None
            # a prompt that is only tokenized is never late
            if self._rejection is not None and (request.params.max_tokens or request.pooling):
                prefill_s = self._rejection.admit(request, num_rows)
            return PreparedRequest(request, keys, num_rows, prefill_s, masks)
        except MergestepError:
            raise
        except BaseException as error:  # a Rust panic too, or the client would wait for ever
            logger.exception("tokenizing %s failed", state.request_id)
            message = f"the prompt could not be tokenized: {type(error).__name__}"
            raise RequestError(message, param="prompt", code="invalid_prompt") from error

    def _tokenized(self, state: RequestState, prompt: Prompt | Encode) -> Request:
        request = state.request
        if state.is_aborted:  # spare the work: the loop ends a request of no tokens at once
            params = request.params.changed(max_tokens=0, min_tokens=0)
            return replace(request, prompt=None, params=params, client=None, pooling=None)
        token_ids = self._token_ids(prompt)
        try:
            request = check_request(request, token_ids, self._limits)
            if request.params.prediction is None:
                return request
            return replace(request, prediction=self._predicted(request.params.prediction))
        except ContextLengthError:
            # freeing a million integers at once would hold the interpreter for 10 ms
            while self.is_large(prompt, 0) and isinstance(token_ids, list) and token_ids:
                del token_ids[-FREED_AT_ONCE:]
            raise

    def _token_ids(self, prompt: Prompt | Encode) -> abc.Sequence[int]:
        if callable(prompt):
            return prompt()
        if isinstance(prompt, dict):
            given: dict[str, Any] = dict(prompt)
            inner: Any = given.get("prompt_token_ids", given.get("prompt"))
            if inner is None or isinstance(inner, dict):
                raise RequestError("a prompt needs prompt_token_ids or prompt", param="prompt")
            if isinstance(inner, str):
                special = given.get("add_special_tokens", True)
                is_cut = given.get("truncate_prompt_tokens") is not None
                inner = self._encode(inner, add_special_tokens=special, is_cut=is_cut)
            return _truncated(inner, given)
        return self._encode(prompt) if isinstance(prompt, str) else prompt

    def _encode(
        self, text: str, *, add_special_tokens: bool = True, is_cut: bool = False
    ) -> abc.Sequence[int]:
        check_text(text, self._tokenizer, self._limits, is_cut=is_cut)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _predicted(self, text: str) -> Prediction:
        most = self._limits.max_model_len
        with (
            parameters_named({"prompt": "prediction"}),
            contextlib.suppress(ContextLengthError),
        ):
            check_text(text, self._tokenizer, self._limits)
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
            if len(token_ids) <= most:
                return Prediction(tuple(token_ids))
        raise RequestError(
            f"prediction is longer than the model's context of {most} tokens",
            param="prediction",
            code="string_above_max_length",
        )


def _truncated(token_ids: abc.Sequence[int], given: dict[str, Any]) -> abc.Sequence[int]:
    size, side = given.get("truncate_prompt_tokens"), given.get("truncation_side", "left")
    if size is None or not isinstance(token_ids, list):
        return token_ids
    if type(size) is not int or not 1 <= size <= MAX_TRUNCATED:
        raise RequestError(
            f"truncate_prompt_tokens must be between 1 and {MAX_TRUNCATED}",
            param="truncate_prompt_tokens",
        )
    if side not in ("left", "right"):
        raise RequestError('truncation_side must be "left" or "right"', param="truncation_side")
    return token_ids[:size] if side == "right" else token_ids[-size:]


def _replay_masks(request: Request, masks: list[SequenceMask] | None) -> None:
    """Brings the masks to the ends of the answers so far. Raises RequestError for an answer that
    its mask does not allow."""
    for mask, answer in zip(masks or (), request.params.answers_so_far, strict=False):
        if answer.finish_reason is None and not mask.replay(
            [*request.prompt_token_ids, *answer.token_ids]
        ):
            raise RequestError(
                "an answer so far does not have the form that the request asks for",
                param="answers_so_far",
            )


def prepare_sequences(
    state: RequestState,
    prepared: PreparedRequest,
    eos_token_ids: frozenset[int],
    detokenizers: DetokenizerFactory,
    *,
    shares_prefix: bool,
) -> list[Sequence]:
    """Returns the request's n sequences, with their masks and pool 3's state.

    shares_prefix: the prefix cache is on, so only the first of the n sequences computes the prompt.
    """
    sequences = make_sequences(prepared.request, eos_token_ids, prepared.page_keys)
    for sequence in sequences:
        computes_prompt = sequence.index == 0 or not shares_prefix
        num_rows = prepared.num_rows if computes_prompt else 1
        sequence.num_expected_rows = num_rows + sequence.num_output_tokens
        sequence.mask = None if prepared.masks is None else prepared.masks[sequence.index]
        sequence.output = OutputState(
            prepared.request,
            sequence.index,
            detokenizers,
            state.sink,
            state.times,
            sequence.prompt_outputs,
        )
    for sequence, answer in zip(sequences, prepared.request.params.answers_so_far, strict=False):
        if answer.finish_reason is not None:
            _mark_ended(sequence, FinishReason(answer.finish_reason))
    return sequences


def _mark_ended(sequence: Sequence, finish_reason: FinishReason) -> None:
    """Marks a sequence that had ended before its request came here."""
    last = sequence.token_ids[-1]
    is_stop = last in sequence.stop_ids and finish_reason is FinishReason.STOP
    sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, finish_reason
    sequence.stop_token = last if is_stop else None
