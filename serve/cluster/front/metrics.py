"""The metrics of the hop, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve.cluster.front.parting import PartingCounts
    from serve.cluster.front.relay import RelayCounts
    from serve.cluster.front.replicas import Replica


def metrics_text(replicas: Iterable[Replica], counts: RelayCounts, parting: PartingCounts) -> str:
    lines = [*_lines(list(replicas), counts), *_parting_lines(parting)]
    return "\n".join(lines) + "\n"


def _parting_lines(counts: PartingCounts) -> Iterator[str]:
    yield "# TYPE mergestep:front_apart_total counter"
    yield f"mergestep:front_apart_total {counts.num_apart}"
    yield "# TYPE mergestep:front_together_total counter"
    for reason, number in sorted(counts.num_together.items()):
        yield f'mergestep:front_together_total{{reason="{reason}"}} {number}'
    yield "# TYPE mergestep:front_moved_total counter"
    yield f"mergestep:front_moved_total {counts.num_moved}"
    yield "# TYPE mergestep:front_handover_seconds_total counter"
    yield f"mergestep:front_handover_seconds_total {counts.handover_s:.6f}"


def _lines(replicas: list[Replica], counts: RelayCounts) -> Iterator[str]:
    yield "# TYPE mergestep:front_replica_ready gauge"
    for replica in replicas:
        yield f'mergestep:front_replica_ready{{replica="{replica.url}"}} {int(replica.is_ready)}'
    yield "# TYPE mergestep:front_replica_calls gauge"
    for replica in replicas:
        yield f'mergestep:front_replica_calls{{replica="{replica.url}"}} {replica.num_calls}'
    yield "# TYPE mergestep:front_calls_total counter"
    yield f"mergestep:front_calls_total {counts.num_calls}"
    yield "# TYPE mergestep:front_failed_total counter"
    yield f"mergestep:front_failed_total {counts.num_failed}"
    yield "# TYPE mergestep:front_continued_total counter"
    for reason, number in sorted(counts.num_continued.items()):
        yield f'mergestep:front_continued_total{{reason="{reason}"}} {number}'
    yield "# TYPE mergestep:front_replayed_tokens_total counter"
    yield f"mergestep:front_replayed_tokens_total {counts.num_replayed_tokens}"
    yield "# TYPE mergestep:front_longest_gap_seconds gauge"
    yield f"mergestep:front_longest_gap_seconds {counts.longest_gap_s:.6f}"
