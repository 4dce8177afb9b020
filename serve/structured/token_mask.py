"""Which tokens a sequence may have next: a bit for each, a pure function of its tokens so far.

Steps are computed again, cut and taken back, so nothing here counts calls: a matcher follows the
tokens that are there, and goes back where some have gone. What goes wrong in it ends its own
sequence. Knows no device and no engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from serve.request import FinishReason

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

Bits = npt.NDArray[np.uint32]

TOO_COMPLEX = "structured: the grammar is too complex for this text"
NOTHING_ALLOWED = "structured, allowed_token_ids and bad_words leave no token"
REQUEST_FAULTS = frozenset({TOO_COMPLEX, NOTHING_ALLOWED})
"""Errors of a sequence that are its request's fault, not the engine's."""

# Tokens that may have been replaced since they were seen: those of two steps in flight, and more.
_LOOK_BACK = 16


# Seconds of the processor that a request may use up before it has saved them: its masks, and taking
# in tokens between two steps, while everybody waits. It saves what a mask (more with a larger
# vocabulary) or a token took less than these.
_MASKS_S, _USUAL_MASK_S, _USUAL_MASK_S_PER_TOKEN = 1.0, 0.5e-3, 20e-9
_TAKES_S, _USUAL_TAKE_S = 5e-3, 0.1e-3


class Effort:
    """What the masks of one request may still cost everybody else. Any thread: two at once may
    make it forget what one of them took."""

    def __init__(self, vocab_size: int) -> None:
        self._usual_mask_s = _USUAL_MASK_S + _USUAL_MASK_S_PER_TOKEN * vocab_size
        self._masks_s, self._takes_s = _MASKS_S, _TAKES_S

    @property
    def is_spent(self) -> bool:
        """It has had more than its share."""
        return self._masks_s <= 0

    @property
    def may_take(self) -> bool:
        """Whether a token may be taken in between two steps, or only when the next mask is made."""
        return self._takes_s > 0

    def made(self, seconds: float) -> None:
        """A mask took so long."""
        self._masks_s = min(_MASKS_S, self._masks_s + self._usual_mask_s - seconds)

    def took(self, seconds: float) -> None:
        """A token did, between two steps."""
        self._takes_s = min(_TAKES_S, self._takes_s + _USUAL_TAKE_S - seconds)


def num_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def bits_of(token_ids: Iterable[int], vocab_size: int) -> Bits:
    """[words] with these bits set; ids beyond the vocabulary are left out."""
    bits = np.zeros(num_words(vocab_size), dtype=np.uint32)
    ids = np.fromiter(token_ids, dtype=np.int64)
    ids = ids[(ids >= 0) & (ids < vocab_size)]
    np.bitwise_or.at(bits, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return bits


def all_bits(vocab_size: int) -> Bits:
    """[words] with the bits of the vocabulary set, and none beyond."""
    bits = np.full(num_words(vocab_size), 0xFFFFFFFF, dtype=np.uint32)
    if vocab_size % 32:
        bits[-1] = (1 << vocab_size % 32) - 1
    return bits


class Matcher:
    """A grammar's matcher that follows a sequence's output.

    Copies of a matcher share a lexer, and with it the limit of its states: a sequence that
    meets the limit begins again with a lexer of its own, for others may have used it up.
    """

    def __init__(self, start: LLMatcher, renew: Callable[[], LLMatcher] | None = None) -> None:
        """start: at the beginning of the text; it stays there. renew: makes another one that
        shares nothing; None: start is such a one."""
        self._start = start
        self._renew = renew
        self._first: list[Bits] = []  # the mask of an empty text, made once for all copies
        self._matcher = start.deep_copy()
        self._seen: list[int] = []  # of them the matcher has the first _num_taken
        self._num_taken = 0

    def copy(self) -> Matcher:
        """At the beginning of the text."""
        other = Matcher(self._start, self._renew)
        other._first = self._first
        return other

    def follow(self, token_ids: Sequence[int], begin: int, end: int) -> None:
        """The output is token_ids[begin:end]."""
        keep = self._num_alike(token_ids, begin, end)
        if keep < self._num_taken:
            self._go_back(keep)
        self._seen[keep:] = token_ids[begin + keep : end]
        self._take()
        if self._begins_again():
            self._take()

    def _take(self) -> None:
        while self._num_taken < len(self._seen) and not self._matcher.is_stopped():
            self._matcher.consume_token(self._seen[self._num_taken])
            self._num_taken += 1

    def _num_alike(self, token_ids: Sequence[int], begin: int, end: int) -> int:
        """Tokens at the beginning that have been seen."""
        keep = min(len(self._seen), end - begin)
        for place in range(max(0, keep - _LOOK_BACK), keep):
            if self._seen[place] != token_ids[begin + place]:
                return place
        return keep

    def _go_back(self, keep: int) -> None:
        if not self._matcher.is_error() and self._matcher.rollback(self._num_taken - keep):
            self._num_taken = keep
        else:
            self._matcher, self._num_taken = self._start.deep_copy(), 0

    def _begins_again(self) -> bool:
        """After an error that may have been others' fault."""
        if self._renew is None or not self._matcher.is_error():
            return False
        self._start, self._renew = self._renew(), None
        self._matcher, self._num_taken = self._start.deep_copy(), 0
        return True

    @property
    def is_accepting(self) -> bool:
        """The text so far is whole."""
        return self._matcher.is_accepting()

    @property
    def is_over(self) -> bool:
        """Nothing can follow."""
        return self._matcher.is_stopped()

    @property
    def is_error(self) -> bool:
        return self._matcher.is_error()

    @property
    def stop_reason(self) -> str:
        return self._matcher.stop_reason()

    def fill(self, bits: Bits) -> None:
        """The tokens that may follow; ends among them where the text may end."""
        if not self._seen and self._first:
            bits[:] = self._first[0]
            return
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._begins_again():
            self._take()
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if not self._seen and not self._matcher.is_error():
            self._first.append(bits.copy())


