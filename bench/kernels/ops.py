"""The CPU kernels against the machine's ceilings: `serve bench ops [--quick]`.

Before each run of a kernel comes a reading of the ceiling that binds it (reading memory, int8, bf16
or fp32 multiply-adds on registers, or moving the same bytes), and after it a run of its peer, so
that the ratios hold although the machine's speed drifts. Operands rotate through more memory than
the caches hold. The time of as many calls without rows is subtracted from kernels of microseconds,
and from the moving with which they are compared. The figures and the ratios are medians. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.common import tables
from bench.kernels.ops_cases import cases
from bench.kernels.ops_linear import Case, Run, Timed
from ops.cpu import native_library
from ops.cpu.heap import keep_freed_memory
from ops.cpu.native_ceilings import Ceilings

_READ = 256 << 20
_ROUNDS = 300_000
_MULTIPLY = {
    "i8": Ceilings.multiply_i8,
    "bf16": Ceilings.multiply_bf16,
    "f32": Ceilings.multiply_f32,
}
_SETTLE_S = 0.02  # after this time torch's threads have stopped spinning


@dataclass(frozen=True, slots=True)
class Reading:
    """A kernel's figures. rate, limit: G bytes or G operations per second. share: the median of
    their ratios.

    limit and share are None where the processor lacks the ceiling's instruction. speedup: over the
    peer, None where there is none.
    """

    name: str
    shape: str
    ceiling: str
    rate: float
    limit: float | None
    share: float | None
    target: float
    speedup: float | None
    us_per_row: float | None


class Limits:
    """Readings of the ceilings."""

    def __init__(self) -> None:
        self._buffer = torch.ones(2 * _READ, dtype=torch.uint8)
        self._half = 0

    def read(self, case: Case) -> float | None:
        """Measures a ceiling now, in G/s. Returns None without its instruction."""
        if case.ceiling == "moved":
            assert case.beside is not None
            return case.work / _net_seconds(case.beside) / 1e9
        if case.ceiling == "read":
            self._half ^= 1
            part = self._buffer[self._half * _READ :][:_READ]
            return _READ / _seconds(lambda: Ceilings.read(part)) / 1e9
        multiply = _MULTIPLY[case.ceiling]
        start = time.perf_counter()
        done = multiply(_ROUNDS)
        return done / (time.perf_counter() - start) / 1e9 or None


def _seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _net_seconds(timed: Timed) -> float:
    """Returns the seconds of the work without its calls, but at least a twentieth of all seconds,
    since noise may exceed the difference."""
    seconds = _seconds(timed.run)
    return seconds if timed.idle is None else max(seconds - _seconds(timed.idle), seconds / 20)


def _peer_seconds(run: Run) -> float:
    """Times the peer with as many threads as our kernels have, and waits until they sleep."""
    torch.set_num_threads(native_library.num_threads())
    seconds = _seconds(run)
    torch.set_num_threads(1)
    time.sleep(_SETTLE_S)
    return seconds


def measure(case: Case, limits: Limits, rounds: int) -> Reading:
    """Measures the ceiling, the kernel and its peer in turn, `rounds` times."""
    case.timed.run()
    if case.peer is not None:
        _peer_seconds(case.peer)
    rates, tops, speedups = [], [], []
    for _ in range(rounds):
        tops.append(limits.read(case))
        rates.append(case.work / _net_seconds(case.timed) / 1e9)
        if case.peer is not None:
            peer_rate = case.peer_work / _peer_seconds(case.peer) / 1e9
            speedups.append(rates[-1] / peer_rate)
    pairs = [(rate, top) for rate, top in zip(rates, tops, strict=True) if top is not None]
    rate = statistics.median(rates)
    return Reading(
        case.name,
        case.shape,
        case.ceiling,
        rate,
        statistics.median(top for _, top in pairs) if pairs else None,
        statistics.median(rate / top for rate, top in pairs) if pairs else None,
        case.target,
        statistics.median(speedups) if speedups else None,
        case.work / (rate * 1e3 * case.rows) if case.rows else None,
    )


def report(readings: list[Reading], console: Console) -> None:
    table = Table("kernel", "shape", "rate", "ceiling", "share", "target", "to torch", "us/row")
    units = {"read": "GB/s", "moved": "GB/s", "i8": "GOP/s", "bf16": "GFLOP/s", "f32": "GFLOP/s"}
    for r in readings:
        limit, share = "n/a", "n/a"
        if r.limit is not None and r.share is not None:
            limit = f"{r.limit:,.1f} {r.ceiling}"
            colour = "green" if r.share >= r.target else "yellow"
            share = f"[{colour}]{r.share:.0%}[/{colour}]"
        table.add_row(
            r.name,
            r.shape,
            f"{r.rate:,.1f} {units[r.ceiling]}",
            limit,
            share,
            f"{r.target:.0%}" if r.target else "",
            "" if r.speedup is None else f"{r.speedup:.1f}x",
            "" if r.us_per_row is None else f"{r.us_per_row:.3g}",
        )
    console.print(table)


def run_and_report(*, quick: bool, only: str = "", json_file: Path | None = None) -> None:
    """Measures the cases whose name contains `only`, and prints the table and the JSON line."""
    tables.check_file(json_file)
    keep_freed_memory()  # as in the engine, so that results cause no page faults
    torch.set_num_threads(1)  # torch's threads do not compete with those of our kernels
    console = tables.console()
    head = {
        "isa": native_library.instruction_set(),
        "threads": native_library.num_threads(),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    console.print(" ".join(f"{key} {value}" for key, value in head.items()), highlight=False)
    limits, rounds, readings = Limits(), 3 if quick else 11, []
    watched = Console(stderr=True)
    is_hidden = not watched.is_terminal
    for case in track(
        cases(quick), "measuring", console=watched, transient=True, disable=is_hidden
    ):
        if only in case.name:
            readings.append(measure(case, limits, rounds))
    report(readings, console)
    result = {"readings": [asdict(r) for r in readings]}
    tables.write(json_file, tables.Head.now("ops"), result)
    print(json.dumps({**head, **result}))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.ops", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="run a few small shapes")
    parser.add_argument("--only", default="", help="run only kernels whose name contains this")
    sets = native_library.library().instruction_sets()
    parser.add_argument("--isa", choices=sets, default=sets[0], help="instruction set")
    args = parser.parse_args()
    native_library.library().choose_instruction_set(args.isa)
    run_and_report(quick=args.quick, only=args.only)


if __name__ == "__main__":
    main()
