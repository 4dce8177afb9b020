"""Finds where admission by predicted length beats greedy admission, in requests per second.

For each load and policy a bisection finds the highest rate that keeps the same bounds of the 99th
percentile of the time per output token and of the 90th of the time to the first token, as in
bench/simulate/memory_policy.py, with memory for two whole contexts. "preempted" is the share of
answers that lost their K/V at least once, "P90" the share within the P90 predicted on arrival.

    short     prompts of 200 to 2,000 tokens, answers of 20 to 200: prompts fill the memory
    mixed     one of five answers has 500 to 4,000 tokens, the others 20 to 200; short prompts
    reasoning prompts of 20 to 200 tokens, answers of 1,000 to 7,000: growth fills the memory

Run: python -m bench.prediction.admission [--quick]
"""

from __future__ import annotations

import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from bench.common import simulated
from bench.load.workload.work import Call
from bench.simulate.memory_policy import GPU, Case, Result, highest_qps

POLICIES = ("oracle", "predicted", "prompt_only", "worst_case")
MAX_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True)
class Load:
    """Bounds of the tokens of prompts and answers; a share of the answers is long."""

    prompt: tuple[int, int]
    short: tuple[int, int]
    long: tuple[int, int] = (0, 0)
    long_share: float = 0.0

    def calls(self, count: int) -> list[Call]:
        rng = random.Random("admission")
        found = []
        for _ in range(count):
            prompt = rng.randint(*self.prompt)
            output = rng.randint(*(self.long if rng.random() < self.long_share else self.short))
            found.append(Call(prompt, output, MAX_MODEL_LEN - prompt))
        return found


LOADS = {
    "short": Load((200, 2000), (20, 200)),
    "mixed": Load((50, 500), (20, 200), (500, 4000), 0.2),
    "reasoning": Load((20, 200), (1000, 7000)),
}


def run(name: str, policy: str, count: int) -> Result:
    """Returns the result at the highest rate."""
    case = Case(name, GPU, None, MAX_MODEL_LEN, count)
    return highest_qps(case, LOADS[name].calls(count), policy)


def measure(is_quick: bool) -> dict[str, dict[str, Result]]:
    """Returns {load: {policy: result}}, computed in two processes."""
    count = 60 if is_quick else 120
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        jobs = {
            name: {policy: pool.submit(run, name, policy, count) for policy in POLICIES}
            for name in LOADS
        }
        return {
            name: {policy: job.result() for policy, job in by_policy.items()}
            for name, by_policy in jobs.items()
        }


def show(name: str, results: dict[str, Result]) -> None:
    """Prints the rates, and those of the other policies over that of greedy admission."""
    greedy = results["prompt_only"].qps
    print(f"\n{name}")
    print(f"  {'policy':12} {'QPS':>7} {'of greedy':>9} {'memory':>7} {'preempted':>9} {'P90':>7}")
    for policy, row in results.items():
        p90 = "" if row.coverage_p90 is None else f"{100 * row.coverage_p90:.1f} %"
        print(
            f"  {policy:12} {row.qps:7.3f} {row.qps / greedy:9.2f} {100 * row.utilisation:5.1f} %"
            f" {100 * row.preempted:7.1f} % {p90:>7}"
        )


if __name__ == "__main__":
    simulated.run(__doc__, measure, show)
