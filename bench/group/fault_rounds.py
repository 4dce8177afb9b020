"""Rounds of requests with faults of a group's workers in them, and what is counted."""

from __future__ import annotations

import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Protocol

from serve import LLM, SamplingParams
from serve.config import EngineSettings
from serve.group.recovery import GroupRecovery
from serve.group.recovery import logger as recovery_logger
from serve.group.runners import TensorRunner

logger = logging.getLogger(__name__)
SETTINGS: EngineSettings = {
    "dtype": "int8",
    "max_model_len": 160,
    "max_num_seqs": 8,
    "kv_cache_bytes": 64 << 20,
    "compute_threads": 1,
}
_WHOLE_S = 90.0  # to be whole again, on a busy machine
_NUM_PROMPTS = 12
_SLOW_S = 20.0
_LEFT_S = 3.0  # for what a lost worker held to be closed
_DECILES = 10
_AGAIN = 0.2  # share of the faults that a second one follows


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a group holds outside of Python's memory."""

    processes: int
    memory_files: int
    sockets: int
    folders: int
    threads: int

    @classmethod
    def now(cls) -> Leftover:
        files = [_target(each) for each in Path("/proc/self/fd").iterdir()]
        return cls(
            len(workers_of(os.getpid())),
            sum("memfd:" in each for each in files),
            sum(each.startswith("socket:") for each in files),
            len(list(Path(tempfile.gettempdir()).glob("mergestep-group-*"))),
            sum(each.name.startswith("mergestep") for each in threading.enumerate()),
        )

    def since(self, before: Leftover) -> dict[str, int]:
        """Returns what is more than before."""
        grown = {name: getattr(self, name) - getattr(before, name) for name in self.__slots__}
        return {name: count for name, count in grown.items() if count > 0}


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


def workers_of(pid: int) -> list[int]:
    """Returns the processes of an engine's workers."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == pid and b"serve.group.worker_main" in command:
            found.append(int(entry.name))
    return found


class Seen(logging.Handler):
    """Notes when the engine sees a loss, and when its group is whole again."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lost_s: list[float] = []
        self.whole_s: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "whole again" in record.getMessage():
            self.whole_s.append(time.monotonic())
        elif record.levelno == logging.WARNING:
            self.lost_s.append(time.monotonic())

    @contextmanager
    def watching(self) -> Iterator[None]:
        level = recovery_logger.level
        recovery_logger.setLevel(logging.INFO)
        recovery_logger.addHandler(self)
        try:
            yield
        finally:
            recovery_logger.removeHandler(self)
            recovery_logger.setLevel(level)