class BadWords:
    """Forbids the last token of a word whose other tokens have just come."""

    def __init__(self, words: Iterable[Sequence[int]], vocab_size: int) -> None:
        words = [tuple(word) for word in words if word]
        self.single = bits_of([word[0] for word in words if len(word) == 1], vocab_size)
        self._longer = [(word[:-1], word[-1]) for word in words if len(word) > 1]

    def forbidden(self, token_ids: Sequence[int], begin: int, end: int) -> list[int]:
        """Beside the single ones, where the output is token_ids[begin:end]."""
        return [
            last
            for head, last in self._longer
            if end - len(head) >= begin and tuple(token_ids[end - len(head) : end]) == head
        ]


class SequenceMask:
    """The mask of one sequence: at `address` when fill() has been called, until its next call."""

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
        effort: Effort | None = None,
    ) -> None:
        """allowed: no other token comes. stop_ids: tokens that end the sequence once it has
        min_output tokens, eos_ids among them unless they are ignored. effort: its request's."""
        self.error: str | None = None
        self.cost_s = 0.0  # of the last fill()
        self.job: object = None  # of who makes it, when the step before was over first; opaque here
        self._effort = Effort(vocab_size) if effort is None else effort
        self._num_prompt = num_prompt
        self._matcher = matcher
        self._bad_words = bad_words
        self._stops = bits_of(stop_ids, vocab_size)
        self._ends = bits_of(stop_ids | eos_ids, vocab_size)
        self._min_output = min_output
        self._whole = all_bits(vocab_size)
        self._allowed = self._whole if allowed is None else allowed
        # one more than there are logits: a matcher may have an end that no token stands for
        self._buffer = np.zeros(num_words(vocab_size + 1), dtype=np.uint32)
        self.bits = self._buffer[: num_words(vocab_size)]
        self.address = self.bits.ctypes.data

    def fill(self, token_ids: Sequence[int]) -> None:
        """For the token after these, prompt first. Never raises: see error."""
        if self.error is None and self._matcher is not None and self._effort.is_spent:
            self._give_up("its masks took too long")
        if self.error is None:
            self.cost_s = self._guarded(lambda: self._fill(token_ids))
            self._effort.made(self.cost_s)
        if self.error is not None:
            self.bits[:] = self._whole  # what comes is not shown to anybody

    def ending(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Whether the sequence ends with these: its text is whole and nothing can follow, or
        something is wrong (see error)."""
        matcher = self._matcher
        if matcher is not None and self.error is None:
            seconds = 0.0
            # else its end is seen a step later, when the mask lets nothing but an end follow
            if self._effort.may_take or not self._ends.any():
                seconds = self._guarded(lambda: self._follow(matcher, token_ids))
            self._effort.took(seconds)
        if self.error is not None:
            return FinishReason.ERROR
        return FinishReason.STOP if matcher is not None and matcher.is_over else None

    def is_end(self, token: int) -> bool:
        """Whether it is one of those that stand for no text but for its end."""
        return bool(self._ends[token >> 5] >> (token & 31) & 1)

    def _guarded(self, work: Callable[[], object]) -> float:
        """Seconds of this thread: what others do meanwhile is not its fault."""
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
        """Where the known tokens end: of the others only the device knows."""
        end = len(token_ids)
        while end > self._num_prompt and token_ids[end - 1] < 0:
            end -= 1
        return end

    def _follow(self, matcher: Matcher, token_ids: Sequence[int]) -> None:
        matcher.follow(token_ids, self._num_prompt, self._end(token_ids))
        self._look_for_error(matcher)

    def _look_for_error(self, matcher: Matcher) -> None:
        if matcher.is_error:
            self._give_up(matcher.stop_reason)  # a name of the library's, nothing of the client's

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
            self._look_for_error(matcher)
            bits &= self._allowed
            self._place_ends(matcher.is_accepting)
        if self._bad_words is not None:
            bits &= ~self._bad_words.single
            for token in self._bad_words.forbidden(token_ids, self._num_prompt, end):
                bits[token >> 5] &= ~np.uint32(1 << (token & 31))
        is_held = end - self._num_prompt < self._min_output
        if matcher is not None:
            self._hold_back(self._ends if is_held else self._ends & ~self._stops)
        elif is_held:
            bits &= ~self._stops
        if self.error is None and not bits.any():
            self.error = NOTHING_ALLOWED

    def _place_ends(self, is_accepting: bool) -> None:
        if is_accepting:
            self.bits |= self._stops
        else:
            self.bits &= ~self._ends

    def _hold_back(self, ends: Bits) -> None:
        """Where the grammar lets nothing but an end follow, it ends all the same."""
        left = self.bits & ~ends
        if left.any():
            self.bits[:] = left
