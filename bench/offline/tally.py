"""The figures of all rounds of `serve bench latency`, by engine and column."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from bench.common import percentiles
from bench.common.ceilings import MAX_DRIFT, Ceiling

OURS = "ours"


@dataclass(frozen=True, slots=True)
class Best:
    """An engine's best mode at a column. mode: empty if it has only one."""

    mode: str
    rates: list[float]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


@dataclass(slots=True)
class Tally:
    """rates: the repeats by engine, column and mode. seconds, shares: of our own columns. experts:
    of our own columns, the different experts of a layer and step, and those if rows draw evenly.
    drifts: of the ceilings around each measurement. titles: what the peers call themselves. errors:
    those of the peers by "mode, column", or by "" for a peer that could not go on."""

    rates: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    shares: dict[str, list[float]] = field(default_factory=dict)
    experts: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    drifts: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    ceilings: dict[str, list[Ceiling]] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    errors: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(
        self, name: str, column: str, mode: str, rate: float, ceiling: Ceiling, drift: float
    ) -> None:
        modes = self.rates.setdefault(name, {}).setdefault(column, {})
        modes.setdefault(mode, []).append(rate)
        self.drifts.setdefault(name, {}).setdefault(column, []).append(drift)
        self.ceilings.setdefault(name, []).append(ceiling)

    def fail(self, name: str, where: str, error: str) -> None:
        """Notes an error of a peer; what it has measured before stays. where: the mode and column;
        empty if it cannot go on."""
        self.errors.setdefault(name, {})[where] = error

    def has_failed(self, name: str, where: str = "") -> bool:
        return where in self.errors.get(name, {})

    def best(self, name: str, column: str) -> Best | None:
        """Returns the mode with the highest median rate at a column."""
        modes = self.rates.get(name, {}).get(column, {})
        found = [Best(mode, rates) for mode, rates in modes.items() if rates]
        return max(found, key=lambda best: best.rate, default=None)

    def unreliable(self, name: str = OURS) -> list[str]:
        """Returns the columns that exceed their bound or during which the ceilings drifted."""
        shares = medians(self.shares) if name == OURS else {}
        drifts = medians(self.drifts.get(name, {}))
        return [c for c in drifts if shares.get(c, 0.0) > 1 or drifts[c] > MAX_DRIFT]

    def summary(self) -> dict[str, Any]:
        """Returns medians over the rounds, and latencies over all their steps or prompts."""
        best = {
            name: {column: self.best(name, column) for column in columns}
            for name, columns in self.rates.items()
        }
        return {
            "tokens_per_s": _each(best, lambda found: found.rate),
            "modes": _each(best, lambda found: found.mode),
            "rounds": self.rates,
            "titles": self.titles,
            "errors": self.errors,
            "ms": {
                column: percentiles.document(seconds, 1e3)
                for column, seconds in self.seconds.items()
            },
            "share_of_bound": medians(self.shares),
            "experts": {
                column: {
                    "drawn": statistics.median(drawn for drawn, _ in found),
                    "even": found[0][1],
                }
                for column, found in self.experts.items()
            },
            "unreliable": self.unreliable(),
            "unreliable_peers": {
                name: columns
                for name in self.rates
                if name != OURS and (columns := self.unreliable(name))
            },
            "ceilings": {
                name: Ceiling(*map(statistics.median, zip(*values, strict=True)))._asdict()
                for name, values in self.ceilings.items()
            },
        }


def medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in values.items() if each}


def _each(best: dict[str, dict[str, Best | None]], figure: Any) -> dict[str, dict[str, Any]]:
    return {
        name: {column: figure(found) for column, found in columns.items() if found is not None}
        for name, columns in best.items()
    }
