"""The highest rate at which enough requests keep the SLO: a geometric bracket, then bisection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bench.load.client.record import RunResult
from bench.load.results.confidence import LEVEL, Estimate, wilson
from bench.load.results.slo import Slo
from bench.load.results.summary import RateSummary, RunSummary, combine, qps_text, summarize
from serve.errors import ConfigError, MergestepError, message_of

GROWTH = 2.0
MAX_RATES = 40
EARLY_LEVEL = 0.999
ENDINGS = (MergestepError, OSError, KeyboardInterrupt)  # of a run, but not of those before it


@dataclass(frozen=True, slots=True)
class Tried:
    """One rate of the search. is_clear: the interval of the attainment excludes the target, or it
    did not pass for another reason: why."""

    qps: float
    attainment: Estimate
    is_passed: bool
    is_clear: bool
    summary: RateSummary
    why: str = ""
    ran_alone: bool = False  # never two requests at once


@dataclass(frozen=True, slots=True)
class SearchResult:
    """max_qps: the highest rate that passed (0: none did); above: the lowest that did not
    (infinite: none). stopped: why the search ended before it knew the rate to its resolution;
    else empty. error: what ended it, where that was one."""

    slo: Slo
    target: float
    max_qps: float
    above: float
    tried: list[Tried]
    stopped: str = ""
    error: BaseException | None = None

    @property
    def is_found(self) -> bool:
        return not self.stopped and self.max_qps > 0

    def __str__(self) -> str:
        bar = f"{100 * self.target:g} % of requests within {self.slo}"
        if self.stopped:
            found = "none was decided"
            if self.max_qps:
                found = f"highest rate that passed: {qps_text(self.max_qps)}/s"
            elif math.isfinite(self.above):
                found = f"none passed, the lowest that did not: {qps_text(self.above)}/s"
            return f"search stopped: {self.stopped}; {found}"
        failed = [tried.why for tried in self.tried if tried.qps == self.above and tried.why]
        why = f": {failed[0]}" if failed else ""
        if not self.max_qps:
            return f"no rate was low enough: at {qps_text(self.above)} requests/s not {bar}{why}"
        found = f"max {qps_text(self.max_qps)} requests/s with {bar}"
        return f"{found} (not at {qps_text(self.above)}/s{why})"


class _Stopped(Exception):
    """Why the search cannot go on; __cause__: an error that it was."""


def find_max_qps(
    run: Callable[[float, int], RunResult],
    slo: Slo,
    *,
    attainment: float = 0.99,
    seeds: int = 3,
    start: float = 1.0,
    resolution: float = 0.05,
    lowest: float | None = None,
    highest: float = math.inf,
    first_seed: int = 0,
    on_rate: Callable[[Tried], None] | None = None,
) -> SearchResult:
    """run(qps, seed): offers that rate once. From `start` the rate doubles until one fails, or
    halves until one passes, then the middle (of the logarithms) is tried until the bracket is
    within `resolution` of its lower end.

    A rate passes if the share of good requests over all its seeds is at least `attainment`, and no
    run of it was rising (no steady state: a longer one would be worse); where the interval of that
    share holds the target, the share decides, and the rate is marked as not clear. Fewer seeds are
    run where an interval of 99.9 % excludes the target already (requests that wait for each other
    are not independent, so 95 % would promise too much). A run whose client was too slow ends the
    search: it says nothing about the server, nor would a higher rate. So does one that passed, but
    was over before its first request could have missed. An error raised by run ends it too, with
    what was found until then; it is raised if nothing was.
    """
    _check(slo, attainment, seeds, start, resolution)
    lowest = start / 1024 if lowest is None else lowest
    tried: list[Tried] = []
    passed, failed, qps = 0.0, math.inf, min(start, highest)
    while True:
        try:
            tried.append(_try(run, qps, slo, attainment, range(first_seed, first_seed + seeds)))
        except _Stopped as stop:
            why, error = str(stop), stop.__cause__
            if error is not None and not tried:
                raise error from None
            return SearchResult(slo, attainment, passed, failed, tried, why, error)
        if on_rate is not None:
            on_rate(tried[-1])
        if tried[-1].is_passed:
            passed = max(passed, qps)
        else:
            failed = min(failed, qps)
        stopped = ""
        if not tried[-1].is_passed and tried[-1].ran_alone:
            stopped = (
                f"at {qps_text(qps)}/s requests ran one at a time, and too few kept the SLO even so"
            )
        elif passed >= highest:
            stopped = f"{qps_text(highest)} requests/s, the highest allowed, passed"
        elif len(tried) >= MAX_RATES:
            stopped = f"{MAX_RATES} rates were tried"
        is_narrow = passed > 0 and failed <= passed * (1 + resolution)
        if stopped or is_narrow or failed <= lowest:
            return SearchResult(slo, attainment, passed, failed, tried, stopped)
        qps = _next(passed, failed, lowest, highest)


def _try(
    run: Callable[[float, int], RunResult], qps: float, slo: Slo, attainment: float, seeds: range
) -> Tried:
    """As many seeds as are needed. _Stopped: they say nothing about the rate."""
    runs: list[RunSummary] = []
    for seed in seeds:
        try:
            result = run(qps, seed)
        except ENDINGS as error:
            raise _Stopped(f"at {qps_text(qps)} requests/s: {ending(error)}") from error
        if result.was_interrupted:
            raise _Stopped("it was interrupted")
        runs.append(summarize(result, slo))
        verdict = runs[-1].verdict
        if not verdict.is_kept:
            raise _Stopped(f"at {qps_text(qps)} requests/s {verdict.reasons[0]}")
        if verdict.is_rising or _is_clear(runs, attainment, EARLY_LEVEL):
            break
    tried = _judge(qps, runs, slo, attainment)
    offered_s = min(summary.offered_s for summary in runs)
    if tried.is_passed and offered_s < slo.longest_s:
        raise _Stopped(
            f"at {qps_text(qps)} requests/s the load lasts {offered_s:.3g} s, less than the"
            f" limit of {slo.longest_s:g} s: offer more requests"
        )
    return tried


def ending(error: BaseException) -> str:
    """One of ENDINGS, in words."""
    return message_of(error) if isinstance(error, Exception) else "interrupted"


def _check(slo: Slo, attainment: float, seeds: int, start: float, resolution: float) -> None:
    if not slo.limits_ms:
        raise ConfigError("find-max-qps: give an SLO (--slo) that the rate has to keep")
    if not 0 < attainment <= 1:
        raise ConfigError(f"attainment must be over 0 and at most 1, not {attainment:g}")
    if seeds < 1:
        raise ConfigError(f"seeds must be at least 1, not {seeds}")
    if not 0 < start < math.inf:
        raise ConfigError(f"the search's first rate must be a positive number, not {start:g}")
    if not resolution > 0:
        raise ConfigError(f"resolution must be positive, not {resolution:g}")


def _next(passed: float, failed: float, lowest: float, highest: float) -> float:
    if math.isinf(failed):
        return min(passed * GROWTH, highest)
    if not passed:
        return max(failed / GROWTH, lowest)
    return math.sqrt(passed * failed)


def _share(runs: list[RunSummary], level: float = LEVEL) -> Estimate:
    return wilson(sum(run.good for run in runs), sum(run.judged for run in runs), level)


def _is_clear(runs: list[RunSummary], target: float, level: float = LEVEL) -> bool:
    share = _share(runs, level)
    return share.low > target or share.high < target


def _judge(qps: float, runs: list[RunSummary], slo: Slo, target: float) -> Tried:
    share, combined = _share(runs), combine(runs, slo)
    if any(run.verdict.is_rising for run in runs):
        return Tried(qps, share, False, True, combined, "not a steady state")
    ran_alone = all(run.rates["peak_concurrency"] <= 1 for run in runs)
    is_passed, is_clear = share.value >= target, _is_clear(runs, target)
    return Tried(qps, share, is_passed, is_clear, combined, ran_alone=ran_alone)
