"""Kills, stops and cuts off workers under load: python -m bench.group.faults [--kills 200].

An engine answers rounds of requests; at a random moment of each round a worker gets SIGKILL or
SIGSTOP, and now and then another one while the group is formed again. With --cuts the worker is in
a network namespace, and its link is cut, too (bench/group/cuts.py). The tokens of every request are
compared with those of one process, and after every fault what the processes hold with what they
held before. The last line is JSON: failed requests, changed answers, seconds until a loss was seen
and until the group was whole again for each kind of fault, and what was left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from dataclasses import replace

from bench.common.checkpoints import model_directory
from bench.group import cuts
from bench.group.fault_rounds import (
    SETTINGS,
    Leftover,
    Result,
    answers_alone,
    cause_faults,
    own_folder,
    workers_of,
)
from serve import LLM
from serve.config import EngineSettings
from serve.group.launch import LocalWorkers
from serve.group.runners import TensorRunner


class LocalFaults:
    """Kills and stops of processes that the engine has started."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def _workers(self) -> list[int]:
        runner = self._llm._loaded.core._runner
        assert isinstance(runner, TensorRunner)
        assert isinstance(runner._resources, LocalWorkers)
        spare = runner._resources._spare
        return [each for each in workers_of(os.getpid()) if spare is None or each != spare.pid]

    def cause(self, rng: random.Random, is_first: bool) -> str:
        kind = rng.choice([signal.SIGKILL, signal.SIGSTOP])
        end_s = time.monotonic() + 1.0
        while not (found := self._workers()) and time.monotonic() < end_s:
            time.sleep(0.01)
        if not found:
            return ""
        os.kill(rng.choice(found), kind)
        return kind.name

    def is_surely_seen(self, kind: str) -> bool:
        return True

    def held(self) -> Leftover:
        return replace(Leftover.now(), processes=len(self._workers()))


def run(model: str, grid: tuple[int, int], kills: int, seed: int = 0) -> Result:
    """Kills and stops workers and returns what came of it."""
    ranks: EngineSettings = {"tensor_parallel_size": grid[0], "pipeline_parallel_size": grid[1]}
    with own_folder():
        expected, before = answers_alone(model), Leftover.now()
        with LLM(model, **{**SETTINGS, **ranks}) as llm:
            result = cause_faults(llm, LocalFaults(llm), expected, kills, random.Random(seed))
        result.left |= Leftover.now().since(before)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200, help="faults in each grid")
    parser.add_argument("--model", default="random:tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grids", default="2x1,1x2,2x2", help="tensor x pipeline ranks")
    parser.add_argument("--cuts", action="store_true", help="workers in a network namespace")
    options = parser.parse_args()
    cause = cuts.run if options.cuts else run
    model = model_directory(options.model)
    assert model is not None, "a model of its own"
    found = {}
    for name in options.grids.split(","):
        tensor, stages = map(int, name.split("x"))
        result = cause(model, (tensor, stages), options.kills, options.seed)
        found[name] = result.to_json()
        print(name, found[name], flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
