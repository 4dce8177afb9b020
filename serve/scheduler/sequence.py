"""The state of one of a request's n outputs: counters and tokens.

Only the compute loop touches a Sequence after it has been queued. No torch, no asyncio.
"""

from __future__ import annotations

import collections.abc as abc
import sys
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from serve.request import FinishReason, Request
from serve.scheduler.prompt_outputs import PromptOutputs, make_prompt_outputs

if TYPE_CHECKING:
    from memory.kv_memory import KVMemory
    from memory.pages.kv_range import Range
    from serve.structured.token_mask import SequenceMask


PENDING_TOKEN = -1
"""Stands for a token that a step in flight computes: the host does not know it yet."""


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Drops(Protocol):
    """When a sequence drops K/V and how much it holds (memory/policies/drop_schedule.py)."""

    def next_drop(self, num_tokens: int, num_dropped: int, /) -> int: ...

    def most_by_group(self, num_tokens: int, /) -> list[int]: ...

    def most_held(self, num_tokens: int, /) -> int: ...


@dataclass(slots=True)
class PeerWait:
    """The wait of a sequence whose prompt a peer computes. Times are the scheduler's."""

    began_s: float | None = None
    until_s: float = 0.0  # when the wait ends if no further page has come
    asks_s: float = 0.0  # the peers are asked again then
    num_cached: int = 0  # tokens that were here when a page came last
    first_missing: int = 0  # the first page that was not here then
    is_changed: bool = True  # pages may have come since
    was_coming: bool = False  # a peer has said that it computes the prompt


@dataclass(slots=True, eq=False)
class Sequence:
    """One output of a request.

    token_ids: prompt and output so far. num_computed_tokens: the tokens whose K/V is written,
    those of steps in flight (rows_in_flight) included. num_expected_rows, expected_s: rows and
    seconds that its prompt was predicted to take on arrival; queueing times are predicted with
    them. max_tokens_total: prompt plus output limit. stop_ids: tokens that end the sequence once
    it has min_tokens_total tokens.
    """

    request: Request
    index: int
    seed: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens_total: int
    min_tokens_total: int
    stop_ids: frozenset[int]
    num_expected_rows: int = 0
    expected_s: float = 0.0
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    # While num_computed_tokens is smaller, the sequence only decodes: it has a page for its next
    # row, completes no page and does not reach its length limit. Only the scheduler uses it.
    recheck_at: int = 0
    rows_in_flight: int = 0  # always 0 where steps are not overlapped
    last_step: int = 0  # the number of the last step that had rows of it, in a pipeline
    # The tokens that its newest plan computes behind its last one, in case they are sampled.
    draft_ids: list[int] = field(default_factory=list)
    kv_range: Range | None = None
    drops: Drops | None = None  # when it drops K/V, where a policy does
    drop_at: int = sys.maxsize  # computed tokens at which it drops K/V next
    predicted_length: int = 0  # the median that was predicted for the answer; 0: ask again
    state_due_at: int = 0  # tokens at which its hidden state is read for the next prediction
    page_keys: list[bytes] = field(default_factory=list)  # of its pages in the prefix cache
    next_cacheable_at: int = 0  # computed tokens at which its next page is complete
    is_fetch_requested: bool = False  # its pages were requested from the store
    peer_wait: PeerWait | None = None  # it waits for pages that a peer computes
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    num_preemptions: int = 0
    num_lost: int = 0  # how often its K/V was lost or given up with a memory node
    first_scheduled_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    output: object = None  # state of the output thread; opaque here
    history: object = None  # state of the sampler; opaque here
    drafting: object = None  # state of what proposes its draft_ids; opaque here
    prompt_outputs: PromptOutputs | None = None  # computed from the prompt's own rows
    mask: SequenceMask | None = None  # the allowed next tokens; None: all
    error: str | None = None  # with finish_reason ERROR, if the sequence itself is the cause

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def most_pages(self, kv: KVMemory) -> int:
        """Returns the most pages that it can hold at once; a prompt is held in full."""
        total = self.max_tokens_total
        if self.drops is None:
            return kv.pages_for(total)
        prompt = kv.pages_for(self.num_prompt_tokens)
        return max(prompt, kv.layout.pages_of(self.drops.most_by_group(total)))

    @property
    def is_prompt_only(self) -> bool:
        """Whether the sequence ends with its prompt, so that no token is sampled."""
        return self.max_tokens_total == self.num_prompt_tokens

    @property
    def reads_prompt(self) -> bool:
        """Whether rows of its prompt are still to be read, which the prefix cache does not hold."""
        outputs = self.prompt_outputs
        return outputs is not None and self.request.reads_prompt and not outputs.is_complete

    @property
    def next_mask(self) -> SequenceMask | None:
        """The mask of the next token; None if every token is allowed."""
        mask = self.mask
        return mask if mask is None or mask.is_needed(len(self.token_ids)) else None

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED


def make_sequences(
    request: Request, eos_token_ids: frozenset[int], page_keys: abc.Sequence[bytes] = ()
) -> list[Sequence]:
    """Returns the n sequences of a request; sequence i has the request's seed plus i."""
    params = request.params
    assert params.max_tokens is not None and params.seed is not None, "resolved by the engine"
    stops = frozenset(params.stop_ids)
    if not params.ignore_eos:
        stops |= eos_token_ids
    num_prompt = len(request.prompt_token_ids)
    so_far = params.answers_so_far
    outputs = make_prompt_outputs(request)
    return [
        Sequence(
            request=request,
            index=index,
            seed=params.seed + index,
            token_ids=[*request.prompt_token_ids, *(so_far[index].token_ids if so_far else ())],
            num_prompt_tokens=num_prompt,
            max_tokens_total=num_prompt + params.max_tokens,
            min_tokens_total=num_prompt + params.min_tokens,
            stop_ids=stops,
            num_expected_rows=num_prompt,
            page_keys=list(page_keys),
            peer_wait=PeerWait() if params.awaits_prefill else None,
            prompt_outputs=None if so_far and so_far[index].token_ids else outputs,
        )
        for index in range(params.n)
    ]


def finish_reason_after(
    sequence: Sequence, token: int, length: int | None = None
) -> FinishReason | None:
    """Returns why this newest known token ends the sequence, or None. length: the number of tokens
    with it; None: all."""
    length = len(sequence.token_ids) if length is None else length
    if sequence.mask is not None:
        sequence.mask.settle(length)
    if token in sequence.stop_ids and length > sequence.min_tokens_total:
        sequence.stop_token = token
        is_cut = sequence.mask is not None and sequence.mask.is_cut
        return FinishReason.LENGTH if is_cut else FinishReason.STOP
    if sequence.mask is not None:
        reason = sequence.mask.ending(sequence.token_ids)
        if reason is not None:
            sequence.error = sequence.mask.error
            sequence.stop_token = token if sequence.mask.is_end(token) else None
            return reason
    return FinishReason.LENGTH if length >= sequence.max_tokens_total else None
