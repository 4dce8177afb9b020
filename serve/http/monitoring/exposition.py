"""/metrics: metrics of the engine and the server as Prometheus text.

Metrics that vLLM has too appear under vLLM's names as well (a setting), for load generators,
scalers and dashboards that expect them. Families are made on each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
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

from serve.histogram import Histogram
from serve.http.monitoring.metric_spec import MetricSources, MetricSpec
from serve.http.monitoring.metric_table import CACHE_INFO, FORMER_USAGE, SECTIONS

__all__ = ["CONTENT_TYPE", "Exposition"]

if TYPE_CHECKING:
    from serve.engine.engine import Engine
    from serve.http.calls.context import ApiContext

ENGINE_NUMBER = "0"  # vLLM's label of the engine's number


class Exposition:
    """Writes the metrics of one server. Requests that arrive during a write share its result."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._current: asyncio.Task[bytes] | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._registry.register(PROCESS_COLLECTOR)

    async def read(self) -> bytes:
        """Returns the text. A thread writes it, since that takes milliseconds."""
        if self._current is None or self._current.done():
            writing = asyncio.to_thread(generate_latest, self._registry)
            self._current = asyncio.create_task(writing)
        return await asyncio.shield(self._current)

    def collect(self) -> Iterator[Metric]:
        engine = self._context.engine
        sources = self._sources(engine)
        own = {"model_name": engine.model_name}
        theirs = {**own, "engine": ENGINE_NUMBER}
        has_aliases = self._context.settings.vllm_metrics
        for specs in SECTIONS.values():
            for spec in specs:
                yield _family(spec, f"mergestep:{spec.name}", own, sources)
                if spec.alias is not None and has_aliases:
                    # http_requests is not a metric of vLLM's own and has no model label
                    labels = theirs if spec.alias.startswith("vllm:") else {}
                    yield _family(spec, spec.alias, labels, sources)
        yield _family(CACHE_INFO, "mergestep:cache_config_info", own | sources.cache, sources)
        if has_aliases:
            yield _family(FORMER_USAGE, "vllm:gpu_cache_usage_perc", theirs, sources)
            yield _family(CACHE_INFO, "vllm:cache_config_info", theirs | sources.cache, sources)

    def _sources(self, engine: Engine) -> MetricSources:
        stats, config = engine.stats(), engine.config
        cache = {
            "block_size": str(stats.kv_page_bytes // max(1, stats.kv_bytes_per_token)),
            "num_gpu_blocks": str(stats.pages_total),
            "cache_dtype": config.kv_dtype,
            "enable_prefix_caching": str(config.prefix_cache),
        }
        kept = engine.kept() | {name: size() for name, size in self._context.kept.items()}
        view, counters = engine.loaded.core.view, self._context.counters
        charged = self._context.budget.num_bytes
        weights, selection = engine.weight_stats(), engine.loaded.selection
        workers = engine.worker_bytes()
        stream = engine.loaded.weight_stream
        streaming = None if stream is None else asdict(stream.stats())
        units = engine.loaded.offload
        return MetricSources(
            stats,
            view,
            counters,
            cache,
            kept,
            workers,
            charged,
            weights,
            selection,
            streaming,
            None if units is None else asdict(units.counts()),
        )


def _family(spec: MetricSpec, name: str, labels: dict[str, str], sources: MetricSources) -> Metric:
    names, values = [*labels, *spec.labels], list(labels.values())
    value = spec.value(sources)
    if isinstance(value, Histogram):
        histogram = HistogramMetricFamily(name, spec.about, labels=names)
        histogram.add_metric(values, _buckets(value), value.sum)
        return histogram
    make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = make(name, spec.about, labels=names)
    if value is None:
        return family
    samples = [((), value)] if isinstance(value, int | float) else value
    for label_values, number in samples:
        family.add_metric([*values, *label_values], number)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Returns the cumulative counts by upper bound."""
    counts = list(histogram.counts)  # a copy, while others add
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(map(float, counts)), strict=True))
