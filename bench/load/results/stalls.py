"""How streams stall when prompts arrive: the figures of runs that differ in the size of chunks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from bench.common import percentiles
from bench.common.percentiles import Latencies
from bench.load.client.record import Outcome, RunResult
from serve.errors import MergestepError


@dataclass(frozen=True, slots=True)
class Stalls:
    """Milliseconds between two tokens of a stream and until the first token, and output tokens per
    second from the first request to the last token; of `requests` answers."""

    gap_ms: Latencies
    ttft_ms: Latencies
    tokens_per_s: float
    requests: int

    @property
    def ratio(self) -> float | None:
        """The 99th percentile between tokens over the median; None for too few tokens."""
        p99 = self.gap_ms["p99"]
        return None if p99 is None else float(p99 / self.gap_ms["p50"])

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def stalls_of(results: Sequence[RunResult]) -> Stalls:
    """Returns the figures over all runs of one setting. Raises MergestepError if a request did not
    succeed."""
    gaps: list[float] = []
    ttfts: list[float] = []
    num_tokens, seconds = 0, 0.0
    for result in results:
        for record in result.records:
            if record.outcome is not Outcome.OK:
                raise MergestepError(f"a request failed: {record.error or record.outcome}")
            gaps += [b - a for a, b in itertools.pairwise(record.chunks_s)]
            ttfts.append(record.chunks_s[0] - record.sent_s)
            num_tokens += record.output_tokens or 0
        began_s = min(record.sent_s for record in result.records)
        seconds += max(record.chunks_s[-1] for record in result.records) - began_s
    return Stalls(
        percentiles.document(gaps, 1e3),
        percentiles.document(ttfts, 1e3),
        num_tokens / seconds,
        len(ttfts),
    )


def stalls_table(title: str, by_name: Mapping[str, Stalls]) -> Table:
    """Returns the figures of one load. The last of by_name is what the others' throughput is
    compared with."""
    gap, ttft = "ms between tokens p50", "ms to first token p50"
    table = Table("", gap, "p99", "ratio", ttft, "p99", "tokens/s", "", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    base = list(by_name.values())[-1]
    for name, of in by_name.items():
        change = 100 * (of.tokens_per_s / base.tokens_per_s - 1)
        table.add_row(
            name,
            *percentiles.cells(of.gap_ms),
            "" if of.ratio is None else f"{of.ratio:.1f}",
            *percentiles.cells(of.ttft_ms),
            f"{of.tokens_per_s:,.1f}",
            f"{change:+.1f} %",
        )
    return table
