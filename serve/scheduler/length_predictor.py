"""Predicts the lengths of outputs from the distribution of past ones, given the tokens so far.

It uses integers and floats only. A predictor is any object with the three methods of
LengthPredictor; the setting length_predictor of LLM and Engine takes one. SequencePredictor is what
the scheduler calls: it knows a request's sequences one by one.
"""

from __future__ import annotations

import collections.abc as abc
import logging
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from math import sqrt
from typing import Any

from serve.length_predictor import LengthPredictor
from serve.request import Request
from serve.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)

_SHRINK = 30  # outputs after which a level weighs as much as the levels above it
PRIOR_MEDIAN = 128.0
_GOLDEN = 0.6180339887498949


class _History:
    """The last `window` lengths, in order of arrival and of size. `add` moves O(window) bytes."""

    __slots__ = ("_arrived", "_window", "lengths")

    def __init__(self, window: int) -> None:
        self._window = window
        self._arrived: deque[int] = deque()
        self.lengths: list[int] = []

    def add(self, length: int) -> None:
        if len(self._arrived) == self._window:
            oldest = self._arrived.popleft()
            del self.lengths[bisect_left(self.lengths, oldest)]
        self._arrived.append(length)
        insort(self.lengths, length)

    def in_order(self) -> list[int]:
        """Returns the lengths in order of arrival. Any thread may call it."""
        return list(self._arrived.copy())


class LengthDistribution:
    """A mixture of histories over a log-logistic prior, as a survival function."""

    __slots__ = ("_parts", "_prior_weight")

    def __init__(self, histories: list[_History]) -> None:
        """histories begins with the most specific one. A history of n outputs takes n / (n + 30)
        of the weight that the histories before it left."""
        left = 1.0
        self._parts: list[tuple[list[int], int, float]] = []
        for history in histories:
            count = len(history.lengths)
            if count:
                self._parts.append((history.lengths, count, left / (count + _SHRINK)))
                left *= _SHRINK / (count + _SHRINK)
        self._prior_weight = left

    def survival(self, length: int) -> float:
        """Returns the probability that an output is longer than `length`; it is never 0."""
        ratio = length / PRIOR_MEDIAN
        probability = self._prior_weight / (1.0 + ratio * sqrt(ratio))  # the shape is 1.5
        for lengths, count, weight in self._parts:
            probability += weight * (count - bisect_right(lengths, length))
        return probability

    def quantile(self, num_output: int, level: float, longest: int) -> int:
        """Returns the quantile of the lengths from num_output + 1 to `longest`.

        It bisects between the smallest and the largest quantile of the parts, because the
        quantile of a mixture lies between those."""
        share = 1.0 - level
        allowed = share * self.survival(num_output)
        low = high = _prior_quantile(num_output, level, longest)
        for lengths, count, _ in self._parts:
            num_longer = count - bisect_right(lengths, num_output)
            num_above = int(share * num_longer)
            part = lengths[count - 1 - num_above] if num_above < num_longer else num_output + 1
            if part < low:
                low = part
            elif part > high:
                high = part
        # The sum is rounded, so the bounds are one wider on each side.
        low, high = min(max(low - 1, num_output + 1), longest), min(high + 1, longest)
        survival = self.survival
        while low < high:
            middle = (low + high) >> 1
            if survival(middle) <= allowed:
                high = middle
            else:
                low = middle + 1
        return low


def _prior_quantile(num_output: int, level: float, longest: int) -> int:
    """Returns what LengthDistribution.quantile returns for the prior alone."""
    if level >= 1.0:
        return longest
    odds = (1.0 + (num_output / PRIOR_MEDIAN) ** 1.5) / (1.0 - level) - 1.0
    return int(min(PRIOR_MEDIAN * odds ** (2 / 3), longest)) + 1


Key = tuple[str, int]


