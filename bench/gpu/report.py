"""Runs every GPU measurement: python -m bench.gpu.report (`make gpu`).

Every section runs in a process of its own, with a time limit within the budget of all sections. One
that fails, hangs or loses its device costs only its own cases. After every case DEVICE.json and
DEVICE.md in --out are complete, so that a run may be ended at any time. The exit code does not
depend on the figures: 0 means that there is a report, 1 that there is no GPU.

--dry-run needs no GPU. It runs tiny shapes on the CPU with Triton interpreted, to find mistakes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.gpu.record import LOST_DEVICE, Record
from bench.gpu.targets import markdown

ROOT = Path(__file__).parents[2]
BUDGET_S = 520.0
_POLL_S = 0.1
_MAX_RESTARTS = 6
_MIN_S = 5.0  # a section does not start with less time left
_RESERVE_S = 6.0  # seconds of the budget that are kept for ending sections
_UNKNOWN = "unknown device"


@dataclass(frozen=True)
class Section:
    """A part of the report. target: "module:function", called with a Record. Neighbours with the
    same stage run at once. A background section runs on until a section names it in `after`."""

    name: str
    target: str
    limit_s: float
    about: str
    stage: str = ""
    is_background: bool = False
    after: str = ""


SECTIONS = (
    Section("environment", "bench.gpu.ceilings:environment", 60, "device, driver, versions"),
    Section("build", "bench.gpu.tests:build", 240, "the native library", is_background=True),
    Section("smoke-linear", "bench.gpu.smoke:linear", 90, "int8 products are right", "first"),
    Section("smoke-formats", "bench.gpu.smoke:formats", 90, "fp8, 4-bit, bf16 are right", "first"),
    Section("smoke-attention", "bench.gpu.smoke:attention", 90, "attention is right", "first"),
    Section("smoke-sampling", "bench.gpu.smoke:sampling", 90, "rows, sampling are right", "first"),
    Section("smoke-states", "bench.gpu.states:smoke", 90, "states are right", "first"),
    Section("smoke-selection", "bench.gpu.selection:smoke", 90, "K/V is selected", "first"),
    Section("warm-up", "bench.gpu.linear:warm", 90, "compiles candidates for tuning", "first"),
    Section("ceilings", "bench.gpu.ceilings:run", 40, "bandwidths, peaks, launches"),
    Section("linear", "bench.gpu.linear:run", 85, "products at the shapes of the 8B model"),
    Section("attention", "bench.gpu.attention:run", 50, "decode and prefill, and libraries"),
    Section("rows", "bench.gpu.rows:run", 25, "kernels bound by memory; sampling"),
    Section("states", "bench.gpu.states:run", 40, "layers that keep a state"),
    Section("selection", "bench.gpu.selection:run", 45, "decode over selected K/V"),
    Section("memory", "bench.gpu.tests:memory", 20, "the driver's virtual memory"),
    Section("engine-8b", "bench.gpu.engine:run_8b", 100, "the engine, 8B-shaped", after="build"),
    Section("transformers", "bench.gpu.peers:run", 80, "Transformers at 64 streams"),
    Section("engine-1b", "bench.gpu.engine:run_1b", 45, "the engine, 1B-shaped", after="build"),
    Section("weights", "bench.gpu.host_weights:run", 100, "weights in host memory", after="build"),
    Section("nodes", "bench.gpu.nodes:run", 60, "K/V on two memory nodes, 1B", after="build"),
    Section("lanes", "bench.gpu.lanes:run", 20, "streams that write to the host and wait for it"),
    Section("ranks", "bench.gpu.ranks:run", 90, "two processes on this GPU", after="build"),
    Section("tests", "bench.gpu.tests:run", 300, "tests of kernels and engine", after="build"),
)


@dataclass
class Child:
    """A section's process and its outcome."""

    section: Section
    out: Path
    log: Path
    limit_s: float
    process: subprocess.Popen[bytes] | None = None
    began_s: float = field(default_factory=time.monotonic)
    status: str = "running"
    seconds: float = 0.0
    restarts: int = 0
    shown: set[str] = field(default_factory=set)
    _found: tuple[int, dict[str, Any]] = (0, {"cases": {}, "errors": {}})

    def entry(self) -> dict[str, Any]:
        """Returns the section's entry in the report."""
        stamp = self.out.stat().st_mtime_ns if self.out.is_file() else 0
        if stamp != self._found[0]:
            self._found = stamp, json.loads(self.out.read_text())
        entry = {"status": self.status, "seconds": round(self.seconds, 1), **self._found[1]}
        if self.status not in ("ok", "running"):
            lines = self.log.read_text(errors="replace").splitlines()
            entry["log"] = "\n".join(lines[-20:])
        return entry


