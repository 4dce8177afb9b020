"""The metrics of the hop, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve.cluster.front.parting import PartingCounts
    from serve.cluster.front.relay import RelayCounts
    from serve.cluster.front.replicas import Replica


def metrics_text(replicas: Iterable[Replica], counts: RelayCounts, parting: PartingCounts) -> str:
    lines = [*_lines(list(replicas), counts), *_parting_lines(parting)]
    return "\n".join(lines) + "\n"


def _parting_lines(counts: PartingCounts) -> Iterator[str]:
    yield from _metric("apart_total", "counter", counts.num_apart)
    yield from _by_label("together_total", "counter", "reason", counts.num_together)
    yield from _metric("moved_total", "counter", counts.num_moved)
    yield from _metric("handover_seconds_total", "counter", f"{counts.handover_s:.6f}")


def _lines(replicas: list[Replica], counts: RelayCounts) -> Iterator[str]:
    ready = {replica.url: int(replica.is_ready) for replica in replicas}
    calls = {replica.url: replica.num_calls for replica in replicas}
    yield from _by_label("replica_ready", "gauge", "replica", ready)
    yield from _by_label("replica_calls", "gauge", "replica", calls)
    yield from _metric("calls_total", "counter", counts.num_calls)
    yield from _metric("failed_total", "counter", counts.num_failed)
    yield from _by_label("continued_total", "counter", "reason", counts.num_continued)
    yield from _metric("replayed_tokens_total", "counter", counts.num_replayed_tokens)
    yield from _metric("continued_at_copies_total", "counter", counts.num_at_copies)
    yield from _metric("longest_gap_seconds", "gauge", f"{counts.longest_gap_s:.6f}")


def _metric(name: str, kind: str, value: object) -> Iterator[str]:
    yield f"# TYPE mergestep:front_{name} {kind}"
    yield f"mergestep:front_{name} {value}"


def _by_label(name: str, kind: str, label: str, values: Mapping[str, int]) -> Iterator[str]:
    yield f"# TYPE mergestep:front_{name} {kind}"
    for one, value in sorted(values.items()):
        yield f'mergestep:front_{name}{{{label}="{one}"}} {value}'
