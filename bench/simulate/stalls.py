"""Compares chunks beside streams, the default and static ones, under a simulated clock.

The scheduler and its step-time model are the real ones, and the model learns from the simulated
steps. Requests have equal lengths and Poisson arrivals, at SHARES of the rate that each machine
serves when all requests come at once. "default" is the engine's rule (docs/step-time.md); a number
is the most prompt rows of a step beside streams. Step times vary by NOISE (lognormal, assumed):

    1B in int8      256 prompt tokens, answers of 128; the model random:llama-1b on 2 vCPUs of an
                    AMD EPYC (Zen 4, AVX-512), steps measured with bench.plan.rig on 2026-11-23
    embedded model  the same requests and machine
    8B on a GPU     1,024 prompt tokens, answers of 128; not measured: `serve plan` for
                    llama-3.1-8b in int8 on an h100-sxm

Run: python -m bench.simulate.stalls [--quick]
"""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from bench.common import simulated, tables
from bench.common.static_chunks import switch_chunks
from bench.load.results.stalls import Stalls, stalls_of, stalls_table
from bench.load.workload.work import Call
from bench.plan.cost import StepCost
from bench.plan.pipeline import StageCost
from bench.simulate.load import LoadSimulation
from bench.simulate.machine import simulated_machine
from bench.simulate.settings import SimulationSettings
from memory.pages.layer_groups import LayerGroup
from serve.config import EngineConfig
from serve.scheduler.step_time import StepWork

SHARES = (0.25, 0.5, 0.7, 0.9, 1.3)
NOISE = 0.03
NUM_REQUESTS = 400
OUTPUT = 128


@dataclass(frozen=True, slots=True)
class StepTable:
    """Measured seconds of steps by their rows, linear between the entries and at least the first
    one; and per token before a decode row and per pair of a prompt row and a token before it."""

    rows_s: tuple[tuple[int, float], ...]
    context_s: float
    pair_s: float

    def seconds(self, work: StepWork) -> float:
        """Returns the seconds of a step, as a StepCost does."""
        above = bisect_left(self.rows_s, (work.num_rows, 0.0))
        (low, low_s), (high, high_s) = self.rows_s[max(0, above - 1)], self.rows_s[above]
        share = (work.num_rows - low) / (high - low) if high > low else 0.0
        rows_s = low_s + share * (high_s - low_s)
        return rows_s + self.context_s * work.num_context + self.pair_s * work.num_pairs


# Least squares over steps with 0 to 32 decode rows and 0 to 256 prompt rows: median error 0.4 %.
SMALL_1B = StepTable(
    (
        (4, 37.4e-3),
        (8, 39.3e-3),
        (12, 44.4e-3),
        (16, 50.8e-3),
        (24, 64.5e-3),
        (32, 84.2e-3),
        (48, 120.0e-3),
        (64, 157.2e-3),
        (128, 304.0e-3),
        (272, 635.4e-3),
    ),
    2.0e-6,
    3.6e-7,
)
# The same; median error 1.3 %.
EMBEDDED = StepTable(
    (
        (1, 0.50e-3),
        (8, 0.58e-3),
        (16, 0.70e-3),
        (24, 0.93e-3),
        (32, 1.11e-3),
        (48, 1.48e-3),
        (64, 1.87e-3),
        (128, 3.26e-3),
        (288, 6.40e-3),
    ),
    1.4e-7,
    2.0e-8,
)


@dataclass(slots=True)
class NoisyCost:
    """A cost whose steps vary from one to the next."""

    cost: StepCost
    random: random.Random

    def seconds(self, work: StepWork) -> float:
        return self.cost.seconds(work) * self.random.lognormvariate(0.0, NOISE)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with a model, the length of its prompts, and the chunks that are compared."""

    cost: StepCost
    settings: SimulationSettings
    num_prompt: int
    chunks: tuple[int, ...]

    def run(self, rate: float | None, static_rows: int | None, count: int) -> Stalls:
        """Simulates `count` requests at a rate, None for all at once."""
        rng = random.Random(1)
        waits = [rng.expovariate(rate) if rate else 0.0 for _ in range(count)]
        calls = [Call(self.num_prompt, OUTPUT, max_tokens=OUTPUT)] * count
        cost = NoisyCost(self.cost, random.Random(0))
        simulation = LoadSimulation(calls, list(accumulate(waits)), cost, self.settings)
        switch_chunks(simulation.scheduler).static_rows = static_rows
        simulation.run()
        return stalls_of([simulation.result(rate or 0.0, 0)])


def machines() -> dict[str, Machine]:
    gpu = simulated_machine("llama-3.1-8b", "h100-sxm", {"prefix_cache": False})
    assert not isinstance(gpu.cost, StageCost), "one machine"
    small, large = (32, 64, 128, 256), (128, 256, 512, 2048)
    return {
        "1B in int8": Machine(SMALL_1B, _cpu_settings(32 << 10), 256, small),
        "embedded model": Machine(EMBEDDED, _cpu_settings(2 << 10), 256, small),
        "8B on a GPU": Machine(gpu.cost, gpu.settings, 1024, large),
    }


def _cpu_settings(token_bytes: int) -> SimulationSettings:
    config = EngineConfig(
        max_model_len=1024, kv_cache_bytes=8 << 30, kv_page_bytes=1 << 20, prefix_cache=False
    )
    return SimulationSettings(config, (LayerGroup(token_bytes, 16),))


def measure(quick: bool) -> dict[str, dict[str, Stalls]]:
    """Returns {machine and rate: {setting: figures}}."""
    count = 60 if quick else NUM_REQUESTS
    results: dict[str, dict[str, Stalls]] = {}
    for name, machine in machines().items():
        capacity = machine.run(None, machine.chunks[-1], count).tokens_per_s / OUTPUT
        for share in SHARES[1::2] if quick else SHARES:
            chunks = machine.chunks[-1:] if quick else machine.chunks
            results[f"{name}, {share:.0%} of {capacity:.3g} requests/s"] = {
                "default" if rows is None else f"{rows} rows": machine.run(
                    share * capacity, rows, count
                )
                for rows in (None, *chunks)
            }
    return results


def show(name: str, results: dict[str, Any]) -> None:
    tables.console().print(stalls_table(name, results))


if __name__ == "__main__":
    simulated.run(__doc__, measure, show)
