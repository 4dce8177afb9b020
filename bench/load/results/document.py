"""Writes a measurement as one JSON document, or as one JSON line per request; reads documents."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bench.load.client.record import RunResult, StepRow
from bench.load.client.redact import command_line, redact
from bench.load.results.columns import Columns
from bench.load.results.confidence import Estimate
from bench.load.results.machine import machine
from bench.load.results.search import SearchResult
from bench.load.results.slo import Slo
from bench.load.results.summary import RateSummary, RunSummary
from serve.errors import ConfigError, reason
from serve.regular_file import open_regular

FORMAT = "mergestep-bench"
VERSION = 1
_NUMPY = orjson.OPT_SERIALIZE_NUMPY


@dataclass(frozen=True, slots=True)
class Measurement:
    """The content of a report. columns are those of runs; command is the command line."""

    runs: list[RunResult]
    columns: list[Columns]
    rates: list[RateSummary]
    settings: dict[str, Any]
    slo: Slo | None
    search: SearchResult | None
    machine: dict[str, Any]
    created: str
    command: str

    @property
    def is_valid(self) -> bool:
        """Whether the figures may be used. A search is valid if the generator kept its schedule,
        as it may try rates at which most requests fail."""
        if self.search is not None:
            return bool(self.rates) and all(rate.is_kept for rate in self.rates)
        return bool(self.rates) and all(rate.is_valid for rate in self.rates)


def measurement(
    runs: list[RunResult],
    columns: list[Columns],
    rates: list[RateSummary],
    settings: dict[str, Any],
    slo: Slo | None,
    search: SearchResult | None,
) -> Measurement:
    """Makes a Measurement, without secrets. settings may have `command`, the command line; the
    default is that of this process."""
    left = dict(settings)
    command = str(left.pop("command", "") or command_line(["serve", *sys.argv[1:]]))
    return Measurement(
        runs,
        columns,
        rates,
        redact(left),
        slo,
        search,
        machine(),
        datetime.now(UTC).isoformat(timespec="seconds"),
        redact(command),
    )


def write_json(path: Path, measured: Measurement) -> None:
    """Writes the figures with their intervals, settings, machine, and the runs without chunk times.
    Raises ConfigError."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "created": measured.created,
        "command": measured.command,
        "is_valid": measured.is_valid,
        "settings": measured.settings,
        "slo": None if measured.slo is None else asdict(measured.slo),
        "machine": measured.machine,
        "rates": [_rate(rate) for rate in measured.rates],
        "search": None if measured.search is None else _search(measured.search),
    }
    document = _plain(document)
    document["runs"] = [_run(r, c) for r, c in zip(measured.runs, measured.columns, strict=True)]
    _write(path, orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE | _NUMPY))


def write_jsonl(path: Path, runs: Sequence[RunResult]) -> None:
    """Writes every request with its rate, seed and chunk times. Raises ConfigError."""
    try:
        with path.open("wb") as file:
            for run in runs:
                head = orjson.dumps({"qps": _plain(run.qps), "seed": run.seed})[:-1]
                for record in run.records:
                    line = {f.name: getattr(record, f.name) for f in fields(record)}
                    line["error"] = redact(record.error)
                    file.write(head + b"," + orjson.dumps(line, option=_NUMPY)[1:] + b"\n")
    except OSError as error:
        raise _unwritable(path, error) from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a document that write_json wrote. Raises ConfigError for any other file."""
    try:
        with open_regular(path) as file:
            document = orjson.loads(file.read())
    except OSError as error:
        raise ConfigError(f"{path}: {reason(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ConfigError(f"{path} is not a result of serve bench --json")
    if document.get("version") != VERSION:
        raise ConfigError(
            f"{path} has format version {document.get('version')}, but this release reads {VERSION}"
        )
    return document


def estimate(value: Any) -> Estimate:
    """Returns the estimate of a document's [value, low, high]."""
    return Estimate(*(math.nan if part is None else float(part) for part in value))


def check_writable(**files: Path | None) -> None:
    """Raises ConfigError, before a run, for files that could not be written after it. The keywords
    are the options' names."""
    for name, path in files.items():
        if path is None:
            continue
        if path.is_dir():
            raise ConfigError(f"--{name.replace('_', '-')}: {path} is a folder")
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"--{name.replace('_', '-')}: there is no folder {path.parent}")


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {error.strerror}")


def _rate(rate: RateSummary) -> dict[str, Any]:
    return {
        "qps": rate.qps,
        "achieved_qps": rate.achieved_qps,
        "is_valid": rate.is_valid,
        "latencies_ms": rate.latencies_ms,
        "rates": rate.rates,
        "counts": rate.counts,
        "errors": rate.errors,
        "failed_share": rate.failed_share,
        "attainment": rate.attainment,
        "goodput": rate.goodput,
        "runs": [_summary(run) for run in rate.runs],
    }


def _summary(run: RunSummary) -> dict[str, Any]:
    return {
        **{f.name: getattr(run, f.name) for f in fields(run) if f.name != "intervals_ms"},
        "target": run.target,
        "verdict": asdict(run.verdict),
        "health": [asdict(health) for health in run.health],
    }


def _search(search: SearchResult) -> dict[str, Any]:
    return {
        "attainment": search.target,
        "max_qps": search.max_qps,
        "above": search.above,
        "stopped": search.stopped,
        "tried": [
            {
                "qps": tried.qps,
                "attainment": tried.attainment,
                "is_passed": tried.is_passed,
                "is_clear": tried.is_clear,
                "why": tried.why,
                "latencies_ms": tried.summary.latencies_ms,
            }
            for tried in search.tried
        ],
    }


def _run(run: RunResult, columns: Columns) -> dict[str, Any]:
    """Returns a run by column, which is much smaller than by request. Seconds have microseconds."""
    seconds = {
        "scheduled_s": columns.due,
        "dispatched_s": columns.began,
        "sent_s": columns.sent,
        "first_chunk_s": columns.first,
        "last_chunk_s": columns.last,
        "finished_s": columns.finished,
        "queue_s": columns.queue,
    }
    records = run.records
    return {
        "qps": _plain(run.qps),
        "seed": run.seed,
        "target": redact(run.target),
        "started": run.started,
        "window": _plain(run.window),
        "is_closed_loop": run.is_closed_loop,
        "notes": redact(run.notes),
        "requests": {
            "index": [r.index for r in records],
            **{name: np.round(at, 6).tolist() for name, at in seconds.items()},
            "num_chunks": columns.num_chunks.tolist(),
            "prompt_tokens": [r.prompt_tokens for r in records],
            "output_tokens": [r.output_tokens for r in records],
            "cached_tokens": [r.cached_tokens for r in records],
            "outcome": [r.outcome.value for r in records],
            "error": [redact(r.error) for r in records],
            "finish_reason": [r.finish_reason for r in records],
            "group": [r.group for r in records],
            "process": [r.process for r in records],
        },
        "steps": {f.name: [getattr(s, f.name) for s in run.steps] for f in fields(StepRow)},
        "samples": [asdict(sample) for sample in run.samples],
    }


def _plain(value: Any) -> Any:
    """Returns a value that JSON can hold: null for NaN, "inf" for infinity, texts without
    secrets."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else "inf" if value > 0 else None
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, int) else redact(str(value))
