"""Summarizes a run, and a rate over all its runs (seeds) with intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.common.percentiles import Tail, is_supported
from bench.load.client.record import ProcessHealth, RunResult
from bench.load.results import metrics
from bench.load.results.columns import Columns
from bench.load.results.confidence import Estimate, sample_intervals, t_interval, wilson
from bench.load.results.metrics import plural
from bench.load.results.slo import Slo, judge
from bench.load.results.validity import Verdict, achieved_qps, check

GAPS_NOTE = "ICL covers the whole run, within 1 %, and has no interval"
SHORT_NOTE = (
    "the run is short compared with its answers, so that rates are taken until the last answer and"
    " are lower than in a longer run"
)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The figures of one run.

    latencies_ms has count, mean, p50, p90, p95, p99 and max by metric (metrics.LABELS). Rates are
    taken over window (seconds), and the load was offered for offered_s. good of the judged requests
    met the SLO, and goodput is their rate in answers per second, NaN without an SLO. intervals_ms
    has the intervals of the run's own sample, only if the rate has one run.
    """

    qps: float
    seed: int
    target: str
    started: str
    window: tuple[float, float]
    offered_s: float
    achieved_qps: float
    latencies_ms: dict[str, dict[str, float]]
    rates: dict[str, float]
    counts: dict[str, int]
    errors: dict[str, int]
    good: int
    judged: int
    goodput: float
    verdict: Verdict
    notes: list[str]
    health: list[ProcessHealth]
    intervals_ms: dict[str, dict[str, Estimate]] = field(default_factory=dict)

    @property
    def attainment(self) -> float:
        return self.good / self.judged if self.judged else math.nan


@dataclass(frozen=True, slots=True)
class RateSummary:
    """The figures of one rate. Several runs give the mean of their figures with a t-interval; a
    single run gives its own figures, and latencies with the intervals of its sample. failed_share
    and attainment are taken over all requests, with Wilson's interval. attainment and goodput are
    None without an SLO."""

    qps: float
    runs: list[RunSummary]
    latencies_ms: dict[str, dict[str, Estimate]]
    rates: dict[str, Estimate]
    counts: dict[str, int]
    errors: dict[str, int]
    failed_share: Estimate
    attainment: Estimate | None = None
    goodput: Estimate | None = None

    @property
    def is_valid(self) -> bool:
        return all(run.verdict.is_valid for run in self.runs)

    @property
    def is_kept(self) -> bool:
        """Whether the generator offered the load as planned."""
        return all(run.verdict.is_kept for run in self.runs)

    @property
    def failed_text(self) -> str:
        """A text with the number of failed requests; empty if none failed."""
        lost = sum(run.verdict.num_lost for run in self.runs)
        total = sum(run.verdict.num_asked for run in self.runs)
        return f"{lost:,} of {total:,} {plural('request', total)} failed" if lost else ""

    @property
    def achieved_qps(self) -> float:
        return math.fsum(run.achieved_qps for run in self.runs) / len(self.runs)

    def tail_ms(self, metric: str, percent: int = 99) -> Tail:
        """Returns a percentile of a metric, or its maximum if the runs have too few values."""
        stats = self.latencies_ms[metric]
        of_runs = [run.latencies_ms[metric] for run in self.runs if metric in run.latencies_ms]
        count = int(min(values["count"] for values in of_runs))
        name = f"p{percent}" if is_supported(percent, count) else "max"
        return Tail(stats[name].value, percent, count)


def summarize(
    result: RunResult,
    slo: Slo | None = None,
    *,
    columns: Columns | None = None,
    intervals: bool = False,
) -> RunSummary:
    """Summarizes a run. columns are the result's, if they exist already. intervals adds those of
    its sample."""
    columns = columns or Columns.of(result)
    samples = metrics.latencies(result, columns)
    good, judged, goodput = 0, 0, math.nan
    if slo is not None:
        is_judged, is_good = judge(columns, slo)
        judged, good = int(is_judged.sum()), int((is_good & is_judged).sum())
        goodput = metrics.answers_per_s(columns, is_good)
    low, high = columns.due_span if math.isfinite(result.qps) else columns.steady_s
    notes = [GAPS_NOTE] if result.gaps else []
    notes += [SHORT_NOTE] if math.isfinite(result.qps) and columns.is_short else []
    return RunSummary(
        qps=result.qps,
        seed=result.seed,
        target=result.target,
        started=result.started,
        window=columns.steady_s,
        offered_s=high - low,
        achieved_qps=achieved_qps(result, columns),
        latencies_ms={name: metrics.describe(values) for name, values in samples.items()},
        rates=metrics.rates(columns),
        counts=metrics.counts(columns),
        errors=metrics.errors(result, columns),
        good=good,
        judged=judged,
        goodput=goodput,
        verdict=check(result, columns, slo),
        notes=[*result.notes, *notes],
        health=list(result.health),
        intervals_ms={name: _intervals(values) for name, values in samples.items()}
        if intervals
        else {},
    )