class Parent:
    """Runs sections and writes the report. It uses no device itself."""

    def __init__(self, out: Path, *, budget_s: float, is_dry: bool = False) -> None:
        self._out = out
        self._is_dry = is_dry
        self._budget_s = budget_s
        self._began_s = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="gpu-report-"))
        self._children: list[Child] = []
        self._skipped: dict[str, str] = {}
        self.when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())

    def left_s(self) -> float:
        return self._budget_s - (time.monotonic() - self._began_s) - _RESERVE_S

    def run(self, sections: Sequence[Section]) -> None:
        """Runs the stages one after the other. No process of a section is left afterwards."""
        try:
            for _, group in groupby(sections, lambda s: s.stage or s.name):
                self._run_stage(list(group))
            self._wait_for(self._children)
        finally:
            for child in self._children:
                self._end(child, "interrupted")
            self.write()

    def _run_stage(self, sections: list[Section]) -> None:
        started = [self._begin(section) for section in sections]
        self.write()
        self._wait_for([child for child in started if child and not child.section.is_background])

    def _begin(self, section: Section) -> Child | None:
        """Returns None where no time is left for the section."""
        self._wait_for([child for child in self._children if child.section.name == section.after])
        limit_s = min(section.limit_s, self.left_s())
        if limit_s < min(_MIN_S, section.limit_s):
            self._skipped[section.name] = "no time was left"
            self._say(section.name, "skipped: no time is left")
            return None
        path = self._folder / f"{section.name}.json"
        child = Child(section, path, path.with_suffix(".log"), limit_s)
        self._children.append(child)
        self._start(child)
        return child

    def _wait_for(self, awaited: list[Child]) -> None:
        while any(child.status == "running" for child in awaited):
            time.sleep(_POLL_S)
            for child in self._children:
                if child.status == "running":
                    self._look_at(child)
            self._show_new()

    def _start(self, child: Child) -> None:
        left_s = child.limit_s - (time.monotonic() - child.began_s)
        command = [sys.executable, "-m", "bench.gpu.report", child.section.target]
        command += ["--section-file", str(child.out), "--limit", f"{left_s:.1f}"]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        if self._is_dry:
            command.append("--dry-run")
            environment["TRITON_INTERPRET"] = "1"
        with child.log.open("ab") as log:
            child.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _look_at(self, child: Child) -> None:
        assert child.process is not None
        child.seconds = time.monotonic() - child.began_s
        code = child.process.poll()
        if code is None:
            if child.seconds > child.limit_s:
                self._end(child, f"killed at its limit of {child.limit_s:.0f} s")
        elif code == LOST_DEVICE and child.restarts < _MAX_RESTARTS:
            child.restarts += 1
            self._kill(child)
            self._start(child)
        else:
            self._end(child, "ok" if code == 0 else f"ended with code {code}")

    def _end(self, child: Child, status: str) -> None:
        if child.status != "running":
            return
        self._kill(child)
        child.status = status
        self._show_new()
        entry = child.entry()
        counts = f"{len(entry['cases'])} cases, {len(entry['errors'])} errors"
        self._say(child.section.name, f"{status} after {child.seconds:.1f} s: {counts}")
        self.write()

    @staticmethod
    def _kill(child: Child) -> None:
        """Kills the whole process group, as a section may have children."""
        assert child.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()

    def _show_new(self) -> None:
        """Prints a line for every new case and writes a new report."""
        is_new = False
        for child in self._children:
            entry = child.entry()
            for name, what in [*entry["cases"].items(), *entry["errors"].items()]:
                if name in child.shown:
                    continue
                child.shown.add(name)
                is_new = True
                text = f"FAILED {what.splitlines()[-1]}" if isinstance(what, str) else _brief(what)
                self._say(child.section.name, f"{name}: {text}")
        if is_new:
            self.write()

    def _say(self, section: str, text: str) -> None:
        elapsed_s = time.monotonic() - self._began_s
        line = " ".join(f"[{elapsed_s:5.0f} s] {section}: {text}".split("\n"))
        print(line[:300], file=sys.stderr, flush=True)

    # ---- the report

    def report(self) -> dict[str, Any]:
        sections = {child.section.name: child.entry() for child in self._children}
        for name, why in self._skipped.items():
            sections[name] = {"status": why, "seconds": 0.0, "cases": {}, "errors": {}}
        return {
            "device": self.device_name(),
            "when": self.when,
            "is_dry_run": self._is_dry,
            "seconds": round(time.monotonic() - self._began_s, 1),
            "sections": sections,
        }

    def device_name(self) -> str:
        if self._is_dry:
            return "dry run"
        for child in self._children:
            device = child.entry()["cases"].get("device", {})
            if "name" in device:
                return str(device["name"])
        return _UNKNOWN

    def path(self, suffix: str) -> Path:
        stem = re.sub(r"[^a-z0-9]+", "-", self.device_name().lower()).strip("-")
        return self._out / f"{stem}{suffix}"

    def write(self) -> None:
        """Writes both files, if the device's name is known."""
        report = self.report()
        if report["device"] == _UNKNOWN:
            return
        self._out.mkdir(parents=True, exist_ok=True)
        for suffix, text in ((".json", json.dumps(report, indent=1)), (".md", markdown(report))):
            path = self.path(suffix)
            part = path.with_suffix(path.suffix + ".part")
            part.write_text(text + "\n")
            part.replace(path)

    def num_failures(self) -> int:
        """Prints all failures and returns their number."""
        count = 0
        for name, entry in self.report()["sections"].items():
            failures = [
                f"{case}: {text.splitlines()[-1]}" for case, text in entry["errors"].items()
            ]
            if entry["status"] != "ok":
                failures.append(entry["status"])
            for failure in failures:
                print(f"failure in {name}: {failure}"[:300], file=sys.stderr)
            count += len(failures)
        return count


