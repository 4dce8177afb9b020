"""The metrics of the front of several models: names, meanings and values, as Prometheus text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import PROCESS_COLLECTOR, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from serve.cluster.models.model import Model, State
from serve.cluster.models.pool import ModelPool
from serve.histogram import Histogram
from serve.http.edge.counters import HttpCounters

__all__ = ["CONTENT_TYPE", "FRONT_METRICS", "FrontMetrics"]

Samples = Iterable[tuple[tuple[str, ...], float | Histogram]]


@dataclass(frozen=True, slots=True)
class FrontMetric:
    """A metric of the front. values: yields (values of the labels, value)."""

    kind: str
    name: str
    about: str
    labels: tuple[str, ...]
    values: Callable[[ModelPool, HttpCounters], Samples]


def _each(value: Callable[[Model], float | Histogram]) -> Callable[..., Samples]:
    def values(pool: ModelPool, _: HttpCounters) -> Samples:
        return [((name,), value(model)) for name, model in pool.models.items()]

    return values


def _states(pool: ModelPool, _: HttpCounters) -> Samples:
    for name, model in pool.models.items():
        for state in State:
            yield (name, state.value), float(model.state is state)


def _switches(pool: ModelPool, _: HttpCounters) -> Samples:
    for name, model in pool.models.items():
        for switch, seconds in model.switch_s.items():
            yield (name, switch.value), seconds


def _refused(pool: ModelPool, _: HttpCounters) -> Samples:
    for name, model in pool.models.items():
        for code, count in model.refused.items():
            yield (name, code), count


FRONT_METRICS = (
    FrontMetric("gauge", "model_state", "1 for the state of each model.",
                ("model_name", "state"), _states),
    FrontMetric("gauge", "model_requests_running", "Requests that a model answers.",
                ("model_name",), _each(lambda model: model.running)),
    FrontMetric("gauge", "model_requests_waiting", "Requests that wait for a model to be ready.",
                ("model_name",), _each(lambda model: len(model.waiters))),
    FrontMetric("histogram", "model_wait_seconds",
                "How long requests waited that found their model not ready.",
                ("model_name",), _each(lambda model: model.wait_s)),
    FrontMetric("histogram", "model_switch_seconds",
                "How long starts, wakes, sleeps and stops took.",
                ("model_name", "switch"), _switches),
    FrontMetric("counter", "model_failures", "Starts that failed and processes that died.",
                ("model_name",), _each(lambda model: model.num_failed)),
    FrontMetric("counter", "model_requests_refused", "Requests refused or failed, by code.",
                ("model_name", "reason"), _refused),
    FrontMetric("gauge", "model_memory_bytes", "Memory that a model has or is granted.",
                ("model_name",), _each(lambda model: model.held_bytes)),
    FrontMetric("gauge", "model_memory_budget_bytes", "What all models together may take.",
                (), lambda pool, _: [((), pool.budget_bytes)]),
    FrontMetric("counter", "front_requests", "Answers by route, method and status class.",
                ("handler", "method", "status"),
                lambda _, http: list(http.answers.items())),
    FrontMetric("gauge", "front_connections", "Open connections of the front.",
                (), lambda _, http: [((), http.num_connections())]),
    FrontMetric("histogram", "front_event_loop_lag_seconds", "Delay of the front's wake-ups.",
                (), lambda _, http: [((), http.lag_s)]),
)  # fmt: skip


class FrontMetrics:
    """Writes the metrics of one front."""

    def __init__(self, pool: ModelPool, counters: HttpCounters) -> None:
        self._pool = pool
        self._counters = counters
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._registry.register(PROCESS_COLLECTOR)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for each in FRONT_METRICS:
            yield self._family(each)

    def _family(self, metric: FrontMetric) -> Metric:
        samples = list(metric.values(self._pool, self._counters))
        name, about, labels = f"mergestep:{metric.name}", metric.about, metric.labels
        if metric.kind == "histogram":
            histogram = HistogramMetricFamily(name, about, labels=labels)
            for values, value in samples:
                assert isinstance(value, Histogram)
                histogram.add_metric(values, _buckets(value), value.sum)
            return histogram
        make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family: CounterMetricFamily | GaugeMetricFamily = make(name, about, labels=labels)
        for values, value in samples:
            assert not isinstance(value, Histogram)
            family.add_metric(values, value)
        return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(map(float, histogram.counts)), strict=True))
