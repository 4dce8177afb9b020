"""The mask of a sequence: a bit for each token that may come next.

A mask is a pure function of the sequence's tokens. Steps are repeated, cut and rolled back, so
nothing here counts calls: a matcher follows the present tokens and rolls back where tokens were
removed. An error ends only its own sequence. Nothing here knows a device or the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from serve.request import FinishReason
from serve.structured.bits import Bits, all_bits, bits_of, num_words
from serve.structured.mask_budget import MaskBudget

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from serve.structured.json_limits import JsonLimits, JsonState
    from serve.structured.reasoning_limit import ReasoningLimit

logger = logging.getLogger(__name__)

TOO_COMPLEX = "structured: the grammar is too complex for this text"
NOTHING_ALLOWED = "structured, allowed_token_ids and bad_words leave no token"
REQUEST_FAULTS = frozenset({TOO_COMPLEX, NOTHING_ALLOWED})
"""Errors that the request causes and not the engine."""

# The output's last tokens that the limits of JSON look at: more than a number has.
RECENT_TOKENS = 64

# The number of last tokens that may have changed: more than two steps in flight or a draft have.
_LOOK_BACK = 16


class Matcher:
    """A grammar's matcher that follows a sequence's output.

    Copies of a matcher share a lexer and the limit on its states. A sequence that meets the limit
    restarts with a lexer of its own, since other sequences may have used the states up.
    """

    def __init__(self, start: LLMatcher, renew: Callable[[], LLMatcher] | None = None) -> None:
        """start: a matcher at the beginning of the text, which is never advanced. renew: makes a
        matcher that shares nothing; None if `start` is one."""
        self._start = start
        self._renew = renew
        self._first: list[Bits] = []  # the mask of an empty text, which all copies share
        self._matcher = start.deep_copy()
        self._seen: list[int] = []  # the matcher has consumed the first _num_consumed
        self._num_consumed = 0

    @property
    def current(self) -> LLMatcher:
        """The library's matcher, which has consumed the text so far."""
        return self._matcher

    def copy(self) -> Matcher:
        """Returns a copy at the beginning of the text."""
        other = Matcher(self._start, self._renew)
        other._first = self._first
        return other

    def follow(self, token_ids: Sequence[int], begin: int, end: int) -> None:
        """Moves the matcher to the output token_ids[begin:end]."""
        keep = self._num_common(token_ids, begin, end)
        if keep < self._num_consumed:
            self._roll_back(keep)
        self._seen[keep:] = token_ids[begin + keep : end]
        self._consume()
        if self._restarts():
            self._consume()

    def _consume(self) -> None:
        while self._num_consumed < len(self._seen) and not self._matcher.is_stopped():
            self._matcher.consume_token(self._seen[self._num_consumed])
            self._num_consumed += 1

    def _num_common(self, token_ids: Sequence[int], begin: int, end: int) -> int:
        """Returns the length of the common prefix with the tokens seen so far."""
        keep = min(len(self._seen), end - begin)
        for index in range(max(0, keep - _LOOK_BACK), keep):
            if self._seen[index] != token_ids[begin + index]:
                return index
        return keep

    def _roll_back(self, keep: int) -> None:
        if not self._matcher.is_error() and self._matcher.rollback(self._num_consumed - keep):
            self._num_consumed = keep
        else:
            self._matcher, self._num_consumed = self._start.deep_copy(), 0

    def _restarts(self) -> bool:
        """Restarts with an unshared lexer after an error, once; returns whether it did."""
        if self._renew is None or not self._matcher.is_error():
            return False
        self._start, self._renew = self._renew(), None
        self._matcher, self._num_consumed = self._start.deep_copy(), 0
        return True

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far is complete."""
        return self._matcher.is_accepting()

    @property
    def is_over(self) -> bool:
        """Whether no token can follow."""
        return self._matcher.is_stopped()

    @property
    def is_error(self) -> bool:
        return self._matcher.is_error()

    @property
    def stop_reason(self) -> str:
        return self._matcher.stop_reason()

    def fill(self, bits: Bits) -> None:
        """Sets the bits of the tokens that may follow, and of EOS where the text may end."""
        if not self._seen and self._first:
            bits[:] = self._first[0]
            return
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._restarts():
            self._consume()
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if not self._seen and not self._matcher.is_error():
            self._first.append(bits.copy())


class BadWords:
    """Forbids the last token of a word after its other tokens."""

    def __init__(self, words: Iterable[Sequence[int]], vocab_size: int) -> None:
        words = [tuple(word) for word in words if word]
        self.single = bits_of([word[0] for word in words if len(word) == 1], vocab_size)
        self._longer = [(word[:-1], word[-1]) for word in words if len(word) > 1]

    def forbidden(self, token_ids: Sequence[int], begin: int, end: int) -> list[int]:
        """Returns the forbidden tokens after token_ids[begin:end], except `single`."""
        return [
            last
            for head, last in self._longer
            if end - len(head) >= begin and tuple(token_ids[end - len(head) : end]) == head
        ]


class SequenceMask:
    """The mask of one sequence; fill() writes it at `address`."""

    def __init__(
        self,
        vocab_size: int,
        *,
        num_prompt: int,
        matcher: Matcher | None = None,
        allowed: Bits | None = None,
        bad_words: BadWords | None = None,
        eos_ids: frozenset[int] = frozenset(),
        stop_ids: frozenset[int] = frozenset(),
        min_output: int = 0,
        budget: MaskBudget | None = None,
        json: JsonLimits | None = None,
        reasoning: ReasoningLimit | None = None,
    ) -> None:
        """allowed: the only tokens that may come. stop_ids: tokens that end the sequence once it
        has min_output tokens, with eos_ids among them unless EOS is ignored. budget: that of the
        request. json: the limits of the JSON in the matcher's texts. reasoning: what it forces
        is allowed whatever else is, except by the matcher."""
        self.error: str | None = None
        self.cost_s = 0.0  # seconds of the last fill()
        self.job: object = None  # opaque: a mask that is filled ahead of its step has its job here
        self._budget = MaskBudget(vocab_size) if budget is None else budget
        self._num_prompt = num_prompt
        self._matcher = matcher
        self._json = json
        self._reasoning = reasoning
        self._is_constant = matcher is not None or allowed is not None or bad_words is not None
        self._bad_words = bad_words
        self._stops = bits_of(stop_ids, vocab_size)
        self._ends = bits_of(stop_ids | eos_ids, vocab_size)
        self._min_output = min_output
        self._whole = all_bits(vocab_size)
        self._allowed = self._whole if allowed is None else allowed
        # one bit more than there are logits: the matcher's EOS may be no token
        self._buffer = np.zeros(num_words(vocab_size + 1), dtype=np.uint32)
        self.bits = self._buffer[: num_words(vocab_size)]
        self.address = self.bits.ctypes.data
        self.draft_bits: list[Bits] = []  # of the rows of the draft, as far as they can matter
        self._num_before = 0  # tokens before that draft
        self._states: list[JsonState] = []  # of `json`, after the first row and each draft row

    def fill(self, token_ids: Sequence[int]) -> None:
        """Fills the mask of the token after these, prompt included. Sets `error`, never raises."""
        if self._states:
            self.settle(len(token_ids))
            self._states = []
        if self.error is None and self._matcher is not None and self._budget.is_spent:
            self._give_up("its masks took too long")
        if self.error is None:
            self.cost_s = self._guarded(lambda: self._fill(token_ids))
            self._budget.add_mask(self.cost_s)
        if self.error is not None:
            self.bits[:] = self._whole  # the next token is never delivered

    def fill_draft(self, token_ids: Sequence[int], draft: Sequence[int]) -> None:
        """Fills the masks of the tokens after each further token of a draft, once fill() has
        returned. It ends where the mask forbids the draft or cannot be made. The request's budget
        is not charged: it must not end sooner with drafts than without."""
        self.draft_bits = []
        first, tokens = self.bits.copy(), list(token_ids)
        states = [] if self._json is None else [self._json.state]
        for token in draft:
            if self.error is not None or not self._has(token):
                break
            tokens.append(token)
            self._guarded(lambda: self._fill(tokens))
            if self.error is not None:
                self.error = None  # it is the draft's, not the sequence's
                break
            self.draft_bits.append(self.bits.copy())
            if self._json is not None:
                states.append(self._json.state)
        self.bits[:] = first
        self._num_before, self._states = len(token_ids), states

    def settle(self, num_tokens: int) -> None:
        """Forgets what only a draft has led to: of its rows, those count that were sampled for the
        sequence's first num_tokens tokens."""
        if self._states and self._json is not None:
            place = max(0, num_tokens - self._num_before - 1)
            self._json.state = self._states[min(place, len(self._states) - 1)]

    def is_needed(self, num_tokens: int) -> bool:
        """Returns whether the mask of the token after this many may forbid any. What it returns
        changes only with ending(), between two steps."""
        if self._is_constant or self._reasoning is None:
            return True
        return self._reasoning.may_force(num_tokens - self._num_prompt)

    def replay(self, token_ids: Sequence[int]) -> bool:
        """Follows an output that another engine has sampled, prompt included. Returns whether the
        mask allows it."""
        tokens = list(token_ids[: self._num_prompt])
        for token in token_ids[self._num_prompt :]:
            if self.is_needed(len(tokens)):
                self.fill(tokens)
                if self.error is not None or not self._has(token):
                    return False
            tokens.append(token)
            if self.ending(tokens) is FinishReason.ERROR:
                return False
        return True

    @property
    def is_cut(self) -> bool:
        """Whether the text was completed because the request's tokens run out."""
        return self._json is not None and self._json.is_cut

    def ending(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Returns STOP if the text is complete and no token can follow, or LENGTH if it was
        completed for lack of tokens, and ERROR after an error."""
        matcher, reasoning = self._matcher, self._reasoning
        if reasoning is not None and self.error is None:
            begin, end = self._num_prompt, self._end(token_ids)
            self._guarded(lambda: reasoning.observe(token_ids, begin, end))
        if matcher is not None and self.error is None:
            seconds = 0.0
            # else the end is noticed a step later, when the mask allows only EOS
            if self._budget.may_consume or not self._ends.any():
                seconds = self._guarded(lambda: self._follow(matcher, token_ids))
            self._budget.add_token(seconds)
        if self.error is not None:
            return FinishReason.ERROR
        if matcher is None or not matcher.is_over:
            return None
        return FinishReason.LENGTH if self.is_cut else FinishReason.STOP

    def is_end(self, token: int) -> bool:
        """Returns whether the token is an EOS or a stop token."""
        return bool(self._ends[token >> 5] >> (token & 31) & 1)

    def _guarded(self, work: Callable[[], object]) -> float:
        """Runs the work and returns the CPU seconds of this thread; sets `error` on failure."""
        began_s = time.thread_time()
        try:
            work()
        except BaseException as error:
            # the library's panics are not Exceptions
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            logger.exception("a token mask failed")
            self.error = f"{type(error).__name__} in the token mask"
        return time.thread_time() - began_s

    def _end(self, token_ids: Sequence[int]) -> int:
        """Returns the end of the tokens that the host knows; later ones are on the device."""
        end = len(token_ids)
        while end > self._num_prompt and token_ids[end - 1] < 0:
            end -= 1
        return end

    def _follow(self, matcher: Matcher, token_ids: Sequence[int]) -> None:
        matcher.follow(token_ids, self._num_prompt, self._end(token_ids))
        self._check_error(matcher)

    def _check_error(self, matcher: Matcher) -> None:
        if matcher.is_error:
            self._give_up(matcher.stop_reason)  # a name of the library, without text of the client

    def _give_up(self, why: str) -> None:
        logger.info("a grammar ended its sequence: %s", why)
        self.error = TOO_COMPLEX

    def _fill(self, token_ids: Sequence[int]) -> None:
        end, bits, matcher = self._end(token_ids), self.bits, self._matcher
        if matcher is None:
            bits[:] = self._allowed
        else:
            self._follow(matcher, token_ids)
            matcher.fill(self._buffer)
            self._check_error(matcher)
        if self._reasoning is not None and self.error is None and self._force(token_ids, end):
            return
        if matcher is not None:
            bits &= self._allowed
            if self._json is not None and self.error is None:
                self._json.limit_number(bits, self._recent(token_ids, end))
            self._set_ends(matcher.is_accepting)
        if self._bad_words is not None:
            bits &= ~self._bad_words.single
            for token in self._bad_words.forbidden(token_ids, self._num_prompt, end):
                bits[token >> 5] &= ~np.uint32(1 << (token & 31))
        is_too_short = end - self._num_prompt < self._min_output
        if matcher is not None:
            self._forbid_ends(self._ends if is_too_short else self._ends & ~self._stops)
            if self._json is not None and self.error is None:
                recent = self._recent(token_ids, end)
                size = end - self._num_prompt
                self._json.fit(bits, self._ends, matcher.current, recent, size)
        elif is_too_short:
            bits &= ~self._stops
        if self.error is None and not bits.any():
            self.error = NOTHING_ALLOWED

    def _force(self, token_ids: Sequence[int], end: int) -> bool:
        """Allows only the token that ends the reasoning, if one is due and the matcher has allowed
        it; returns whether it did."""
        reasoning = self._reasoning
        assert reasoning is not None
        if not reasoning.may_force(end - self._num_prompt):
            return False
        token = reasoning.forced(token_ids, self._num_prompt, end)
        if token is None or (self._matcher is not None and not self._has(token)):
            return False
        self.bits[:] = 0
        self.bits[token >> 5] = np.uint32(1 << (token & 31))
        return True

    def _has(self, token: int) -> bool:
        return bool(self.bits[token >> 5] >> (token & 31) & 1)

    def _recent(self, token_ids: Sequence[int], end: int) -> Sequence[int]:
        return token_ids[max(self._num_prompt, end - RECENT_TOKENS) : end]

    def _set_ends(self, is_accepting: bool) -> None:
        if is_accepting:
            self.bits |= self._stops
        else:
            self.bits &= ~self._ends

    def _forbid_ends(self, ends: Bits) -> None:
        """Clears the bits of these ends unless the grammar allows nothing else."""
        left = self.bits & ~ends
        if left.any():
            self.bits[:] = left
