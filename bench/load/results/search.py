"""Searches for the highest rate at which enough requests meet the SLO, by bracket and bisection."""

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
ENDINGS = (MergestepError, OSError, KeyboardInterrupt)  # end a run but keep the runs before it


@dataclass(frozen=True, slots=True)
class Tried:
    """One rate of the search. is_clear means that the interval of the attainment excludes the
    target or that the rate failed for another reason, which `why` gives."""

    qps: float
    attainment: Estimate
    is_passed: bool
    is_clear: bool
    summary: RateSummary
    why: str = ""
    ran_alone: bool = False  # at most one request ran at a time


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search. max_qps is the highest rate that passed, 0 if none; above is the
    lowest rate that failed, infinite if none. stopped says why the search ended before its
    resolution, else it is empty. error is the error that ended it, if any."""

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
            text = "no rate was decided"
            if self.max_qps:
                text = f"highest rate that passed: {qps_text(self.max_qps)}/s"
            elif math.isfinite(self.above):
                text = f"no rate passed; the lowest that failed: {qps_text(self.above)}/s"
            return f"search stopped: {self.stopped}; {text}"
        failed = [tried.why for tried in self.tried if tried.qps == self.above and tried.why]
        why = f": {failed[0]}" if failed else ""
        if not self.max_qps:
            return f"no rate was low enough: at {qps_text(self.above)} requests/s not {bar}{why}"
        text = f"max {qps_text(self.max_qps)} requests/s with {bar}"
        return f"{text} (not at {qps_text(self.above)}/s{why})"


class _Stopped(Exception):
    """The reason why the search cannot continue; __cause__ is the error, if there was one."""


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
    """Searches with run(qps, seed), which offers a rate once.

    From `start` the rate doubles until one fails, or halves until one passes; then the middle of
    the logarithms is tried until the bracket is within `resolution` of its lower end.

    A rate passes if the share of good requests over all its seeds is at least `attainment`, and no
    run of it was rising (a longer run would then be worse). If the interval of that share contains
    the target, the share decides, and the rate is marked as not clear. Fewer seeds run if an
    interval of 99.9 % excludes the target already; requests that wait for each other are not
    independent, so that 95 % would be too narrow.

    A run whose client was too slow ends the search, as neither it nor a higher rate says anything
    about the server. So does a run that passed but was over before its first request could have
    missed. An error of run also ends the search; it is raised if no rate was tried before. Raises
    ConfigError for wrong parameters.
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
                f"at {qps_text(qps)}/s requests ran one at a time, and too few of them met the SLO"
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
    """Offers a rate with as many seeds as needed. Raises _Stopped if they do not decide it."""
    runs: list[RunSummary] = []
    for seed in seeds:
        try:
            result = run(qps, seed)
        except ENDINGS as error:
            raise _Stopped(f"at {qps_text(qps)} requests/s: {ending(error)}") from error
        if result.was_interrupted:
            raise _Stopped("the run was interrupted")
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
    """Returns the message of one of ENDINGS."""
    return message_of(error) if isinstance(error, Exception) else "interrupted"


def _check(slo: Slo, attainment: float, seeds: int, start: float, resolution: float) -> None:
    if not slo.limits_ms:
        raise ConfigError("find-max-qps needs an SLO (--slo)")
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
