"""What bench.group.speed measures: engines of ours and of others, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from bench.group.measured_engine import Task, Timed, prompts_of
from bench.offline.peers import PeerProcess
from bench.offline.tasks import Shape
from bench.offline.tasks import Task as PeerTask

ONE, TWO, TENSOR, STAGES, GLOO = "1 thread", "2 threads", "tensor 2", "stages 2", "gloo 2"
VARIANTS: dict[str, dict[str, Any]] = {
    ONE: {"compute_threads": 1},
    TWO: {"compute_threads": 2},
    TENSOR: {"compute_threads": 2, "tensor_parallel_size": 2},
    STAGES: {"compute_threads": 2, "pipeline_parallel_size": 2},
    GLOO: {"compute_threads": 2, "tensor_parallel_size": 2, "exchange": "gloo"},
}


class Measured(Protocol):
    def measure(self, task: Task) -> Timed | None:
        """Returns None for a task that it does not do."""

    def close(self) -> None:
        """Ends all its processes."""


class EngineProcess:
    """An engine of ours in a process (measured_engine.py)."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        """Waits until it is ready."""
        self._has_stages = "pipeline_parallel_size" in VARIANTS[name]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "bench.group.measured_engine",
                json.dumps(settings | VARIANTS[name]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read()["ready"]

    def measure(self, task: Task) -> Timed | None:
        if not task.is_dense and not self._has_stages:
            return None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(task)) + "\n")
        self._process.stdin.flush()
        return Timed(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._process.communicate()


class OtherEngine:
    """An engine of others, in one of its modes (bench/offline/peers.py). It gets the same
    prompts."""

    def __init__(self, command: str, model: Path, sequences: int, tokens: int) -> None:
        """Waits until it is ready. sequences, tokens: the most at once, and of each."""
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        self._vocab_size = int(vocab)
        shape = Shape((sequences,), 1, tokens, (tokens,), False)
        self._process = PeerProcess(command, shape, threads=2)
        self._process.__enter__()

    def measure(self, task: Task) -> Timed | None:
        column = task.column.split()[0]
        if column not in ("prefill", "decode"):
            return None
        prompts, steps = prompts_of(task, self._vocab_size), task.answer - 1
        asked = PeerTask(task.column, column, prompts, [max(1, steps)] * len(prompts))
        taken_s = sum(self._process.seconds(self._process.modes[0], asked))
        rate = task.batch * steps / taken_s if column == "decode" else 0.0
        return Timed(taken_s, rate, taken_s, 0.0, 0.0, 0, max(1, steps))

    def close(self) -> None:
        self._process.__exit__(None, None, None)