def _brief(figures: dict[str, Any]) -> str:
    parts = []
    for name, value in figures.items():
        if isinstance(value, float):
            parts.append(f"{name} {value:.4g}")
        elif isinstance(value, (int, str, bool)):
            parts.append(f"{name} {value}")
    return ", ".join(parts)[:200]


def run_section(target: str, record: Record) -> None:
    """Runs a section in its own process."""
    module, _, name = target.partition(":")
    function: Callable[[Record], None] = getattr(importlib.import_module(module), name)
    function(record)


def chosen(only: str | None) -> list[Section]:
    if only is None:
        return list(SECTIONS)
    names = {"environment", *only.split(",")}
    unknown = names - {section.name for section in SECTIONS}
    if unknown:
        sys.exit(f"unknown sections: {', '.join(sorted(unknown))} (see --list)")
    return [section for section in SECTIONS if section.name in names]


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target", nargs="?", help="run this section's MODULE:FUNCTION in this process"
    )
    parser.add_argument("--section-file", type=Path, help="file of the section's results")
    parser.add_argument("--limit", type=float, default=3600.0, help="the section's seconds")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of all sections")
    parser.add_argument("--only", metavar="A,B", help="run only these sections")
    parser.add_argument("--list", action="store_true", help="list the sections")
    parser.add_argument("--dry-run", action="store_true", help="run tiny shapes on the CPU")
    args = parser.parse_args()
    if args.list:
        for section in SECTIONS:
            print(f"{section.name:16} {section.limit_s:4.0f} s  {section.about}")
        return 0
    if args.target:
        signal.alarm(int(args.limit) + 10)  # ends the section if the parent has died
        path = args.section_file or Path(tempfile.mkdtemp()) / "section.json"
        run_section(args.target, Record(path, limit_s=args.limit, is_dry=args.dry_run))
        if args.section_file is None:
            print(path.read_text())
        return 0
    sections = chosen(args.only)
    signal.signal(signal.SIGTERM, _interrupt)
    parent = Parent(args.out, budget_s=args.budget, is_dry=args.dry_run)
    parent.run(sections[:1])
    if parent.device_name() == _UNKNOWN:
        parent.num_failures()
        return 1
    parent.run(sections[1:])
    failures = parent.num_failures()
    print(f"{failures} failures; written: {parent.path('.json')}, {parent.path('.md')}")
    print(parent.path(".md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
