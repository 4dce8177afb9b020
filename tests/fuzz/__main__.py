"""`python -m tests.fuzz [TARGET ...] [--seconds N] [--seed S]`: mutated inputs, as many as go.

With atheris installed and --atheris, coverage guides the mutations (each target in a process of
its own; what it learned stays in build/fuzz/TARGET). A failure prints how to get it again.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time

import uvloop

from tests.fuzz.live import fuzz_server
from tests.fuzz.mutate import MAX_INPUT, mutate
from tests.fuzz.targets import TARGETS, Target

LIVE = "live"
MAX_KNOWN = 500


def run_cases(
    name: str, target: Target, seed: int, *, seconds: float, most: int = sys.maxsize
) -> int:
    """How many were run. Raises what the target raised, with the input in the message."""
    rng = random.Random(seed)
    until_s = time.monotonic() + seconds
    known = list(target.seeds)
    count = 0
    while count < most and time.monotonic() < until_s:
        data = mutate(rng, rng.choice(known))
        try:
            target.run(data)
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__} for {data[:4000]!r}") from error
        if rng.random() < 0.01:  # changes of changes reach further
            del known[MAX_KNOWN:]
            known.insert(len(target.seeds), data[:MAX_INPUT])
        count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, LIVE, []], help="all by default")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true", help="let coverage guide")
    asked = parser.parse_args()
    names = [name for name in asked.targets if name != LIVE] or list(TARGETS)
    for name in [] if asked.targets == [LIVE] else names:
        if asked.atheris:
            guided = [sys.executable, "-m", "tests.fuzz.guided", name, str(asked.seconds)]
            subprocess.run(guided, check=True)
            continue
        count = run_cases(name, TARGETS[name], asked.seed, seconds=asked.seconds)
        print(f"{name:>16}: {count:>9,} cases, none but the documented errors", flush=True)
    if LIVE in asked.targets or not (asked.targets or asked.atheris):
        statuses = uvloop.run(fuzz_server(seconds=asked.seconds, most=sys.maxsize, seed=asked.seed))
        listed = ", ".join(f"{status}: {count:,}" for status, count in sorted(statuses.items()))
        print(f"{LIVE:>16}: {statuses.total():>9,} requests, none 5xx ({listed})", flush=True)


if __name__ == "__main__":
    main()