def _intervals(samples: metrics.Samples) -> dict[str, Estimate]:
    *points, mean = sample_intervals(samples.values * 1000, samples.owners, metrics.PERCENTS)
    count = len(samples.values) if samples.total is None else samples.total
    known = {
        f"p{percent}": point if is_supported(percent, count) else Estimate(math.nan)
        for percent, point in zip(metrics.PERCENTS, points, strict=True)
    }
    largest = Estimate(float(np.max(samples.values)) * 1000)  # a maximum has no interval
    return {"mean": mean, **known, "max": largest}


def summarize_rates(
    results: Sequence[RunResult],
    slo: Slo | None = None,
    *,
    columns: Sequence[Columns] | None = None,
) -> list[RateSummary]:
    """Returns one summary for each offered rate, ascending. columns are those of the results."""
    columns_of = columns or [Columns.of(result) for result in results]
    by_rate: dict[float, list[int]] = {}
    for index, result in enumerate(results):
        by_rate.setdefault(nominal(result.qps), []).append(index)
    return [
        combine(
            [
                summarize(results[i], slo, columns=columns_of[i], intervals=len(indices) == 1)
                for i in indices
            ],
            slo,
        )
        for _, indices in sorted(by_rate.items())
    ]


def nominal(qps: float) -> float:
    """Returns the rate without its rounding error, so that equal rates compare equal."""
    return float(f"{qps:.6g}")


def qps_text(qps: float) -> str:
    """Formats a rate with three digits, or as a whole number."""
    return f"{qps:.3g}" if qps < 1000 or math.isinf(qps) else f"{qps:,.0f}"


def combine(runs: Sequence[RunSummary], slo: Slo | None) -> RateSummary:
    """Combines the runs of one rate."""
    latencies: dict[str, dict[str, Estimate]] = {}
    for name in metrics.LABELS:
        of_runs = [run.latencies_ms[name] for run in runs if name in run.latencies_ms]
        if not of_runs:
            continue
        latencies[name] = {"count": Estimate(math.fsum(values["count"] for values in of_runs))}
        for stat in metrics.STATS:
            figures = [values[stat] for values in of_runs]
            is_known = not any(map(math.isnan, figures))  # each run has values enough for it
            latencies[name][stat] = _not_below_zero(figures if is_known else [math.nan])
        if len(runs) == 1:
            latencies[name].update(runs[0].intervals_ms.get(name, {}))
    rates = {
        name: _not_below_zero([run.rates[name] for run in runs if name in run.rates])
        for name in metrics.RATES
        if any(name in run.rates for run in runs)
    }
    counts: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    for run in runs:
        counts.update(run.counts)
        errors.update(run.errors)
    attainment = goodput = None
    if slo is not None:
        attainment = wilson(sum(run.good for run in runs), sum(run.judged for run in runs))
        goodput = _not_below_zero([run.goodput for run in runs])
    return RateSummary(
        nominal(runs[0].qps),
        list(runs),
        latencies,
        rates,
        {name: counts[name] for name in runs[0].counts},
        dict(errors.most_common()),
        wilson(
            sum(run.verdict.num_lost for run in runs), sum(run.verdict.num_asked for run in runs)
        ),
        attainment,
        goodput,
    )


def _not_below_zero(values: Sequence[float]) -> Estimate:
    """Returns the t_interval of figures that cannot be negative."""
    interval = t_interval(values)
    return interval if math.isnan(interval.low) else interval._replace(low=max(interval.low, 0.0))
