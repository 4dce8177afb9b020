"""/metrics: what the engine tells about itself, as Prometheus text.

Figures that vLLM has too carry its names, so that what reads them (load generators, scalers,
dashboards) finds them; the others are called mergestep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

__all__ = ["CONTENT_TYPE", "exposition"]

if TYPE_CHECKING:
    from serve.engine import Engine
    from serve.stats import EngineStats


class EngineCollector:
    """A snapshot of EngineStats for every reading."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats, name = self._engine.stats(), self._engine.model_name
        for family, value in (*_vllm_figures(stats), *_own_figures(stats)):
            family.add_metric([name], value)
            yield family
        rows = CounterMetricFamily(
            "mergestep:step_rows", "Rows computed by kind.", labels=["model_name", "kind"]
        )
        rows.add_metric([name, "decode"], stats.num_decode_rows)
        rows.add_metric([name, "prefill"], stats.num_prefill_rows)
        yield rows
        pages = GaugeMetricFamily(
            "mergestep:kv_pages", "Pages of K/V memory by state.", labels=["model_name", "state"]
        )
        for state in ("in_use", "mapped", "cached", "total"):
            pages.add_metric([name, state], getattr(stats, f"pages_{state}"))
        yield pages


def _gauge(name: str, about: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, labels=["model_name"])


def _counter(name: str, about: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, about, labels=["model_name"])


def _vllm_figures(
    stats: EngineStats,
) -> list[tuple[GaugeMetricFamily | CounterMetricFamily, float]]:
    usage = stats.pages_in_use / max(1, stats.pages_total)
    return [
        (_gauge("vllm:num_requests_running", "Sequences that run."), stats.num_running),
        (_gauge("vllm:num_requests_waiting", "Sequences that wait."), stats.num_waiting),
        (_gauge("vllm:kv_cache_usage_perc", "K/V memory in use, 0 to 1."), usage),
        (_counter("vllm:num_preemptions", "Preemptions."), stats.num_preemptions),
        (
            _counter("vllm:prefix_cache_queries", "Prompt tokens that were looked for."),
            stats.prefix_asked_tokens,
        ),
        (_counter("vllm:prefix_cache_hits", "Of those, found."), stats.prefix_hit_tokens),
    ]


def _own_figures(
    stats: EngineStats,
) -> list[tuple[GaugeMetricFamily | CounterMetricFamily, float]]:
    return [
        (_counter("mergestep:steps", "Merged steps."), stats.num_steps),
        (_counter("mergestep:sequences_finished", "Sequences that ended."), stats.num_finished),
        (_gauge("mergestep:requests_unfinished", "Requests inside."), stats.num_unfinished),
    ]


def exposition(engine: Engine) -> bytes:
    """The text of one reading."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(engine))
    return generate_latest(registry)
