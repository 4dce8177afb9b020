"""/metrics: what the engine and the server tell about themselves, as Prometheus text.

What vLLM tells too is told by its names as well (a setting), so that what reads them (load
generators, scalers, dashboards) finds it. Families are made when somebody reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import PROCESS_COLLECTOR, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from serve.engine.counters import Histogram
from serve.http.monitoring.metric_names import CACHE_INFO, SECTIONS, Figure, Reading

__all__ = ["CONTENT_TYPE", "Exposition"]

if TYPE_CHECKING:
    from serve.engine.engine import Engine
    from serve.http.calls.context import ApiContext

ENGINE_NUMBER = "0"  # vLLM's label of one engine of several


class Exposition:
    """Readings of one server. Those that come while one is being written share it."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._current: asyncio.Task[bytes] | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._registry.register(PROCESS_COLLECTOR)

    async def read(self) -> bytes:
        """Written in a thread: milliseconds that the event loop does not have."""
        if self._current is None or self._current.done():
            writing = asyncio.to_thread(generate_latest, self._registry)
            self._current = asyncio.create_task(writing)
        return await asyncio.shield(self._current)

    def collect(self) -> Iterator[Metric]:
        engine = self._context.engine
        reading = self._reading(engine)
        own = {"model_name": engine.model_name}
        theirs = {**own, "engine": ENGINE_NUMBER}
        has_aliases = self._context.settings.vllm_metrics
        for figures in SECTIONS.values():
            for figure in figures:
                yield _family(figure, f"mergestep:{figure.name}", own, reading)
                if figure.alias is not None and has_aliases:
                    # the one that is not vLLM's own knows of no model
                    labels = theirs if figure.alias.startswith("vllm:") else {}
                    yield _family(figure, figure.alias, labels, reading)
        yield _family(CACHE_INFO, "mergestep:cache_config_info", own | reading.cache, reading)
        if has_aliases:
            yield _family(CACHE_INFO, "vllm:cache_config_info", theirs | reading.cache, reading)

    def _reading(self, engine: Engine) -> Reading:
        stats, config = engine.stats(), engine.config
        cache = {
            "block_size": str(stats.kv_page_bytes // max(1, stats.kv_bytes_per_token)),
            "num_gpu_blocks": str(stats.pages_total),
            "cache_dtype": config.kv_dtype,
            "enable_prefix_caching": str(config.prefix_cache),
        }
        return Reading(stats, engine.loaded.core.view, self._context.counters, cache)


def _family(figure: Figure, name: str, labels: dict[str, str], reading: Reading) -> Metric:
    names, values = [*labels, *figure.labels], list(labels.values())
    value = figure.value(reading)
    if isinstance(value, Histogram):
        histogram = HistogramMetricFamily(name, figure.about, labels=names)
        histogram.add_metric(values, _buckets(value), value.sum)
        return histogram
    make = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = make(name, figure.about, labels=names)
    if value is None:
        return family
    samples = [((), value)] if isinstance(value, int | float) else value
    for label_values, number in samples:
        family.add_metric([*values, *label_values], number)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative, by upper bound."""
    counts = list(histogram.counts)  # at one moment
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(map(float, counts)), strict=True))
