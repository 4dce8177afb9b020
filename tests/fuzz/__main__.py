"""`python -m tests.fuzz [TARGET ...] [--seconds N] [--cases N] [--seed S]`: runs mutated inputs.

Coverage guides the mutations with --atheris, if atheris is installed. Each target then has a
process of its own and keeps its corpus in build/fuzz/TARGET. A failure prints the input.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import time
from collections import Counter

import uvloop

from bench.soak.mutate import MAX_INPUT, mutate
from tests.fuzz.live import fuzz_server
from tests.fuzz.targets import TARGETS, Target

LIVE = "live"
MAX_CORPUS = 500


def run_cases(
    name: str, target: Target, seed: int, *, seconds: float, most: int = sys.maxsize
) -> Counter[str]:
    """Returns the numbers of cases by what became of them. Raises AssertionError with the input if
    the target raises."""
    rng = random.Random(seed)
    until_s = time.monotonic() + seconds
    corpus = list(target.seeds)
    found: Counter[str] = Counter()
    while found.total() < most and time.monotonic() < until_s:
        data = mutate(rng, rng.choice(corpus))
        try:
            outcome = target.run(data)
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__} for {data[:4000]!r}") from error
        # mutations of mutations reach further
        if outcome not in target.ends and rng.random() < 0.01:
            del corpus[MAX_CORPUS:]
            corpus.insert(len(target.seeds), data[:MAX_INPUT])
        found[outcome or ""] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, LIVE, []], help="all by default")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="at most, of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true", help="guide mutations by coverage")
    options = parser.parse_args()
    names = [name for name in options.targets if name != LIVE] or list(TARGETS)
    for name in [] if options.targets == [LIVE] else names:
        if options.atheris:
            guided = [sys.executable, "-m", "tests.fuzz.guided", name, str(options.seconds)]
            subprocess.run(guided, check=True)
            continue
        limits = {"seconds": options.seconds, "most": options.cases}
        start_s = time.monotonic()
        found = run_cases(name, TARGETS[name], options.seed, **limits)
        took_s = time.monotonic() - start_s
        kinds = ", ".join(f"{kind}: {count:,}" for kind, count in sorted(found.items()) if kind)
        # of this process, in KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(
            f"{name:>16}: {found.total():>9,} cases in {took_s:,.0f} s, only documented errors, at "
            f"most {peak:,} MiB" + (f" ({kinds})" if kinds else ""),
            flush=True,
        )
    if LIVE in options.targets or not (options.targets or options.atheris):
        statuses = uvloop.run(
            fuzz_server(seconds=options.seconds, most=sys.maxsize, seed=options.seed)
        )
        listed = ", ".join(f"{status}: {count:,}" for status, count in sorted(statuses.items()))
        print(f"{LIVE:>16}: {statuses.total():>9,} requests, none 5xx ({listed})", flush=True)


if __name__ == "__main__":
    main()
