"""A predictor that learns from what a sequence shows of itself.

Three regressions predict the logarithm of remaining tokens: for a request that arrives; for a
prompt that has just been computed, as a factor on that; and for an answer that has grown, as a
factor on what past answers say (the median of HistoryPredictor). Their past errors, as ratios of
real to predicted tokens, are the distribution around the prediction: quantiles are calibrated by
what was observed, not by a formula, and a sequence that outgrows its prediction moves along that
distribution's tail.

What a client can do to others is bounded in two ways. It teaches the regressions only as long as it
has taught no more than all others together and a few more. And for each client the regression is
used only where its errors for this client have been smaller than those of the client's own past
answers, so what misled it for one client is not believed for another.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import ceil, exp, log
from typing import Any

import numpy as np

from serve.prediction.features import NUM_FEATURES, set_earlier, state_features
from serve.prediction.regression import MAX_TARGET, Floats, OnlineRegression
from serve.prediction.token_regression import TokenRegression, places_of
from serve.request import Request
from serve.scheduler.length_predictor import (
    PRIOR_MEDIAN,
    HistoryPredictor,
    HistoryTable,
    Key,
    SequencePredictor,
    has_fixed_length,
)
from serve.scheduler.sequence import Sequence

ARRIVED, COMPUTED, GROWN = range(3)
STAGES = ("arrived", "computed", "grown")
# A regression is believed after so many sequences.
MIN_LEARNED = 32
_ADVANTAGE = 64  # sequences that a client may teach beyond what all others together have taught
_RECENT = 2048  # sequences whose clients are counted for that
_MAX_CLIENTS = 1024  # whose errors are kept
_SHRINK = 16  # sequences after which a client's own errors weigh as much as those of all
_MAX_STATES = 64  # of a sequence; an answer of 10^7 tokens has about as many
_USUAL = log(64.0)  # what a prediction on arrival begins with, so that weights stay small
_LEAST, _MOST = log(0.5), log(1e12)  # logarithms of predicted tokens
_MAX_RATIO = 1 << 40
MAX_ERRORS = 256.0  # after so many a mean forgets older ones


@dataclass(slots=True)
class _Seen:
    """What was known of a sequence when it had num_output tokens. tokens: the remaining tokens
    that are predicted; past_tokens: those that past answers say. base + factor: the logarithm of
    what the regression predicts, whose own part is factor."""

    stage: int
    num_output: int
    features: Any
    past_tokens: float
    base: float
    factor: float
    tokens: float
    keys: tuple[Key, ...]


@dataclass(slots=True)
class _Errors:
    """Mean errors of a client, or of all: of the logarithms of lengths, each cut to MAX_TARGET."""

    count: float = 0.0
    learned: float = 0.0
    past: float = 0.0

    def add(self, learned: float, past: float) -> None:
        self.count = min(self.count + 1.0, MAX_ERRORS)
        self.learned += (min(learned, MAX_TARGET) - self.learned) / self.count
        self.past += (min(past, MAX_TARGET) - self.past) / self.count


@dataclass(slots=True)
class _Stage:
    """The regression of one stage, the ratios of real to predicted tokens (PRIOR_MEDIAN stands for
    1), and the errors by client."""

    regression: OnlineRegression | TokenRegression
    ratios: HistoryTable = field(default_factory=HistoryTable)
    errors: OrderedDict[str, _Errors] = field(default_factory=OrderedDict)
    overall: _Errors = field(default_factory=_Errors)

    def is_better_for(self, client: str) -> bool:
        """Returns whether the regression has been better than past answers for the client."""
        if self.regression.num_learned < MIN_LEARNED:
            return False
        own, overall = self.errors.get(client), self.overall
        if own is None:
            return overall.learned < overall.past
        gain = own.count * (own.past - own.learned) + _SHRINK * min(
            0.1, overall.past - overall.learned
        )
        return gain > 0.0

    def note_errors(self, client: str, learned: float, past: float) -> None:
        self.overall.add(learned, past)
        errors = self.errors.setdefault(client, _Errors())
        self.errors.move_to_end(client)
        errors.add(learned, past)
        while len(self.errors) > _MAX_CLIENTS:
            self.errors.popitem(last=False)


class LearnedPredictor(SequencePredictor):
    """Predicts with the regressions, and from past answers where those are better.

    A prediction takes about 30 us, a quantile 10 us, and to learn a sequence takes about 60 us.
    Only the compute loop calls it.
    """

    def __init__(self) -> None:
        self.past = HistoryPredictor()
        super().__init__(self.past)
        self.stages = (
            _Stage(TokenRegression()),
            _Stage(OnlineRegression(NUM_FEATURES)),
            _Stage(OnlineRegression(NUM_FEATURES)),
        )
        self._seen: dict[Sequence, list[_Seen]] = {}
        self._teachers: deque[str] = deque()
        self._num_taught: Counter[str] = Counter()

    @property
    def tables(self) -> tuple[Collection[object], ...]:
        ratios = [stage.ratios.histories for stage in self.stages]
        errors = [stage.errors for stage in self.stages]
        regressions = [stage.regression for stage in self.stages]
        return (self.histories, *ratios, *errors, regressions, self._teachers)

    def arrived(self, sequence: Sequence) -> None:
        request = sequence.request
        if not has_fixed_length(request):
            places = places_of(request.prompt_token_ids, request.client or "")
            past = self._past_tokens(request, 0)
            self._seen[sequence] = [self._predicted(sequence, ARRIVED, 0, places, past, 0.0)]

    def saw_state(self, sequence: Sequence, num_output: int, sketch: Floats) -> None:
        seen = self._seen.get(sequence)
        if seen is None or len(seen) >= _MAX_STATES:
            return
        features = state_features(sketch, sequence.num_prompt_tokens, num_output)
        stage = GROWN if num_output else COMPUTED
        past = self._past_tokens(sequence.request, num_output)
        seen.append(self._predicted(sequence, stage, num_output, features, past, seen[0].factor))

    def _past_tokens(self, request: Request, num_output: int) -> float:
        return max(1.0, self.past.quantile(request, num_output, 0.5) - num_output)

    def _predicted(
        self,
        sequence: Sequence,
        stage: int,
        num_output: int,
        features: Any,
        past: float,
        arrived: float,
    ) -> _Seen:
        """past: the remaining tokens that past answers say. arrived: the factor that was predicted
        on arrival, for the later stages."""
        client = sequence.request.client or ""
        base = log(past) if stage == GROWN else _USUAL + arrived
        if stage != ARRIVED:
            set_earlier(features, past, arrived)
        factor = self.stages[stage].regression.predict(features)
        tokens = past
        if self.stages[stage].is_better_for(client):
            tokens = exp(min(max(base + factor, _LEAST), _MOST))
        bucket = int(2.0 * log(2.0 * tokens))
        keys = (client, bucket), ("", -1 - bucket)
        return _Seen(stage, num_output, features, past, base, factor, tokens, keys)

    def quantile(self, sequence: Sequence, level: float) -> int:
        seen, num_output = self._seen.get(sequence), sequence.num_output_tokens
        longest = sequence.max_tokens_total - sequence.num_prompt_tokens
        if seen is None or self.stages[seen[-1].stage].regression.num_learned < MIN_LEARNED:
            return super().quantile(sequence, level)
        if longest <= num_output + 1:
            return num_output + 1
        last = seen[-1]
        unit = last.tokens / PRIOR_MEDIAN  # tokens of a ratio's unit
        done = max(0, num_output - last.num_output)
        distribution = self.stages[last.stage].ratios.distribution(last.keys)
        most = ceil((longest - last.num_output) / unit)
        ratio = distribution.quantile(int(done / unit), level, most)
        predicted = last.num_output + int(ratio * unit + 1e-6)
        least = max(num_output + 1, sequence.request.params.min_tokens)
        return min(max(predicted, least), longest)

    def ended(self, sequence: Sequence, *, is_whole: bool) -> None:
        seen, length = self._seen.pop(sequence, None), sequence.num_output_tokens
        if seen and length:
            # What would be predicted now is what the next predictions are like: those that were
            # made long ago, perhaps before anything was known, say little about them.
            request = sequence.request
            before = self._past_tokens(request, 0)
            now = [self._predicted(sequence, ARRIVED, 0, seen[0].features, before, 0.0)]
            for each in seen[1:]:
                if each.num_output < length:
                    count = each.num_output
                    past = self._past_tokens(request, count) if count else before
                    known = each.stage, count, each.features, past
                    now.append(self._predicted(sequence, *known, now[0].factor))
            self._learn(sequence.request.client or "", now, length, is_whole=is_whole)
        super().ended(sequence, is_whole=is_whole)

    def _learn(self, client: str, seen: list[_Seen], length: int, *, is_whole: bool) -> None:
        may_teach = self._may_teach(client)
        rows: list[list[Any]] = [[] for _ in self.stages]
        targets: list[list[float]] = [[] for _ in self.stages]
        for each in seen:
            remaining = self._remaining(each, length, is_whole=is_whole)
            target = log(remaining) - each.base
            if is_whole:
                learned, past = target - each.factor, log(remaining / each.past_tokens)
                self.stages[each.stage].note_errors(client, abs(learned), abs(past))
            rows[each.stage].append(each.features)
            targets[each.stage].append(target)
        for number, stage in enumerate(self.stages):
            if may_teach and rows[number]:
                stage.regression.learn(rows[number], targets[number])

    def _remaining(self, seen: _Seen, length: int, *, is_whole: bool) -> float:
        """Notes the ratio of the answer to what is predicted. Returns the remaining tokens, which
        are drawn from beyond the cut if the answer was cut off."""
        ratios, unit = self.stages[seen.stage].ratios, seen.tokens / PRIOR_MEDIAN
        remaining = length - seen.num_output
        ratio = min(ceil(remaining / unit), _MAX_RATIO)
        if not is_whole:
            ratio = ratios.drawn_beyond(seen.keys, ratio)
            remaining = max(remaining, ceil(ratio * unit))
        ratios.add(seen.keys, ratio)
        return float(remaining)

    def _may_teach(self, client: str) -> bool:
        """Counts a sequence of the client, if it may teach the regressions, and returns whether."""
        own = self._num_taught[client]
        others = len(self._teachers) - own
        if others and own >= others + _ADVANTAGE:
            return False
        if len(self._teachers) == _RECENT:
            oldest = self._teachers.popleft()
            self._num_taught[oldest] -= 1
            if not self._num_taught[oldest]:
                del self._num_taught[oldest]
        self._teachers.append(client)
        self._num_taught[client] += 1
        return True

    def errors(self) -> dict[str, tuple[int, float, float]]:
        """Returns for each stage how many sequences it has learned, and the mean errors of
        logarithms of lengths of the regression and of past answers."""
        return {
            name: (stage.regression.num_learned, stage.overall.learned, stage.overall.past)
            for name, stage in zip(STAGES, self.stages, strict=True)
        }

    @property
    def num_learned(self) -> int:
        """The sequences that any regression has learned, counted once in each."""
        return sum([stage.regression.num_learned for stage in self.stages])

    def state(self) -> dict[str, Any]:
        """Returns, as arrays, what serve/prediction/saved.py keeps. Any thread may call it."""
        found = {"past_lengths": np.array(self.past.table.overall, np.int64)}
        for name, stage in zip(STAGES, self.stages, strict=True):
            overall = stage.overall
            for key, value in stage.regression.state().items():
                found[f"{name}.{key}"] = value
            found[f"{name}.ratios"] = np.array(stage.ratios.overall, np.int64)
            errors = [overall.count, overall.learned, overall.past]
            found[f"{name}.errors"] = np.array(errors, np.float64)
        return found

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over the state of another predictor; this one is new. The arrays have the names,
        types and shapes of `state`. Raises ValueError if no predictor can have these values."""
        for name, stage in zip(STAGES, self.stages, strict=True):
            keys = ("sums", "num_learned")
            stage.regression.restore({key: state[f"{name}.{key}"] for key in keys})
            stage.ratios.restore(_lengths(state[f"{name}.ratios"]))
            count, learned, past = state[f"{name}.errors"].tolist()
            if not (
                0 <= count <= MAX_ERRORS and 0 <= learned <= MAX_TARGET and 0 <= past <= MAX_TARGET
            ):
                raise ValueError("its errors are out of bounds")
            stage.overall = _Errors(count, learned, past)
        self.past.table.restore(_lengths(state["past_lengths"]))


def _lengths(found: Any) -> list[int]:
    lengths: list[int] = found.tolist()
    if len(lengths) > 1024 or any(not 0 <= length <= _MAX_RATIO for length in lengths):
        raise ValueError("its past lengths are too many or out of bounds")
    return lengths
