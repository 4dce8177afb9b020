"""Readings of rounds as they are kept in a file, and their medians and ratios."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.group.measured_engine import Timed
from serve.errors import ConfigError

Readings = dict[tuple[str, str], list[Timed]]  # by variant and column


def figure(column: str, timed: Timed) -> float:
    """Returns the figure of a column: a rate, or seconds."""
    if column.startswith("prefill"):
        return int(column.split()[1]) / timed.first_s
    return timed.tokens_per_s if column.startswith("decode") else timed.first_s


def medians(readings: Readings) -> dict[str, dict[str, float]]:
    """Returns the median of the rounds, by column and variant."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for (name, column), timed in readings.items():
        found[column][name] = statistics.median(figure(column, each) for each in timed)
    return dict(found)


def ratios(readings: Readings, one: str, other: str) -> dict[str, float]:
    """Returns how many times as fast as the other one is, the median of the rounds that both have
    run."""
    found = {}
    for name, column in readings:
        if name != one or (other, column) not in readings:
            continue
        pairs = zip(readings[one, column], readings[other, column], strict=False)
        faster = [figure(column, mine) / figure(column, theirs) for mine, theirs in pairs]
        is_rate = not column.startswith("first")
        found[column] = statistics.median(each if is_rate else 1 / each for each in faster)
    return found


def waits(readings: Readings, name: str) -> dict[str, dict[str, float]]:
    """Returns what the engine's rank waits for in each column."""
    found = {}
    for (variant, column), timed in readings.items():
        if variant == name:
            found[column] = {
                "waits": statistics.median(
                    (each.waited_s + each.stage_wait_s) / each.seconds for each in timed
                ),
                "results a step": statistics.median(
                    each.results / max(1, each.steps) for each in timed
                ),
            }
    return found


def gaps(readings: Readings) -> dict[str, dict[str, list[float]]]:
    """Returns the median, 95th and 99th percentile and the largest of the seconds between tokens of
    the streams beside a prompt, of all rounds together."""
    found: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for (name, column), timed in readings.items():
        times = sorted(gap for each in timed for gap in each.gaps_s)
        if times:
            last = len(times) - 1
            found[column][name] = [times[round(share * last)] for share in (0.5, 0.95, 0.99, 1.0)]
    return dict(found)


def load(file: Path | None, what: dict[str, Any]) -> Readings:
    """Returns the readings of earlier calls, none if there is no such file. what: the model and the
    sizes; ConfigError if the file has those of others."""
    readings: Readings = defaultdict(list)
    if file is None or not file.exists():
        return readings
    kept = json.loads(file.read_text())
    if kept["what"] != what:
        raise ConfigError(f"{file} has readings of {kept['what']}, not of {what}")
    for name, column, timed in kept["readings"]:
        readings[name, column].append(Timed(**timed))
    return readings


def save(file: Path, what: dict[str, Any], readings: Readings) -> None:
    rows = [
        [name, column, asdict(each)] for (name, column), timed in readings.items() for each in timed
    ]
    file.write_text(json.dumps({"what": what, "readings": rows}) + "\n")
