"""What every measurement prints and writes: the head, tables, JSON and progress."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ops.cpu import native_ceilings, native_library
from serve.cli.eval import check_writable
from serve.machine import usable_processors

WIDTH = 120


@dataclass(frozen=True, slots=True)
class Head:
    """Where figures come from. commit is the source tree's, with "+" if it has changes, or None if
    the package was installed without one."""

    what: str
    machine: str
    processors: int
    kernels: str
    system: str
    python: str
    torch: str
    mergestep: str
    commit: str | None
    began: str

    @classmethod
    def now(cls, what: str) -> Head:
        kernels = native_library.instruction_set() if native_library.is_available() else "not built"
        return cls(
            what,
            _machine(),
            usable_processors(),
            kernels,
            platform.platform(),
            platform.python_version(),
            torch.__version__,
            _version(),
            _commit(),
            datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def __str__(self) -> str:
        source = f"mergestep {self.mergestep}" + (f" ({self.commit})" if self.commit else "")
        return (
            f"{self.what}: {self.machine}, {self.processors} processors, {self.kernels} kernels;"
            f" {source}, torch {self.torch}, Python {self.python}; {self.began}"
        )


def _machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    if torch.cuda.is_available():
        name += f" with {torch.cuda.get_device_name()}"
    return name


def _version() -> str:
    try:
        return metadata.version("mergestep")
    except metadata.PackageNotFoundError:
        return "source"


def _commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def console() -> Console:
    """Returns the console for results, wide enough for the tables where it is no terminal."""
    made = Console()
    made.width = max(made.width, int(os.environ.get("COLUMNS", WIDTH)))
    return made


def progress() -> Progress:
    """Returns a progress bar on stderr, which shows only on a terminal."""
    watched = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=watched,
        transient=True,
        disable=not watched.is_terminal,
    )


def write(path: Path | None, head: Head, result: Any) -> None:
    """Writes {"head": ..., **result} as JSON; does nothing without a path."""
    if path is not None:
        path.write_text(json.dumps(_finite({"head": asdict(head), **result}), indent=1) + "\n")


def check_file(path: Path | None, option: str = "--json") -> None:
    """Raises ConfigError, which names the option, if the file could not be written."""
    if path is not None:
        check_writable(path, option)


def _finite(value: Any) -> Any:
    """Replaces floats that JSON does not have (NaN and infinity) with None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def number(value: float) -> str:
    """Formats a value with three or four digits and no exponent."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns an interval that contains the median with at least 90 % probability.

    Its ends are values by rank: as many values are left out at either end as the probability
    allows. Of fewer than five values none is left out, and the probability may be lower."""
    ordered, count = sorted(values), len(values)
    left_out, outside = 0, 0.5**count
    while count >= 5 and 2 * (outside + math.comb(count, left_out + 1) * 0.5**count) <= 0.1:
        left_out += 1
        outside += math.comb(count, left_out) * 0.5**count
    return ordered[left_out], ordered[count - 1 - left_out]


def spread(values: Sequence[float], form: Callable[[float], str] = number) -> str:
    """Formats the median and its interval."""
    text = form(statistics.median(values))
    if len(values) < 2:
        return text
    low, high = interval(values)
    return f"{text} ({form(low)} to {form(high)})"


def has_bf16_product() -> bool:
    """Returns whether this processor's kernels have an instruction for bf16 products."""
    return native_library.is_available() and native_ceilings.Ceilings.multiply_bf16(1) > 0


def print_medians(found: Mapping[str, Any], unit: str = "") -> None:
    """Prints samples as their median (lowest to highest), other values as they are, and all of them
    as JSON in the last line. unit: of the samples, behind their names."""
    for name, values in found.items():
        if isinstance(values, list):
            median, low, high = statistics.median(values), min(values), max(values)
            print(f"{name}{unit}: {median:.1f} ({low:.1f} to {high:.1f})")
        else:
            print(f"{name}: {values:.5g}")
    print(json.dumps(found))
