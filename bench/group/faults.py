"""Kills and stops workers under load: python -m bench.group.faults [--kills 200].

An engine answers rounds of requests; at a random moment of each round a worker gets SIGKILL or
SIGSTOP, and now and then another one while the group is formed again. The tokens of every request
are compared with those of one process. The last line is JSON: failed requests, changed answers,
seconds until a loss was seen and until the group was whole again, and what was left at the end.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.common.checkpoints import model_directory
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
    """What faults did. seen_s, whole_s: seconds from each round's first fault."""

    faults: int = 0
    failed: int = 0
    changed: int = 0
    requests: int = 0
    seen_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {
            "faults": self.faults,
            "requests": self.requests,
            "failed": self.failed,
            "changed": self.changed,
            "seen_s": _summary(self.seen_s),
            "whole_s": _summary(self.whole_s),
            "left": self.left,
        }


def _summary(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": round(median(values), 3), "max": round(max(values), 3)}


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


def run(model: str, grid: tuple[int, int], kills: int, seed: int = 0) -> Result:
    """Causes faults and returns what came of them."""
    with own_folder():
        return _run(model, grid, kills, random.Random(seed))


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


def _run(model: str, grid: tuple[int, int], kills: int, rng: random.Random) -> Result:
    result, seen = Result(), Seen()
    ranks: EngineSettings = {"tensor_parallel_size": grid[0], "pipeline_parallel_size": grid[1]}
    of_grid: EngineSettings = {**SETTINGS, **ranks}
    with LLM(model, **SETTINGS) as llm:
        load = Load(llm.tokenizer.vocab_size)
        expected = load.answers(llm)
    before = Leftover.now()
    with (
        seen.watching(),
        LLM(model, **of_grid) as llm,
    ):
        assert load.answers(llm) == expected, "wrong before any fault"
        began_s = time.monotonic()
        load.answers(llm)
        round_s = time.monotonic() - began_s
        whole = Leftover.now()
        while result.faults < kills:
            _round(llm, load, expected, rng, result, seen, round_s)
        result.left = {f"growth of {k}": n for k, n in Leftover.now().since(whole).items()}
    result.left |= Leftover.now().since(before)
    return result


def _round(
    llm: LLM,
    load: Load,
    expected: list[tuple[object, ...]],
    rng: random.Random,
    result: Result,
    seen: Seen,
    round_s: float,
) -> None:
    """Answers all requests, with a fault at a random moment, and counts."""
    at_s: list[float] = []
    sent: list[str] = []
    waits_s = [rng.uniform(0, round_s)]
    if rng.random() < _AGAIN:
        waits_s.append(rng.uniform(0, 3.0))
    seen.lost_s.clear()
    seen.whole_s.clear()

    def cause_faults() -> None:
        for wait_s in waits_s:
            time.sleep(wait_s)
            found = workers_of(os.getpid())
            if found:
                at_s.append(time.monotonic())
                # One that is stopped before it has connected is seen after a minute only.
                kinds = [signal.SIGKILL] if len(at_s) > 1 else [signal.SIGKILL, signal.SIGSTOP]
                sent.append(rng.choice(kinds).name)
                os.kill(rng.choice(found), signal.Signals[sent[-1]])

    thread = threading.Thread(target=cause_faults)
    thread.start()
    answers = load.answers(llm)
    thread.join()
    result.faults += len(at_s)
    result.requests += len(answers)
    result.failed += sum(each[0] != "length" for each in answers)
    result.changed += sum(
        a != e and a[0] == "length" for a, e in zip(answers, expected, strict=True)
    )
    _await_whole(llm, seen, at_s)
    if seen.whole_s and seen.whole_s[-1] - at_s[0] > _SLOW_S:
        logger.warning("%s at %s s: whole after %s s", sent, at_s, seen.whole_s)
    result.seen_s += [lost_s - at_s[0] for lost_s in seen.lost_s[:1]]
    result.whole_s += [seen.whole_s[-1] - at_s[0]] if seen.whole_s else []


def _await_whole(llm: LLM, seen: Seen, at_s: list[float]) -> None:
    """Waits until the group is whole after the last fault."""
    end_s = time.monotonic() + _WHOLE_S
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    time.sleep(max(0.0, at_s[-1] + 2.0 - time.monotonic()))  # a stopped worker is seen by then
    while not seen.whole_s or not _is_whole(llm):
        if time.monotonic() > end_s:
            raise RuntimeError(f"the group was not whole {_WHOLE_S:.0f} s after a fault")
        llm.generate([[5, 6, 7]], params, use_tqdm=False)
        time.sleep(0.05)


def _is_whole(llm: LLM) -> bool:
    runner, recovery = llm._loaded.core._runner, llm._loaded.core._recovery
    assert isinstance(runner, TensorRunner) and isinstance(recovery, GroupRecovery)
    return recovery._lost_at is None and not runner._group.is_lost()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200, help="faults in each grid")
    parser.add_argument("--model", default="random:tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grids", default="2x1,1x2,2x2", help="tensor x pipeline ranks")
    options = parser.parse_args()
    model = model_directory(options.model)
    assert model is not None, "a model of its own"
    found = {}
    for name in options.grids.split(","):
        tensor, stages = map(int, name.split("x"))
        result = run(model, (tensor, stages), options.kills, options.seed)
        found[name] = result.to_json()
        print(name, found[name], flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