@dataclass
class Result:
    """What faults did. seen_s, whole_s: seconds from each round's only fault, by its kind; rounds
    with two faults are a kind of their own, and count from the last one. left: what grew."""

    faults: int = 0
    failed: int = 0
    changed: int = 0
    requests: int = 0
    seen_s: dict[str, list[float]] = field(default_factory=dict)
    whole_s: dict[str, list[float]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {
            "faults": self.faults,
            "requests": self.requests,
            "failed": self.failed,
            "changed": self.changed,
            "seen_s": {kind: _summary(each) for kind, each in self.seen_s.items()},
            "whole_s": {kind: _summary(each) for kind, each in self.whole_s.items()},
            "left": self.left,
        }


def _summary(values: list[float]) -> dict[str, float]:
    found = {"count": len(values), "median": round(median(values), 2), "max": round(max(values), 2)}
    if len(values) >= _DECILES:
        found["p90"] = round(quantiles(values, n=_DECILES)[-1], 2)
    return found


class Load:
    """Rounds of requests, some sampled. Each request has its own seed, so a round's answers are
    the same each time."""

    def __init__(self, vocab_size: int) -> None:
        rng = random.Random(1)
        lengths = [rng.choice([3, 40, 60]) for _ in range(_NUM_PROMPTS)]
        self._prompts = [[rng.randrange(2, vocab_size) for _ in range(n)] for n in lengths]
        self._params = [
            SamplingParams(
                max_tokens=60,
                temperature=rng.choice([0.0, 0.9]),
                seed=number,
                ignore_eos=True,
                logprobs=1,
            )
            for number in range(_NUM_PROMPTS)
        ]

    def answers(self, llm: LLM) -> list[tuple[object, ...]]:
        found = llm.generate(self._prompts, self._params, use_tqdm=False)
        outputs = [each.outputs[0] for each in found]
        return [(o.finish_reason, o.token_ids, o.cumulative_logprob) for o in outputs]


class Faults(Protocol):
    """Where the workers are, and what can happen to them."""

    def cause(self, rng: random.Random, is_first: bool) -> str:
        """Causes a fault, and ends it if it does not end by itself; returns its kind."""

    def is_surely_seen(self, kind: str) -> bool:
        """Returns whether the engine must notice faults of this kind."""

    def held(self) -> Leftover:
        """Returns what the engine and its workers hold."""


def answers_alone(model: str) -> list[tuple[object, ...]]:
    """Returns what one process answers."""
    with LLM(model, **SETTINGS) as llm:
        return Load(llm.tokenizer.vocab_size).answers(llm)


def cause_faults(
    llm: LLM, faults: Faults, expected: list[tuple[object, ...]], count: int, rng: random.Random
) -> Result:
    """Causes faults in rounds of requests."""
    result, seen, load = Result(), Seen(), Load(llm.tokenizer.vocab_size)
    with seen.watching():
        assert load.answers(llm) == expected, "wrong before any fault"
        began_s = time.monotonic()
        load.answers(llm)
        rounds = Rounds(llm, load, expected, faults, seen, time.monotonic() - began_s)
        while result.faults < count:
            rounds.run(rng, result)
    return result


@contextmanager
def own_folder() -> Iterator[None]:
    """Has this process make its temporary files in a folder of its own."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


class Rounds:
    """Rounds of requests, with a fault or two in each. duration_s: of a round without one."""

    def __init__(
        self,
        llm: LLM,
        load: Load,
        expected: list[tuple[object, ...]],
        faults: Faults,
        seen: Seen,
        duration_s: float,
    ) -> None:
        self._llm = llm
        self._load = load
        self._expected = expected
        self._faults = faults
        self._seen = seen
        self._duration_s = duration_s
        self._whole = faults.held()

    def run(self, rng: random.Random, result: Result) -> None:
        """Answers all requests, with a fault at a random moment, and counts."""
        began: list[tuple[float, str]] = []
        waits_s = [rng.uniform(0, self._duration_s)]
        if rng.random() < _AGAIN:
            waits_s.append(rng.uniform(0, 3.0))
        self._seen.lost_s.clear()
        self._seen.whole_s.clear()

        def cause() -> None:
            for wait_s in waits_s:
                time.sleep(wait_s)
                at_s = time.monotonic()
                if kind := self._faults.cause(rng, not began):
                    began.append((at_s, kind))

        thread = threading.Thread(target=cause)
        thread.start()
        answers = self._load.answers(self._llm)
        thread.join()
        result.faults += len(began)
        result.requests += len(answers)
        result.failed += sum(each[0] != "length" for each in answers)
        result.changed += sum(
            a != e and a[0] == "length" for a, e in zip(answers, self._expected, strict=True)
        )
        self._await_whole(began)
        kind = began[0][1] if len(began) == 1 else "two"
        if self._seen.whole_s:
            seen_s = self._seen.lost_s[0] - began[0][0]
            result.seen_s.setdefault(kind, []).append(seen_s)
            whole_s = self._seen.whole_s[-1]
            last_s = max(at_s for at_s, _ in began if at_s < whole_s)  # a short cut may follow
            result.whole_s.setdefault(kind, []).append(whole_s - last_s)
            if result.whole_s[kind][-1] > _SLOW_S:
                logger.warning("%s: lost at %s", began, self._seen.lost_s)
        for name, more in self._left().items():
            result.left[f"growth of {name}"] = more

    def _await_whole(self, began: list[tuple[float, str]]) -> None:
        """Waits until the group is whole after the last fault."""
        end_s = time.monotonic() + _WHOLE_S
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        must_be_seen = any(self._faults.is_surely_seen(kind) for _, kind in began)
        time.sleep(max(0.0, began[-1][0] + 2.0 - time.monotonic()))  # it is seen by then
        while (must_be_seen and not self._seen.whole_s) or not _is_whole(self._llm):
            if time.monotonic() > end_s:
                raise RuntimeError(f"{began}: the group was not whole after {_WHOLE_S:.0f} s")
            self._llm.generate([[5, 6, 7]], params, use_tqdm=False)
            time.sleep(0.05)

    def _left(self) -> dict[str, int]:
        """Returns what has grown, once what ends by itself has had time to."""
        end_s = time.monotonic() + _LEFT_S
        while (found := self._faults.held().since(self._whole)) and time.monotonic() < end_s:
            time.sleep(0.05)
        return found


def _is_whole(llm: LLM) -> bool:
    runner, recovery = llm._loaded.core._runner, llm._loaded.core._recovery
    assert isinstance(runner, TensorRunner) and isinstance(recovery, GroupRecovery)
    return recovery._lost_at is None and not runner._group.is_lost()
