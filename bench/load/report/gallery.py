"""Selects the pictures of a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from bench.load.report.plots import Plot
from bench.load.report.plots_latency import cdf_plot, pooled, rates_plot
from bench.load.report.plots_requests import client_plot, lanes_plot
from bench.load.report.plots_time import steps_plot, timeline_plot
from bench.load.report.terminal import rate_title
from bench.load.results.document import Measurement
from bench.load.results.summary import RateSummary, nominal


@dataclass(frozen=True, slots=True)
class Section:
    """The pictures of one rate, or of all rates if rate is None. note says what is left out."""

    title: str
    plots: list[Plot]
    rate: RateSummary | None = None
    note: str = ""


def gallery(measurement: Measurement, *, max_detailed: int) -> list[Section]:
    """Returns distributions of all rates, and pictures over time and by request of at most
    max_detailed rates."""
    sections = []
    rates = list(measurement.rates)
    if measurement.search is not None:
        shown = {rate.qps for rate in rates}
        rates += [t.summary for t in measurement.search.tried if t.qps not in shown]
        rates.sort(key=lambda rate: rate.qps)
    over = rates_plot("rates", rates, measurement.slo, measurement.search)
    if over is not None:
        sections.append(Section("All rates", [over]))
    detailed = detailed_rates(measurement, max_detailed)
    for index, rate in enumerate(measurement.rates):
        is_detailed = rate.qps in detailed
        sections.append(_rate_section(measurement, rate, f"r{index}", is_detailed=is_detailed))
    return [section for section in sections if section.plots]


def detailed_rates(measurement: Measurement, limit: int) -> set[float]:
    """Returns the rate that the search found, else the highest, then the ends and the middle."""
    rates = [rate.qps for rate in measurement.rates]
    if not rates:
        return set()
    best = rates[-1]
    if measurement.search is not None and measurement.search.max_qps in rates:
        best = measurement.search.max_qps
    ordered = [best, rates[0], rates[-1], rates[len(rates) // 2], *rates]
    return set(list(dict.fromkeys(ordered))[:limit])


def _rate_section(
    measurement: Measurement, rate: RateSummary, name: str, *, is_detailed: bool
) -> Section:
    indices = [i for i, run in enumerate(measurement.runs) if nominal(run.qps) == rate.qps]
    runs = [measurement.runs[i] for i in indices]
    columns = [measurement.columns[i] for i in indices]
    plots = [cdf_plot(f"{name}-cdf", pooled(runs, columns), measurement.slo)]
    if is_detailed:
        plots += [
            timeline_plot(f"{name}-timeline", runs[0], columns[0]),
            steps_plot(f"{name}-steps", runs[0]),
            lanes_plot(f"{name}-lanes", columns[0]),
            client_plot(f"{name}-client", runs[0], columns[0], measurement.slo),
        ]
    notes = []
    if is_detailed and len(runs) > 1:
        notes.append(f"Distributions show all {len(runs)} runs, the other pictures the first.")
    if not is_detailed:
        notes.append("Only some rates have pictures over time.")
    return Section(rate_title(rate), [p for p in plots if p is not None], rate, " ".join(notes))
