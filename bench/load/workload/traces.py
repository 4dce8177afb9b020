"""Reads traces: the times and lengths of requests. Files are read line by line, only as far as
needed, and an error names the file and line."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from bench.load.workload.work import Call
from serve.errors import ConfigError, reason
from serve.regular_file import open_regular

MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Selects rows: the first `count` of those from start_s on and before end_s, in seconds after
    the file's first row."""

    count: int | None = None
    start_s: float = 0.0
    end_s: float = math.inf

    def includes(self, since_s: float) -> bool:
        """since_s is counted from the first row; a later row with an earlier time counts as 0."""
        return self.start_s <= max(since_s, 0.0) < self.end_s


def read_trace(
    name: str, path: Path, part: Part, notes: list[str], *, block_size: int = 512
) -> list[Call]:
    """Returns the calls in the order of time, each with its at_s (seconds; its origin is the
    format's). name is mooncake, azure or burstgpt; block_size the tokens of a Mooncake hash id.
    Raises ConfigError."""
    rows: Iterator[Call]
    if name == "mooncake":
        rows = (mooncake_call(row, where, block_size) for row, where in json_lines(path))
    else:
        rows = _csv_calls(path, {"azure": _azure_row, "burstgpt": _burstgpt_row}[name])
    calls: list[Call] = []
    first_s: float | None = None
    num_empty = 0
    for call in rows:
        at_s = call.at_s
        assert at_s is not None
        first_s = at_s if first_s is None else first_s
        if not part.includes(at_s - first_s):
            continue
        if call.num_prompt < 1 or call.num_output is None or call.num_output < 1:
            num_empty += 1
            continue
        calls.append(call)
        if len(calls) == part.count:
            break
    if num_empty:
        notes.append(f"{path}: rows skipped, as they have no prompt or no answer: {num_empty}")
    if not calls:
        raise ConfigError(f"{path}: the selected part has no request")
    return sorted(calls, key=_due)


def _due(call: Call) -> float:
    assert call.at_s is not None
    return call.at_s


def mooncake_call(row: Any, where: str, block_size: int) -> Call:
    """Reads {"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}. Equal ids are
    equal runs of block_size tokens, of which a prompt's last may be shorter."""
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: the line must be a JSON object")
    milliseconds = row.get("timestamp", 0)
    if type(milliseconds) not in (int, float) or not math.isfinite(milliseconds):
        raise ConfigError(f"{where}: timestamp must be a number of milliseconds")
    num_prompt = whole(row, "input_length", where)
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(key) is int for key in ids):
        raise ConfigError(f"{where}: hash_ids must be whole numbers")
    if ids and len(ids) not in (num_prompt // block_size, -(-num_prompt // block_size)):
        raise ConfigError(
            f"{where}: {len(ids)} hash_ids do not make input_length {num_prompt} with"
            f" {block_size} tokens each; block_size may be wrong"
        )
    runs = tuple((key, min(block_size, num_prompt - i * block_size)) for i, key in enumerate(ids))
    return Call(num_prompt, whole(row, "output_length", where), at_s=milliseconds / 1000, runs=runs)


def whole(row: dict[str, Any], key: str, where: str) -> int:
    """Returns row[key], a number of tokens. Raises ConfigError for any other value."""
    value = row.get(key)
    if type(value) is not int or value < 0:
        raise ConfigError(f"{where}: {key} must be a whole number, not {value!r}")
    return value


def lines(path: Path) -> Iterator[tuple[bytes, str]]:
    """Yields every line that is not empty, with "file:line"."""
    try:
        with open_regular(path) as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{path}:{number}: over {MAX_LINE_BYTES >> 20} MiB long")
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield line.strip(), f"{path}:{number}"
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {reason(exc)}") from None


def json_lines(path: Path) -> Iterator[tuple[Any, str]]:
    for line, where in lines(path):
        try:
            yield orjson.loads(line), where
        except orjson.JSONDecodeError as exc:
            raise ConfigError(f"{where}: not JSON: {exc}") from None


Row = dict[str, str]


def _csv_calls(path: Path, read: Callable[[Row], Call]) -> Iterator[Call]:
    """Yields read(row), where a row has its columns' names in lower case. A ValueError of `read`
    becomes a ConfigError that names the line."""
    header: list[str] | None = None
    for line, where in lines(path):
        try:
            cells = next(csv.reader([line.decode()], strict=True))
            if header is None:
                header = [cell.strip().lower() for cell in cells]
                continue
            if len(cells) != len(header):
                raise ValueError(f"{len(cells)} columns, but the header has {len(header)}")
            yield read(dict(zip(header, cells, strict=True)))
        except (ValueError, csv.Error) as exc:
            raise ConfigError(f"{where}: {exc}") from None


def _azure_row(row: Row) -> Call:
    """Reads TIMESTAMP,ContextTokens,GeneratedTokens. A time without a zone is in UTC."""
    at = datetime.fromisoformat(_cell(row, "timestamp"))
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return Call(_tokens(row, "contexttokens"), _tokens(row, "generatedtokens"), at_s=at.timestamp())


def _burstgpt_row(row: Row) -> Call:
    """Reads Timestamp[(s)],[Session ID,Elapsed time,]Model,Request tokens,Response tokens,..."""
    at_s = float(_cell(row, "timestamp" if "timestamp" in row else "timestamp(s)"))
    if not math.isfinite(at_s):
        raise ValueError(f"timestamp must be finite, not {at_s}")
    call = Call(_tokens(row, "request tokens"), _tokens(row, "response tokens"), at_s=at_s)
    return replace(call, client=row.get("model") or None, group=row.get("session id") or None)


def _cell(row: Row, name: str) -> str:
    if name not in row:
        raise ValueError(f"there is no column {name!r}, only {', '.join(row)}")
    return row[name].strip()


def _tokens(row: Row, name: str) -> int:
    text = _cell(row, name)
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{name} must be a whole number, not {text!r}")
    return int(text)