class HistoryTable:
    """The last `window` lengths of each key, and the last 4 * window of all.

    It keeps at most max_keys histories and drops the least recently used."""

    def __init__(self, *, window: int = 256, max_keys: int = 1024) -> None:
        self._window = window
        self._max_keys = max_keys
        self._overall = _History(4 * window)
        self.histories: OrderedDict[Key, _History] = OrderedDict()
        self._draw = 0.5
        self._last: tuple[tuple[Key, ...], LengthDistribution] | None = None  # still valid

    def distribution(self, keys: tuple[Key, ...]) -> LengthDistribution:
        """Returns the distribution of lengths with these keys, the most specific one first."""
        if self._last is not None and self._last[0] == keys:
            return self._last[1]
        histories = []
        for key in keys:
            history = self.histories.get(key)
            if history is not None:
                self.histories.move_to_end(key)
                histories.append(history)
        distribution = LengthDistribution([*histories, self._overall])
        self._last = keys, distribution
        return distribution

    def add(self, keys: tuple[Key, ...], length: int) -> None:
        """Notes a length with these keys."""
        self._last = None
        self._overall.add(length)
        for key in keys:
            history = self.histories.get(key)
            if history is None:
                history = self.histories[key] = _History(self._window)
            self.histories.move_to_end(key)
            history.add(length)
        while len(self.histories) > self._max_keys:
            self.histories.popitem(last=False)

    @property
    def overall(self) -> list[int]:
        """The last lengths of all keys, the oldest first."""
        return self._overall.in_order()

    def restore(self, overall: abc.Iterable[int]) -> None:
        """Takes lengths over into a new table, which belong to no key."""
        for length in overall:
            self._overall.add(length)

    def drawn_beyond(self, keys: tuple[Key, ...], length: int) -> int:
        """Returns a length drawn from beyond `length`, at which an answer was cut off."""
        self._draw = (self._draw + _GOLDEN) % 1.0
        # At most twice as long, because later draws use this one.
        return self.distribution(keys).quantile(length, self._draw, 2 * length + 1)


class HistoryPredictor:
    """Predicts from past lengths: per (client, log2 of prompt length), per client, and overall.

    Each level is shrunk towards the one above it by n / (n + 30). The topmost level is a prior:
    log-logistic with median 128 and P90 554 tokens, between the means of published chat and code
    traces and as heavy-tailed as they are. A prior of the worst case would let a new server run
    only a few sequences, and a prior of 0 would cause preemptions. Its tail continues beyond the
    longest past output, so an output that is already longer may still double.

    Conditioning on num_output divides the survival functions, so a growing output moves along
    its own tail. An output that was cut off counts with a length drawn from the distribution
    beyond the cut (a stratified draw, as in Kaplan-Meier's redistribution to the right): to omit
    it or to count it as complete would both make long outputs look rare. A request with a fixed
    length (ignore_eos without stops) is predicted as max_tokens and not learned.

    quantile takes 10 us (about 12 bisection steps of 3 bisections each), and observe 3 us (3
    insertions into sorted lists).
    """

    def __init__(self, *, window: int = 256, max_keys: int = 1024) -> None:
        self._table = HistoryTable(window=window, max_keys=max_keys)

    def __len__(self) -> int:
        """Number of keys that have a history."""
        return len(self._table.histories)

    @property
    def histories(self) -> OrderedDict[Key, Any]:
        """The histories by key."""
        return self._table.histories

    @property
    def table(self) -> HistoryTable:
        return self._table

    def quantile(self, request: Request, num_output: int, level: float) -> int:
        longest = _longest(request)
        if has_fixed_length(request):
            return longest
        if longest <= num_output + 1:
            return num_output + 1
        distribution = self._table.distribution(_keys(request))
        predicted = distribution.quantile(num_output, level, longest)
        return max(predicted, request.params.min_tokens)

    def observe(self, request: Request, num_output: int) -> None:
        if not has_fixed_length(request):
            self._table.add(_keys(request), num_output)

    def observe_cut(self, request: Request, num_output: int) -> None:
        if num_output > 0 and not has_fixed_length(request):
            keys = _keys(request)
            self._table.add(keys, self._table.drawn_beyond(keys, num_output))


