"""What bench.streaming.run measures, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(slots=True)
class Measured:
    """One number of requests. Seconds, rates in bytes a second; hit rates are None without
    experts."""

    requests: int
    is_equal: bool
    memory_tokens_s: float
    tokens_s: float
    step_s: float
    read_rate: float
    disk_rate: float
    stalled: float
    hits: float | None = None
    heat: float | None = None
    lru: float | None = None
    oracle: float | None = None
    waiting_tokens_s: float | None = None
    never_tokens_s: float | None = None
    always_tokens_s: float | None = None
    llama: dict[str, dict[str, float]] | None = None  # as mapped_experts.py prints it

    @property
    def share(self) -> float:
        return self.read_rate / self.disk_rate


def as_table(found: Sequence[Measured]) -> Table:
    names = ["requests", "equal", "tok/s in memory", "tok/s", "step ms", "read MB/s", "disk MB/s"]
    names += ["share", "stalled"]
    if found and found[0].hits is not None:
        names += ["hits", "heat", "LRU", "oracle", "waiting"]
        names += ["never", "always"] if found[0].never_tokens_s is not None else []
    table = Table(*names)
    for one in found:
        cells = [
            str(one.requests),
            "yes" if one.is_equal else "NO",
            f"{one.memory_tokens_s:.1f}",
            f"{one.tokens_s:.1f}",
            f"{one.step_s * 1e3:.0f}",
            f"{one.read_rate / 1e6:,.0f}",
            f"{one.disk_rate / 1e6:,.0f}",
            f"{one.share:.0%}",
            f"{one.stalled:.0%}",
        ]
        rates = (one.hits, one.heat, one.lru, one.oracle)
        cells += [f"{each:.1%}" for each in rates if each is not None]
        speeds = one.waiting_tokens_s, one.never_tokens_s, one.always_tokens_s
        cells += [f"{each:.1f}" for each in speeds if each is not None]
        table.add_row(*cells)
    return table


def llama_table(found: Sequence[Measured]) -> Table:
    table = Table("llama.cpp, requests", "memory", "tok/s", "hits", "read MB/s", "dropping s")
    for one in found:
        for name, each in (one.llama or {}).items():
            cells = [str(one.requests), name, f"{each['tokens_s']:.2f}"]
            if "hits" in each:
                cells += [f"{each['hits']:.1%}", f"{each['read'] / each['seconds'] / 1e6:,.0f}"]
                cells.append(f"{each['dropping']:.1f}")
            table.add_row(*cells)
    return table
