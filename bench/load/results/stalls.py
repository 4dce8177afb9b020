"""How streams stall when prompts arrive: the figures of runs that differ in the size of chunks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from bench.load.client.record import Outcome, RunResult
from bench.load.results.metrics import percentile


@dataclass(frozen=True, slots=True)
class Stalls:
    """Seconds between two tokens of a stream and until the first token, and output tokens per
    second from the first request to the last token; of `requests` answers."""

    gap_p50_s: float
    gap_p99_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tokens_per_s: float
    requests: int

    @property
    def ratio(self) -> float:
        """The 99th percentile between tokens over the median."""
        return self.gap_p99_s / self.gap_p50_s

    def as_json(self) -> dict[str, float]:
        names = ("gap_p50_s", "gap_p99_s", "ttft_p50_s", "ttft_p99_s", "tokens_per_s", "requests")
        return {name: getattr(self, name) for name in names} | {"ratio": self.ratio}


def stalls_of(results: Sequence[RunResult]) -> Stalls:
    """Returns the figures over all runs of one setting. Every request must have succeeded."""
    gaps: list[float] = []
    ttfts: list[float] = []
    num_tokens, seconds = 0, 0.0
    for result in results:
        for record in result.records:
            assert record.outcome is Outcome.OK, f"a request failed: {record.error}"
            gaps += [b - a for a, b in itertools.pairwise(record.chunks_s)]
            ttfts.append(record.chunks_s[0] - record.sent_s)
            num_tokens += record.output_tokens or 0
        began_s = min(record.sent_s for record in result.records)
        seconds += max(record.chunks_s[-1] for record in result.records) - began_s
    return Stalls(
        percentile(gaps, 50),
        percentile(gaps, 99),
        percentile(ttfts, 50),
        percentile(ttfts, 99),
        num_tokens / seconds,
        len(ttfts),
    )


def stalls_table(title: str, by_name: Mapping[str, Stalls]) -> Table:
    """Returns the figures of one load. The last of by_name is what the others' throughput is
    compared with."""
    columns = ("", "between tokens p50", "p99", "ratio", "first token p50", "p99", "tokens/s", "")
    table = Table(*columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    base = list(by_name.values())[-1]
    for name, of in by_name.items():
        change = 100 * (of.tokens_per_s / base.tokens_per_s - 1)
        table.add_row(
            name,
            f"{1e3 * of.gap_p50_s:.1f} ms",
            f"{1e3 * of.gap_p99_s:.1f} ms",
            f"{of.ratio:.1f}",
            f"{1e3 * of.ttft_p50_s:,.0f} ms",
            f"{1e3 * of.ttft_p99_s:,.0f} ms",
            f"{of.tokens_per_s:,.1f}",
            f"{change:+.1f} %",
        )
    return table