def _keys(request: Request) -> tuple[Key, ...]:
    """Returns (client, bucket) and, as bucket -1, the client. Requests without a client share
    one."""
    client = request.client or ""
    return (client, len(request.prompt_token_ids).bit_length()), (client, -1)


def _longest(request: Request) -> int:
    assert request.params.max_tokens is not None, "resolved by the engine"
    return request.params.max_tokens


def has_fixed_length(request: Request) -> bool:
    """Returns whether the answer has max_tokens tokens unless it is aborted."""
    params = request.params
    return params.ignore_eos and not params.stop_ids and not params.stop_strings


class GuardedPredictor:
    """Protects the engine from a user's predictor: its results are bounded, and a HistoryPredictor
    answers when it raises."""

    def __init__(self, predictor: LengthPredictor) -> None:
        self._predictor = predictor
        self._history = HistoryPredictor()
        self._has_logged = False

    def quantile(self, request: Request, num_output: int, level: float) -> int:
        longest = request.params.max_tokens
        assert longest is not None, "resolved by the engine"
        try:
            predicted = int(self._predictor.quantile(request, num_output, level))
        except Exception:
            self._log_failure()
            return self._history.quantile(request, num_output, level)
        return max(min(num_output + 1, longest), min(predicted, longest))

    def observe(self, request: Request, num_output: int) -> None:
        self._history.observe(request, num_output)
        try:
            self._predictor.observe(request, num_output)
        except Exception:
            self._log_failure()

    def observe_cut(self, request: Request, num_output: int) -> None:
        self._history.observe_cut(request, num_output)
        try:
            self._predictor.observe_cut(request, num_output)
        except Exception:
            self._log_failure()

    def _log_failure(self) -> None:
        if not self._has_logged:
            self._has_logged = True
            logger.exception("length_predictor failed; past outputs predict instead")


class SequencePredictor:
    """Predicts the answers of sequences as a LengthPredictor predicts those of requests.

    serve/prediction/learned.py has one that also learns from what a sequence shows of itself.
    """

    def __init__(self, predictor: LengthPredictor) -> None:
        self._predictor = predictor

    @property
    def histories(self) -> abc.Collection[object]:
        """The past lengths that are kept; empty for a user's own predictor."""
        predictor = self._predictor
        return predictor.histories if isinstance(predictor, HistoryPredictor) else ()

    @property
    def tables(self) -> tuple[abc.Collection[object], ...]:
        """All that is kept; the past lengths come first."""
        return (self.histories,)

    def arrived(self, sequence: Sequence) -> None:
        """Notes a sequence that was queued."""

    def quantile(self, sequence: Sequence, level: float) -> int:
        """Returns the quantile of the answer's length, given the tokens that it has."""
        return self._predictor.quantile(sequence.request, sequence.num_output_tokens, level)

    def saw_state(self, sequence: Sequence, num_output: int, sketch: Any) -> None:
        """Notes a sketch of the hidden state of a running sequence, [SKETCH_SIZE], from when it
        had num_output tokens. It never comes without a reader of hidden states."""

    def ended(self, sequence: Sequence, *, is_whole: bool) -> None:
        """Learns from a finished sequence, whose answer ended by itself if is_whole. An answer
        without a token teaches nothing, unless it is whole."""
        length = sequence.num_output_tokens
        if is_whole:
            self._predictor.observe(sequence.request, length)
        elif length:
            self._predictor.observe_cut(sequence.request, length)


class Coverage:
    """Counts how often an output was within its predicted quantile.

    Outputs whose quantile is max_tokens itself do not count, because nothing was predicted;
    aborted ones do not count, because they have no length.
    """

    __slots__ = ("level", "num_answers", "num_within")

    def __init__(self, level: float) -> None:
        self.level = level
        self.num_answers = 0
        self.num_within = 0

    @property
    def share(self) -> float | None:
        return self.num_within / self.num_answers if self.num_answers else None

    def add(self, predicted: int, length: int) -> None:
        self.num_answers += 1
        self.num_within += length <= predicted
