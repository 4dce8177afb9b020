"""Pool 1's work: from what a caller gives to a request that is checked, before it is queued.

Runs in several threads at once, beside the loop: tokenizing, checking, naming pages and
predicting do not take time between two steps.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

from serve.engine.early_rejection import EarlyRejection
from serve.engine.output_processor import OutputState, Sink
from serve.engine.request_limits import RequestLimits, check_request, check_text
from serve.engine.request_table import RequestState
from serve.errors import MergestepError, RequestError
from serve.pooling import PoolingParams
from serve.request import Prompt, Request
from serve.sampling_params import SamplingParams
from serve.scheduler.prefix_lookup import PrefixUse
from serve.scheduler.sequence import Sequence, make_sequences
from serve.structured.masks import MaskMaker
from serve.structured.token_mask import SequenceMask
from serve.text.detokenizer import DetokenizerFactory
from serve.text.tokenizer import Tokenizer

MAX_TRUNCATED = (1 << 31) - 1

logger = logging.getLogger(__name__)

# Requests without a seed get distinct ones: multiples of 2^64 / golden ratio.
_SEED_STEP = 0x9E3779B97F4A7C15
_SEED_MASK = (1 << 62) - 1

Encode = Callable[[], "list[int]"]
"""A prompt that is still to be made, in this pool."""


class PreparedRequest(NamedTuple):
    """page_keys of a prompt; the rows of it to compute, and how long they are expected to take;
    masks of its sequences, if not all tokens may come."""

    page_keys: list[bytes]
    num_rows: int
    seconds: float
    masks: list[SequenceMask] | None = None


class Preprocessor:
    """Tokenizes and checks. Any thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        prefixes: PrefixUse,
        rejection: EarlyRejection | None,
        eos_token_ids: frozenset[int],
        seed: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._prefixes = prefixes
        self._rejection = rejection
        self.masks = MaskMaker(tokenizer, limits.vocab_size, eos_token_ids)
        self._seed = seed
        self._counter = itertools.count()

    def make_state(
        self,
        prompt: Prompt | Encode,
        params: SamplingParams | PoolingParams,
        sink: Sink,
        now_s: float,
        request_id: str | None = None,
        client: str | None = None,
    ) -> RequestState:
        """What the core keeps of it; with a name and a seed, if it brings none."""
        text = prompt if isinstance(prompt, str) else None
        number = next(self._counter)
        pooling = None
        if isinstance(params, PoolingParams):
            pooling, params = params, params.sampling()
        if params.seed is None:
            params = params.changed(seed=(self._seed + number * _SEED_STEP) & _SEED_MASK)
        name = request_id or f"req-{number}"
        return RequestState(name, text, params, sink, now_s, client, pooling)

    def prepare(
        self, state: RequestState, prompt: Prompt | Encode
    ) -> tuple[Request, PreparedRequest]:
        """MergestepError: what is wrong with it, or OverloadedError: it would come too late."""
        try:
            request = self._request(state, prompt)
            return request, self._arrival(request)
        except MergestepError:
            raise
        except BaseException as error:  # a library's panic, too: nobody else would answer
            logger.exception("tokenizing %s failed", state.request_id)
            message = f"the prompt could not be tokenized: {type(error).__name__}"
            raise RequestError(message, param="prompt", code="invalid_prompt") from error

    def _request(self, state: RequestState, prompt: Prompt | Encode) -> Request:
        if state.is_aborted:
            params = state.params.changed(max_tokens=0, min_tokens=0)
            return Request(state.request_id, None, (), params, state.times.arrival_s)
        return check_request(
            state.request_id,
            state.prompt,
            self._token_ids(prompt),
            state.params,
            self._limits,
            state.times.arrival_s,
            state.client,
            state.pooling,
        )

    def _arrival(self, request: Request) -> PreparedRequest:
        masks = self.masks.make(request) if request.prompt_token_ids else None
        keys = self._prefixes.page_keys(request)
        num_rows = self._prefixes.num_missing_rows(request, keys)
        seconds = 0.0 if self._rejection is None else self._rejection.admit(request, num_rows)
        return PreparedRequest(keys, num_rows, seconds, masks)

    def _token_ids(self, prompt: Prompt | Encode) -> SequenceOf[int]:
        if callable(prompt):
            return prompt()
        if isinstance(prompt, dict):
            given: dict[str, Any] = dict(prompt)
            inner: Any = given.get("prompt_token_ids", given.get("prompt"))
            if inner is None or isinstance(inner, dict):
                raise RequestError("a prompt needs prompt_token_ids or prompt", param="prompt")
            if isinstance(inner, str):
                special = given.get("add_special_tokens", True)
                inner = self._encode(inner, add_special_tokens=special)
            return _truncated(inner, given)
        return self._encode(prompt) if isinstance(prompt, str) else prompt

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> SequenceOf[int]:
        check_text(text, self._tokenizer, self._limits)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _truncated(token_ids: SequenceOf[int], given: dict[str, Any]) -> SequenceOf[int]:
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


def prepare_sequences(
    state: RequestState,
    request: Request,
    arrival: PreparedRequest,
    eos_token_ids: frozenset[int],
    detokenizers: DetokenizerFactory,
    *,
    is_shared: bool,
) -> list[Sequence]:
    """Its n sequences, with masks and what pool 3 needs. is_shared: of several that begin alike
    the first one computes."""
    sequences = make_sequences(request, eos_token_ids, arrival.page_keys)
    for sequence in sequences:
        is_alone = sequence.index == 0 or not is_shared
        sequence.num_expected_rows = arrival.num_rows if is_alone else 1
        sequence.mask = None if arrival.masks is None else arrival.masks[sequence.index]
        rows = sequence.prompt_rows
        sequence.output = OutputState(
            request, sequence.index, detokenizers, state.sink, state.times, rows
        )
    return sequences
