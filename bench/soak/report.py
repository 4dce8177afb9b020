"""Shows a soak: the parts of memory, what is kept by name, the calls, and the verdict."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from bench.soak.run import JUDGED, MEGABYTE, SERVER, WORKERS, Soak, Value
from bench.soak.slope import Slope
from bench.soak.usage import Usage

_PARTS: dict[str, Value] = {
    SERVER: lambda usage: usage.own_bytes,
    "anonymous": lambda usage: usage.memory["anonymous"],
    "files": lambda usage: usage.memory["file"],
    WORKERS: lambda usage: usage.memory["workers"],
    "C heap in use": lambda usage: usage.metrics.get("heap_bytes in_use", 0.0),
    "C heap free": lambda usage: usage.metrics.get("heap_bytes free", 0.0),
}
_BLOCKS = "python_blocks"
_SHOWN_BYTES = 1 << 10  # tables below this size are left out


def show_sample(usage: Usage, num_calls: int, num_failed: int, console: Console) -> None:
    """Prints a line of progress."""
    own, pool = usage.own_bytes / MEGABYTE, usage.kept.get("kv_pages", 0.0) / MEGABYTE
    console.print(
        f"{usage.at_s / 60:5.1f} min  {own:7.1f} MB, K/V pool {pool:.1f} MB, "
        f"C heap {usage.metrics.get('heap_bytes in_use', 0.0) / MEGABYTE:.1f} MB in use,"
        f" {usage.files} files, {num_calls:,} calls, {num_failed} failed",
        highlight=False,
    )


def show(soak: Soak, console: Console) -> None:
    console.print(_calls_table(soak))
    table = Table("memory in MB", "in the middle", "at the end", "per hour (95 % interval)")
    for name, value in _PARTS.items():
        table.add_row(name, *_cells(soak, value, MEGABYTE))
    table.add_row("Python's blocks, thousands", *_cells(soak, _metric(_BLOCKS), 1e3))
    console.print(table)
    console.print(_kept_table(soak))
    full_s = max(soak.filled_s.values(), default=0.0)
    console.print(
        f"the caches were full after {full_s / 60:.1f} min; the slopes are those of the time since"
        f" minute {soak.fit_from_s / 60:.1f}",
        highlight=False,
    )
    for name, value in JUDGED.items():
        console.print(f"{name}: {_text(soak.slope(value))}", highlight=False, soft_wrap=True)
    faults, undecided = soak.faults(), soak.undecided()
    for fault in faults:
        console.print(f"[red]FAULT[/red] {fault}", highlight=False, soft_wrap=True)
    for text in undecided:
        console.print(f"[yellow]UNDECIDED[/yellow] {text}", highlight=False, soft_wrap=True)
    if not faults and not undecided:
        console.print("no fault")


def document(soak: Soak) -> dict[str, Any]:
    """Returns what is written as JSON."""
    slopes = {name: _fields(soak.slope(value)) for name, value in _PARTS.items()}
    kept = {name: _fields(soak.slope(_kept(name))) for name in _names(soak)}
    return {
        "calls": {f"{kind}: {result}": n for (kind, result), n in _sorted_calls(soak)},
        "filled_s": soak.filled_s,
        "fit_from_s": soak.fit_from_s,
        "bytes_per_hour": slopes,
        "kept_bytes_per_hour": kept,
        "samples": [
            {
                "at_s": usage.at_s,
                "memory": usage.memory,
                "kept": usage.kept,
                "heap_in_use": usage.metrics.get("heap_bytes in_use"),
                "python_blocks": usage.metrics.get(_BLOCKS),
                "files": usage.files,
                "threads": usage.threads,
            }
            for usage in soak.samples
        ],
        "faults": soak.faults(),
        "undecided": soak.undecided(),
    }


def _calls_table(soak: Soak) -> Table:
    results = ("ok", "refused", "aborted", "failed")
    table = Table("calls", *results)
    by_kind = soak.outcomes.by_kind
    for kind in sorted({kind for kind, _ in by_kind}):
        table.add_row(kind, *(str(by_kind[kind, result] or "") for result in results))
    table.add_row("all", *(str(soak.outcomes.total(result)) for result in results))
    return table


def _sorted_calls(soak: Soak) -> list[tuple[tuple[str, str], int]]:
    return sorted(soak.outcomes.by_kind.items())


def _kept_table(soak: Soak) -> Table:
    """The fastest growing first."""
    table = Table("kept, in MB", "full after", "in the middle", "at the end", "per hour")
    grown = {name: soak.slope(_kept(name)) for name in _names(soak)}
    for name in sorted(grown, key=lambda name: -(grown[name] or Slope(0, 0, 0)).value):
        at_s = soak.filled_s.get(name)
        full = "" if at_s is None else f"{at_s / 60:.1f} min"
        table.add_row(name, full, *_cells(soak, _kept(name), MEGABYTE))
    return table


def _names(soak: Soak) -> list[str]:
    kept = soak.samples[-1].kept if soak.samples else {}
    return [name for name, size in kept.items() if size >= _SHOWN_BYTES]


def _cells(soak: Soak, value: Value, unit: float) -> list[str]:
    points = soak.series(value)
    if not points:
        return ["", "", ""]
    slope = soak.slope(value)
    text = "" if slope is None else f"{slope.value / unit:+.2f}"
    if slope is not None:
        text += f" ({slope.low / unit:+.2f} to {slope.high / unit:+.2f})"
    return [f"{points[0][1] / unit:.2f}", f"{points[-1][1] / unit:.2f}", text]


def _kept(name: str) -> Value:
    return lambda usage: usage.kept.get(name, 0.0)


def _metric(name: str) -> Value:
    return lambda usage: usage.metrics.get(name, 0.0)


def _text(slope: Slope | None) -> str:
    """Returns a slope in MB per hour."""
    if slope is None:
        return "too few samples"
    value, low, high = (each / MEGABYTE for each in slope)
    return f"{value:+.2f} MB/h ({low:+.2f} to {high:+.2f})"


def _fields(slope: Slope | None) -> dict[str, float] | None:
    return None if slope is None else slope._asdict()
