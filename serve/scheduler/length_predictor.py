"""How long an answer will be: empirical laws of past answers, conditioned on what is written.

Integers and floats only. A predictor is anything with the three methods of LengthPredictor; a
learned one is a setting of LLM and Engine (length_predictor).
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from math import sqrt

from serve.config import LengthPredictor
from serve.request import Request

logger = logging.getLogger(__name__)

_SHRINK = 30  # answers after which a level weighs as much as what is above it
_PRIOR_MEDIAN = 128.0
_GOLDEN = 0.6180339887498949


class _History:
    """The last `window` lengths, in order of arrival and of size. add: O(window) moved bytes."""

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


class _Law:
    """A mixture of histories over a log-logistic prior, as a survival function."""

    __slots__ = ("_parts", "_prior_weight")

    def __init__(self, histories: list[_History]) -> None:
        """histories: the most specific first. One with n answers takes n / (n + 30) of the
        weight that those before it left."""
        left = 1.0
        self._parts: list[tuple[list[int], int, float]] = []
        for history in histories:
            count = len(history.lengths)
            if count:
                self._parts.append((history.lengths, count, left / (count + _SHRINK)))
                left *= _SHRINK / (count + _SHRINK)
        self._prior_weight = left

    def survival(self, length: int) -> float:
        """P(an answer is longer than `length`); never 0."""
        ratio = length / _PRIOR_MEDIAN
        found = self._prior_weight / (1.0 + ratio * sqrt(ratio))  # of shape 1.5
        for lengths, count, weight in self._parts:
            found += weight * (count - bisect_right(lengths, length))
        return found

    def quantile(self, num_output: int, level: float, longest: int) -> int:
        """By bisection over the lengths from num_output + 1 to longest, between the smallest and
        the largest quantile of the parts: where all of them have come to their level, or none
        has, so has their mixture."""
        share = 1.0 - level
        allowed = share * self.survival(num_output)
        low = high = _prior_quantile(num_output, level, longest)
        for lengths, count, _ in self._parts:
            num_longer = count - bisect_right(lengths, num_output)
            rest = int(share * num_longer)
            own = lengths[count - 1 - rest] if rest < num_longer else num_output + 1
            if own < low:
                low = own
            elif own > high:
                high = own
        # One more on each side, for what rounding does to the sum.
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
    """As _Law.quantile, of the prior alone."""
    if level >= 1.0:
        return longest
    odds = (1.0 + (num_output / _PRIOR_MEDIAN) ** 1.5) / (1.0 - level) - 1.0
    return int(min(_PRIOR_MEDIAN * odds ** (2 / 3), longest)) + 1


_Keys = tuple[tuple[str, int], tuple[str, int]]


class HistoryPredictor:
    """Lengths seen before, per (client, log2 of the prompt's length), per client, and overall.

    Each level is shrunk to the one above it by n / (n + 30). Above all stands a prior for the
    time before any answer: log-logistic with median 128 and P90 554 tokens, between the means
    of published chat and code traces and heavy-tailed as they are. It is not the worst case (a
    new server would run a handful of sequences) and not nothing (it would preempt), and its
    tail goes on where the longest answer seen ends: what is already longer than all others may
    well become twice as long.

    Conditioning on num_output divides the survival functions, so a growing answer moves along
    its own tail. Answers that were cut off count with a length drawn from the law beyond the
    cut (a stratified draw, as in Kaplan-Meier's redistribution to the right): leaving them out
    or taking the cut for the end would both make long answers look rare. Requests whose length
    is their own wish (ignore_eos without stops) are predicted as max_tokens and not learned.

    Memory: at most max_keys histories of `window` lengths, least recently used ones dropped.
    Cost: quantile about 12 steps of bisection, each 3 bisections of a history, 10 us; observe 3
    insertions into sorted lists, 3 us.
    """

    def __init__(self, *, window: int = 256, max_keys: int = 1024) -> None:
        self._window = window
        self._max_keys = max_keys
        self._overall = _History(4 * window)
        self._histories: OrderedDict[tuple[str, int], _History] = OrderedDict()
        self._draw = 0.5
        self._last: tuple[_Keys, _Law] | None = None  # asked for, and still true

    def __len__(self) -> int:
        """Number of keys that have a history."""
        return len(self._histories)

    def quantile(self, request: Request, num_output: int, level: float) -> int:
        longest = _longest(request)
        if _has_fixed_length(request):
            return longest
        if longest <= num_output + 1:
            return num_output + 1
        law = self._law(request)
        return max(law.quantile(num_output, level, longest), request.params.min_tokens)

    def observe(self, request: Request, num_output: int) -> None:
        if not _has_fixed_length(request):
            self._add(request, num_output)

    def observe_cut(self, request: Request, num_output: int) -> None:
        if num_output <= 0 or _has_fixed_length(request):
            return
        self._draw = (self._draw + _GOLDEN) % 1.0
        # Twice what was seen at most: what is drawn here is drawn from again.
        length = self._law(request).quantile(num_output, self._draw, 2 * num_output + 1)
        self._add(request, length)

    def _law(self, request: Request) -> _Law:
        keys = _keys(request)
        if self._last is not None and self._last[0] == keys:
            return self._last[1]
        found = []
        for key in keys:
            history = self._histories.get(key)
            if history is not None:
                self._histories.move_to_end(key)
                found.append(history)
        law = _Law([*found, self._overall])
        self._last = keys, law
        return law

    def _add(self, request: Request, length: int) -> None:
        self._last = None
        self._overall.add(length)
        for key in _keys(request):
            history = self._histories.get(key)
            if history is None:
                history = self._histories[key] = _History(self._window)
            self._histories.move_to_end(key)
            history.add(length)
        while len(self._histories) > self._max_keys:
            self._histories.popitem(last=False)


def _keys(request: Request) -> _Keys:
    """(client, bucket) and, as bucket -1, the client. Requests without a name share one."""
    client = request.client or ""
    return (client, len(request.prompt_token_ids).bit_length()), (client, -1)


def _longest(request: Request) -> int:
    assert request.params.max_tokens is not None, "resolved by the engine"
    return request.params.max_tokens


def _has_fixed_length(request: Request) -> bool:
    params = request.params
    return params.ignore_eos and not params.stop_ids and not params.stop_strings


class GuardedPredictor:
    """A user's predictor: whatever it raises or says is no fault of the engine. Past answers
    predict where it does not."""

    def __init__(self, predictor: LengthPredictor) -> None:
        self._predictor = predictor
        self._history = HistoryPredictor()
        self._has_complained = False

    def quantile(self, request: Request, num_output: int, level: float) -> int:
        longest = request.params.max_tokens
        assert longest is not None, "resolved by the engine"
        try:
            found = int(self._predictor.quantile(request, num_output, level))
        except Exception:
            self._complain()
            return self._history.quantile(request, num_output, level)
        return max(min(num_output + 1, longest), min(found, longest))

    def observe(self, request: Request, num_output: int) -> None:
        self._history.observe(request, num_output)
        try:
            self._predictor.observe(request, num_output)
        except Exception:
            self._complain()

    def observe_cut(self, request: Request, num_output: int) -> None:
        self._history.observe_cut(request, num_output)
        try:
            self._predictor.observe_cut(request, num_output)
        except Exception:
            self._complain()

    def _complain(self) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.exception("length_predictor failed; past answers predict instead")


class Coverage:
    """Running calibration: how often an answer was within its predicted quantile.

    Where the quantile is max_tokens itself nothing was predicted, and answers that were aborted
    have no length: neither counts.
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
