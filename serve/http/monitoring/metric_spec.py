"""What a metric of /metrics is, and what its value is computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serve.engine.stats import EngineStats, WeightStats
from serve.histogram import Histogram
from serve.http.edge.counters import HttpCounters
from serve.kept import Kept

if TYPE_CHECKING:
    from memory.policies.selection import Selection
    from serve.engine.core_view import CoreView

Sampled = Iterable[tuple[tuple[str, ...], float]]
Value = float | None | Histogram | Sampled


@dataclass(frozen=True, slots=True)
class MetricSources:
    """The sources of the metrics at one moment. cache: labels with the K/V configuration. kept:
    what is kept between requests, by name. workers: resident bytes of the child processes.
    charged_bytes: see memory_budget.py. selection: what is read; None: everything. streaming: of
    weights that are read from the disk, by name; offload: of K/V."""

    stats: EngineStats
    view: CoreView
    http: HttpCounters
    cache: dict[str, str]
    kept: dict[str, Kept]
    workers: dict[str, int]
    charged_bytes: int
    weights: WeightStats | None = None
    selection: Selection | None = None
    streaming: Mapping[str, float] | None = None
    offload: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric. name: without a prefix; a counter's name gets the suffix _total. value: returns a
    number, None (no value yet), a histogram, or numbers by the values of `labels`. alias: vLLM's
    name of it."""

    kind: str
    name: str
    about: str
    value: Callable[[MetricSources], Value]
    labels: tuple[str, ...] = ()
    alias: str | None = None


def shared(
    kind: str,
    name: str,
    about: str,
    value: Callable[[MetricSources], Value],
    labels: tuple[str, ...] = (),
) -> MetricSpec:
    """Returns a metric that vLLM has under the same name."""
    return MetricSpec(kind, name, about, value, labels, f"vllm:{name}")


def by(label_values: Mapping[str, float]) -> Sampled:
    return [((name,), value) for name, value in label_values.items()]
