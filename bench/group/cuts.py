"""Faults of a rank in a network namespace, which a supervisor starts again as torchrun's agent or
Kubernetes would: python -m bench.group.faults --cuts.

Its link to the engine is cut for a shorter time than a loss takes to be seen, or for longer, in one
direction or both; its process is killed, or stopped and continued.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.common.namespaces import Site, can_have_namespaces
from bench.group.fault_rounds import (
    SETTINGS,
    Leftover,
    Result,
    answers_alone,
    cause_faults,
    own_folder,
)
from serve import LLM
from serve.config import EngineSettings
from serve.machine import free_port

_END_S = 30.0
_LOOK_S = 0.05
_SHORT_S, _LONG_S = (0.2, 0.9), (1.6, 4.0)
KINDS = ("short cut", "long cut", "link down", "SIGKILL", "SIGSTOP")
_LEFT_OUT = "LOCAL_RANK", "LOCAL_WORLD_SIZE"


class Supervised:
    """A rank's process, which is started again whenever it ends with an error."""

    def __init__(self, command: list[str], variables: dict[str, str], log: Path) -> None:
        self._command = command
        self._environment = os.environ | variables
        self._log = log
        self._is_over = threading.Event()
        self.process = self._start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            if self.process.poll():
                self.process = self._start()

    def close(self) -> int:
        """Waits until the process has ended, or ends it; returns its status."""
        self._is_over.set()
        self._thread.join()
        try:
            return self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class NamespaceFaults:
    """Implements bench.group.fault_rounds.Faults."""

    def __init__(self, site: Site, rank: Supervised, kinds: tuple[str, ...]) -> None:
        self._site = site
        self._rank = rank
        self._kinds = kinds

    def cause(self, rng: random.Random, is_first: bool) -> str:
        kind = rng.choice(self._kinds)
        if kind == "SIGKILL":
            self._rank.process.kill()
        elif kind == "SIGSTOP":
            process = self._rank.process
            process.send_signal(signal.SIGSTOP)
            time.sleep(rng.uniform(*_LONG_S))
            process.send_signal(signal.SIGCONT)
        else:
            to_site = rng.random() < 0.7
            if kind == "link down":
                self._site.down()
            else:
                self._site.cut(to_site, not to_site or rng.random() < 0.7)
            time.sleep(rng.uniform(*(_SHORT_S if kind == "short cut" else _LONG_S)))
            self._site.heal()
        return kind

    def is_surely_seen(self, kind: str) -> bool:
        return kind != "short cut"

    def held(self) -> Leftover:
        """The engine's, with the files of the rank's process."""
        files = []
        for each in Path(f"/proc/{self._rank.process.pid}/fd").glob("*"):
            try:
                files.append(os.readlink(each))
            except OSError:  # closed meanwhile
                continue
        own = Leftover.now()
        return replace(
            own,
            processes=len(self._site.processes()),
            memory_files=own.memory_files + sum("memfd:" in each for each in files),
            sockets=own.sockets + sum(each.startswith("socket:") for each in files),
        )


def run(
    model: str,
    grid: tuple[int, int],
    kills: int,
    seed: int = 0,
    kinds: tuple[str, ...] = KINDS,
) -> Result:
    """Causes faults of the second of two ranks and returns what came of them."""
    if (reason := can_have_namespaces()) is not None:
        raise SystemExit(f"--cuts needs network namespaces: {reason}")
    if grid[0] * grid[1] != 2:
        raise SystemExit("--cuts has two ranks: --grids 2x1,1x2")
    with own_folder():
        expected, before = answers_alone(model), Leftover.now()
        site = Site(1)
        try:
            result = _run(model, grid, kills, random.Random(seed), site, expected, kinds)
            if site.processes():
                result.left["processes in the namespace"] = len(site.processes())
        finally:
            site.close()
        result.left |= Leftover.now().since(before)
    return result


def _run(
    model: str,
    grid: tuple[int, int],
    kills: int,
    rng: random.Random,
    site: Site,
    expected: list[tuple[object, ...]],
    kinds: tuple[str, ...],
) -> Result:
    folder = Path(tempfile.mkdtemp())
    key_file = folder / "key"
    key_file.write_bytes(os.urandom(32).hex().encode())
    key_file.chmod(0o600)
    more: EngineSettings = {
        "tensor_parallel_size": grid[0],
        "pipeline_parallel_size": grid[1],
        "group_url": f"tcp://{site.here}:{free_port(site.here)}",
        "group_key_file": str(key_file),
        "group_exchange": "connections",
    }
    options = [
        f"--{name.replace('_', '-')}={value}" for name, value in {**SETTINGS, **more}.items()
    ]
    command = ["ip", "netns", "exec", site.space, sys.executable, "-m", "serve", "run", model]
    rank = Supervised(command + options, {"RANK": "1", "WORLD_SIZE": "2"}, folder / "rank.log")
    try:
        with _variables({"RANK": "0", "WORLD_SIZE": "2"}):
            llm = LLM(model, **{**SETTINGS, **more})
        with llm:
            result = cause_faults(llm, NamespaceFaults(site, rank, kinds), expected, kills, rng)
    except BaseException:
        rank.process.kill()
        sys.stderr.write((folder / "rank.log").read_text()[-4000:])
        raise
    finally:
        status = rank.close()
    if status:
        result.left["status of the rank"] = status
    return result


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Has this process be a rank, as a launcher would."""
    before = {name: os.environ.pop(name, None) for name in (*values, *_LEFT_OUT)}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
